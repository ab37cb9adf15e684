"""`vitrail bench accuracy`: measure the time and operations that recipes need to reach validation accuracies."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from vitrail.bench.accuracy.cell import Cell, CellResult
from vitrail.bench.accuracy.comparison import AccuracyComparison, check_environments, peer_entries
from vitrail.bench.accuracy.results import Curves, reached
from vitrail.cli.bench.environments import parse_environments
from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional, convert
from vitrail.cli.options.run_options import run_options
from vitrail.cli.output.accuracy_chart import accuracy_chart
from vitrail.cli.output.accuracy_tables import (
    POINT_COLUMNS,
    ROW_COLUMNS,
    plain_accuracy,
    point_rows,
    tables,
    target_rows,
)
from vitrail.errors import ConfigError, Interrupted, nearest
from vitrail.files import saving, write_json
from vitrail.machine import pick_device
from vitrail.recipes import RECIPES
from vitrail.training.config import TrainConfig
from vitrail.training.monitoring.stop import interrupted_by_signals
from vitrail.transfer.budget import FACTORS, seconds_of

__all__ = ["main"]

SET_BY_THE_COMPARISON = ("checkpoints", "device", "evaluations", "overwrite", "run", "seed", "task")
"""Settings of a run that an entry cannot change. The settings of the data are the same for all entries too."""


@dataclass(frozen=True, kw_only=True)
class BenchAccuracy:
    """Options of `vitrail bench accuracy`."""

    recipes: Annotated[tuple[str, ...], Positional("RECIPE...")]
    """Recipes to compare, also with changed settings, such as demo:epochs=5,learning_rate=0.001. Ratios refer to the
    first one. vitrail recipes lists all."""
    data: str | None = None
    """Data set that all entries train on. By default that of the first recipe."""
    validation_share: float | None = None
    """Fraction of the training images held out for validation. By default that of the first recipe."""
    against: str = ""
    """Other libraries to compare with, separated by commas. timm is both timm-defaults, the defaults of its training
    script, and timm-small, published settings for images of 32 pixels."""
    environment: tuple[str, ...] = ()
    """Python of a library's own environment, such as timm=/opt/timm/bin/python. By default the Python of Vitrail."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Random seeds. Every entry runs once with each of them."""
    targets: tuple[float, ...] = (0.8, 0.85, 0.9)
    """Validation accuracies to reach, between 0 and 1."""
    budget: str | None = None
    """Time of training of each run, such as 90s or 20m. Runs that would take longer are shortened before they start,
    with their whole learning rate schedule. By default each run has the length that its settings state."""
    evaluations: int = 20
    """Number of evaluations on the validation split during each run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto is the GPU if there is one."""
    out: Path = Path("runs/bench-accuracy")
    """Folder of the results. Runs that it already has are not repeated."""
    json: bool = False
    """Print JSON instead of tables, with every evaluation of every run."""


COMMAND = Command(
    name="bench accuracy",
    summary="""Measure the time and the counted operations that recipes need to reach given accuracies on the validation
    split, and compare them with each other and with other libraries.

    Runs follow one another, each in a process of its own, with the same data, seeds and budget. The folder --out has
    the curves as CSV and SVG. If the command is stopped, the same command continues. The test split is measured once,
    at the end of each run.""",
    examples=(
        Example("vitrail bench accuracy demo", "Measure the demo with three seeds."),
        Example("vitrail bench accuracy demo demo:epochs=5 --targets 0.8", "Compare two lengths of a run."),
        Example(
            "vitrail bench accuracy demo --against timm --environment timm=timm/bin/python --budget 5m",
            "Compare with timm within five minutes per run.",
        ),
    ),
    options=(BenchAccuracy,),
    essential={
        "Data and entries": ("data", "validation_share", "against", "environment"),
        "Measurement": ("seeds", "targets", "budget", "evaluations", "device"),
        "Output": ("out", "json"),
    },
)


def main(call: Call) -> int:
    options = BenchAccuracy(**call.options)
    _check(options)
    entries = peer_entries([name.strip() for name in options.against.split(",") if name.strip()])
    recipes = _recipes(options)
    libraries = check_environments(entries, parse_environments(options.environment))
    comparison = AccuracyComparison(
        recipes=recipes,
        peers=entries,
        libraries=libraries,
        seeds=options.seeds,
        budget=_budget(options.budget),
        evaluations=options.evaluations,
        device=pick_device(options.device),
    )
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)

    def show(cell: Cell, result: CellResult) -> None:
        last = result.points[-1]
        console.print(
            f"{cell.entry}, seed {cell.seed}: {result.validation_accuracy:.2%} of the validation images after "
            f"{result.epochs:,.1f} epochs, {last.seconds:,.0f} s, {last.flops / 1e12:,.3g} TFLOP",
            markup=False,
        )

    try:
        with interrupted_by_signals():
            curves = comparison.measure(options.out, show)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; the finished runs stay in {options.out}") from None
    plain = _write(options, comparison, curves)
    if options.json:
        print(json.dumps(plain))
        return 0
    for table in tables(curves, reached(curves, options.targets, comparison.budget)):
        console.print()
        console.print(table, soft_wrap=False)
    console.print(f"\nwritten to {options.out}: results.json, targets.csv, curves.csv, curves.svg", markup=False)
    return 0


def _check(options: BenchAccuracy) -> None:
    """Raise `ConfigError` for values out of range."""
    for name in ("recipes", "seeds", "targets"):
        values: Sequence[Any] = getattr(options, name)
        if twice := [value for value in values if list(values).count(value) > 1]:
            raise ConfigError(f"{name}: {twice[0]} is given twice; give each value once")
    for target in options.targets:
        if not 0 < target < 1:
            raise ConfigError(f"targets={target} is not between 0 and 1; give a fraction, such as 0.85 for 85 %")
    for seed in options.seeds:
        if not 0 <= seed < 2**32:
            raise ConfigError(f"seeds={seed} is not between 0 and 2**32 - 1")
    if options.evaluations < 1:
        raise ConfigError(f"evaluations={options.evaluations} is less than 1")


def _budget(text: str | None) -> float | None:
    """Return the seconds of a budget. Raise `ConfigError` for a text that is not a time."""
    if text is None:
        return None
    if text in FACTORS:
        raise ConfigError(f"budget={text!r} is not a time; give a number above 0 with a unit, such as 90s or 20m")
    return seconds_of(text, usual=0.0)


def _recipes(options: BenchAccuracy) -> dict[str, TrainConfig]:
    """Return the configs of the recipes on the chosen data."""
    changes: dict[str, Any] = {"data": options.data, "validation_share": options.validation_share}
    changes = {name: value for name, value in changes.items() if value is not None}
    configs = {}
    for entry in options.recipes:
        name, _, settings = entry.partition(":")
        if name not in RECIPES:
            raise ConfigError(f"recipe {name!r} does not exist; {nearest(name, RECIPES)}")
        config = RECIPES[name]().override(**changes)
        if (task := config.task.name) != "classification":
            raise ConfigError(f"recipe {name!r} trains the task {task}, which has no accuracy; choose another recipe")
        try:
            configs[entry] = config.override(**_changed(settings))
        except ConfigError as error:
            raise ConfigError(f"recipe {entry!r}: {error}") from None
    return configs


def _changed(settings: str) -> dict[str, Any]:
    """Return the values of the settings of an entry, such as `epochs=5,flip=off`. Raise `ConfigError` for others."""
    known = {option.name: option for option in run_options() if option.section != "data"}
    for setting in SET_BY_THE_COMPARISON:
        del known[setting]
    changes: dict[str, Any] = {}
    for part in settings.split(",") if settings else ():
        setting, equals, value = (word.strip() for word in part.partition("="))
        setting = setting.replace("-", "_")
        if setting not in known:
            raise ConfigError(f"{setting!r} is no setting to compare; {nearest(setting, known)}")
        option = known[setting]
        if option.is_flag and value not in ("on", "off"):
            raise ConfigError(f"{setting}={value!r} is neither on nor off")
        if not equals or not value:
            raise ConfigError(f"{setting} has no value; give {setting}=VALUE")
        changes[setting] = value == "on" if option.is_flag else convert(option, value.split())
    return changes


def _write(options: BenchAccuracy, comparison: AccuracyComparison, curves: Curves) -> dict[str, Any]:
    """Write the results into the folder, and return them as JSON values."""
    folder = options.out
    rows = reached(curves, options.targets, comparison.budget)
    shared = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    plain = {**shared, **plain_accuracy(curves, rows)}
    with saving("the results", folder):
        write_json(folder / "results.json", plain)
        _write_csv(folder / "targets.csv", ROW_COLUMNS, list(target_rows(rows)))
        _write_csv(folder / "curves.csv", POINT_COLUMNS, list(point_rows(curves)))
        chart = accuracy_chart(curves, options.targets, comparison.budget)
        (folder / "curves.svg").write_text(chart, encoding="utf-8")
    return plain


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
