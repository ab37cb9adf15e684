"""What a run shows while it runs: a line that moves on a terminal, plain lines elsewhere, nothing if so wished."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

__all__ = ["ConsoleDisplay", "Display"]


class Display:
    """What the loop tells whoever is looking. This one shows nothing; others override what they show."""

    def begin(self, step: int, steps: int) -> None:
        """The loop starts after `step`."""

    def say(self, text: str) -> None:
        """What goes on."""

    def note(self, text: str) -> None:
        """What asks for attention."""

    def step(self, step: int, figures: dict[str, float]) -> None:
        """Means since the last call: loss, metrics, images_per_second."""

    def evaluated(self, step: int, result: dict[str, float], best: bool) -> None:
        """What an evaluation on the validation split gave."""

    def end(self) -> None:
        """The loop is over, one way or another."""


class ConsoleDisplay(Display):
    """Step, loss, accuracy, images/s and time left. Off a terminal, a line about every ten seconds."""

    LINE_SECONDS = 10.0

    def __init__(self, console: Console) -> None:
        self.console = console
        self.steps = 0
        self._progress: Progress | None = None
        self._last_line = 0.0

    def begin(self, step: int, steps: int) -> None:
        self.steps = steps
        self._begun = time.perf_counter(), step
        if not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._progress.add_task("", total=steps, completed=step, figures="")
        self._progress.start()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self.console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, figures: dict[str, float]) -> None:
        shown = f"loss {figures['loss']:.3f}"
        if "accuracy" in figures:
            shown += f"  accuracy {figures['accuracy']:.1%}"
        shown += f"  {figures['images_per_second']:,.0f} images/s"
        now = time.perf_counter()
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=shown)
        elif now - self._last_line >= self.LINE_SECONDS or step == self.steps:
            self._last_line = now
            begun, first = self._begun
            left = (now - begun) / max(step - first, 1) * (self.steps - step)
            self.say(f"step {step:,}/{self.steps:,}  {shown}  {left:,.0f} s left")

    def evaluated(self, step: int, result: dict[str, float], best: bool) -> None:
        star = "  (best so far)" if best else ""
        precision = result.get("mean_average_precision")
        more = "" if precision is None else f", mean average precision {precision:.2%},"
        figures = f"accuracy {result['accuracy']:.2%}{more} of {result['images']:,.0f} images"
        self.say(f"step {step:,}: validation {figures}{star}")

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
