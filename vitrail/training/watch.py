"""What happens between steps: figures to the journal and the screen, evaluation, checkpoints, stopping."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitrail.data.pipeline import Batch
from vitrail.errors import DataError, Stopped
from vitrail.machine import peak_memory
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.display import Display
from vitrail.training.journal import Journal
from vitrail.training.meter import Meter, check_finite
from vitrail.training.state import Best, TrainState
from vitrail.training.stop import StopRequest

__all__ = ["Intervals", "Watch"]


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
        *,
        steps: int,
        intervals: Intervals,
        journal: Journal,
        checkpoints: Checkpoints,
        display: Display,
        stop: StopRequest,
        evaluate: Callable[[], dict[str, float]] | None,
        keep_best: Callable[[], None] | None,
        most_skipped: int,
        started: float,
    ) -> None:
        self.state = state
        self.steps = steps
        self.intervals = intervals
        self.journal = journal
        self.checkpoints = checkpoints
        self.display = display
        self.stop = stop
        self.evaluate = evaluate
        self.keep_best = keep_best
        self.most_skipped = most_skipped
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
                self._evaluate()
        stopping = self.stop.requested and step < self.steps
        if self._due(self.intervals.checkpoint) or stopping:
            self.report()  # sees to it that no state is saved whose loss was not finite
            with self._elsewhere():
                path = self.checkpoints.save(self.state)
                self.journal.write("checkpoint", step=step, path=path.name)
            if not stopping:
                return
            self.journal.write("stopped", step=step)
            raise Stopped(
                f"stopped at step {step:,} of {self.steps:,}; the state is saved in {path}", path.parent.parent
            )

    def report(self) -> None:
        """Sends what was measured since the last report to the journal and the display. Raises `NonFiniteLoss`."""
        if not (figures := self.meter.read()):
            return
        clock, now = self.clock, time.perf_counter()
        seconds = now - clock.mark - clock.elsewhere
        figures["learning_rate"] = self.state.optimizer.param_groups[0]["lr"]
        figures["images_per_second"] = (clock.images - clock.marked_images) / seconds
        clock.training += seconds
        clock.mark, clock.elsewhere, clock.marked_images = now, 0.0, clock.images
        self.journal.write("step", step=self.state.step, **figures)
        self.display.step(self.state.step, figures)

    def summary(self, device: torch.device) -> dict[str, float]:
        """The run's speed and memory: seconds, shares and bytes."""
        clock = self.clock
        return {
            "seconds": time.perf_counter() - clock.started,
            "seconds_to_first_step": clock.to_first_step,
            "training_seconds": clock.training,
            "images_per_second": clock.images / clock.training if clock.training else 0.0,
            "waiting_share": clock.waiting / clock.training if clock.training else 0.0,
            "peak_memory_bytes": float(peak_memory(device)),
        }

    def _due(self, interval: int | None) -> bool:
        return interval is not None and (self.state.step % interval == 0 or self.state.step == self.steps)

    def _skip(self, batch: Batch) -> None:
        for item in batch.skipped:
            if item.key not in self.state.skipped:
                self.state.skipped.add(item.key)
                self.journal.write("skipped", step=self.state.step, key=item.key, reason=item.reason)
                self.display.note(f"skipped {item.key}: {item.reason}")
        if len(self.state.skipped) > self.most_skipped:
            raise DataError(
                f"{len(self.state.skipped)} training images cannot be decoded, more than the {self.most_skipped} that "
                f"--max-skipped allows; the last: {batch.skipped[-1].key} {batch.skipped[-1].reason}"
            )

    def _evaluate(self) -> None:
        if self.evaluate is None:
            return
        result = self.evaluate()
        check_finite(result, self.state.step)
        best = result["accuracy"] > self.state.best.accuracy
        if best:
            self.state.best = Best(result["accuracy"], self.state.step)
            if self.keep_best is not None:
                self.keep_best()
        self.journal.write("evaluation", step=self.state.step, split="validation", best=best, **result)
        self.display.evaluated(self.state.step, result, best)

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.clock.elsewhere += time.perf_counter() - begin
