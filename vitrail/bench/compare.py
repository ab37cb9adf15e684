"""The main table: our network, the same products alone, and other libraries, each in a process of its own, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from vitrail.bench.contenders import COMPILED, OURS, PRODUCTS, Entry, Runner, entries
from vitrail.bench.measure import Spread, interleave
from vitrail.bench.memory import measure_memory
from vitrail.bench.peers import check_peers
from vitrail.bench.processes import Worker
from vitrail.bench.workload import Workload
from vitrail.errors import ConfigError
from vitrail.models.compiled import Compiled

__all__ = ["ALONE", "Comparison", "Row", "compare"]


@dataclass(frozen=True)
class Row:
    """One contender."""

    entry: Entry
    settings: str
    """What it ran with, in the reader's words."""
    seconds: tuple[float, ...]
    """Of each round's step."""
    images_per_second: Spread
    gflops: float
    """Achieved in the median step: 1e9 FLOPs of the closed form in a second."""
    share: float
    """The time of the products alone, divided by this one's; the median of all rounds."""
    ratio: float
    """How many times as fast as this one our network is: compiled where another library is compiled, else not. The
    median of all rounds."""
    memory: int | None = None
    """Bytes that a step needs at most, where that was measured; of compiled networks it is not."""


@dataclass(frozen=True)
class Comparison:
    """All rows, ours first and the products alone second."""

    rows: tuple[Row, ...]
    product_flops: int
    """Of the products that were replayed; a fused attention kernel computes one of them twice."""
    large_gflops: float
    """What one large square product in the workload's format achieves, as `Row.gflops`."""
    breakdown: dict[str, float] | None
    """Where the time of our step goes, as shares."""
    skipped: dict[str, str]
    """Contenders that could not take part, and why."""


def compare(
    workload: Workload,
    *,
    peers: Sequence[str] = (),
    best: bool = False,
    compile: Compiled = "off",  # noqa: A002
    repetitions: int = 7,
    warmup: int = 2,
    profile: bool = True,
    memory: bool = False,
) -> Comparison:
    """Times all contenders in interleaved rounds, one at a time. Raises `ConfigError` for peers that do not exist.

    With `best` all libraries also take part compiled; with `compile` "on" or "graphs", ours does.
    """
    check_peers(peers, workload.config)
    wanted = entries(workload, tuple(dict.fromkeys(peers)), best=best, compile=compile)
    with ExitStack() as stack:
        workers, skipped = _ready([wanted[0], ALONE, *wanted[1:]], workload, stack)
        timers = {entry: partial(worker.call, "seconds") for entry, worker in workers.items()}
        times = interleave(timers, repetitions=repetitions, warmup=warmup)
        shares = workers[wanted[0]].call("breakdown") if profile else None
        product_flops = workers[ALONE].call("flops")
        large_gflops = workers[ALONE].call("large_flops") / 1e9
    needed: dict[Entry, int] = {}
    if memory:
        # a compiler needs far more memory than a step does, so a process that compiles says nothing of the step
        measured = [entry for entry in times if entry.settings not in COMPILED and entry != ALONE]
        needed = {entry: measure_memory(entry, workload) for entry in measured}
    rows = tuple(_row(entry, workload, times, needed.get(entry)) for entry in times)
    return Comparison(rows, product_flops, large_gflops, shares, skipped)


ALONE = Entry(PRODUCTS)


def _ready(wanted: Sequence[Entry], workload: Workload, stack: ExitStack) -> tuple[dict[Entry, Worker], dict[str, str]]:
    """A process of each contender, after its first step, and those that did not come so far with the reason."""
    found: dict[Entry, Worker] = {}
    skipped: dict[str, str] = {}
    for entry in wanted:
        if entry.library in skipped:
            continue
        try:
            worker = Worker(Runner, entry, workload, torch.get_num_threads())
        except ConfigError as error:
            skipped[entry.library] = str(error)
            continue
        except Exception as error:
            if entry.settings not in COMPILED:
                raise
            # a compiler may be missing, or may not know this network: nothing of ours is wrong then
            skipped[entry.library + COMPILED[entry.settings]] = (str(error).splitlines() or [""])[0]
            continue
        stack.callback(worker.close)
        found[entry] = worker
    return found, skipped


def _row(entry: Entry, workload: Workload, times: dict[Entry, list[float]], memory: int | None) -> Row:
    seconds, alike = times[entry], Entry(OURS, entry.settings)
    flops = workload.flops if entry.library in (OURS, PRODUCTS) else workload.whole_flops

    def beside(other: Entry) -> float:
        """Pairs of the same round saw the same machine."""
        return statistics.median(a / b for a, b in zip(times[other], seconds, strict=True))

    return Row(
        entry=entry,
        settings=entry.describe(workload),
        seconds=tuple(seconds),
        images_per_second=Spread.of([workload.batch / each for each in seconds]),
        gflops=flops / statistics.median(seconds) / 1e9,
        share=beside(ALONE),
        ratio=1 / beside(alike if entry.library != OURS and alike in times else Entry(OURS)),
        memory=memory,
    )
