"""The display of a run: a progress bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from vitrail.tasks import Task

__all__ = ["TRAINING", "ConsoleDisplay", "Display", "training_metrics"]

TRAINING = "train_"
"""Prefix of the names of training metrics in a dictionary that also has the metrics of an evaluation."""


def training_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of training steps among `values`, by their own names."""
    return {name.removeprefix(TRAINING): value for name, value in values.items() if name.startswith(TRAINING)}


class Display:
    """Receives the events of a run. This class shows nothing; subclasses override the events that they show."""

    def begin(self, step: int, steps: int, task: Task) -> None:
        """Called when the training loop starts. The run has `steps` steps, of which `step` are already done."""

    def say(self, text: str) -> None:
        """Show a message to the user."""

    def note(self, text: str) -> None:
        """Show a message that needs the user's attention."""

    def extracting(self, done: int, total: int) -> None:
        """Receive the number of images whose features are computed for a linear model, and the number of all images."""

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Receive the means since the last call: the loss and the objective's metrics. images_per_second and
        limit_fraction are means over about the last minute. limit_fraction is the FLOPs per second of the steps as a
        fraction of those of matrix products alone, measured when the run began. It is missing if the FLOPs of a step
        are unknown. seconds_left is missing while the time left is unknown. waiting_share is the fraction of the time
        that was spent waiting for images."""

    def tick(self, step: int, seconds_left: float) -> None:
        """Receive the progress after a step without metrics. On a GPU, which computes several steps ahead, only `step`
        is called."""

    def evaluated(self, step: int, result: dict[str, float], best: bool) -> None:
        """Receive the metrics of an evaluation on the validation split. Metrics of the training steps since the last
        evaluation begin with "train_"."""

    def end(self) -> None:
        """Called when the training loop ends, even if it ends with an error."""


class ConsoleDisplay(Display):
    """Shows the step, loss, metrics, time left, images per second, FLOPs per second as a fraction of those of matrix
    products alone, learning rate and peak memory, in this order of importance. Says if more than a tenth of the time is
    spent waiting for images.

    On a terminal it shows a progress bar beside as many of them as fit into the line. Elsewhere it prints lines: first
    one about every ten seconds, and after 1,000 seconds one whenever a hundredth of the time so far has passed, so that
    a week has about 700 lines.
    """

    LINE_SECONDS = 10.0
    FIRST_SECONDS = 3.0
    """Seconds before the first line."""
    LINE_SHARE = 0.01
    """Least time between two lines, as a fraction of the time so far."""
    WAITING_SHARE = 0.1
    """Fraction of the time spent waiting for images from which on it is shown."""
    BAR = 10
    """Columns that the bar, the percentage and the spaces beside them need at least."""

    def __init__(self, console: Console, spell: Callable[[str], str] = str) -> None:
        """`spell` returns a note with the values that it recommends in the syntax of the command line."""
        self.console = console
        self._spell = spell
        self.steps = 0
        self._progress: Progress | None = None
        self._texts: list[str] = []
        self._more: list[str] = []
        self._last_line = 0.0
        self._extracted: float = math.inf

    def begin(self, step: int, steps: int, task: Task) -> None:
        self.steps, self.task = steps, task
        self._began = time.perf_counter()
        self._last_line = self._began - self.LINE_SECONDS + self.FIRST_SECONDS
        if not self.console.is_terminal:
            return
        self._progress = Progress(
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[shown]}", markup=False),
            console=self.console,
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._progress.add_task(
            "", total=steps, completed=step, shown=self._line(step, "", self.console.width)
        )
        self._progress.start()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        wraps = self.console.is_terminal  # at words; files and pipes get one line
        self.console.print(self._spell(text), style="yellow", highlight=False, markup=False, soft_wrap=not wraps)

    def extracting(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if done <= self._extracted:  # the images of another split
            self._last_line = now
        elif done < total and now - self._last_line >= self.LINE_SECONDS:
            self._last_line = now
            self.say(f"features of {done:,} of {total:,} images")
        self._extracted = done

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._texts = [f"loss {metrics['loss']:.3f}", *self.task.texts(metrics, digits=1)]
        self._more = [f"{metrics['images_per_second']:,.0f} images/s"]
        if metrics["waiting_share"] > self.WAITING_SHARE:
            self._more.insert(0, f"waiting for images {metrics['waiting_share']:.0%}")
        if "limit_fraction" in metrics:
            self._more.append(f"{metrics['limit_fraction']:.0%} of the speed of matrix products")
        self._more += [
            f"learning rate {metrics['learning_rate']:.2g}", f"{metrics['memory_bytes'] / 2**30:.1f} GiB of memory",
        ]  # fmt: skip
        self._show(step, metrics.get("seconds_left"), is_last=step == self.steps)

    def tick(self, step: int, seconds_left: float) -> None:
        self._show(step, seconds_left)

    def _show(self, step: int, seconds_left: float | None, *, is_last: bool = False) -> None:
        """Update the progress bar, or print a line if the last one is about ten seconds ago."""
        if self._progress is not None:
            left = "" if seconds_left is None else f"{timedelta(seconds=round(seconds_left))} left"
            self._progress.update(self._task, completed=step, shown=self._line(step, left, self.console.width))
            return
        now = time.perf_counter()
        if now - self._last_line >= max(self.LINE_SECONDS, self.LINE_SHARE * (now - self._began)) or is_last:
            self._last_line = now
            self.say(self._line(step, "" if seconds_left is None else f"{seconds_left:,.0f} s left"))

    def _line(self, step: int, left: str, width: int | None = None) -> str:
        """Return the step and all texts, or as many as fit into a line of `width` columns that begins with the bar."""
        line = f"step {step:,}/{self.steps:,}"
        for text in filter(None, (*self._texts, left, *self._more)):
            if width is not None and len(line) + 2 + len(text) > width - self.BAR:
                break
            line += f"  {text}"
        return line

    def evaluated(self, step: int, result: dict[str, float], best: bool) -> None:
        star = "  (best so far)" if best else ""
        texts = ", ".join(self.task.texts(result)) or "metrics unknown"
        train = ", ".join(self.task.texts(training_metrics(result)))
        beside = f"; training {train}" if train else ""
        start = f"step {step:,}" if step else "before the first step"
        count = f"{result['images']:,.0f} images"
        if skipped := result.get("skipped"):
            count += f" ({skipped:,.0f} skipped)"
        self.say(f"{start}: validation {texts} on {count}{beside}{star}")

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
