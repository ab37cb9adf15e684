"""Suites: many tasks in one file, and a model's figures on all of them in one table."""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vitrail.data.source import Source
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, DataError, UserError, nearest
from vitrail.evaluation.evaluators import Measure, evaluators_of, measure
from vitrail.evaluation.outputs import Outputs
from vitrail.plain import from_plain

__all__ = ["Suite", "SuiteResult", "Task", "TaskResult", "read_suite", "run_suite", "suite_as_plain", "suites"]

SUFFIX = ".toml"

COUNTS = ("images", "skipped", "unlabelled", "training_images", "real_images", "linear_penalty")
"""Figures of which a mean over tasks says nothing."""
EXTRAS = ("_low", "_high", "_deviation")
"""Ends of the names of what is said of another figure."""

Settings = dict[str, dict[str, Any]]
"""Evaluators by name, with their settings."""


@dataclass(frozen=True)
class Task:
    """One data set of a suite, and how it is measured."""

    name: str
    group: str
    data: str = ""
    """A data SPEC. A relative path is looked for beside the suite's file first."""
    where: str = ""
    """How to come by the data, where `data` cannot say it."""
    train: str = ""
    """How many of the training images are learned from, like "[:1000]" or "[:10%]"; all of them without it."""
    per_class: int | None = None
    """The same for each class."""
    split: Literal["held-out", "validation", "test"] = "held-out"
    """What is measured; held-out is the test split, or else the validation split."""
    held_out_share: float = 0.1
    """Of the training images, to measure where the data has no other split."""
    evaluators: Settings = field(default_factory=dict)
    """Those of the suite, unless given."""


@dataclass(frozen=True)
class Suite:
    """The content of a suite's file. Its evaluators are those of all tasks that name none."""

    name: str
    tasks: tuple[Task, ...]
    about: str = ""
    evaluators: Settings = field(default_factory=dict)

    def measures(self, task: Task) -> dict[str, Measure]:
        """Raises `ConfigError` for a task without any."""
        settings = task.evaluators or self.evaluators
        if not settings:
            raise ConfigError("it has no evaluators, and the suite names none for all tasks")
        return evaluators_of(",".join(settings), settings)


@dataclass(frozen=True)
class TaskResult:
    """What became of a task."""

    task: Task
    figures: dict[str, float] = field(default_factory=dict)
    """As evaluators name them (`evaluation.evaluators.Measure`)."""
    reason: str | None = None
    """Why it was left out; None where it was measured."""


@dataclass(frozen=True)
class SuiteResult:
    """What became of all tasks, in their order."""

    suite: Suite
    rows: tuple[TaskResult, ...]

    def groups(self) -> tuple[str, ...]:
        """In the order of the tasks."""
        return tuple(dict.fromkeys(row.task.group for row in self.rows))

    def of(self, group: str | None) -> tuple[TaskResult, ...]:
        """The tasks of a group; None is all of them."""
        return tuple(row for row in self.rows if group is None or row.task.group == group)

    def columns(self) -> tuple[str, ...]:
        """The figures that have a mean, in the order in which they came."""
        names = dict.fromkeys(name for row in self.rows for name in row.figures)
        return tuple(name for name in names if name not in COUNTS and not name.endswith(EXTRAS))

    def means(self) -> dict[str | None, dict[str, tuple[float, int]]]:
        """By group, and over all tasks by None: each figure's mean, and the number of tasks that it is of."""
        result: dict[str | None, dict[str, tuple[float, int]]] = {}
        for group in (*self.groups(), None):
            result[group] = {}
            for name in self.columns():
                if values := [row.figures[name] for row in self.of(group) if name in row.figures]:
                    result[group][name] = sum(values) / len(values), len(values)
        return result


def suites() -> dict[str, Path]:
    """The files of the suites that come with the package, by name."""
    folder = Path(str(importlib.resources.files("vitrail.transfer") / "suites"))
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def read_suite(name: str | Path) -> Suite:
    """A suite by its name or by its file, checked whole. Raises `ConfigError` where there is none, and for an unknown
    key, evaluator or setting in it."""
    known = suites()
    path = known.get(str(name), Path(name).expanduser())
    if path.suffix != SUFFIX and not path.exists():
        raise ConfigError(
            f"{str(name)!r} is neither a suite ({nearest(str(name), known)}) nor a file of tasks (TASKS{SUFFIX})"
        )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the suite {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    try:
        suite = from_plain(Suite, values | {"tasks": []})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    suite = replace(suite, tasks=tuple(_tasks(path, suite, values.get("tasks"))))
    names = [task.name for task in suite.tasks]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path} has two tasks with the name {repeated[0]!r}")
    return replace(suite, tasks=tuple(_beside(task, path.parent) for task in suite.tasks))


def run_suite(
    outputs: Outputs,
    suite: Suite,
    *,
    folder: Path | None = None,
    strict: bool = False,
    on_task: Callable[[Task], None] | None = None,
) -> SuiteResult:
    """Measures a model on every task. `outputs` says how, and keeps features in its cache, so that a suite that was
    stopped goes on where it was.

    Where `folder` has something with the name of a task in it, that is its data. A task that cannot be measured is left
    out, with the reason; with `strict` it raises. `on_task` is told what begins. Raises `DataError` where no task could
    be measured.
    """
    rows = []
    for task in suite.tasks:
        if on_task is not None:
            on_task(task)
        outputs.forget()
        try:
            train, held_out = _open(task, folder, outputs.note)
            rows.append(TaskResult(task, measure(suite.measures(task), outputs, train, held_out)))
        except UserError as error:
            if strict:
                raise type(error)(f"task {task.name}: {error}") from error
            rows.append(TaskResult(task, reason=str(error)))
        for key, reason in outputs.skipped.items():
            outputs.note(f"{task.name}: skipped {key}: {reason}")
    outputs.forget()
    if all(row.reason is not None for row in rows):
        reasons = "".join(f"\n  {row.task.name}: {row.reason}" for row in rows)
        raise DataError(f"no task of the suite {suite.name} could be measured:{reasons}")
    return SuiteResult(suite, tuple(rows))


def suite_as_plain(result: SuiteResult) -> dict[str, Any]:
    """What JSON can hold: the tasks' figures by name, the means by group and over all, with their numbers of tasks."""
    tasks = {
        row.task.name: {"group": row.task.group}
        | ({"figures": row.figures} if row.reason is None else {"left_out": row.reason})
        for row in result.rows
    }
    means = {
        group: {name: {"mean": value, "tasks": count} for name, (value, count) in figures.items()}
        for group, figures in result.means().items()
    }
    over_all: Mapping[str, Any] = means.pop(None)
    return {"suite": result.suite.name, "tasks": tasks, "groups": means, "all": over_all}


def _tasks(path: Path, suite: Suite, tables: Any) -> Iterator[Task]:
    """The tasks of a file, one by one, so that a message says which is wrong."""
    if not tables or not isinstance(tables, list):
        raise ConfigError(f"{path} has no tasks; each is a table [[tasks]] with a name, a group and data")
    for number, table in enumerate(tables, start=1):
        name = table.get("name", number) if isinstance(table, dict) else number
        try:
            task = from_plain(Task, table)
            suite.measures(task)
        except ConfigError as error:
            raise ConfigError(f"{path}: task {name}: {error}") from None
        yield task


def _beside(task: Task, folder: Path) -> Task:
    """A relative path is that of something beside the suite's file, if it is there."""
    path = folder / task.data
    return replace(task, data=str(path)) if task.data and path.exists() else task


def _open(task: Task, folder: Path | None, note: Callable[[str], None]) -> tuple[Source, Source]:
    """The images to learn from, and those to measure. Raises `DataError` where the data is not there."""
    data = task.data
    if folder is not None and (own := folder / task.name).exists():
        data = str(own)
    if not data:
        raise DataError(task.where or "the suite does not say where its data is")
    spec = f"{data}{task.train}"
    splits = open_data(spec, validation_share=0.0, per_class=task.per_class)
    if splits.held_out is None:
        splits = open_data(spec, validation_share=task.held_out_share, per_class=task.per_class)
    for text in splits.notes:
        note(f"{task.name}: {text}")
    found = {"held-out": splits.held_out and splits.held_out[1], "validation": splits.validation, "test": splits.test}
    held_out = found[task.split]
    if held_out is None:
        raise DataError(f"data {data!r} has no {task.split} split")
    return splits.train, held_out
