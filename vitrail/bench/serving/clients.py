"""Clients that load a server: some that each wait for an answer, or requests at random times."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Load", "Outcome", "send_load", "send_requests"]

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
        try:
            async with asyncio.timeout(TIMEOUT):
                return await self._ask(image)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
            self.close()
            return 0

    def close(self) -> None:
        if self._streams is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._streams[1].close()
            self._streams = None

    async def _ask(self, image: bytes) -> int:
        if time.perf_counter() - self._used > STALE:
            self.close()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        self._used = time.perf_counter()
        reader, writer = self._streams
        head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/jpeg\r\nContent-Length: {len(image)}\r\n\r\n"
        writer.write(head.encode() + image)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        await reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("connection") == "close":
            self.close()
        return int(lines[0].split()[1])
