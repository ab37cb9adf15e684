"""Reports of a run to its journal, to the display, and to TensorBoard or Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from vitrail.errors import nearest
from vitrail.files import saving
from vitrail.tasks.task import Task

if TYPE_CHECKING:
    from vitrail.training.checkpoint import Checkpoints
from vitrail.registry import optional_module

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


# `journal.jsonl`: the events of a run, one per line. Lines are only ever appended.


class Journal:
    """Appends events to a file, each with its time in seconds since 1970. If `is_kept` is False, nothing is written:
    one of several processes keeps the journal of all."""

    def __init__(self, path: Path, *, is_kept: bool = True) -> None:
        self.path = path
        self.is_kept = is_kept
        self.readers: list[Callable[[dict[str, Any]], None]] = []
        """Functions that receive each event after it is written."""

    def write(self, event: str, **values: Any) -> None:
        """Append an event. Raises `SaveError`."""
        if not self.is_kept:
            return
        content = {"event": event, "time": round(time.time(), 3), **values}
        data = (json.dumps(content, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        with saving("the journal", self.path), self.path.open("ab+") as file:
            if file.tell() and file.seek(-1, os.SEEK_END) is not None and file.read(1) != b"\n":
                data = b"\n" + data  # the previous line is incomplete; it stays in the file
            file.write(data)
        for reader in self.readers:
            reader(content)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run. If a run that was resumed or rolled back repeated steps, only the events of the
    repetition are returned. If a finished run was extended, the events of its earlier end are not returned.

    Incomplete lines, which a power failure can leave, are skipped. A run without a journal has no events.
    """
    if not path.exists():
        return []
    events: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["event"] in ("resumed", "rolled back"):
            events = [old for old in events if _stays(old, event)]
        events.append(event)
    return events


def kept_result(path: Path) -> dict[str, float]:
    """Return all metrics of the finished model on the validation split, with its loss. Return an empty dictionary if
    the run has not measured its finished model on any validation image."""
    for event in reversed(read_journal(path)):
        if event.get("kept") and event["split"] == "validation" and event["images"]:
            return {name: value for name, value in event.items() if isinstance(value, float)}
    return {}


def _stays(event: dict[str, Any], resumed: dict[str, Any]) -> bool:
    """Return True if an event still holds after the run was resumed. An extended run has a new end."""
    ends = ("finished", "ended early") if "extends" in resumed else ("finished",)
    return event.get("step", 0) <= resumed["step"] and not event.get("kept") and event["event"] not in ends


# The files and the display that receive the reports of a run.


@dataclass(frozen=True)
class Sinks:
    """The files and the display that receive the reports of a run."""

    journal: Journal
    checkpoints: Checkpoints
    display: Display


# Programs that show the metrics of a run during training: TensorBoard, and Weights & Biases. They receive the
# journal's events.


class Tracker(Protocol):
    """A program that receives the numbers of a run."""

    def add(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add numbers by their names. `time` is in seconds since 1970."""

    def close(self) -> None:
        """Write all numbers that were received and are not written yet."""


class TensorBoard:
    """Writes event files for TensorBoard into the folder `tensorboard` of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        writer: Any = optional_module("torch.utils.tensorboard.writer", "tensorboard")
        place = folder / "tensorboard"
        with saving("the curves", place):  # a resumed run hides the steps that it repeats
            self._writer = writer.SummaryWriter(str(place), purge_step=step + 1 if step else None, flush_secs=10)
        if not step:
            self._writer.add_text("settings", f"```\n{json.dumps(settings, indent=1)}\n```")

    def add(self, step: int, values: Mapping[str, float], time: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Sends numbers to Weights & Biases. Its own environment variables set the account and the project, and
    `WANDB_MODE=offline` writes them to the folder `wandb` of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        wandb: Any = optional_module("wandb", "wandb")
        place = folder / "wandb"
        identity = place / "run-id.txt"
        with saving("the curves", place):
            place.mkdir(exist_ok=True)
            if not identity.exists():
                identity.write_text(secrets.token_hex(4), encoding="utf-8")
            name = identity.read_text(encoding="utf-8")
        quiet = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            dir=folder, id=name, name=folder.name, resume="allow", config=dict(settings), settings=quiet
        )
        self._run.define_metric("*", step_metric="training_step")  # its own steps cannot go back to a checkpoint

    def add(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log({"training_step": step, **values})

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True)
class _Kind:
    module: str
    make: Callable[[Path, Mapping[str, Any], int], Tracker]


TRACKERS = {"tensorboard": _Kind("tensorboard", TensorBoard), "wandb": _Kind("wandb", WeightsAndBiases)}
"""The programs by their names. A name is also that of the extra that installs the program."""


def tracker_problems(track: str) -> list[str]:
    """Return messages about names of `track` that are not in the table."""
    return [
        f"track={track!r}: unknown program {name!r}; {nearest(name, TRACKERS)}"
        for name in _names(track)
        if name not in TRACKERS
    ]


def check_trackers(track: str) -> None:
    """Raise `ConfigError` if a program of `track` is not installed."""
    for name in _names(track):
        optional_module(TRACKERS[name].module, name)


@contextmanager
def tracking(track: str, folder: Path, settings: Mapping[str, Any], journal: Journal, step: int) -> Iterator[None]:
    """Send the journal's events inside the `with` block to the programs that `track` names. `step` is the number of
    steps that a resumed run has taken."""
    with ExitStack() as stack:
        trackers = list[Tracker]()
        for name in _names(track) if journal.is_kept else ():
            trackers.append(TRACKERS[name].make(folder, settings, step))
            stack.callback(trackers[-1].close)

        def receive(event: dict[str, Any]) -> None:
            if values := scalars(event):
                for tracker in trackers:
                    tracker.add(event["step"], values, event["time"])

        journal.readers.append(receive)
        stack.callback(journal.readers.remove, receive)
        yield


def scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an event by their names: "train/loss", "validation/accuracy", "probe/knn_1". Those of the
    finished model begin with "final/"."""
    kind = event["event"]
    if kind not in ("step", "evaluation", "probe"):
        return {}
    start = {"step": "train", "probe": "probe"}.get(kind) or event["split"]
    if event.get("kept"):
        start = f"final/{start}"
    return {
        f"{start}/{name}": float(value)
        for name, value in event.items()
        if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _names(track: str) -> list[str]:
    return [name.strip() for name in track.split(",") if name.strip()]
