"""Comparison of the step times of our network, of its matrix products, and of other libraries' networks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from vitrail.bench.memory import is_out_of_memory, measure_memory
from vitrail.bench.peers import RUNTIMES, check_peers
from vitrail.bench.step import COMPILED, OURS, PRODUCTS, Entry, Runner, entries
from vitrail.bench.workload import Spread, Worker, Workload, interleave
from vitrail.errors import ConfigError
from vitrail.models.compiled import Compiled
from vitrail.weights.tensors import first_line


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
) -> dict[str, Any]:
    """Time our network, the matrix products and the libraries `peers` in interleaved rounds, one at a time.

    The result has these values:

    - `rows`: a row of `_row` for our network, then for the matrix products alone, then for other libraries;
    - `product_flops`: FLOPs of the replayed matrix products. A product that a fused attention kernel computes twice is
      counted twice;
    - `large_gflops`: billions of FLOPs per second of one large square matrix product in the workload's number format,
      or None if our network is faster in two measurements, because other programs used the machine while the product
      was timed;
    - `breakdown`: fraction of our step time for each category of operation, or None if it was not measured;
    - `skipped`: reasons for skipping libraries, by the library's name.

    With `best`, the compiled networks of all libraries are also measured. With `compile` "on" or "graphs", our compiled
    network is also measured. Raises `ConfigError` for unknown peers.
    """
    check_peers(peers, workload.config)
    if workload.task == "train" and (named := [peer for peer in peers if peer in RUNTIMES]):
        raise ConfigError(f"{named[0]} does not train; use bench infer, or leave {named[0]} out")
    wanted = entries(workload, tuple(dict.fromkeys(peers)), best=best, compile=compile)
    with ExitStack() as stack:
        workers, skipped = _ready([wanted[0], ALONE, *wanted[1:]], workload, stack)
        timers = {entry: partial(worker.call, "seconds") for entry, worker in workers.items()}
        times = interleave(timers, repetitions=repetitions, warmup=warmup)
        if any(_beside(times[ALONE], seconds) > 1 for seconds in times.values()):
            times = interleave(timers, repetitions=repetitions, warmup=warmup)
        fractions = workers[wanted[0]].call("breakdown") if profile else None
        product_flops = workers[ALONE].call("flops")
        large_gflops = _large_gflops(workers[ALONE], workload.flops / statistics.median(times[wanted[0]]) / 1e9)
    needed: dict[Entry, int] = {}
    if memory:
        # Compiling needs far more memory than a step, so the peak memory of a compiled step cannot be measured.
        measured = [entry for entry in times if entry.settings not in COMPILED and entry != ALONE]
        needed = {entry: measure_memory(entry, workload) for entry in measured}
    return {
        "rows": [_row(entry, workload, times, needed.get(entry)) for entry in times],
        "product_flops": product_flops,
        "large_gflops": large_gflops,
        "breakdown": fractions,
        "skipped": skipped,
    }


ALONE = Entry(PRODUCTS)


def _large_gflops(worker: Worker, ours: float) -> float | None:
    """Return the billions of FLOPs per second of a large product, or None if two measurements are below `ours`."""
    for _ in range(2):
        if (found := worker.call("large_flops") / 1e9) >= ours:
            return found
    return None


def _beside(others: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the ratio of times, as the median over rounds. The machine's load is similar within a round."""
    return statistics.median(a / b for a, b in zip(others, seconds, strict=True))


def _ready(wanted: Sequence[Entry], workload: Workload, stack: ExitStack) -> tuple[dict[Entry, Worker], dict[str, str]]:
    """Start a process for each entry, and wait until it has run its first step.

    Return the processes, and the reasons why entries failed.
    """
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
            # The compiler may be missing or may not support this network, so its failure is not an error of ours. Nor
            # is a peer that needs more memory than our network.
            is_too_large = entry.library not in (OURS, PRODUCTS) and is_out_of_memory(error)
            if entry.settings not in COMPILED and not is_too_large:
                raise
            reason = first_line(error)
            # PyTorch's own message names every process on the GPU.
            reason = reason.split(". ")[0] if is_out_of_memory(error) else reason
            skipped[entry.library + COMPILED.get(entry.settings, "")] = reason
            continue
        stack.callback(worker.close)
        found[entry] = worker
    return found, skipped


def _row(entry: Entry, workload: Workload, times: dict[Entry, list[float]], memory: int | None) -> dict[str, Any]:
    """Return the measurements of one library in one of its settings, or of the matrix products alone.

    `gflops` are billions of closed-form FLOPs per second in the median step. `share_of_limit` is the time of the matrix
    products alone divided by the time of this row, as the median over rounds. It is None if it is above 1 in two
    measurements, because other programs used the machine while the products were timed. `vitrail_times_as_fast` is the
    speed of our network divided by the speed of this row, as the median over rounds. A compiled library is compared
    with our compiled network. `memory_bytes` is the peak of a step, or None if it was not measured. The memory of
    compiled networks is never measured.
    """
    seconds, alike = times[entry], Entry(OURS, entry.settings)
    flops = workload.flops if entry.library in (OURS, PRODUCTS) else workload.whole_flops
    share, against = _beside(times[ALONE], seconds), alike if entry.library != OURS and alike in times else Entry(OURS)
    return {
        "library": entry.library,
        "settings": entry.settings,
        "ran_with": entry.describe(workload),
        "seconds": seconds,
        "images_per_second": asdict(Spread.of([workload.batch / each for each in seconds])),
        "gflops": flops / statistics.median(seconds) / 1e9,
        "share_of_limit": share if share <= 1 else None,
        "vitrail_times_as_fast": 1 / _beside(times[against], seconds),
        "memory_bytes": memory,
    }
