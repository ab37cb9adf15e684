"""Overhead of servers: their answers beside prediction without a server, measured in turns."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch

from vitrail.bench.serving.clients import Load, send_load
from vitrail.bench.serving.measure import Bare, predict
from vitrail.bench.serving.servers import started
from vitrail.cores import compute_threads
from vitrail.machine import Precision
from vitrail.models.predictor import Predictor
from vitrail.weights.bundle import Bundle

__all__ = ["BUSY", "Overhead", "measure_overhead"]

TURNS = 3
"""Number of turns. In each of them, the server and prediction without a server are measured one after the other, so
that a machine that becomes slower changes both."""

BUSY = 16
"""Number of clients that keep a server busy."""


@dataclass(frozen=True)
class Overhead:
    """One server beside prediction without a server. Times are in seconds, and all values are medians over turns."""

    server: str
    alone: float
    """Median time to the answer for one client."""
    threads: int
    """Number of compute threads of an image that is alone, with and without the server."""
    bare: float
    """Median time for decoding and computing one image without a server."""
    added: float
    """Difference of these two times."""
    throughput: float
    """Successful answers per second to `BUSY` clients."""
    bare_throughput: float
    """Images per second without a server, in batches of the fastest size."""
    fraction: float
    """Ratio of these two speeds."""
    errors: int
    """Requests that were not answered by status 200."""


def measure_overhead(
    names: Sequence[str],
    model: Path,
    bundle: Bundle,
    images: Sequence[bytes],
    bare: Bare,
    *,
    precision: Precision,
    seconds: float,
    pythons: Mapping[str, str] | None = None,
) -> Iterator[Overhead]:
    """Yield the overhead of each server. A turn measures each of four things for half of `seconds`. `bare` has the
    fastest batch size without a server."""
    predictor = Predictor(bundle.network, precision)

    def times_without_server(batch: int, threads: int | None = None) -> np.ndarray:
        """Return the times of batches on a number of threads, by default all, without the first one."""
        found: list[float] = []
        source, begun = cycle(images), time.perf_counter()
        with compute_threads(threads):
            while len(found) < 2 or time.perf_counter() - begun < seconds / 2:
                now = time.perf_counter()
                predict(bundle, predictor, list(islice(source, batch)))
                found.append(time.perf_counter() - now)
        return np.array(found[1:])

    with ExitStack() as stack:
        ports = {name: stack.enter_context(started(name, model, precision, pythons or {}))[1] for name in names}
        for name, port in ports.items():
            turns, errors, threads = [], 0, _lone_threads(port)
            for _ in range(TURNS):
                one = asyncio.run(send_load(Load(clients=1), port, images, seconds / 2))
                single = float(np.median(times_without_server(1, threads)))
                begun = time.perf_counter()
                many = asyncio.run(send_load(Load(clients=BUSY), port, images, seconds / 2))
                speed = sum(outcome.status == 200 for outcome in many) / (time.perf_counter() - begun)
                bare_speed = bare.batch / float(times_without_server(bare.batch).mean())
                errors += sum(outcome.status != 200 for outcome in (*one, *many))
                alone = float(np.median([outcome.seconds for outcome in one[1:] or one]))
                turns.append((alone, single, alone - single, speed, bare_speed, speed / bare_speed))
            alone, single, added, speed, bare_speed, fraction = np.median(turns, axis=0).tolist()
            yield Overhead(name, alone, threads, single, added, speed, bare_speed, fraction, errors)


def _lone_threads(port: int) -> int:
    """Return the number of compute threads of a batch that is alone in a server of Vitrail. Other servers do not report
    it, and count as servers that use all threads."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/models", timeout=10) as answer:
            return int(json.load(answer)["models"][0]["batch_threads"])
    except (OSError, ValueError, LookupError, TypeError):
        return torch.get_num_threads()
