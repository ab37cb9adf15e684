"""The times of a run, the speed and the time left that follow from them, and the machine's limit."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.machine import TrainingPrecision
from vitrail.models.linear.float32 import has_onednn
from vitrail.processes.group import Processes
from vitrail.training.job import Job
from vitrail.training.log import Log
from vitrail.training.state import TrainState


@dataclass
class _Interval:
    """Measurements since the last report. Times are in seconds."""

    step: int
    begin: float
    paused: float = 0.0
    waited: float = 0.0
    images: int = 0
    flops: int = 0


class Timing:
    """Times the steps of a run, its pauses for evaluations and checkpoints, and its waiting for data."""

    def __init__(self, job: Job, started: float) -> None:
        """`started` is the time (`time.perf_counter()`) at which the user started the command."""
        self._job = job
        self._left = TimeLeft(job)
        self._started = started
        self._limit: MachineLimit | None = None
        self._to_first_step = 0.0
        self._training = 0.0
        self._waiting = 0.0
        self._images = 0
        self._image_rate = SmoothedRate()
        self._flop_rate = SmoothedRate()
        self.begin(0, None)

    def begin(self, step: int, limit: MachineLimit | None) -> None:
        """Begin to time the steps after `step`. `limit` is that with which their speed is compared, or None if their
        FLOPs are unknown."""
        self._limit = limit
        self._last_step_end = time.perf_counter()
        self._interval = _Interval(step, begin=self._last_step_end)

    @property
    def times_each_step(self) -> bool:
        """True on a CPU. A GPU computes several steps ahead, so that the time of one step does not predict the
        remaining time."""
        return self._job.device.type == "cpu"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the `with` block as waiting for data."""
        begin = time.perf_counter()
        yield
        self._interval.waited += time.perf_counter() - begin

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
        self._interval.images += images
        if was_taken:
            self._interval.flops += self._job.phase_of(step - 1).flops
        now = time.perf_counter()
        seconds, self._last_step_end = max(now - self._last_step_end, 1e-9), now
        self._to_first_step = self._to_first_step or now - self._started
        work = self._job.work(step) - self._job.work(step - 1)
        if self.times_each_step:
            self._left.add(work, seconds)
        return seconds, work

    def seconds_left(self, step: int) -> float | None:
        """Return the forecast of the seconds until the end of the run, or None if it is unknown."""
        return self._left.seconds(step)

    def report(self, step: int) -> tuple[int, dict[str, float], dict[str, float]]:
        """Return the number of steps since the last report and their speed, and begin to measure the next report.

        The first dictionary has the images per second, the fraction of the time spent waiting for data, and the
        fraction of the machine's limit. The second one has the images per second and the fraction of the limit over
        about the last minute, and the seconds left if they are known.
        """
        now, since = time.perf_counter(), self._interval
        seconds = now - since.begin - since.paused
        self._training += seconds
        self._images += since.images
        self._waiting += since.waited
        if not self.times_each_step:
            self._left.add(self._job.work(step) - self._job.work(since.step), seconds)
        exact = {"images_per_second": since.images / seconds, "waiting_share": since.waited / seconds}
        smoothed = {"images_per_second": self._image_rate.add(since.images, seconds)}
        self._interval = _Interval(step, begin=now)
        if (limit := self._limit_for(since.flops / seconds)) is not None:
            exact["limit_fraction"] = since.flops / seconds / limit
            smoothed["limit_fraction"] = self._flop_rate.add(since.flops, seconds) / limit
        if (left := self.seconds_left(step)) is not None:
            smoothed["seconds_left"] = left
        return step - since.step, exact, smoothed

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


# The fastest matrix products of this machine, with which the speed of a run's steps is compared.


SECONDS = 0.04
"""Time for which products are measured, apart from their first call, which loads the libraries."""
LONG_ENOUGH = 0.002
"""Seconds of a product from which on larger matrices are hardly faster."""
SMALLEST, LARGEST = 256, 4096
"""Sides of the matrices."""
AHEAD = 8
"""Number of products that a GPU computes before they are waited for."""

Multiply = Callable[[Tensor, Tensor], Tensor]


class MachineLimit:
    """The limit with which the speed of a run's steps is compared.

    No step is faster than matrix products alone. If one is, other programs used the machine while the products were
    measured. They are measured again, once. If steps are still faster, there is no limit any more.
    """

    def __init__(self, job: Job, log: Log, state: TrainState) -> None:
        self._job = job
        self._log = log
        self._state = state
        self._is_repeated = False
        self.flops_per_second: float | None = self._measured()
        """None if there is no limit any more."""

    def check(self, rate: float) -> None:
        """Measure the limit again, or give it up, if the steps are faster: they compute `rate` FLOPs per second.

        All processes call this method together, each with the rate that it measured.
        """
        while (limit := self.flops_per_second) is not None and any(self._job.processes.gather(rate > limit)):
            if self._is_repeated:
                self.flops_per_second = None
                self._log.tell("limit too low", step=self._state.step)
            else:
                self._is_repeated = True
                self.flops_per_second = max(limit, self._measured(again=True))

    def _measured(self, *, again: bool = False) -> float:
        precision, device = self._job.config.run.precision, self._job.device
        found = product_limit(precision, device, self._job.processes, again=again)
        threads = torch.get_num_threads() if device.type == "cpu" else None
        self._log.tell("limit", step=self._state.step, flops_per_second=found, precision=precision, threads=threads)
        return found


def product_limit(
    precision: TrainingPrecision, device: torch.device, processes: Processes = Processes(), *, again: bool = False
) -> float:
    """Return the FLOPs per second of the fastest matrix products of all processes together.

    Square matrices are multiplied in the number format of training for about 40 ms, and the fastest product counts. All
    processes measure at the same time, because they may share cores. While other programs use the machine, the products
    are slower, as the steps are. A process measures once for each number of threads, unless `again` is True. No random
    number is drawn.
    """
    if processes.are_several:
        processes.gather(None)  # so that they begin together
    if again:
        _measured.cache_clear()
    return sum(processes.gather(_measured(precision, device, torch.get_num_threads())))


@functools.cache
def _measured(precision: TrainingPrecision, device: torch.device, threads: int) -> float:
    """Return the FLOPs per second of the fastest product of this process. `threads` distinguishes measurements."""
    kernels, side, best = _kernels(precision, device), SMALLEST, 0.0
    left, right = _factors(side, precision, device)
    with torch.no_grad():
        for multiply in kernels:
            _seconds(multiply, left, right)
        end = time.perf_counter() + SECONDS
        while True:
            seconds = min(_seconds(multiply, left, right) for multiply in kernels)
            best = max(best, 2 * side**3 / seconds)
            if time.perf_counter() >= end:
                return best
            if seconds < LONG_ENOUGH and side < LARGEST:
                side *= 2
                left, right = _factors(side, precision, device)


def _seconds(multiply: Multiply, left: Tensor, right: Tensor) -> float:
    """Return the time of one product. A GPU computes several, because waiting for one takes time itself."""
    count = 1 if left.device.type == "cpu" else AHEAD
    begin = time.perf_counter()
    for _ in range(count):
        product = multiply(left, right)
    product[0, 0].item()  # waits for the device
    return (time.perf_counter() - begin) / count


def _factors(side: int, precision: TrainingPrecision, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two matrices of different numbers, because equal numbers take less energy and can be faster."""
    formats = {"float32": torch.float32, "bf16": torch.bfloat16, "float8": torch.float8_e4m3fn}
    numbers = torch.arange(side * side, device=device, dtype=torch.float32).mul_(0.7).sin_().view(side, side)
    left = numbers.to(formats[precision])
    return left, left.flip(0) if precision != "float8" else left.t()


def _kernels(precision: TrainingPrecision, device: torch.device) -> list[Multiply]:
    """Return the functions that multiply two matrices. On a CPU, PyTorch's kernel and oneDNN's are compared."""
    if precision == "float8":
        one = torch.ones((), device=device)
        return [lambda left, right: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)]
    kernels: list[Multiply] = [torch.mm]
    if device.type == "cpu" and has_onednn(torch.bfloat16 if precision == "bf16" else torch.float32):
        kernels.append(lambda left, right: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], ""))
    return kernels


# A rate that does not swing with every report, and a forecast of the time left.


class SmoothedRate:
    """Count per second over about the last minute, from reports of different lengths.

    Counts and seconds are summed separately, and both sums decay by exp(-seconds / 60). A short report therefore
    changes the rate little. The first report contains the start-up, so it is dropped when the second one arrives.
    """

    SECONDS = 60.0

    def __init__(self) -> None:
        self._count = 0.0
        self._seconds = 0.0
        self.reports = 0
        """Number of reports so far."""

    def add(self, count: int | float, seconds: float) -> float:
        """Add a report, and return the rate. `seconds` is above 0."""
        kept = 0.0 if self.reports == 1 else math.exp(-seconds / self.SECONDS)
        self._count = kept * self._count + count
        self._seconds = kept * self._seconds + seconds
        self.reports += 1
        return self._count / self._seconds


class TimeLeft:
    """Forecast of the seconds until the end of a run: the steps, the pauses for evaluations and checkpoints, and the
    last measurements.

    Before the first evaluation, an evaluated image is counted as a third of a training step's time per image, because a
    training step computes a forward pass and a backward pass, which costs twice as much. A pause that has not occurred
    yet is otherwise not counted.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._every = {name: steps for name, steps in job.intervals.items() if name != "report"}
        """Number of steps between two pauses of each name."""
        if job.probes:
            self._every["probe"] = min(probe.every for probe in job.probes)
        self._evaluated = len(job.splits.validation or ())
        """Number of images that an evaluation measures. The test images are also measured after the last step."""
        self._rate = SmoothedRate()
        self._step_seconds = 0.0
        self._pauses: dict[str, tuple[int, float]] = {}

    def add(self, work: int | float, seconds: float) -> None:
        """Add the time of some steps, without pauses."""
        self._step_seconds = 1 / self._rate.add(work, seconds)

    def pause(self, name: str, seconds: float) -> None:
        """Add the time of a pause."""
        count, total = self._pauses.get(name, (0, 0.0))
        self._pauses[name] = count + 1, total + seconds

    def seconds(self, step: int) -> float | None:
        """Return the forecast after a step. Return None if the only known time contains the start-up."""
        if self._rate.reports < 2:
            return None
        job, steps = self._job, self._job.steps
        per_image = self._step_seconds / (3 * job.config.run.batch_size)
        if self._evaluated and "evaluation" in self._pauses:
            count, total = self._pauses["evaluation"]
            per_image = total / count / self._evaluated
        left = (job.work(steps) - job.work(step)) * self._step_seconds
        left += (self._evaluated + len(job.splits.test or ())) * per_image
        for name, every in self._every.items():
            times = steps // every - step // every + (steps % every > 0 and step < steps)
            count, total = self._pauses.get(name, (0, 0.0))
            each = per_image * self._evaluated if name == "evaluation" else total / max(count, 1)
            left += times * each
        return left
