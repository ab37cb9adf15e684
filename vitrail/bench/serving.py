"""The HTTP server under load, beside other servers and prediction without a server.

Each server runs in processes of its own. Measured are latency, throughput, processor time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitrail
from vitrail.bench.peers import benchmark_script, run_python
from vitrail.cores import compute_threads
from vitrail.errors import ConfigError
from vitrail.machine import Precision, system_bytes
from vitrail.models.predictor import Predictor
from vitrail.settings import raise_problems
from vitrail.training.stop import StopRequest
from vitrail.weights.bundle import Bundle

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


def _turn(
    process: int, port: int, load: Load, images: Sequence[bytes], seconds: float, seed: int
) -> tuple[list[Outcome], float, float]:
    """Return the outcomes of a server's turn under a load, and the seconds and the processor time that it took."""
    asyncio.run(send_load(load, port, images, seconds / 10, seed=1000 + seed))
    before, begun = cpu_seconds(process), time.perf_counter()
    outcomes = asyncio.run(send_load(load, port, images, seconds, seed=seed))
    return outcomes, time.perf_counter() - begun, cpu_seconds(process) - before


def measure_bare(bundle: Bundle, images: Sequence[bytes], precision: Precision, seconds: float) -> Bare:
    """Measure prediction without a server, for `seconds` per batch size."""
    predictor = Predictor(bundle.network, precision)
    times = {batch: bare_times(bundle, predictor, images, batch, seconds) for batch in BATCHES}
    speeds = {batch: batch / float(found.mean()) for batch, found in times.items()}
    best = max(speeds, key=speeds.__getitem__)
    return Bare(speeds[best], best, float(np.median(times[1])))


def bare_times(
    bundle: Bundle,
    predictor: Predictor,
    images: Sequence[bytes],
    batch: int,
    seconds: float,
    threads: int | None = None,
) -> np.ndarray:
    """Return the times of decoding and computing batches without a server, on a number of threads, by default all. The
    first batch does not count."""
    found: list[float] = []
    source, begun = cycle(images), time.perf_counter()
    with compute_threads(threads):
        while len(found) < 2 or time.perf_counter() - begun < seconds:
            now = time.perf_counter()
            predict(bundle, predictor, list(islice(source, batch)))
            found.append(time.perf_counter() - now)
    return np.array(found[1:])


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
) -> Iterator[dict[str, Any]]:
    """Yield the measurements of every server under every load (`summarise`).

    All servers run during the whole measurement, and one of them at a time has a load. Each load is measured for
    `seconds`, after a tenth of that for warming up. This time is divided among `rounds`, in which the servers take
    turns, so that a machine that becomes slower changes all of them. All servers get requests at the same times, and
    other times in each round. `pythons` has the Python of libraries with an environment of their own.
    """
    with ExitStack() as stack:
        running = {name: stack.enter_context(started(name, model, precision, pythons or {})) for name in names}
        for number, load in enumerate(loads):
            turns: dict[str, list[tuple[list[Outcome], float, float]]] = {name: [] for name in names}
            for count in range(rounds):
                seed = number + len(loads) * count
                for place in range(len(names)):  # another server begins each round
                    name = names[(place + count) % len(names)]
                    turns[name].append(_turn(*running[name], load, images, seconds / rounds, seed))
            for name, (process, _) in running.items():
                outcomes, took, cpu = zip(*turns[name], strict=True)
                yield summarise(name, load, [*chain(*outcomes)], sum(took), sum(cpu), memory_bytes(process))


def measure_memory(
    names: Sequence[str],
    model: Path,
    images: Sequence[bytes],
    *,
    precision: Precision,
    requests: int,
    clients: int,
    pythons: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the memory of each server while `clients` send requests, ten times until all are answered. The servers run
    one after the other. `errors` are the requests so far that were not answered by status 200."""
    for name in names:
        with started(name, model, precision, pythons or {}) as (process, port):
            done = errors = 0
            for tenth in range(1, 11):
                count = requests * tenth // 10 - done
                outcomes = asyncio.run(send_requests(clients, count, port, images))
                done += len(outcomes)
                errors += sum(outcome.status != 200 for outcome in outcomes)
                yield {"server": name, "requests": done, "errors": errors, "memory": memory_bytes(process)}


def summarise(
    server: str, load: Load, outcomes: Sequence[Outcome], took: float, cpu_seconds: float, memory: int
) -> dict[str, Any]:
    """Return the measurements of a load that took `took` seconds.

    `errors` are the requests that were not answered by status 200. `throughput` are the successful answers per second,
    until the last answer, and `goodput` those within a second. `p50`, `p95` and `p99` are percentiles of the time to
    the answer in seconds, over all requests. `cpu_seconds` is the server's processor time per request. `memory` are the
    bytes of the server's processes after the load. Pages that several processes share are divided among them.
    """
    right = [outcome for outcome in outcomes if outcome.status == 200]
    times = [outcome.seconds for outcome in outcomes] or [float("nan")]
    p50, p95, p99 = (float(value) for value in np.percentile(times, (50, 95, 99)))
    return {
        "server": server,
        "load": load.name,
        "requests": len(outcomes),
        "errors": len(outcomes) - len(right),
        "throughput": len(right) / took,
        "goodput": sum(outcome.seconds <= GOOD for outcome in right) / took,
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "cpu_seconds": cpu_seconds / max(len(outcomes), 1),
        "memory": memory,
    }


def predict(bundle: Bundle, predictor: Predictor, images: Sequence[bytes]) -> None:
    """Decode images and compute their logits, without a server."""
    pixels = np.stack([bundle.preprocess.pixels(image) for image in images])
    predictor.logits(bundle.preprocess.normalise(torch.from_numpy(pixels).to(bundle.device))).float().cpu()


# Clients that load a server: some that each wait for an answer, or requests at random times.


TIMEOUT = 60.0
"""Seconds after which a request without an answer counts as an error."""

STALE = 2.0
"""Seconds after which an unused connection is not used again, because the server may be closing it."""


@dataclass(frozen=True)
class Load:
    """A pattern of requests. Either `clients` send the next request after each answer (a closed loop), or requests
    arrive at random times (a Poisson process, an open loop)."""

    clients: int = 0
    """Number of clients of a closed loop, or 0 for an open loop."""
    rate: float = 0.0
    """Mean number of requests per second of an open loop."""

    @property
    def name(self) -> str:
        return f"{self.rate:.1f} req/s" if self.rate else "1 client" if self.clients == 1 else f"{self.clients} clients"


@dataclass(frozen=True)
class Outcome:
    """A request that ended."""

    seconds: float
    """Time from the moment when the request was due to the whole answer. In an open loop, a request that is sent late
    has waited too."""
    status: int
    """HTTP status, or 0 if the connection failed."""


async def send_load(load: Load, port: int, images: Sequence[bytes], seconds: float, seed: int = 0) -> list[Outcome]:
    """Send images to `POST /` for some seconds, and return the outcomes after all answers have come."""
    if load.clients:
        loops = [_closed_loop(port, images, seconds, first=number) for number in range(load.clients)]
        return [outcome for outcomes in await asyncio.gather(*loops) for outcome in outcomes]
    return await _open_loop(port, images, load.rate, seconds, seed)


async def send_requests(clients: int, count: int, port: int, images: Sequence[bytes]) -> list[Outcome]:
    """Send `count` images to `POST /`, divided among clients that each wait for an answer before the next request."""
    parts = [len(range(number, count, clients)) for number in range(clients)]
    loops = [_closed_loop(port, images, math.inf, first=number, most=part) for number, part in enumerate(parts)]
    return [outcome for outcomes in await asyncio.gather(*loops) for outcome in outcomes]


async def _closed_loop(
    port: int, images: Sequence[bytes], seconds: float, first: int, most: float = math.inf
) -> list[Outcome]:
    connection = _Connection(port)
    outcomes: list[Outcome] = []
    end = time.perf_counter() + seconds
    while len(outcomes) < most and (begun := time.perf_counter()) < end:
        status = await connection.ask(images[(first + len(outcomes)) % len(images)])
        outcomes.append(Outcome(time.perf_counter() - begun, status))
    connection.close()
    return outcomes


async def _open_loop(port: int, images: Sequence[bytes], rate: float, seconds: float, seed: int) -> list[Outcome]:
    draws = np.random.default_rng(seed)
    idle: list[_Connection] = []
    begun = time.perf_counter()

    async def ask(number: int, due: float) -> Outcome:
        connection = idle.pop() if idle else _Connection(port)
        status = await connection.ask(images[number % len(images)])
        idle.append(connection)
        return Outcome(time.perf_counter() - due, status)

    tasks: list[asyncio.Task[Outcome]] = []
    due = begun + draws.exponential(1 / rate)
    while due < begun + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(len(tasks), due)))
        due += draws.exponential(1 / rate)
    outcomes = list(await asyncio.gather(*tasks))
    for connection in idle:
        connection.close()
    return outcomes


class _Connection:
    """A connection that stays open between requests."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._used = 0.0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, image: bytes) -> int:
        """Send an image, and return the status of the answer, or 0 if there was none."""
        head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/jpeg\r\nContent-Length: {len(image)}\r\n\r\n"
        try:
            async with asyncio.timeout(TIMEOUT):
                if time.perf_counter() - self._used > STALE:
                    self.close()
                if self._streams is None:
                    self._streams = await asyncio.open_connection("127.0.0.1", self._port)
                self._used = time.perf_counter()
                reader, writer = self._streams
                writer.write(head.encode() + image)
                await writer.drain()
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                await reader.readexactly(int(headers.get("content-length", "0")))
                if headers.get("connection") == "close":
                    self.close()
                return int(lines[0].split()[1])
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
            self.close()
            return 0

    def close(self) -> None:
        if self._streams is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._streams[1].close()
            self._streams = None


# Overhead of servers: their answers beside prediction without a server, measured in turns.


TURNS = 3
"""Number of turns. In each of them, the server and prediction without a server are measured one after the other, so
that a machine that becomes slower changes both."""

BUSY = 16
"""Number of clients that keep a server busy."""


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
) -> Iterator[dict[str, Any]]:
    """Yield the overhead of each server. A turn measures each of four things for half of `seconds`. `bare` has the
    fastest batch size without a server.

    Times are in seconds, and all values are medians over turns: the time to the answer for one client (`alone`), the
    time for decoding and computing one image without a server (`bare`) on as many threads, and their difference
    (`added`); the successful answers per second to `BUSY` clients (`throughput`), the images per second without a
    server in batches of the fastest size, and the ratio of these two speeds (`fraction`).
    """
    predictor = Predictor(bundle.network, precision)

    without_server = partial(bare_times, bundle, predictor, images, seconds=seconds / 2)
    with ExitStack() as stack:
        ports = {name: stack.enter_context(started(name, model, precision, pythons or {}))[1] for name in names}
        for name, port in ports.items():
            turns, errors, threads = [], 0, _lone_threads(port)
            for _ in range(TURNS):
                one = asyncio.run(send_load(Load(clients=1), port, images, seconds / 2))
                single = float(np.median(without_server(1, threads=threads)))
                begun = time.perf_counter()
                many = asyncio.run(send_load(Load(clients=BUSY), port, images, seconds / 2))
                speed = sum(outcome.status == 200 for outcome in many) / (time.perf_counter() - begun)
                bare_speed = bare.batch / float(without_server(bare.batch).mean())
                errors += sum(outcome.status != 200 for outcome in (*one, *many))
                alone = float(np.median([outcome.seconds for outcome in one[1:] or one]))
                turns.append((alone, single, alone - single, speed, bare_speed, speed / bare_speed))
            alone, single, added, speed, bare_speed, fraction = np.median(turns, axis=0).tolist()
            yield {
                "server": name,
                "alone": alone,
                "threads": threads,
                "bare": single,
                "added": added,
                "throughput": speed,
                "bare_throughput": bare_speed,
                "fraction": fraction,
                "errors": errors,
            }


def _lone_threads(port: int) -> int:
    """Return the number of compute threads of a batch that is alone in a server of Vitrail. Other servers do not report
    it, and count as servers that use all threads."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/models", timeout=10) as answer:
            return int(json.load(answer)["models"][0]["batch_threads"])
    except (OSError, ValueError, LookupError, TypeError):
        return torch.get_num_threads()


# Servers to measure, each in processes of its own: their start, their processor time and their memory.


PATIENCE = 20.0
"""Seconds in which a server has to end."""


@dataclass(frozen=True)
class ServerKind:
    """A server that can be measured."""

    words: tuple[str, ...]
    """Arguments of the Python that runs the server. The server prints its address to the standard error output as soon
    as it answers."""
    library: str = ""
    """Library that it needs, which can have an environment of its own."""


SERVERS = {
    "vitrail": ServerKind(("-m", "vitrail", "serve", "model={model}", "--port", "0", "--precision", "{precision}")),
    "naive": ServerKind(("{servers}", "naive", "{model}", "{precision}")),
    "litserve": ServerKind(("{servers}", "batches", "{model}", "{precision}"), "litserve"),
    "litserve-workers": ServerKind(("{servers}", "workers", "{model}", "{precision}"), "litserve"),
}
"""Servers by their names."""


def check_pythons(names: Sequence[str], pythons: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless the libraries of these servers can be imported by their Pythons, by default the Python
    that runs Vitrail."""
    if len(names) > 1:
        benchmark_script("servers.py")
    needed = {SERVERS[name].library for name in names} - {""}
    raise_problems(
        f"environment: {library!r} is not a library of the servers to measure: {', '.join(names)}"
        for library in pythons
        if library not in needed
    )
    for library in sorted(needed):
        words = ["-c", f"import sys; sys.stdout = sys.stderr; import {library}, vitrail.weights.load"]
        advice = f"Install {library} and the packages of Vitrail in an environment, and name its Python"
        run_python(pythons.get(library, sys.executable), library, words, advice, _environment())


@contextmanager
def started(name: str, model: Path, precision: str, pythons: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Start a server, and yield the number of its process and its port. Raise `ConfigError` if it does not start."""
    kind = SERVERS[name]
    script = benchmark_script("servers.py") if "{servers}" in kind.words else ""
    words = (word.format(model=model, precision=precision, servers=script) for word in kind.words)
    command = [pythons.get(kind.library, sys.executable), *words]
    process = None
    try:
        with StopRequest() as request:  # a signal that came before the process is known would leave it behind
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL,  # a banner would stand before the JSON of this process
                stderr=subprocess.PIPE, text=True, env=_environment(), start_new_session=True,
            )  # fmt: skip
        if request.is_asked:
            raise KeyboardInterrupt
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
        if process is not None:
            with process:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)
                with suppress(ProcessLookupError):  # processes that it has left behind
                    os.killpg(process.pid, signal.SIGKILL)


def cpu_seconds(process: int) -> float:
    """Return the processor time of a process and its descendants so far."""
    ticks = 0
    for one in _tree(process):
        with suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes(process: int) -> int:
    """Return the memory of a process and its descendants. Pages that several processes share are divided among them."""
    return sum(system_bytes(f"{one}/smaps_rollup", "Pss") or 0 for one in _tree(process))


def _tree(process: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found = [process]
    for one in found:  # the list grows
        found += children.get(one, [])
    return found


def _environment() -> dict[str, str]:
    """Return the variables of a server: it finds this Vitrail, also from another library's environment."""
    return {**os.environ, "PYTHONPATH": str(Path(vitrail.__file__).parents[1])}
