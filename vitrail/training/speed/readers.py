"""The choice between threads and the main thread for reading images, measured in the first steps of a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

__all__ = ["ReaderTrials"]


class ReaderTrials:
    """Times steps with different numbers of reading threads in turns, and chooses the fastest number.

    The turns alternate, because the speed of a machine changes from second to second. The choice does not influence
    which images a batch holds, so the timed steps are ordinary steps of the run.
    """

    SECONDS, STEPS = 1.0, 4
    """Least time in seconds and least number of steps of a turn."""
    SKIPPED = 2
    """Number of first steps of a turn that are not timed, because the readers start in them."""
    TURNS = 2
    """Number of turns of each choice. The faster one counts."""
    GAIN = 0.02
    """Fraction of the time that a choice must save to be preferred to the first one."""

    def __init__(self, choices: Sequence[int], use: Callable[[int], None]) -> None:
        """`choices` are numbers of threads, the usual one first. `use` is called with each number that is tried, and
        with the chosen one."""
        self.times: dict[int, float] = {}
        """Seconds per step by the number of threads."""
        self._use = use
        self._turns = itertools.chain(*[choices] * self.TURNS)
        self._usual = choices[0]
        self._begin(next(self._turns))

    def add(self, seconds: float, work: float = 1.0) -> int | None:
        """Add the time of a step, whose cost is `work`. Return the chosen number of threads after the last turn."""
        self._steps += 1
        if self._steps <= self.SKIPPED:
            return None
        self._seconds += seconds
        self._work += work
        if self._seconds < self.SECONDS or self._steps < self.SKIPPED + self.STEPS:
            return None
        taken = self._seconds / self._work
        self.times[self._tried] = min(taken, self.times.get(self._tried, taken))
        if (following := next(self._turns, None)) is not None:
            self._begin(following)
            return None
        best = min(self.times, key=lambda threads: self.times[threads])
        chosen = best if self.times[best] <= (1 - self.GAIN) * self.times[self._usual] else self._usual
        if chosen != self._tried:
            self._use(chosen)
        return chosen

    def _begin(self, threads: int) -> None:
        self._tried, self._steps, self._seconds, self._work = threads, 0, 0.0, 0.0
        self._use(threads)
