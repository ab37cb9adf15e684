"""Batching: images that arrive while the model computes are computed together in the next batch."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from vitrail.cores import compute_threads

__all__ = ["LARGEST", "Batcher", "Compute", "Row", "Run", "TooLate", "choose_batch"]

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


class Compute:
    """Computes batches on a number of workers, among which the compute threads of the process are divided.

    A batch that is alone has all threads, which answers it soonest. Batches that are computed at the same time have
    threads of their own, because threads of one batch wait for each other (docs/serving.md).
    """

    def __init__(self, workers: int, threads: int) -> None:
        """Compute at most `workers` batches at the same time, with `threads` compute threads in all."""
        self.workers = workers
        self._threads = threads
        self._running = 0
        self._executor = ThreadPoolExecutor(workers, "vitrail-compute")

    @property
    def free(self) -> int:
        """Number of workers that do not compute."""
        return max(0, self.workers - self._running)

    async def run(self, function: Run, batch: np.ndarray, *, is_last: bool) -> Mapping[str, np.ndarray]:
        """Return `function(batch)`. `is_last` is True if no images wait for the next batch."""
        self._running += 1
        parts = min(self.workers, self._running + (not is_last))
        threads = max(1, self._threads // parts)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, _run_with, threads, function, batch)
        finally:
            self._running -= 1

    def stop(self) -> None:
        """End the workers after they have computed their batches."""
        self._executor.shutdown()


def _run_with(threads: int, function: Run, batch: np.ndarray) -> Mapping[str, np.ndarray]:
    with compute_threads(threads):  # of this worker only
        return function(batch)


class Batcher:
    """Collects images of many requests into batches. An idle batcher computes the first image at once.

    Images of clients that have gone, and images that waited too long, are dropped before they are computed. Use a
    batcher in one event loop only.
    """

    def __init__(
        self,
        run: Run,
        compute: Compute,
        *,
        largest: int,
        seconds: float,
        on_batch: Callable[[int, float, float], None] = lambda images, waited, took: None,
    ) -> None:
        """Compute at most `largest` images together, and drop images that wait longer than `seconds`.

        Batchers can share the workers of `compute`. `on_batch` is called with the number of images, the longest wait
        and the time for computing.
        """
        self.largest = largest
        self._run, self._compute, self._seconds, self._on_batch = run, compute, seconds, on_batch
        self._waiting: deque[_Waiting] = deque()
        self._working = 0
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to a task

    async def compute(self, images: Sequence[np.ndarray]) -> list[Row]:
        """Return the outputs of each image. Raise `TooLate` if an image waited too long."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        items = [_Waiting(pixels, loop.create_future(), now) for pixels in images]
        self._waiting += items
        for _ in range(min(len(items), self._compute.workers - self._working)):
            self._working += 1
            task = loop.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return list(await asyncio.gather(*(item.answer for item in items)))
        finally:
            for item in items:  # if one image fails or the client has gone, the others need no computing
                item.answer.cancel()

    async def _work(self) -> None:
        """Compute batches until no image waits. An idle batcher has no task, so nothing keeps an unused one alive."""
        try:
            while batch := self._next_batch():
                await self._answer(batch)
        finally:
            self._working -= 1

    async def _answer(self, batch: Sequence[_Waiting]) -> None:
        """Compute a batch, and give each image its outputs, or all of them the error."""
        begun = time.monotonic()
        try:
            pixels = np.stack([one.pixels for one in batch])
            outputs = await self._compute.run(self._run, pixels, is_last=not self._waiting)
        except Exception as error:  # the error belongs to these requests; the server goes on
            for item in batch:
                if not item.answer.done():
                    item.answer.set_exception(error)
            return
        self._on_batch(len(batch), begun - batch[0].since, time.monotonic() - begun)
        for row, item in enumerate(batch):
            if not item.answer.done():
                item.answer.set_result({name: values[row] for name, values in outputs.items()})

    def _next_batch(self) -> list[_Waiting]:
        """Take the next batch from the queue: at most `largest` images. The free workers get equal parts of the
        queue."""
        most = min(self.largest, math.ceil(len(self._waiting) / max(1, self._compute.free)))
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < most:
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

    One thread computes, as when all workers are busy. All images of a batch are answered when the last one is computed,
    so a larger batch delays every answer.
    """
    speeds: dict[int, float] = {}
    size = 1
    while size <= LARGEST:
        batch = np.repeat(pixels[None], size, axis=0)
        _run_with(1, run, batch)  # the first call of a size allocates memory
        took = min(_time(run, batch, clock) for _ in range(2))
        if took > LONGEST and speeds:
            break
        speeds[size] = size / max(took, 1e-9)
        size *= 2
    return min(size for size, speed in speeds.items() if speed >= ENOUGH * max(speeds.values()))


def _time(run: Run, batch: np.ndarray, clock: Callable[[], float]) -> float:
    begun = clock()
    _run_with(1, run, batch)
    return clock() - begun
