"""Batching: images that arrive while the model computes are computed together in the next batch."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

__all__ = ["LARGEST", "Batcher", "Row", "TooLate", "choose_batch"]

LARGEST = 16
"""Largest batch that is tried when the largest batch size is measured."""

ENOUGH = 0.95
"""Fraction of the best throughput that the chosen batch size reaches."""

LONGEST = 0.5
"""Longest time in seconds for a batch of more than one image, because all requests wait for a batch."""

Run = Callable[[np.ndarray], Mapping[str, np.ndarray]]
"""A function that computes the named outputs of a batch of pixels (b, c, h, w)."""

Row = dict[str, np.ndarray]
"""Outputs of one image, by their names."""


class TooLate(Exception):
    """The image waited longer than its deadline."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    pixels: np.ndarray
    answer: asyncio.Future[Row]
    since: float


class Batcher:
    """Collects images of many requests into batches. An idle batcher computes the first image at once.

    Images of clients that have gone, and images that waited too long, are dropped before they are computed.
    """

    def __init__(
        self,
        run: Run,
        thread: ThreadPoolExecutor,
        *,
        largest: int,
        seconds: float,
        on_batch: Callable[[int, float, float], None] = lambda images, waited, took: None,
    ) -> None:
        """Compute at most `largest` images together, and drop images that wait longer than `seconds`.

        `thread` computes. Batchers that share an executor of one thread do not compete for the processor. `on_batch` is
        called with the number of images, the longest wait and the time for computing.
        """
        self.largest = largest
        self._run, self._thread, self._seconds, self._on_batch = run, thread, seconds, on_batch
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start computing. Call it in the server's event loop."""
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """Stop computing. Images that still wait get no answer, so call it when all requests are answered."""
        assert self._worker is not None
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)

    async def compute(self, images: Sequence[np.ndarray]) -> list[Row]:
        """Return the outputs of each image. Raise `TooLate` if an image waited too long."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        items = [_Waiting(pixels, loop.create_future(), now) for pixels in images]
        self._waiting += items
        self._arrived.set()
        try:
            return list(await asyncio.gather(*(item.answer for item in items)))
        finally:
            for item in items:  # if one image fails or the client has gone, the others need no computing
                item.answer.cancel()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if not batch:
                self._arrived.clear()
                continue
            begun = time.monotonic()
            try:
                outputs = await loop.run_in_executor(self._thread, self._run, np.stack([one.pixels for one in batch]))
            except Exception as error:  # the error belongs to these requests; the server goes on
                for item in batch:
                    if not item.answer.done():
                        item.answer.set_exception(error)
                continue
            self._on_batch(len(batch), begun - batch[0].since, time.monotonic() - begun)
            for row, item in enumerate(batch):
                if not item.answer.done():
                    item.answer.set_result({name: values[row] for name, values in outputs.items()})

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self.largest:
            item = self._waiting.popleft()
            if item.answer.done():
                continue
            if time.monotonic() - item.since > self._seconds:
                item.answer.set_exception(TooLate())
                continue
            batch.append(item)
        return batch


def choose_batch(run: Run, pixels: np.ndarray, clock: Callable[[], float] = time.perf_counter) -> int:
    """Return the largest number of images to compute together: the smallest power of two up to `LARGEST` that computes
    nearly as many images per second as the best one. `pixels` is one image.

    All images of a batch are answered when the last one is computed, so a larger batch delays every answer.
    """
    speeds: dict[int, float] = {}
    size = 1
    while size <= LARGEST:
        batch = np.repeat(pixels[None], size, axis=0)
        run(batch)  # the first call of a size allocates memory
        took = min(_time(run, batch, clock) for _ in range(2))
        if took > LONGEST and speeds:
            break
        speeds[size] = size / max(took, 1e-9)
        size *= 2
    return min(size for size, speed in speeds.items() if speed >= ENOUGH * max(speeds.values()))


def _time(run: Run, batch: np.ndarray, clock: Callable[[], float]) -> float:
    begun = clock()
    run(batch)
    return clock() - begun
