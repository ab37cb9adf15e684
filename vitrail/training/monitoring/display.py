"""The display of a run: a progress bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from vitrail.tasks import Task

__all__ = ["ConsoleDisplay", "Display"]


class Display:
    """Receives the events of a run. This class shows nothing; subclasses override the events that they show."""

    def begin(self, step: int, steps: int, task: Task) -> None:
        """Called when the training loop starts. The run has `steps` steps, of which `step` are already done."""

    def say(self, text: str) -> None:
        """Show a message to the user."""

    def note(self, text: str) -> None:
        """Show a message that needs the user's attention."""

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Receive the means since the last call: the loss and the objective's metrics. images_per_second is the mean
        over about the last minute."""

    def evaluated(self, step: int, result: dict[str, float], best: bool) -> None:
        """Receive the metrics of an evaluation on the validation split."""

    def end(self) -> None:
        """Called when the training loop ends, even if it ends with an error."""


class ConsoleDisplay(Display):
    """Shows the step, loss, metrics, images per second and time left.

    On a terminal it shows a progress bar. Elsewhere it prints a line about every ten seconds.
    """

    LINE_SECONDS = 10.0

    def __init__(self, console: Console, spell: Callable[[str], str] = str) -> None:
        """`spell` returns a note with the values that it recommends in the syntax of the command line."""
        self.console = console
        self._spell = spell
        self.steps = 0
        self._progress: Progress | None = None
        self._last_line = 0.0

    def begin(self, step: int, steps: int, task: Task) -> None:
        self.steps, self.task = steps, task
        self._begun = time.perf_counter(), step
        self._is_started = False
        if not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[metrics]}"),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._progress.add_task("", total=steps, completed=step, metrics="", left="")
        self._progress.start()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self.console.print(self._spell(text), style="yellow", highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        texts = [f"loss {metrics['loss']:.3f}", *self.task.texts(metrics, digits=1)]
        shown = "  ".join([*texts, f"{metrics['images_per_second']:,.0f} images/s"])
        now = time.perf_counter()
        left = self._seconds_left(step, now)
        if self._progress is not None:
            text = f"{timedelta(seconds=round(left))} left"
            self._progress.update(self._task, completed=step, metrics=shown, left=text)
        elif now - self._last_line >= self.LINE_SECONDS or step == self.steps:
            self._last_line = now
            self.say(f"step {step:,}/{self.steps:,}  {shown}  {left:,.0f} s left")

    def _seconds_left(self, step: int, now: float) -> float:
        """Return the time left, from the mean time of all steps so far, evaluations and checkpoints included.

        The time before the first report is excluded as soon as there is a second one, because it contains the start-up.
        """
        begun, first = self._begun
        if not self._is_started:
            self._is_started, self._begun = True, (now, step)
        return (now - begun) / max(step - first, 1) * (self.steps - step)

    def evaluated(self, step: int, result: dict[str, float], best: bool) -> None:
        star = "  (best so far)" if best else ""
        texts = ", ".join(self.task.texts(result)) or "metrics unknown"
        self.say(f"step {step:,}: validation {texts} on {result['images']:,.0f} images{star}")

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
