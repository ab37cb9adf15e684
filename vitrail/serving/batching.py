"""Batching: images that arrive while the model computes are computed together in the next batch.

Threads of one matrix product wait for each other, so more threads are not always faster. The number of threads of a
batch that is alone is therefore measured at the start.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from vitrail.cores import compute_threads, share_cores

NEARLY = 1.15
"""Largest ratio of the time of an image with the chosen number of threads to its time with the best number. Threads
that gain less are left to other batches and programs."""

ROUNDS = 8
"""Number of times that each number of threads is tried at the start."""

START_SECONDS = 1.5
"""Seconds after which no further round of trials at the start begins, if there were two."""


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

    Batches that are computed at the same time have threads of their own, because threads of one batch wait for each
    other (docs/serving.md). The threads are divided anew while batches are computed, if their function calls `divide`
    now and then.
    """

    def __init__(self, workers: int, threads: int) -> None:
        """Compute at most `workers` batches at the same time, with `threads` compute threads in all."""
        share_cores()
        self.workers = workers
        self.threads = threads
        """Number of compute threads of all workers together."""
        self.running = 0
        """Number of batches that are computed."""
        self._here = threading.local()
        self._executor = ThreadPoolExecutor(workers, "vitrail-compute")

    async def run(self, function: Run, batch: np.ndarray, most: int | None = None) -> Mapping[str, np.ndarray]:
        """Return `function(batch)`, computed with at most `most` threads, by default with all."""
        self.running += 1
        try:
            await asyncio.sleep(0)  # batches that begin together count each other
            return await asyncio.get_running_loop().run_in_executor(
                self._executor, self._work, function, batch, most or self.threads
            )
        finally:
            self.running -= 1

    def divide(self) -> None:
        """Give the calling worker its part of the compute threads, if other batches have begun or ended. Other threads
        than the workers keep the number that they have."""
        most: int | None = getattr(self._here, "most", None)
        if most is not None and torch.get_num_threads() != (threads := self._part(most)):
            torch.set_num_threads(threads)

    def stop(self) -> None:
        """End the workers after they have computed their batches."""
        self._executor.shutdown()

    def _part(self, most: int) -> int:
        """Return the number of compute threads of a batch that may have at most `most`."""
        return max(1, min(most, self.threads // max(1, min(self.workers, self.running))))

    def _work(self, function: Run, batch: np.ndarray, most: int) -> Mapping[str, np.ndarray]:
        with compute_threads(self._part(most)):
            self._here.most = most
            try:
                return function(batch)
            finally:
                self._here.most = None


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
        threads: int | None = None,
        on_batch: Callable[[int, float, float], None] = lambda images, waited, took: None,
    ) -> None:
        """Compute at most `largest` images together, and drop images that wait longer than `seconds`. A batch
        that is alone has at most `threads` compute threads, by default all.

        Batchers can share the workers of `compute`. `on_batch` is called with the number of images, the longest wait
        and the time for computing.
        """
        self.largest = largest
        self.threads = threads
        self._run, self._compute, self._seconds, self._on_batch = run, compute, seconds, on_batch
        self._waiting: OrderedDict[_Waiting, None] = OrderedDict()  # in the order of their arrival
        self._working = 0
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to a task

    async def compute(self, images: Sequence[np.ndarray]) -> list[Row]:
        """Return the outputs of each image. Raise `TooLate` if an image waited too long."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        items = [_Waiting(pixels, loop.create_future(), now) for pixels in images]
        self._waiting.update(dict.fromkeys(items))
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
                self._waiting.pop(item, None)  # or a busy batcher would keep pixels that nobody waits for

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
            outputs = await self._compute.run(self._run, pixels, self.threads)
        except Exception as error:  # the error belongs to these requests; the server continues
            for item in batch:
                if not item.answer.done():
                    item.answer.set_exception(error)
            return
        self._on_batch(len(batch), begun - batch[0].since, time.monotonic() - begun)
        for row, item in enumerate(batch):
            if not item.answer.done():
                item.answer.set_result({name: values[row] for name, values in outputs.items()})

    def _next_batch(self) -> list[_Waiting]:
        """Take the next batch from the queue: at most `largest` images.

        A single worker takes all of them. One of several workers takes half of its equal part of the queue. All images
        of a batch are answered when the last one is computed, so while few images wait they are computed one by one,
        and larger batches, which save some time per image, are left to long queues.
        """
        workers = self._compute.workers
        most = min(self.largest, max(1, len(self._waiting) // (2 * workers if workers > 1 else 1)))
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < most:
            item, _ = self._waiting.popitem(last=False)
            if time.monotonic() - item.since > self._seconds:
                item.answer.set_exception(TooLate())
            else:
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
        times = []
        with compute_threads(1):
            run(batch)  # the first call of a size allocates memory
            for _ in range(2):
                begun = clock()
                run(batch)
                times.append(clock() - begun)
        took = min(times)
        if took > LONGEST and speeds:
            break
        speeds[size] = size / max(took, 1e-9)
        size *= 2
    return min(size for size, speed in speeds.items() if speed >= ENOUGH * max(speeds.values()))


def choose_threads(run: Run, pixels: np.ndarray, most: int, clock: Callable[[], float] = time.perf_counter) -> int:
    """Return the number of compute threads of a batch that is alone: the smallest of 1, 2, 4, ... and `most` with which
    one image, `pixels`, takes nearly the shortest time."""
    numbers = sorted({most, *(2**power for power in range(most.bit_length()))})
    if len(numbers) == 1:
        return most
    times: dict[int, list[float]] = {number: [] for number in numbers}
    batch, began = pixels[None], clock()
    for round_number in range(ROUNDS):
        if round_number > 1 and clock() - began > START_SECONDS:
            break
        for number, found in times.items():
            begun = clock()
            with compute_threads(number):
                run(batch)
            if round_number:  # the first call is slow
                found.append(clock() - begun)
    means = {number: _mean(found) for number, found in times.items()}
    return min(number for number, mean in means.items() if mean <= NEARLY * min(means.values()))


def _mean(times: Sequence[float]) -> float:
    """Return the mean without the slowest time, if there are several."""
    return sum(sorted(times)[:-1]) / (len(times) - 1) if len(times) > 1 else sum(times)
