"""Everything that happens between steps: the journal, the display, evaluation, checkpoints and stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
from vitrail.training.reporting.display import TRAINING
from vitrail.training.reporting.sinks import Sinks
from vitrail.training.speed.adaptation import Adaptation
from vitrail.training.speed.limit import MachineLimit
from vitrail.training.speed.rates import TimeLeft
from vitrail.training.speed.timing import Timing
from vitrail.training.state.state import TrainState
from vitrail.training.steps.phases import Phase
from vitrail.training.steps.plan import Plan

__all__ = ["Intervals", "Monitor"]


@dataclass(frozen=True)
class Intervals:
    """Numbers of steps between reports, evaluations and checkpoints. A report, an evaluation and a checkpoint also
    follow the last step."""

    journal: int
    evaluate: int | None
    checkpoint: int


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
        limit: MachineLimit | None = None,
    ) -> None:
        """`started` is the time (`time.perf_counter()`) at which the user started the command. `on_readers` receives
        the number of reading threads if the run chooses it. `limit` is that with which the speed of the steps is
        compared, or None if their FLOPs are unknown."""
        self.state = state
        self.plan = plan
        self.sinks = sinks
        self.intervals = intervals
        self.examiner = examiner
        self.stop = stop
        self.timing = Timing(plan, self._time_left(), step=state.step, started=started, limit=limit)
        self.meter = Meter()
        self.health = Health()
        self.means = RunningMeans()
        self.adaptation = Adaptation(state, plan, sinks, on_readers)
        self.skipped = SkippedImages(state, sinks, plan.most_skipped, plan.processes)
        self.recovery = Recovery(
            plan.faults,
            state,
            examiner.splits.train,
            sinks,
            processes=plan.processes,
            on_rollback=self._forget,
        )

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
            with self.timing.pause("evaluation"):
                self.examiner.evaluate()
        if self.plan.faults.may_roll_back:
            with self.timing.pause("checkpoint"):
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
            f"from step {phase.first + 1:,}: images of {height} x {width} pixels (height x width), patch dropout "
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
        images = processes.world * (len(batch) - batch.partners)
        if metrics:
            self.meter.add(step, metrics)
        seconds, work = self.timing.after_step(step, images, was_taken=bool(metrics))
        self.adaptation.after_step(seconds, work)
        if self.timing.times_each_step and (left := self.timing.seconds_left(step)) is not None:
            self.sinks.display.tick(step, left)
        self.skipped.add(batch.skipped)
        if self._due(self.intervals.journal):
            self.report()
        if self._due(self.intervals.evaluate):
            self.report()
            with self.timing.pause("evaluation"):
                self.examiner.evaluate(self.means.read())
        over = self.plan.is_over(self.state)
        if due := self.examiner.due(over=over):
            self.report()
            with self.timing.pause("probe"):
                self.examiner.probe(due)
        if over and step < self.plan.steps:
            self._say_early()
        stopping = processes.any_earlier(self.stop.requested) and not over
        if self._due(self.intervals.checkpoint) or over or stopping:
            self.report()  # raises if the loss is not finite, so that no broken state is saved
            with self.timing.pause("checkpoint"):
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
        speeds = self.timing.report(self.state.step)
        self.means.add(speeds.steps, metrics)
        metrics["learning_rate"] = max(group["lr"] for group in self.state.optimizer.param_groups)  # the highest
        metrics |= speeds.exact | {"memory_bytes": float(peak_memory(self.plan.device))} | self.health.read()
        self.sinks.journal.write("step", step=self.state.step, **metrics)
        self.sinks.display.step(self.state.step, metrics | speeds.smoothed)

    def summary(self, device: torch.device) -> dict[str, float]:
        """Return the run's length, speed and memory: steps, seconds, fractions and bytes. Metrics of the training steps
        before the last evaluation begin with "train_"."""
        return {
            "steps": float(self.state.step),
            **{f"{TRAINING}{name}": value for name, value in self.means.read().items()},
            **self.timing.summary(),
            "peak_memory_bytes": float(peak_memory(device)),
        }

    def _forget(self) -> None:
        """Forget the steps after the checkpoint to which the run went back."""
        self.meter, self.means = Meter(), RunningMeans()
        self.timing.go_back(self.state.step)

    def _due(self, interval: int | None) -> bool:
        return interval is not None and (self.state.step % interval == 0 or self.state.step == self.plan.steps)

    def _say_early(self) -> None:
        step, best = self.state.step, self.state.best
        self.sinks.journal.write("ended early", step=step, patience=self.plan.patience, best=best.step)
        self.sinks.display.note(
            f"ended early, after step {step:,} of {self.plan.steps:,}: step {best.step:,} is still the best "
            f"after {best.waited} more evaluations"
        )

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
