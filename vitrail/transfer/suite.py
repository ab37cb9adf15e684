"""Suites: files that list many data sets, on all of which a model is measured."""

from __future__ import annotations

import importlib.resources
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vitrail.data.source import Source
from vitrail.data.sources import OpenedData, open_whole
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, NonFiniteLoss, UserError, listed, nearest
from vitrail.evaluation.evaluators import Evaluator, evaluators_of, measure
from vitrail.evaluation.outputs import Outputs
from vitrail.experiments.runner import check_folder, complete_run
from vitrail.files import expanded, saving, write_json
from vitrail.settings import Checked, from_plain, setting
from vitrail.tasks.regression import Regression
from vitrail.training.config import TrainConfig
from vitrail.training.log import Log
from vitrail.training.run import finished
from vitrail.transfer.facts import FinetunePlan
from vitrail.transfer.finetune import Method, evaluate_run, plan
from vitrail.transfer.protocols import TableRow
from vitrail.transfer.trials import choose_rate, trials_folder
from vitrail.weights.bundle import Bundle

SUFFIX = ".toml"

COUNTS = (
    "images", "skipped", "unlabelled", "training_images", "test_images", "real_images", "linear_penalty",
    "learning_rate",
)  # fmt: skip
"""Metrics that are not averaged over tasks, because their mean has no meaning."""
DETAILS = ("_low", "_high", "_deviation")
"""Suffixes of values that belong to another metric: the ends of its interval and its standard deviation."""

ERRORS = ("mean_absolute_error", "root_mean_squared_error")
"""Suffixes of metrics in the units of a task's numbers. They are not averaged over tasks."""

NAME = re.compile(r"\w[\w.-]*")
"""Pattern of task names, which are also names of folders."""

Settings = dict[str, dict[str, Any]]
"""Settings of each evaluator, by the evaluator's name."""


@dataclass(frozen=True)
class SuiteTask:
    """One data set of a suite, and the settings with which a model is measured on it."""

    name: str
    group: str
    data: str = ""
    """Data set, in any form that `--data` accepts. A relative path is first looked up in the folder of the suite's
    file."""
    where: str = ""
    """Instructions for getting the data, if `data` cannot name it."""
    train: str = ""
    """Part of the training images to train on, such as "[:1000]" or "[:10%]". By default all of them."""
    numbers: tuple[str, ...] = ()
    """Numeric columns of a table that are predicted instead of classes."""
    per_class: int | None = None
    """Number of training images per class. By default all of them."""
    split: Literal["held-out", "validation", "test"] = "held-out"
    """The split that is measured. held-out: the test split, or the validation split if there is no test split."""
    held_out_fraction: float = 0.1
    """Fraction of the training images that is measured if the data has no other split."""
    evaluators: Settings = field(default_factory=dict)
    """Evaluators of this task, with their settings. By default the evaluators of the suite."""
    flip: bool = True
    """True if fine-tuning may mirror images. False if the labels depend on left and right."""
    crop: bool = True
    """True if fine-tuning may crop images. False if the labels depend on positions, distances or counts."""


@dataclass(frozen=True)
class Finetuning(Checked):
    """Settings for fine-tuning on the tasks of a suite. Raise `ConfigError` if `held_out` is not in (0, 1)."""

    table_row: TableRow | None = None
    """Row of the paper's Table 4 for the paper's protocol. By default the row for the number of training images."""
    held_out: float = setting(0.2, name="finetune.held_out", above=0, below=1)
    """Fraction of a task's training images that is held out to choose among several learning rates."""


@dataclass(frozen=True)
class Suite:
    """The content of a suite's file. Its evaluators apply to every task that has none of its own."""

    name: str
    tasks: tuple[SuiteTask, ...]
    about: str = ""
    evaluators: Settings = field(default_factory=dict)
    finetune: Finetuning = field(default_factory=Finetuning)

    def evaluators_for(self, task: SuiteTask) -> dict[str, Evaluator]:
        """Return the evaluators of a task. Raise `ConfigError` if there are none."""
        settings = task.evaluators or self.evaluators
        if not settings:
            raise ConfigError("neither the task nor the suite has evaluators; add a table [evaluators.NAME]")
        return evaluators_of(",".join(settings), settings)


@dataclass(frozen=True)
class TaskData:
    """The images of a task. They are the same for every model and every seed of a run."""

    spec: str
    """The data SPEC of the training images."""
    train: Source
    held_out: Source
    """The images to measure."""
    split: str | None
    """Name of the split to measure. None if the task holds out images because the data has only one split."""


@dataclass(frozen=True)
class TaskResult:
    """The metrics of a task, or the reason for skipping it."""

    task: SuiteTask
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of all evaluators, by name."""
    reason: str | None = None
    """The reason for skipping the task, or None if the task was measured."""


@dataclass(frozen=True)
class SuiteResult:
    """The results of all tasks, in the order of the suite."""

    suite: Suite
    rows: Sequence[TaskResult]

    def check(self) -> None:
        """Raise `DataError` with the reasons if every task was skipped."""
        if all(row.reason is not None for row in self.rows):
            reasons = "".join(f"\n  {row.task.name}: {row.reason}" for row in self.rows)
            raise DataError(f"suite {self.suite.name}: no task could be measured:{reasons}")

    def groups(self) -> tuple[str, ...]:
        """Return the names of the groups in the order of the tasks."""
        return tuple(dict.fromkeys(row.task.group for row in self.rows))

    def in_group(self, group: str | None) -> tuple[TaskResult, ...]:
        """Return the results of a group. If `group` is None, return the results of all tasks."""
        return tuple(row for row in self.rows if group is None or row.task.group == group)

    def columns(self) -> tuple[str, ...]:
        """Return the names of the metrics that are averaged, in order of appearance."""
        names = dict.fromkeys(name for row in self.rows for name in row.metrics)
        return tuple(
            name for name in names if name not in COUNTS and not name.endswith(DETAILS + ERRORS) and ":" not in name
        )

    def means(self) -> dict[str | None, dict[str, tuple[float, int]]]:
        """Return, for each group, the mean of each metric and the number of tasks that have the metric.

        The key None has the means over all tasks.
        """
        return {group: self._means_of(group) for group in (*self.groups(), None)}

    def _means_of(self, group: str | None) -> dict[str, tuple[float, int]]:
        rows = [row.metrics for row in self.in_group(group)]
        values = {name: [row[name] for row in rows if name in row] for name in self.columns()}
        return {name: (sum(found) / len(found), len(found)) for name, found in values.items() if found}


def suites() -> dict[str, Path]:
    """Return the paths of the suites in this package, by name."""
    folder = Path(str(importlib.resources.files("vitrail.transfer") / "suites"))
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def read_suite(name: str | Path) -> Suite:
    """Read a suite by its name or from its file.

    Raise `ConfigError` if the suite does not exist, or if it contains an unknown field, evaluator or setting.
    """
    known = suites()
    path = known.get(str(name), expanded(name))
    if path.suffix != SUFFIX and not path.exists():
        raise ConfigError(
            f"suite {str(name)!r} does not exist ({nearest(str(name), known)}); give the name of a suite or a file "
            f"TASKS{SUFFIX}"
        )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: the suite cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: the suite is not valid TOML: {error}") from error
    try:
        suite = from_plain(Suite, values | {"tasks": []})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    suite = replace(suite, tasks=tuple(_tasks(path, suite, values.get("tasks"))))
    names = [task.name for task in suite.tasks]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path}: two tasks have the name {repeated[0]!r}; give each task its own name")
    return suite


def run_suite(
    outputs: Outputs,
    suite: Suite,
    *,
    folder: Path | None = None,
    strict: bool = False,
    on_task: Callable[[SuiteTask], None] = lambda task: None,
) -> SuiteResult:
    """Measure a model on every task of a suite.

    `outputs` computes the model's features and predictions. Its cache keeps features, so that a stopped suite continues
    where it stopped. If `folder` contains a file or folder with the name of a task, this file or folder is the data of
    the task. A task that cannot be measured is skipped with a reason. With `strict` its error is raised instead.
    `on_task` is called when a task starts.

    Raise `DataError` if no task could be measured.
    """
    rows = []
    for task in suite.tasks:
        on_task(task)
        outputs.forget()
        try:
            data = open_task(task, folder, outputs.note)
            rows.append(TaskResult(task, measure(suite.evaluators_for(task), outputs, data.train, data.held_out)))
        except UserError as error:
            if strict:
                raise type(error)(f"task {task.name}: {error}") from error
            rows.append(TaskResult(task, reason=str(error)))
        for key, reason in outputs.skipped.items():
            outputs.note(f"{task.name}: skipped {key}: {reason}")
    outputs.forget()
    result = SuiteResult(suite, rows)
    result.check()
    return result


def suite_as_plain(result: SuiteResult) -> dict[str, Any]:
    """Return the result as JSON values: metrics by task, and means with task counts by group and over all tasks."""
    tasks = {
        row.task.name: {"group": row.task.group}
        | ({"metrics": row.metrics} if row.reason is None else {"skipped": row.reason})
        for row in result.rows
    }
    means = {
        group: {name: {"mean": value, "tasks": count} for name, (value, count) in metrics.items()}
        for group, metrics in result.means().items()
    }
    over_all: Mapping[str, Any] = means.pop(None)
    return {"suite": result.suite.name, "tasks": tasks, "groups": means, "all": over_all}


def open_task(task: SuiteTask, folder: Path | None, note: Callable[[str], None]) -> TaskData:
    """Return the images of a task. A file or folder in `folder` with the name of the task is used as its data.

    `note` is called with each remark on the data. Raise `DataError` if the data does not exist, or if it has no split
    to measure.
    """
    data = task.data
    if folder is not None and (own := folder / task.name).exists():
        data = str(own)
    if not data:
        raise DataError(task.where or "the suite has no data for this task; add the field data or where to the task")
    spec = f"{data}{task.train}"
    opened = open_whole(spec, numbers=task.numbers)
    has_split = opened.whole.held_out is not None
    splits = opened.splits(validation_share=0.0 if has_split else task.held_out_fraction, per_class=task.per_class)
    for text in splits.notes:
        note(f"{task.name}: {text}")
    found = splits.held_out
    if task.split != "held-out":
        source = {"validation": splits.validation, "test": splits.test}[task.split]
        found = None if source is None else (task.split, source)
    if found is None:
        raise DataError(f"data {data!r} has no {task.split} split; choose another split")
    name, held_out = found
    return TaskData(spec, splits.train, held_out, name if has_split else None)


def _tasks(path: Path, suite: Suite, tables: Any) -> Iterator[SuiteTask]:
    """Yield the tasks of a file. Their data can be in the folder of the file. Raise `ConfigError` with the name of the
    first invalid task."""
    if not tables or not isinstance(tables, list):
        raise ConfigError(f"{path}: the suite has no tasks; add tables [[tasks]] with a name, a group and data")
    for number, table in enumerate(tables, start=1):
        name = table.get("name", number) if isinstance(table, dict) else number
        try:
            task = from_plain(SuiteTask, table)
            suite.evaluators_for(task)
            if NAME.fullmatch(task.name) is None:
                raise ConfigError(
                    f"name={task.name!r} cannot be the name of a folder; use letters, digits, '.', '_' and '-', and "
                    "begin with a letter or digit"
                )
        except ConfigError as error:
            raise ConfigError(f"{path}: task {name}: {error}") from None
        beside = path.parent / task.data
        yield replace(task, data=str(beside)) if task.data and beside.exists() else task


# Fine-tuning of a model on every task of a suite, such as VTAB-1k (1910.04867).


RESULTS = "suite.json"
"""Name of the file with the results, in the folder of the runs."""


def finetune_suite(
    suite: Suite,
    initial: Bundle,
    config: TrainConfig,
    *,
    folder: Path,
    place: Path,
    method: Method = Method(),
    strict: bool = False,
    log: Log | None = None,
) -> SuiteResult:
    """Fine-tune the model `initial` on each task of a suite, and measure it on the task's test images.

    The model learns from all training images that a task selects. If several learning rates are tried, the suite's
    fraction of these images (200 of the 1,000 images of VTAB-1k) is first held out to choose one of them. The images
    are the same for every model, seed and method.

    Each task has a run in `place`, a folder for this suite alone. A finished run is reused, and a stopped run
    continues. The file `suite.json` in `place` has the results of all tasks so far. If `folder` contains a file or
    folder with the name of a task, it is the task's data. A task whose data does not exist or cannot be used, or whose
    training diverges, is skipped with a reason. With `strict` its error is raised instead.

    Raise `DataError` if every task was skipped, `RunError` if `place` contains other runs, and the errors of `plan` and
    `finetune`.
    """
    log, rows = log or Log(), list[TaskResult]()
    run = _SuiteRun(SuiteResult(suite, rows), initial, config, folder, place, method, log)
    path = place / RESULTS
    check_folder(path, {"suite": suite.name, **run.about}, "the runs of a suite", "--name")
    earlier = json.loads(path.read_text(encoding="utf-8")).get("tasks", ()) if path.is_file() else ()
    if gone := [name for name in earlier if name not in {task.name for task in suite.tasks}]:
        log.note(
            f"{path}: the results of {listed(gone)} are dropped, because the suite lacks these tasks; their runs stay"
        )
    for number, task in enumerate(suite.tasks, start=1):
        log.say(f"task {task.name}, {number} of {len(suite.tasks)}")
        try:
            rows.append(TaskResult(task, run.metrics(task)))
        except (DataError, NonFiniteLoss) as error:
            if strict:
                raise type(error)(f"task {task.name}: {error}") from error
            log.note(f"skipped {task.name}: {error}")
            rows.append(TaskResult(task, reason=str(error)))
    run.result.check()
    run.write_results()
    return run.result


def is_suite_run(folder: Path) -> bool:
    """Return True if a run belongs to a suite."""
    return (folder.absolute().parent / RESULTS).is_file()


@dataclass
class _SuiteRun:
    """The runs of all tasks of a suite, one after the other."""

    result: SuiteResult
    """The results so far."""
    initial: Bundle
    config: TrainConfig
    folder: Path
    place: Path
    method: Method
    log: Log

    def metrics(self, task: SuiteTask) -> dict[str, float]:
        """Return the metrics of the model after fine-tuning. Work that an earlier call finished is not repeated."""
        if "accuracy" in task.evaluators:
            raise DataError(
                "the evaluator accuracy measures a model's existing head, so there is nothing to fine-tune; fine-tune "
                "on another task, and measure that run with vitrail evaluate"
            )
        images = open_task(task, self.folder, self.log.note)
        data = OpenedData(task.name, Splits(images.train, None, images.held_out, title=f"task {task.name}"))
        place = self.place / task.name
        chosen = self._plan(task, data, images.spec, place)
        for reason in () if (place / "run.json").is_file() else chosen.reasons:
            self.log.say(f"  {reason}")
        # A run that is stopped is known by this file to belong to a suite. Earlier results stay if it is refused.
        if any(row.metrics for row in self.result.rows) or not (self.place / RESULTS).exists():
            self.write_results()
        config, trials = choose_rate(
            chosen.config, data, chosen.rates, trials_folder(place), initial=self.initial, log=self.log
        )
        found, run = complete_run(config, data=data, initial=self.initial, log=self.log)
        splits = config.data.cut(data)
        if run is None and not (place / "report.html").is_file():
            run = finished(place)
        if run is not None:
            evaluate_run(run, config, splits, trials, names={"test": images.split} if images.split else {})
        start = "test_"
        values = {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}
        if not values:
            raise DataError("no test image both has a label and can be decoded")
        self.log.say(f"task {task.name}: {', '.join(config.task.texts(values))}")
        counts = {"training_images": len(splits.train), "test_images": len(images.held_out)}
        return values | counts | {"learning_rate": config.optimizer.learning_rate}

    def _plan(self, task: SuiteTask, data: OpenedData, spec: str, place: Path) -> FinetunePlan:
        """Return the settings of a task: the user's, else the suite's, else the protocol's."""
        method, of_suite = self.method, self.result.suite.finetune
        about: dict[str, Any] = {"data": spec, "run": str(place)}
        if task.numbers:
            about |= {"numbers": task.numbers, "task": Regression.name}
        config = self.config.override(**about)
        chosen: dict[str, Any] = {}
        if not task.flip:
            chosen |= {"flip": False}
        if not task.crop:
            chosen |= {"crop_area": (1.0, 1.0), "crop_from": None}
        if method.protocol == "rule":
            chosen |= {"validation_share": 0.0}
        row = of_suite.table_row if method.row is None and method.protocol == "paper" else method.row

        def planned(**more: Any) -> FinetunePlan:
            explicit = {**chosen, **more, **method.explicit}
            return plan(self.initial, data, config, replace(method, explicit=explicit, row=row), search=False)

        found = planned()
        return planned(validation_share=of_suite.held_out) if found.rates else found

    @property
    def about(self) -> dict[str, Any]:
        """The model and the protocol of all tasks, in the file with the results."""
        return {"model": self.config.start.init, "protocol": self.method.protocol}

    def write_results(self) -> None:
        """Write the results so far, so that the folder is known to belong to a suite."""
        with saving("the results", self.place):
            self.place.mkdir(parents=True, exist_ok=True)
            write_json(self.place / RESULTS, suite_as_plain(self.result) | self.about)
