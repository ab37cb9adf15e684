"""What happens between steps: figures to the journal and the screen, evaluation, checkpoints, stopping."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitrail.data.pipeline import Batch
from vitrail.errors import DataError, Stopped
from vitrail.machine import peak_memory
from vitrail.training.monitoring.display import Display
from vitrail.training.monitoring.examiner import Examiner
from vitrail.training.monitoring.journal import Journal
from vitrail.training.monitoring.meter import Meter
from vitrail.training.monitoring.stop import StopRequest
from vitrail.training.plan import Plan
from vitrail.training.state.checkpoint import Checkpoints
from vitrail.training.state.state import TrainState

__all__ = ["Intervals", "Outlets", "Watch"]


@dataclass(frozen=True)
class Outlets:
    """Where a run's news goes."""

    journal: Journal
    checkpoints: Checkpoints
    display: Display


@dataclass(frozen=True)
class Intervals:
    """How many steps lie between two of each; the last step has all of them."""

    journal: int
    evaluate: int | None
    checkpoint: int


@dataclass
class Clock:
    """Where the time of a run goes, in seconds."""

    started: float
    to_first_step: float = 0.0
    training: float = 0.0
    """In steps, waiting for data included."""
    waiting: float = 0.0
    elsewhere: float = 0.0
    """In evaluation and in writing, since the last mark."""
    images: int = 0
    mark: float = field(default_factory=time.perf_counter)
    marked_images: int = 0


class Watch:
    """Called by the loop after each step. It reads the device's numbers only when something is due."""

    def __init__(
        self,
        state: TrainState,
        plan: Plan,
        outlets: Outlets,
        intervals: Intervals,
        examiner: Examiner,
        *,
        stop: StopRequest,
        started: float,
    ) -> None:
        """`started` is when the user began to wait (perf_counter)."""
        self.state = state
        self.plan = plan
        self.outlets = outlets
        self.intervals = intervals
        self.examiner = examiner
        self.stop = stop
        self.clock = Clock(started)
        self.meter = Meter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever waits for data."""
        begin = time.perf_counter()
        yield
        self.clock.waiting += time.perf_counter() - begin

    def after_step(self, batch: Batch, figures: dict[str, Tensor]) -> None:
        step = self.state.step
        self.clock.images += len(batch)
        self.meter.add(step, figures)
        if not self.clock.to_first_step:
            self.clock.to_first_step = time.perf_counter() - self.clock.started
        if batch.skipped:
            self._skip(batch)
        if self._due(self.intervals.journal):
            self.report()
        if self._due(self.intervals.evaluate):
            self.report()
            with self._elsewhere():
                self.examiner.evaluate()
        over = self.plan.is_over(self.state)
        if due := self.examiner.due(over=over):
            self.report()
            with self._elsewhere():
                self.examiner.probe(due)
        if over and step < self.plan.steps:
            self._say_early()
        stopping = self.stop.requested and not over
        if self._due(self.intervals.checkpoint) or over or stopping:
            self.report()  # sees to it that no state is saved whose loss was not finite
            with self._elsewhere():
                path = self.outlets.checkpoints.save(self.state)
                self.outlets.journal.write("checkpoint", step=step, path=path.name)
        if stopping:
            self.outlets.journal.write("stopped", step=step)
            raise Stopped(
                f"stopped at step {step:,} of {self.plan.steps:,}; the state is saved in {path}", path.parent.parent
            )

    def report(self) -> None:
        """Sends what was measured since the last report to the journal and the display. Raises `NonFiniteLoss`."""
        if not (figures := self.meter.read()):
            return
        clock, now = self.clock, time.perf_counter()
        seconds = now - clock.mark - clock.elsewhere
        figures["learning_rate"] = max(group["lr"] for group in self.state.optimizer.param_groups)  # the head's
        figures["images_per_second"] = (clock.images - clock.marked_images) / seconds
        clock.training += seconds
        clock.mark, clock.elsewhere, clock.marked_images = now, 0.0, clock.images
        self.outlets.journal.write("step", step=self.state.step, **figures)
        self.outlets.display.step(self.state.step, figures)

    def summary(self, device: torch.device) -> dict[str, float]:
        """The run's length, speed and memory: steps, seconds, shares and bytes."""
        clock = self.clock
        return {
            "steps": float(self.state.step),
            "seconds": time.perf_counter() - clock.started,
            "seconds_to_first_step": clock.to_first_step,
            "training_seconds": clock.training,
            "images_per_second": clock.images / clock.training if clock.training else 0.0,
            "waiting_share": clock.waiting / clock.training if clock.training else 0.0,
            "peak_memory_bytes": float(peak_memory(device)),
        }

    def _due(self, interval: int | None) -> bool:
        return interval is not None and (self.state.step % interval == 0 or self.state.step == self.plan.steps)

    def _skip(self, batch: Batch) -> None:
        skipped, most = self.state.skipped, self.plan.most_skipped
        for item in batch.skipped:
            if item.key not in skipped:
                skipped.add(item.key)
                self.outlets.journal.write("skipped", step=self.state.step, key=item.key, reason=item.reason)
                self.outlets.display.note(f"skipped {item.key}: {item.reason}")
        if len(skipped) > most:
            raise DataError(
                f"{len(skipped)} training images cannot be decoded, more than the {most} that --max-skipped allows; "
                f"the last: {batch.skipped[-1].key} {batch.skipped[-1].reason}. See vitrail data check"
            )

    def _say_early(self) -> None:
        step, best = self.state.step, self.state.best
        self.outlets.journal.write("ended early", step=step, patience=self.plan.patience, best=best.step)
        self.outlets.display.note(
            f"ended early, after step {step:,} of {self.plan.steps:,}: {best.waited} evaluations without a better "
            f"validation accuracy than that of step {best.step:,}"
        )

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.clock.elsewhere += time.perf_counter() - begin
