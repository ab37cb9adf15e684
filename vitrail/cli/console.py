"""Parts that several commands share: images that the user names, tables, options, and what runs show."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from vitrail.data.faults import refuse
from vitrail.data.formats.folder import Scan, unread_images
from vitrail.data.pixels.decode import SUFFIXES
from vitrail.data.splits import Request
from vitrail.errors import DataError, plural
from vitrail.settings import setting
from vitrail.training.log import numbers_of

if TYPE_CHECKING:
    from vitrail.models.reduction import TokenReduction
    from vitrail.tasks.task import Task


def image_paths(places: Sequence[Path]) -> list[Path]:
    """Return the image files. A folder is replaced by all images in it and its subfolders, sorted, which are found as
    those of data. If it has images with unusual suffixes, a note is printed. A table is replaced by the images that it
    names, which need no labels.

    Raise `DataError` if a path does not exist, a folder has no images or cannot be read, or a table cannot be read.
    """
    paths: list[Path] = []
    for path in places:
        if not path.exists():
            raise DataError(f"image {str(path)!r} does not exist")
        if path.is_dir():
            scan = Scan(path)
            found = sorted(path / key for key, _ in scan.images(""))
            print_messages(*(fault.text for fault in unread_images(path, scan.others)))
            if not found:
                raise DataError(f"folder {str(path)!r} has no images ({', '.join(sorted(SUFFIXES))})")
        else:
            found = list(_images_of_table(path)) if path.suffix.lower() in (".csv", ".tsv", ".jsonl") else [path]
        paths += found
    return paths


def _images_of_table(path: Path) -> Iterator[Path]:
    from vitrail.data.formats.table import open_table

    splits = open_table(Request(str(path.absolute()), unlabelled=True), [path])
    refuse(splits.faults)
    yield from (path.parent / source.key(index) for source in splits.sources.values() for index in range(len(source)))


def message_console(is_json: bool) -> Console:
    """Return the console for messages. With --json, standard output is for the JSON alone."""
    return Console(stderr=is_json, highlight=False, soft_wrap=True)


def print_json(value: Any, *, ascii_only: bool = True) -> None:
    """Print a value as a line of JSON. Letters beyond ASCII are escaped, unless `ascii_only` is False and the standard
    output can encode the line, which file names that are not UTF-8 prevent."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    print(text)


def print_notes(console: Console, *notes: str) -> None:
    """Print messages that need the user's attention. Lines wrap at words on terminals; files and pipes get one line for
    each."""
    for note in notes:
        console.print(note, style="yellow", highlight=False, markup=False, soft_wrap=not console.is_terminal)


def print_messages(*messages: str) -> None:
    """Print messages beside the output of a command, to the standard error output."""
    for message in messages:
        print(f"vitrail: {message}", file=sys.stderr, flush=True)


def print_in_full(table: Table) -> None:
    """Print a table, unless it is empty. It may be wider than the terminal, because rich would shorten paths."""
    if table.row_count:
        console = Console()
        needed = console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum
        console.width = max(console.width, needed)
        console.print(table)


# Tables: rows of values, and the columns that say which values are shown, and how.


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    heading: str
    value: str | Callable[[Any], Any]
    """Key of the value in a row, or a function that returns the value from a row."""
    form: str | Callable[[Any], str] = ""
    """Format specification of a value, or a function that returns its text."""
    missing: str = ""
    """Text for None."""
    is_text: bool = False
    """True for a column that is aligned to the left. The first column of a table always is."""
    folds: bool = False
    """True for a column whose texts continue on a second line if the table would be too wide. Others are cut."""

    def text(self, row: Any) -> str:
        value = row[self.value] if isinstance(self.value, str) else self.value(row)
        if value is None:
            return self.missing
        return format(value, self.form) if isinstance(self.form, str) else self.form(value)


def terminal_table(columns: Sequence[Column], rows: Iterable[Any], caption: str | None = None) -> Table:
    """Return a table with a line for each row. `caption` explains the columns."""
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), caption=caption, caption_justify="left"
    )
    for column in columns:
        is_text = column.is_text or column is columns[0]
        table.add_column(
            column.heading,
            justify="left" if is_text else "right",
            no_wrap=not column.folds,
            overflow="fold" if column.folds else "ellipsis",
        )
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    return table


def measurement_title(machine: dict[str, Any], what: str, rounds: dict[str, int] | None = None) -> str:
    """Return the lines above the tables of a measurement: the machine, what is measured, and the number of rounds."""
    often = "" if rounds is None else f"\n{plural(rounds['repetitions'], 'round')} after {rounds['warmup']} of warm-up"
    return escape(
        f"{machine['device']}, {plural(machine['cores'], 'core')}, {plural(machine['threads'], 'thread')}, torch "
        f"{machine['versions']['torch']}\n{what}{often}"
    )


def text_table(heads: Iterable[str], rows: Iterable[Iterable[str]] = (), *, left: int = 1, **look: Any) -> Table:
    """Return a table of texts. The first `left` columns are aligned to the left, and the others to the right. `look`
    has further arguments of rich's tables."""
    table = Table(**{"box": SIMPLE_HEAD, "pad_edge": False, **look})
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < left else "right")
    for row in rows:
        table.add_row(*row)
    return table


# The options of commands that can merge or prune tokens.


NEEDS_TOKENS = "reduce_tokens", "it has an effect only with --reduce-tokens; add a number of tokens"


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """The options of merged and pruned tokens."""

    reduce_tokens: int | None = setting(None, least=0, advice="0 keeps all tokens")
    """Patch tokens that each block removes, on average over the blocks. 0 keeps all tokens. By default
    the network's own setting."""
    reduce_by: Literal["merge", "prune"] = setting("merge", needs=NEEDS_TOKENS)
    """merge averages the most similar tokens. prune drops those that the class token attends to least."""
    reduce_schedule: Literal["constant", "decreasing"] = setting("constant", needs=NEEDS_TOKENS)
    """Distribution of the removed tokens: the same number in every block, or a number that decreases to 0 in the last
    block."""

    def reduction(self) -> TokenReduction | None:
        """Return the reduction, or None if no tokens are to be removed."""
        from vitrail.models.reduction import TokenReduction

        tokens, by, schedule = self.reduce_tokens, self.reduce_by, self.reduce_schedule
        return TokenReduction(tokens=tokens, by=by, schedule=schedule) if tokens else None


# The progress bar that all commands use while they process images.


SPEED_SECONDS = 300.0
"""Seconds over which the speed is averaged for the remaining time. Batches can take many seconds."""


def images_bar(console: Console, *, transient: bool = False) -> Progress:
    """Return a progress bar with the number of images and the remaining time. It is shown only on terminals."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
        expand=True,
        speed_estimate_period=SPEED_SECONDS,
        transient=transient,
    )


@contextmanager
def showing_progress(
    console: Console, description: str, total: int | None = None, *, transient: bool = False
) -> Iterator[Callable[..., None]]:
    """Show a progress bar over images on terminals. Yield a function that takes the number of images that are done, the
    number of all images if it is known only now, and a description with which the bar begins again."""
    with images_bar(console, transient=transient) as bar:
        task = bar.add_task(description, total=total)

        def show(done: int, total: int | None = None, description: str | None = None) -> None:
            if description not in (None, bar.tasks[0].description):
                bar.reset(task, description=description)
            bar.update(task, completed=done, total=total)

        yield show


# The lines and the progress bar of a run.


class ConsoleDisplay:
    """Shows the events of runs, as a listener of their logs.

    Of the training steps it shows the loss, metrics, time left, images per second, FLOPs per second as a fraction of
    those of matrix products alone, learning rate and peak memory, in this order of importance. Says if more than a
    tenth of the time is spent waiting for images.

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
    MOST_NAMED = 10
    """Largest number of held-out images of a split that are named. The journal names all of them."""

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
        self._skipped: defaultdict[str, set[str]] = defaultdict(set)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show an event, if it is one that is shown."""
        name, step = event["event"], event.get("step", 0)
        match name:
            case "say":
                self.say(event["text"])
            case "note":
                self.note(event["text"])
            case "extracting":
                self.extracting(event["done"], event["total"])
            case "begin":
                self.begin(step, event["steps"], event["task"])
            case "end":
                self.end()
            case "tick":
                # A GPU computes several steps ahead, so a run on it has no such events.
                self._show(step, event["seconds_left"])
            case "step":
                self.step(step, numbers_of(event) | event["shown"])
            case "evaluation" if "best" in event:
                self.evaluated(step, event, event["shown"]["training"])
            case "probe":
                metrics = (f"{key} {value:.4g}" for key, value in event["shown"]["metrics"].items())
                self.say(f"step {step:,}: {', '.join(metrics)}")
            case "skipped":
                self._skip(event["split"], event["key"], event["reason"])
            case "phase":
                height, width = event["image_size"]
                self.note(
                    f"from step {step + 1:,}: images of {height} x {width} pixels (height x width), patch dropout "
                    f"{event['patch_dropout']:g}, batches of {event['batch_size']}"
                )
            case "ended early":
                self.note(
                    f"ended early, after step {step:,} of {self.steps:,}: step {event['best']:,} is still the best "
                    f"after {event['patience']} more evaluations"
                )
            case "rolled back":
                first, last = event["left_out"]
                self.note(
                    f"{event['reason']} at step {event['at']:,}: the run goes back to step {step:,}, and skips the "
                    f"batches of steps {first:,} to {last:,}"
                )

    def begin(self, step: int, steps: int, task: Task) -> None:
        """Start to show a run of `steps` steps, of which `step` are done."""
        self.steps, self.task = steps, task
        self._skipped.clear()
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
        """Show a message."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Show a message that needs the user's attention."""
        print_notes(self.console, self._spell(text))

    def extracting(self, done: int, total: int) -> None:
        """Show the number of images that are computed, if the last line is about ten seconds ago."""
        now = time.perf_counter()
        if done <= self._extracted:  # the images of another split
            self._last_line = now
        elif done < total and now - self._last_line >= self.LINE_SECONDS:
            self._last_line = now
            self.say(f"computed {done:,} of {total:,} images")
        self._extracted = done

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the means since the last report. images_per_second and limit_fraction are those of about the last
        minute. limit_fraction is missing if the FLOPs of a step are unknown, and seconds_left while the time left is
        unknown."""
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

    def evaluated(self, step: int, result: Mapping[str, Any], training: Mapping[str, float]) -> None:
        """Show an evaluation on the validation split, beside the `training` metrics since the last one."""
        star = "  (best so far)" if result["best"] else ""
        texts = ", ".join(self.task.texts(numbers_of(result))) or "metrics unknown"
        train = ", ".join(self.task.texts(training))
        beside = f"; training {train}" if train else ""
        start = f"step {step:,}" if step else "before the first step"
        skipped = f" ({result['skipped']:,.0f} skipped)" if result.get("skipped") else ""
        self.say(f"{start}: validation {texts} on {plural(round(result['images']), 'image')}{skipped}{beside}{star}")

    def _skip(self, split: str, key: str, reason: str) -> None:
        """Name an image that cannot be decoded. Every evaluation finds those of its split, so each is named once."""
        if split == "train":
            self.note(f"skipped {key}: {reason}")
            return
        named = self._skipped[split]
        if key in named:
            return
        named.add(key)
        if len(named) <= self.MOST_NAMED:
            self.note(f"skipped {key} of the {split} split: {reason}")
        elif len(named) == self.MOST_NAMED + 1:
            self.note(f"more images of the {split} split are skipped; journal.jsonl names all of them")

    def end(self) -> None:
        """Remove the progress bar at the end of the training steps, whatever their end is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
