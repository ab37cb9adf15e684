"""A rate that does not swing with every report, and a forecast of the time left."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

__all__ = ["SmoothedRate", "TimeLeft"]


class SmoothedRate:
    """Count per second over about the last minute, from reports of different lengths.

    Counts and seconds are summed separately, and both sums decay by exp(-seconds / 60). A short report therefore
    changes the rate little. The first report contains the start-up, so it is dropped when the second one arrives.
    """

    SECONDS = 60.0

    def __init__(self) -> None:
        self._count = 0.0
        self._seconds = 0.0
        self._reports = 0

    def add(self, count: int | float, seconds: float) -> float:
        """Add a report, and return the rate. `seconds` is above 0."""
        kept = 0.0 if self._reports == 1 else math.exp(-seconds / self.SECONDS)
        self._count = kept * self._count + count
        self._seconds = kept * self._seconds + seconds
        self._reports += 1
        return self._count / self._seconds


class TimeLeft:
    """Forecast of the seconds until the end of a run: the steps, the pauses for evaluations and checkpoints, and the
    last measurements.

    Before the first evaluation, an evaluated image is counted as a third of a training step's time per image, because a
    training step computes a forward pass and a backward pass, which costs twice as much. A pause that has not occurred
    yet is otherwise not counted.
    """

    def __init__(
        self,
        steps: int,
        every: Mapping[str, int],
        *,
        batch_size: int = 1,
        evaluated: int = 0,
        at_end: int = 0,
        work: Callable[[int], float] = float,
    ) -> None:
        """`every` maps the names of pauses to the number of steps between them; an "evaluation" measures `evaluated`
        images. `at_end` is the number of images that are measured after the last step. `work` returns the cost of the
        steps before a step, in steps of `batch_size` images. By default all steps cost the same.
        """
        self.steps = steps
        self.every = dict(every)
        self.batch_size = batch_size
        self.evaluated = evaluated
        self.at_end = at_end
        self.work = work
        self._rate = SmoothedRate()
        self._reports = 0
        self._step_seconds = 0.0
        self._pauses: dict[str, tuple[int, float]] = {}

    def add(self, work: int | float, seconds: float) -> None:
        """Add the time of some steps, without pauses."""
        self._reports += 1
        self._step_seconds = 1 / self._rate.add(work, seconds)

    def pause(self, name: str, seconds: float) -> None:
        """Add the time of a pause."""
        count, total = self._pauses.get(name, (0, 0.0))
        self._pauses[name] = count + 1, total + seconds

    def seconds(self, step: int) -> float | None:
        """Return the forecast after a step. Return None if the only known time contains the start-up."""
        if self._reports < 2:
            return None
        per_image = self._step_seconds / (3 * self.batch_size)
        if self.evaluated and "evaluation" in self._pauses:
            count, total = self._pauses["evaluation"]
            per_image = total / count / self.evaluated
        left = (self.work(self.steps) - self.work(step)) * self._step_seconds + self.at_end * per_image
        for name, every in self.every.items():
            times = self.steps // every - step // every + (self.steps % every > 0 and step < self.steps)
            count, total = self._pauses.get(name, (0, 0.0))
            each = per_image * self.evaluated if name == "evaluation" else total / max(count, 1)
            left += times * each
        return left
