"""Everything that happens between steps: the journal, the display, evaluation, checkpoints and stopping."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.errors import Stopped
from vitrail.machine import peak_memory
from vitrail.training.monitoring.examiner import Examiner
from vitrail.training.monitoring.health import Health
from vitrail.training.monitoring.meter import Meter, RunningMeans
from vitrail.training.monitoring.recovery import Recovery
from vitrail.training.monitoring.skipped import SkippedImages
from vitrail.training.monitoring.stop import StopRequest
from vitrail.training.phases import Phase
from vitrail.training.plan import Plan
from vitrail.training.reporting.display import TRAINING
from vitrail.training.reporting.sinks import Sinks
from vitrail.training.speed.adaptation import Adaptation
from vitrail.training.speed.rates import SmoothedRate, TimeLeft
from vitrail.training.state.state import TrainState

__all__ = ["Intervals", "Monitor"]


@dataclass(frozen=True)
class Intervals:
    """Numbers of steps between reports, evaluations and checkpoints. A report, an evaluation and a checkpoint also
    follow the last step."""

    journal: int
    evaluate: int | None
    checkpoint: int


@dataclass
class Clock:
    """Time spent in the parts of a run, in seconds."""

    started: float
    to_first_step: float = 0.0
    training: float = 0.0
    """Time spent in training steps, including the time spent waiting for data."""
    waiting: float = 0.0
    """Time spent waiting for data."""
    paused: float = 0.0
    """Time spent in evaluation and in saving since the last report."""
    waited: float = 0.0
    """Time spent waiting for data since the last report."""
    images: int = 0
    mark: float = field(default_factory=time.perf_counter)
    marked_images: int = 0
    flops: int = 0
    """FLOPs of the steps of all processes since the last report."""

    def summary(self) -> dict[str, float]:
        """Return the times in seconds, the speed and the fraction of the time spent waiting for data."""
        return {
            "seconds": time.perf_counter() - self.started,
            "seconds_to_first_step": self.to_first_step,
            "training_seconds": self.training,
            "images_per_second": self.images / self.training if self.training else 0.0,
            "waiting_share": self.waiting / self.training if self.training else 0.0,
        }


class Monitor:
    """Receives every step of the loop, and runs the reports, evaluations and checkpoints that are due. It waits for the
    device only when one of these is due."""

    def __init__(
        self,
        state: TrainState,
        plan: Plan,
        sinks: Sinks,
        intervals: Intervals,
        examiner: Examiner,
        *,
        stop: StopRequest,
        started: float,
        on_readers: Callable[[int], None] = lambda threads: None,
        limit: float | None = None,
    ) -> None:
        """`started` is the time (`time.perf_counter()`) at which the user started the command. `on_readers` receives
        the number of reading threads if the run chooses it. `limit` is the number of FLOPs per second with which the
        speed of the steps is compared, or None if their FLOPs are unknown."""
        self.state = state
        self.plan = plan
        self.sinks = sinks
        self.intervals = intervals
        self.examiner = examiner
        self.stop = stop
        self.clock = Clock(started)
        self.meter = Meter()
        self.health = Health()
        self.speed = SmoothedRate()
        self.limit = limit
        self.work_speed = SmoothedRate()
        self.means = RunningMeans()
        self.left = self._time_left()
        self.adaptation = Adaptation(state, plan, sinks, on_readers)
        self.skipped = SkippedImages(state, sinks, plan.most_skipped, plan.processes)
        self._ticked = time.perf_counter()
        self._reported = state.step
        self.recovery = Recovery(
            plan.faults,
            state,
            examiner.splits.train,
            sinks,
            processes=plan.processes,
            on_rollback=self._forget,
        )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the `with` block as waiting for data."""
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.clock.waiting += seconds
        self.clock.waited += seconds

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the step inside the `with` block if the journal is due after it."""
        following = self.state.step + 1
        if following % self.intervals.journal and following != self.plan.steps:
            yield
            return
        with self.health.measuring(self.state.objective):
            yield

    def before_first_step(self, *, evaluates: bool) -> None:
        """Save the state if the run may go back to it after a fault. If `evaluates`, measure the initial weights on the
        validation split, so that they are kept unless training improves them.

        Raises `NonFiniteLoss` and `SaveError`.
        """
        if evaluates:
            with self._pause():
                self.examiner.evaluate()
        if self.plan.faults.may_roll_back:
            with self._pause("checkpoint"):
                self.sinks.checkpoints.save(self.state)

    def begin_phase(self, phase: Phase) -> None:
        """Write the settings of a phase to the journal and the display, unless the run has one phase only or continues
        within the phase."""
        if len(self.plan.phases) == 1 or phase.first != self.state.step:
            return
        self.report()
        height, width = phase.image_size
        self.sinks.journal.write(
            "phase",
            step=self.state.step,
            image_size=[height, width],
            patch_dropout=phase.patch_dropout,
            batch_size=phase.batch_size,
        )
        self.sinks.display.note(
            f"from step {phase.first + 1:,}: images of {height} x {width} pixels, patch dropout "
            f"{phase.patch_dropout:g}, batches of {phase.batch_size}"
        )

    def after_step(self, batch: Batch, metrics: dict[str, Tensor]) -> None:
        """Run the reports, evaluations and checkpoints that are due after a step. `metrics` is empty if the batch was
        skipped.

        Raises `Stopped` if the user asked to stop, `DataError` for too many broken images, `NonFiniteLoss` and
        `SaveError`.
        """
        step = self.state.step
        processes = self.plan.processes
        self.clock.images += processes.world * (len(batch) - batch.partners)
        if metrics:
            self.meter.add(step, metrics)
            self.clock.flops += self.plan.flops(step - 1)
        self._tick()
        if not self.clock.to_first_step:
            self.clock.to_first_step = time.perf_counter() - self.clock.started
        self.skipped.add(batch.skipped)
        if self._due(self.intervals.journal):
            self.report()
        if self._due(self.intervals.evaluate):
            self.report()
            with self._pause("evaluation"):
                self.examiner.evaluate(self.means.read())
        over = self.plan.is_over(self.state)
        if due := self.examiner.due(over=over):
            self.report()
            with self._pause("probe"):
                self.examiner.probe(due)
        if over and step < self.plan.steps:
            self._say_early()
        stopping = processes.any_earlier(self.stop.requested) and not over
        if self._due(self.intervals.checkpoint) or over or stopping:
            self.report()  # raises if the loss is not finite, so that no broken state is saved
            with self._pause("checkpoint"):
                path = self.sinks.checkpoints.save(self.state)
                if over or stopping:
                    self.sinks.checkpoints.wait()
        if stopping:
            self.sinks.journal.write("stopped", step=step)
            raise Stopped(
                f"stopped at step {step:,} of {self.plan.steps:,}; the state is saved in {path}", path.parent.parent
            )

    def report(self) -> None:
        """Send the metrics since the last report to the journal and the display. Raises `NonFiniteLoss`.

        The journal receives the images per second and the fraction of the machine's limit since the last report, and
        the display receives smoothed ones.
        """
        self.sinks.checkpoints.poll()
        if not (metrics := self.meter.read()):
            return
        self.skipped.exchange()
        clock, now = self.clock, time.perf_counter()
        seconds = now - clock.mark - clock.paused
        steps, self._reported = self.state.step - self._reported, self.state.step
        self.means.add(steps, metrics)
        if self.plan.device.type != "cpu":
            done = self.state.step
            self.left.add(self.plan.work(done) - self.plan.work(done - steps), seconds)
        metrics["learning_rate"] = max(group["lr"] for group in self.state.optimizer.param_groups)  # the highest
        images = clock.images - clock.marked_images
        metrics["images_per_second"] = images / seconds
        metrics |= {"waiting_share": clock.waited / seconds, "memory_bytes": float(peak_memory(self.plan.device))}
        metrics |= self.health.read()
        smoothed = self.speed.add(images, seconds)
        smoothed_flops = self.work_speed.add(clock.flops, seconds)
        if self.limit is not None:
            metrics["limit_fraction"] = clock.flops / seconds / self.limit
        clock.training += seconds
        clock.mark, clock.paused, clock.waited, clock.marked_images, clock.flops = now, 0.0, 0.0, clock.images, 0
        self.sinks.journal.write("step", step=self.state.step, **metrics)
        metrics["images_per_second"] = smoothed
        if self.limit is not None:
            metrics["limit_fraction"] = smoothed_flops / self.limit
        if (left := self.left.seconds(self.state.step)) is not None:
            metrics["seconds_left"] = left
        self.sinks.display.step(self.state.step, metrics)

    def summary(self, device: torch.device) -> dict[str, float]:
        """Return the run's length, speed and memory: steps, seconds, fractions and bytes. Metrics of the training steps
        before the last evaluation begin with "train_"."""
        return {
            "steps": float(self.state.step),
            **{f"{TRAINING}{name}": value for name, value in self.means.read().items()},
            **self.clock.summary(),
            "peak_memory_bytes": float(peak_memory(device)),
        }

    def _forget(self) -> None:
        """Forget the steps after the checkpoint to which the run went back."""
        self.meter, self.means = Meter(), RunningMeans()
        self._reported = self.state.step
        self._ticked = time.perf_counter()

    def _due(self, interval: int | None) -> bool:
        return interval is not None and (self.state.step % interval == 0 or self.state.step == self.plan.steps)

    def _say_early(self) -> None:
        step, best = self.state.step, self.state.best
        self.sinks.journal.write("ended early", step=step, patience=self.plan.patience, best=best.step)
        self.sinks.display.note(
            f"ended early, after step {step:,} of {self.plan.steps:,}: step {best.step:,} is still the best "
            f"after {best.waited} more evaluations"
        )

    def _tick(self) -> None:
        """Measure the time of a step, and show the progress. A GPU computes several steps ahead, so that the time of
        one step does not predict the remaining time."""
        now = time.perf_counter()
        step, seconds = self.state.step, max(now - self._ticked, 1e-9)
        work = self.plan.work(step) - self.plan.work(step - 1)
        self._ticked = now
        self.adaptation.after_step(seconds, work)
        if self.plan.device.type == "cpu":
            self.left.add(work, seconds)
            if (left := self.left.seconds(step)) is not None:
                self.sinks.display.tick(step, left)

    def _time_left(self) -> TimeLeft:
        intervals, splits = self.intervals, self.examiner.splits
        every = {"evaluation": intervals.evaluate, "checkpoint": intervals.checkpoint}
        if self.examiner.probes:
            every["probe"] = min(probe.every for probe in self.examiner.probes)
        validation, test = (0 if source is None else len(source) for source in (splits.validation, splits.test))
        return TimeLeft(
            self.plan.steps,
            {name: steps for name, steps in every.items() if steps is not None},
            batch_size=self.plan.batch_size,
            evaluated=validation,
            at_end=validation + test,
            work=self.plan.work,
        )

    @contextmanager
    def _pause(self, name: str = "evaluation") -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._ticked = time.perf_counter()
        self.clock.paused += self._ticked - begin
        self.left.pause(name, self._ticked - begin)
