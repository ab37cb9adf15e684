"""The times of a run, and the speed and the time left that follow from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vitrail.training.speed.limit import MachineLimit
from vitrail.training.speed.rates import SmoothedRate, TimeLeft
from vitrail.training.steps.plan import Plan

__all__ = ["Speeds", "Timing"]


@dataclass(frozen=True)
class Speeds:
    """The speed of a run since the last report."""

    steps: int
    exact: dict[str, float]
    """Images per second, fraction of the time spent waiting for data, and fraction of the machine's limit."""
    smoothed: dict[str, float]
    """Images per second and fraction of the limit over about the last minute, and the seconds left if known."""


@dataclass
class _Interval:
    """What happened since the last report. Times are in seconds."""

    step: int
    begin: float
    paused: float = 0.0
    waited: float = 0.0
    images: int = 0
    flops: int = 0


class Timing:
    """Times the steps of a run, its pauses for evaluations and checkpoints, and its waiting for data."""

    def __init__(
        self, plan: Plan, left: TimeLeft, *, step: int, started: float, limit: MachineLimit | None = None
    ) -> None:
        """`step` is the number of steps before. `started` is the time (`time.perf_counter()`) at which the user started
        the command. `limit` is that with which the speed of the steps is compared, or None if their FLOPs are
        unknown."""
        self._plan = plan
        self._left = left
        self._started = started
        self._limit = limit
        self._to_first_step = 0.0
        self._training = 0.0
        self._waiting = 0.0
        self._images = 0
        self._image_rate = SmoothedRate()
        self._flop_rate = SmoothedRate()
        self._last_step_end = time.perf_counter()
        self._interval = _Interval(step, begin=self._last_step_end)

    @property
    def times_each_step(self) -> bool:
        """True on a CPU. A GPU computes several steps ahead, so that the time of one step does not predict the
        remaining time."""
        return self._plan.device.type == "cpu"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the `with` block as waiting for data."""
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self._waiting += seconds
        self._interval.waited += seconds

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block as a pause of this name, such as "evaluation"."""
        begin = time.perf_counter()
        yield
        self._last_step_end = time.perf_counter()
        self._interval.paused += self._last_step_end - begin
        self._left.pause(name, self._last_step_end - begin)

    def after_step(self, step: int, images: int, *, was_taken: bool) -> tuple[float, float]:
        """Count a step, and return its seconds and its cost in steps of the last phase. If not `was_taken`, its batch
        was skipped, and no FLOPs are counted."""
        self._images += images
        self._interval.images += images
        if was_taken:
            self._interval.flops += self._plan.flops(step - 1)
        now = time.perf_counter()
        seconds, self._last_step_end = max(now - self._last_step_end, 1e-9), now
        self._to_first_step = self._to_first_step or now - self._started
        work = self._plan.work(step) - self._plan.work(step - 1)
        if self.times_each_step:
            self._left.add(work, seconds)
        return seconds, work

    def seconds_left(self, step: int) -> float | None:
        """Return the forecast of the seconds until the end of the run, or None if it is unknown."""
        return self._left.seconds(step)

    def report(self, step: int) -> Speeds:
        """Return the speed since the last report, and begin to measure the next one."""
        now, since = time.perf_counter(), self._interval
        seconds = now - since.begin - since.paused
        self._training += seconds
        if not self.times_each_step:
            self._left.add(self._plan.work(step) - self._plan.work(since.step), seconds)
        exact = {"images_per_second": since.images / seconds, "waiting_share": since.waited / seconds}
        smoothed = {"images_per_second": self._image_rate.add(since.images, seconds)}
        self._interval = _Interval(step, begin=now)
        if (limit := self._limit_for(since.flops / seconds)) is not None:
            exact["limit_fraction"] = since.flops / seconds / limit
            smoothed["limit_fraction"] = self._flop_rate.add(since.flops, seconds) / limit
        if (left := self.seconds_left(step)) is not None:
            smoothed["seconds_left"] = left
        return Speeds(step - since.step, exact, smoothed)

    def _limit_for(self, rate: float) -> float | None:
        """Return the machine's limit in FLOPs per second, which is checked against the speed of the last steps."""
        if self._limit is None or self._limit.flops_per_second is None:
            return None
        with self.pause("limit"):
            self._limit.check(rate)
        return self._limit.flops_per_second

    def go_back(self, step: int) -> None:
        """Count the following steps from this one, to which the run went back. The time of the others stays counted."""
        self._interval.step = step
        self._last_step_end = time.perf_counter()

    def summary(self) -> dict[str, float]:
        """Return the times in seconds, the speed and the fraction of the time spent waiting for data, up to the last
        report."""
        return {
            "seconds": time.perf_counter() - self._started,
            "seconds_to_first_step": self._to_first_step,
            "training_seconds": self._training,
            "images_per_second": self._images / self._training if self._training else 0.0,
            "waiting_share": self._waiting / self._training if self._training else 0.0,
        }
