"""Fine-tuning of a model on every task of a suite, such as VTAB-1k (1910.04867)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.data.sources import OpenedData
from vitrail.data.splits import Splits
from vitrail.errors import DataError, NonFiniteLoss, RunError
from vitrail.files import saving, write_json
from vitrail.tasks import Regression
from vitrail.training.config import TrainConfig
from vitrail.training.reporting.display import Display
from vitrail.training.run import finished
from vitrail.transfer.choices import Explicit, Plan
from vitrail.transfer.finetune import Protocol, choose_best_rate, evaluate_run, plan
from vitrail.transfer.protocol import TableRow, complete_run
from vitrail.transfer.suite import Suite, SuiteResult, SuiteTask, TaskResult, open_task, suite_as_plain
from vitrail.weights.bundle import Bundle

__all__ = ["Method", "finetune_suite", "is_suite_run"]

RESULTS = "suite.json"
"""Name of the file with the results, in the folder of the runs."""


@dataclass(frozen=True)
class Method:
    """Settings of `plan` that all tasks of a suite share."""

    protocol: Protocol = "rule"
    explicit: Explicit = field(default_factory=dict)
    """Settings of the user. They replace those of the suite and of the protocol."""
    rates: tuple[float, ...] | None = None
    """Learning rates to try on images that the suite holds out. By default the learning rates of the protocol."""
    row: TableRow | None = None
    """Row of the paper's Table 4 for the paper's protocol. By default the row of the suite."""


def finetune_suite(
    suite: Suite,
    initial: Bundle,
    config: TrainConfig,
    *,
    folder: Path,
    place: Path,
    method: Method = Method(),
    strict: bool = False,
    display: Display | None = None,
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
    _check_place(place, suite)
    return _SuiteRun(suite, initial, config, folder, place, method, display or Display()).go(strict=strict)


def is_suite_run(folder: Path) -> bool:
    """Return True if a run belongs to a suite."""
    return (folder.absolute().parent / RESULTS).is_file()


class _SuiteRun:
    """The runs of all tasks of a suite, one after the other."""

    def __init__(
        self,
        suite: Suite,
        initial: Bundle,
        config: TrainConfig,
        folder: Path,
        place: Path,
        method: Method,
        display: Display,
    ) -> None:
        self.suite = suite
        self.initial = initial
        self.config = config
        self.folder = folder
        self.place = place
        self.method = method
        self.display = display
        self.rows: list[TaskResult] = []

    def go(self, *, strict: bool) -> SuiteResult:
        """Fine-tune and measure the model on every task, and return the results."""
        for number, task in enumerate(self.suite.tasks, start=1):
            self.display.say(f"task {task.name}, {number} of {len(self.suite.tasks)}")
            try:
                self.rows.append(TaskResult(task, self._metrics(task)))
            except (DataError, NonFiniteLoss) as error:
                if strict:
                    raise type(error)(f"task {task.name}: {error}") from error
                self.display.note(f"skipped {task.name}: {error}")
                self.rows.append(TaskResult(task, reason=str(error)))
        result = self._result()
        result.check()
        self._write_results()
        return result

    def _metrics(self, task: SuiteTask) -> dict[str, float]:
        """Return the metrics of the model after fine-tuning. Work that an earlier call finished is not repeated."""
        if "accuracy" in task.evaluators:
            raise DataError(
                "the evaluator accuracy measures a model's existing head, so there is nothing to fine-tune; fine-tune "
                "on another task, and measure that run with vitrail evaluate"
            )
        images = open_task(task, self.folder, self.display.note)
        data = OpenedData(task.name, Splits(images.train, None, images.held_out, title=f"task {task.name}"))
        place = self.place / task.name
        chosen = self._plan(task, data, images.spec, place)
        for reason in () if (place / "run.json").is_file() else chosen.reasons:
            self.display.say(f"  {reason}")
        self._write_results()  # marks the folder, so that a run that is stopped is known to belong to a suite
        config, trials = choose_best_rate(
            chosen.config,
            data,
            self.initial,
            chosen.rates,
            place,
            display=self.display,
            on_trial=lambda trial: self.display.say(trial.text()),
        )
        found, run = complete_run(config, data, self.initial, display=self.display)
        splits = config.data.cut(data)
        if run is None and not (place / "report.html").is_file():
            run = finished(place)
        if run is not None:
            evaluate_run(run, config, splits, trials, names={"test": images.split} if images.split else {})
        start = "test_"
        values = {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}
        if not values:
            raise DataError("no test image both has a label and can be decoded")
        self.display.say(f"task {task.name}: {', '.join(config.task.texts(values))}")
        counts = {"training_images": len(splits.train), "test_images": len(images.held_out)}
        return values | counts | {"learning_rate": config.optimizer.learning_rate}

    def _plan(self, task: SuiteTask, data: OpenedData, spec: str, place: Path) -> Plan:
        """Return the settings of a task: the user's, else the suite's, else the protocol's."""
        method, of_suite = self.method, self.suite.finetune
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

        def planned(**more: Any) -> Plan:
            explicit = {**chosen, **more, **method.explicit}
            return plan(
                self.initial, data, config, method.protocol, explicit, rates=method.rates, row=row, search=False
            )

        found = planned()
        return planned(validation_share=of_suite.held_out) if found.rates else found

    def _result(self) -> SuiteResult:
        return SuiteResult(self.suite, tuple(self.rows))

    def _write_results(self) -> None:
        about = {"model": self.config.start.init, "protocol": self.method.protocol}
        with saving("the results", self.place):
            self.place.mkdir(parents=True, exist_ok=True)
            write_json(self.place / RESULTS, suite_as_plain(self._result()) | about)


def _check_place(place: Path, suite: Suite) -> None:
    """Raise `RunError` if the folder contains anything but the runs of this suite."""
    path = place / RESULTS
    if path.is_file():
        try:
            name = json.loads(path.read_text(encoding="utf-8"))["suite"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is damaged: {error!r}; delete it, or choose another --name") from error
        if name != suite.name:
            raise RunError(f"{place} contains the runs of suite {name}, not of {suite.name}; choose another --name")
    elif place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise RunError(f"{place} exists and does not contain the runs of a suite; choose another --name")
