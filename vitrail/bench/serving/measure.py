"""Measurement of servers in processes of their own: latency, throughput, processor time and memory under each load."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitrail.bench.serving.clients import Load, Outcome, send_load
from vitrail.errors import ConfigError
from vitrail.machine import Precision
from vitrail.models.predictor import Predictor
from vitrail.weights.bundle import Bundle

__all__ = ["SERVERS", "Bare", "Measured", "measure_bare", "measure_servers", "summarise"]

SERVERS = {
    "vitrail": ("vitrail", "serve", "model={model}", "--port", "0", "--precision", "{precision}"),
    "naive": ("vitrail.bench.serving.naive", "{model}", "{precision}"),
}
"""Modules and arguments of servers, by name."""

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
    """Resident bytes of the server after the load."""


def measure_bare(bundle: Bundle, images: Sequence[bytes], precision: Precision, seconds: float) -> Bare:
    """Measure prediction without a server, for `seconds` per batch size."""
    predictor = Predictor(bundle.network, precision)
    speeds, alone = {}, []
    for batch in BATCHES:
        _predict(bundle, predictor, images[:batch])
        begun, done = time.perf_counter(), 0
        while (now := time.perf_counter()) - begun < seconds:
            _predict(bundle, predictor, [images[(done + k) % len(images)] for k in range(batch)])
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
) -> Iterator[Measured]:
    """Yield the measurements of every server under every load. All servers run during the whole measurement, and one of
    them at a time has a load. Each load is measured for `seconds`, after a tenth of that for warming up."""
    with ExitStack() as stack:
        running = {name: stack.enter_context(_started(name, model, precision)) for name in names}
        for number, load in enumerate(loads):
            for name, (process, port) in running.items():
                asyncio.run(send_load(load, port, images, seconds / 10, seed=1000 + number))
                before, begun = _cpu_seconds(process), time.perf_counter()
                outcomes = asyncio.run(send_load(load, port, images, seconds, seed=number))
                took = time.perf_counter() - begun
                yield summarise(name, load, outcomes, took, _cpu_seconds(process) - before, _resident(process))


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


def _predict(bundle: Bundle, predictor: Predictor, images: Sequence[bytes]) -> None:
    pixels = np.stack([bundle.preprocess.pixels(image) for image in images])
    predictor.logits(bundle.preprocess.normalise(torch.from_numpy(pixels).to(bundle.device))).float().cpu()


@contextmanager
def _started(name: str, model: Path, precision: str) -> Iterator[tuple[int, int]]:
    """Start a server, and yield the number of its process and its port. Raise `ConfigError` if it does not start."""
    module, *arguments = (word.format(model=model, precision=precision) for word in SERVERS[name])
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while (found := re.search(r"http://127\.0\.0\.1:(\d+)", said)) is None:
                line = process.stderr.readline()
                if not line:
                    raise ConfigError(f"against={name!r} did not start: {said.strip()}")
                said += line
            log = process.stderr  # it is read, so that the server never waits for a full pipe
            threading.Thread(target=lambda: [None for _ in log], daemon=True).start()
            yield process.pid, int(found[1])
        finally:
            process.terminate()


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
