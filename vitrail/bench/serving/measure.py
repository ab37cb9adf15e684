"""Measurement of servers in processes of their own: latency, throughput, processor time and memory under each load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitrail.bench.serving.clients import Load, Outcome, send_load, send_requests
from vitrail.bench.serving.servers import cpu_seconds, memory_bytes, started
from vitrail.machine import Precision
from vitrail.models.predictor import Predictor
from vitrail.weights.bundle import Bundle

__all__ = [
    "Bare",
    "Measured",
    "MemoryPoint",
    "measure_bare",
    "measure_memory",
    "measure_servers",
    "predict",
    "summarise",
]


BATCHES = (1, 4, 8, 16)
"""Batch sizes of prediction without a server."""

GOOD = 1.0
"""Seconds within which an answer counts as good."""


@dataclass(frozen=True)
class Bare:
    """Prediction without a server: decoding and computing one after the other."""

    images_per_second: float
    """Throughput of the fastest batch size."""
    batch: int
    """The fastest batch size."""
    seconds: float
    """Median time of a single image."""


@dataclass(frozen=True)
class Measured:
    """A server under one load."""

    server: str
    load: str
    requests: int
    errors: int
    """Requests that were not answered by status 200."""
    throughput: float
    """Successful answers per second, until the last answer."""
    goodput: float
    """Successful answers within a second, per second."""
    p50: float
    """Median time to the answer in seconds, over all requests. `p95` and `p99` are the other percentiles."""
    p95: float
    p99: float
    cpu_seconds: float
    """Processor time of the server per request."""
    memory: int
    """Bytes of the server's processes after the load. Pages that several processes share are divided among them."""


@dataclass(frozen=True)
class MemoryPoint:
    """The memory of a server after a number of requests."""

    server: str
    requests: int
    errors: int
    """Requests so far that were not answered by status 200."""
    memory: int
    """Bytes of the server's processes."""


@dataclass(frozen=True)
class _Turn:
    """The outcomes of a server's turn under a load, and the seconds and the server's processor time that it took."""

    outcomes: Sequence[Outcome]
    took: float
    cpu_seconds: float


def _turn(process: int, port: int, load: Load, images: Sequence[bytes], seconds: float, seed: int) -> _Turn:
    asyncio.run(send_load(load, port, images, seconds / 10, seed=1000 + seed))
    before, begun = cpu_seconds(process), time.perf_counter()
    outcomes = asyncio.run(send_load(load, port, images, seconds, seed=seed))
    return _Turn(outcomes, time.perf_counter() - begun, cpu_seconds(process) - before)


def measure_bare(bundle: Bundle, images: Sequence[bytes], precision: Precision, seconds: float) -> Bare:
    """Measure prediction without a server, for `seconds` per batch size."""
    predictor = Predictor(bundle.network, precision)
    speeds, alone = {}, []
    for batch in BATCHES:
        predict(bundle, predictor, images[:batch])
        begun, done = time.perf_counter(), 0
        while (now := time.perf_counter()) - begun < seconds:
            predict(bundle, predictor, [images[(done + k) % len(images)] for k in range(batch)])
            done += batch
            if batch == 1:
                alone.append(time.perf_counter() - now)
        speeds[batch] = done / (time.perf_counter() - begun)
    best = max(speeds, key=speeds.__getitem__)
    return Bare(speeds[best], best, float(np.median(alone)))


def measure_servers(
    names: Sequence[str],
    loads: Sequence[Load],
    model: Path,
    images: Sequence[bytes],
    *,
    precision: Precision,
    seconds: float,
    rounds: int = 1,
    pythons: Mapping[str, str] | None = None,
) -> Iterator[Measured]:
    """Yield the measurements of every server under every load. All servers run during the whole measurement, and one of
    them at a time has a load. Each load is measured for `seconds`, after a tenth of that for warming up. This time is
    divided among `rounds`, in which the servers take turns, so that a machine that becomes slower changes all of them.
    All servers get requests at the same times, and other times in each round. `pythons` has the Python of libraries
    with an environment of their own."""
    with ExitStack() as stack:
        running = {name: stack.enter_context(started(name, model, precision, pythons or {})) for name in names}
        for number, load in enumerate(loads):
            turns: dict[str, list[_Turn]] = {name: [] for name in names}
            for count in range(rounds):
                seed = number + len(loads) * count
                for place in range(len(names)):  # another server begins each round
                    name = names[(place + count) % len(names)]
                    turns[name].append(_turn(*running[name], load, images, seconds / rounds, seed))
            for name, (process, _) in running.items():
                outcomes = [outcome for turn in turns[name] for outcome in turn.outcomes]
                took = sum(turn.took for turn in turns[name])
                cpu = sum(turn.cpu_seconds for turn in turns[name])
                yield summarise(name, load, outcomes, took, cpu, memory_bytes(process))


def measure_memory(
    names: Sequence[str],
    model: Path,
    images: Sequence[bytes],
    *,
    precision: Precision,
    requests: int,
    clients: int,
    pythons: Mapping[str, str] | None = None,
) -> Iterator[MemoryPoint]:
    """Yield the memory of each server while `clients` send requests, ten times until all are answered. The servers run
    one after the other."""
    for name in names:
        with started(name, model, precision, pythons or {}) as (process, port):
            done = errors = 0
            for tenth in range(1, 11):
                count = requests * tenth // 10 - done
                outcomes = asyncio.run(send_requests(clients, count, port, images))
                done += len(outcomes)
                errors += sum(outcome.status != 200 for outcome in outcomes)
                yield MemoryPoint(name, done, errors, memory_bytes(process))


def summarise(
    server: str, load: Load, outcomes: Sequence[Outcome], took: float, cpu_seconds: float, memory: int
) -> Measured:
    """Return the measurements of a load that took `took` seconds."""
    right = [outcome for outcome in outcomes if outcome.status == 200]
    times = [outcome.seconds for outcome in outcomes] or [float("nan")]
    p50, p95, p99 = (float(value) for value in np.percentile(times, (50, 95, 99)))
    return Measured(
        server, load.name, len(outcomes), len(outcomes) - len(right), len(right) / took,
        sum(outcome.seconds <= GOOD for outcome in right) / took, p50, p95, p99,
        cpu_seconds / max(len(outcomes), 1), memory,
    )  # fmt: skip


def predict(bundle: Bundle, predictor: Predictor, images: Sequence[bytes]) -> None:
    """Decode images and compute their logits, without a server."""
    pixels = np.stack([bundle.preprocess.pixels(image) for image in images])
    predictor.logits(bundle.preprocess.normalise(torch.from_numpy(pixels).to(bundle.device))).float().cpu()
