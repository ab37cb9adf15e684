"""The number of compute threads of a batch that is alone, chosen by the times of the latest batches.

Threads of one matrix product wait for each other, so more threads are faster on free cores only. Whether the cores are
free changes while a server runs: other programs, clients on the same machine and decoding take them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np

from vitrail.cores import compute_threads

NEARLY = 1.15
"""Largest ratio of the time of an image with the chosen number of threads to its time with the best number. Threads
that gain less are left to other batches and programs."""

LATEST = 8
"""Number of times that are kept per number of threads. The slowest of them is ignored, because it can be due to a
single interruption."""

FIRST_PAUSE, PAUSE = 25, 200
"""Numbers of lone batches before the first trial of another number of threads, and between two trials. After a failed
trial the pause is doubled, up to the second number. A failed trial delays one answer, and with the long pause stays
outside the 99th percentile."""

TRIALS = 4
"""Number of successful trials after which another number of threads is chosen."""

ROUNDS = 8
"""Number of times that each number of threads is tried at the start."""

START_SECONDS = 1.5
"""Seconds after which no further round of trials at the start begins, if there were two."""


class ThreadChoice:
    """The number of compute threads of batches that are alone: the smallest one that is nearly as fast as the best one.

    The latest times of each number are compared after every lone batch. Other numbers have only old times, so now and
    then a batch has half or twice as many threads as the others. If this is no improvement, the trial ends. Otherwise
    further batches have this number too, until there are enough times for a decision.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        """Choose among `numbers`, and begin with the largest one. A single number is always chosen."""
        self.numbers = sorted(numbers)
        self.threads = self.numbers[-1]
        """The number that was chosen last. During a trial, the next lone batch has another one."""
        self._times: dict[int, deque[float]] = {number: deque(maxlen=LATEST) for number in self.numbers}
        self._trial: int | None = None
        self._tried = self.threads
        self._since, self._pause = 0, FIRST_PAUSE

    def next(self) -> int:
        """Return the number of threads for the next lone batch."""
        if self._trial is None and self._since >= self._pause and len(self.numbers) > 1:
            self._begin_trial()
        return self.threads if self._trial is None else self._trial

    def note(self, threads: int, seconds: float) -> None:
        """Note the time of a batch of one image that was alone from its beginning to its end."""
        if threads not in self._times:
            return
        self._times[threads].append(seconds)
        best = self._best()
        if self._trial is None:
            self._since += 1
            self._use(best)
        elif threads == self._trial and (best != self._trial or len(self._times[threads]) >= TRIALS):
            self._trial, self._since, self._pause = None, 0, min(2 * self._pause, PAUSE)
            self._use(best)

    def _use(self, threads: int) -> None:
        """Choose a number. After a change the next trial comes soon, because the cores have just been taken or freed,
        or the first measurements were wrong."""
        if threads != self.threads:
            self.threads, self._pause = threads, FIRST_PAUSE

    def _begin_trial(self) -> None:
        """Try a neighbour of the chosen number: the one that was not tried last. Its old times are forgotten."""
        place = self.numbers.index(self.threads)
        near = [self.numbers[other] for other in (place - 1, place + 1) if 0 <= other < len(self.numbers)]
        self._trial = self._tried = next((number for number in near if number != self._tried), near[0])
        self._times[self._trial].clear()

    def _best(self) -> int:
        """Return the smallest number whose time is at most `NEARLY` times the best one."""
        means = {number: _mean(times) for number, times in self._times.items() if times}
        return min(number for number, mean in means.items() if mean <= NEARLY * min(means.values()))


def measured_choice(
    run: Callable[[np.ndarray], object],
    pixels: np.ndarray,
    most: int,
    clock: Callable[[], float] = time.perf_counter,
) -> ThreadChoice:
    """Return the choice among 1, 2, 4, ... and `most` threads that begins with measured times of `run` for one image,
    `pixels`."""
    choice = ThreadChoice(sorted({most, *(2**power for power in range(most.bit_length()))}))
    if len(choice.numbers) == 1:
        return choice
    batch, began = pixels[None], clock()
    for round_number in range(ROUNDS):
        if round_number > 1 and clock() - began > START_SECONDS:
            break
        for number in choice.numbers:
            begun = clock()
            with compute_threads(number):
                run(batch)
            if round_number:  # the first call is slow
                choice.note(number, clock() - begun)
    return choice


def _mean(times: Collection[float]) -> float:
    """Return the mean without the slowest time, if there are several."""
    return sum(sorted(times)[:-1]) / (len(times) - 1) if len(times) > 1 else sum(times)
