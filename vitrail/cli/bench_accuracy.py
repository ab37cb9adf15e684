"""`vitrail bench accuracy`: measure the time and operations that recipes need to reach validation accuracies."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape as escape_markup
from rich.table import Table

from vitrail.analysis.charts import series_chart, side_by_side, standalone
from vitrail.bench.peers import parse_environments
from vitrail.bench.workload import Spread
from vitrail.cli.console import Column, message_console, print_json, print_notes, terminal_table
from vitrail.cli.options import Call, Command, convert, names_in, option_problems
from vitrail.cli.run_options import check_effects, run_options
from vitrail.errors import ConfigError, check_known, nearest
from vitrail.experiments.accuracy import (
    AccuracyComparison,
    Curve,
    CurvePoint,
    Curves,
    check_environments,
    final_accuracies,
    peer_entries,
    reached,
)
from vitrail.files import saving, write_csv, write_json
from vitrail.machine import pick_device
from vitrail.recipes import RECIPES
from vitrail.report.charts import Series, horizontal_text, svg_picture
from vitrail.settings import raise_problems, seconds_in, setting
from vitrail.training.config import TrainConfig
from vitrail.training.stop import interrupted_by_signals

SET_BY_THE_COMPARISON = (
    "checkpoints", "device", "evaluations", "max_time", "name", "overwrite", "run", "seed", "task",
)  # fmt: skip
"""Settings of a run that an entry cannot change. The settings of the data are the same for all entries too."""


@dataclass(frozen=True, kw_only=True)
class BenchAccuracy:
    """Options of `vitrail bench accuracy`."""

    recipes: tuple[str, ...] = setting(argument="RECIPE...", distinct=True)
    """Recipes to compare, also with changed settings, such as demo:epochs=5,learning_rate=0.001. Ratios refer to the
    first one. vitrail recipes lists all."""
    data: str | None = setting(None, metavar="SPEC")
    """Data set that all entries train on. By default that of the first recipe."""
    validation_share: float | None = None
    """Fraction of the training images held out for validation. By default that of the first recipe."""
    against: str = ""
    """Other libraries to compare with, separated by commas. timm is both timm-defaults, the defaults of its training
    script, and timm-small, published settings for images of 32 pixels."""
    environment: tuple[str, ...] = ()
    """Python of a library's own environment, such as timm=/opt/timm/bin/python. By default the Python of Vitrail."""
    seeds: tuple[int, ...] = setting((0, 1, 2), commas=True, least=0, below=2**32, distinct=True)
    """Random seeds. Every entry runs once with each of them."""
    targets: tuple[float, ...] = setting(
        (0.8, 0.85, 0.9), above=0, below=1, advice="give a fraction, such as 0.85 for 85 %", distinct=True
    )
    """Validation accuracies to reach, between 0 and 1."""
    budget: str | None = None
    """Time of training of each run, such as 90s or 20m. Runs that would take longer are shortened before they start,
    with their whole learning rate schedule. By default each run has the length that its settings state."""
    evaluations: int = setting(20, least=1)
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
        ("vitrail bench accuracy demo", "Measure the demo with three seeds."),
        ("vitrail bench accuracy demo demo:epochs=5 --targets 0.8", "Compare two lengths of a run."),
        (
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


def main(call: Call, options: BenchAccuracy) -> None:
    entries = peer_entries(names_in(options.against, "against"))
    budget = None if options.budget is None else seconds_in(options.budget)
    if options.budget is not None and budget is None:
        raise ConfigError(
            f"budget={options.budget!r} is not a time; give a number above 0 with a unit, such as 90s or 20m"
        )
    comparison = AccuracyComparison(
        recipes=_recipes(options),
        peers=check_environments(entries, parse_environments(options.environment)),
        seeds=options.seeds,
        budget=budget,
        evaluations=options.evaluations,
        device=pick_device(options.device),
    )
    console = message_console(options.json)
    data = next(iter(comparison.recipes.values())).data
    if options.validation_share is not None and (note := data.open_whole().share_note(data, call.options)):
        print_notes(console, note)

    def show(label: str, result: Curve) -> None:
        last = result.points[-1]
        console.print(
            f"{label}: {result.validation_accuracy:.2%} of the validation images after "
            f"{result.epochs:,.1f} epochs, {last.seconds:,.0f} s, {last.flops / 1e12:,.3g} TFLOP",
            markup=False,
        )

    with interrupted_by_signals(f"stopped; the finished runs stay in {options.out}"):
        curves = comparison.measure(options.out, show)
    plain = _write(options, comparison, curves)
    if options.json:
        print_json(plain)
        return
    for table in tables(curves, reached(curves, options.targets, comparison.budget)):
        console.print()
        console.print(table, soft_wrap=False)
    console.print(f"\nwritten to {options.out}: results.json, targets.csv, curves.csv, curves.svg", markup=False)


def _recipes(options: BenchAccuracy) -> dict[str, TrainConfig]:
    """Return the configs of the recipes on the chosen data."""
    changes: dict[str, Any] = {"data": options.data, "validation_share": options.validation_share}
    changes = {name: value for name, value in changes.items() if value is not None}
    configs = {}
    for entry in options.recipes:
        name, _, settings = entry.partition(":")
        check_known(name, RECIPES, f"recipe {name!r} does not exist")
        config = RECIPES[name]().override(**changes)
        if (task := config.task.name) != "classification":
            raise ConfigError(f"recipe {name!r} trains the task {task}, which has no accuracy; choose another recipe")
        try:
            changed = _changed(settings)
            configs[entry] = config.override(**changed)
            check_effects(changed, configs[entry].override(evaluations=options.evaluations))
        except ConfigError as error:
            raise ConfigError(f"recipe {entry!r}: {error}") from None
    return configs


def _changed(settings: str) -> dict[str, Any]:
    """Return the values of the settings of an entry, such as `epochs=5,flip=off`. Raise `ConfigError` for others."""
    known = {option.name: option for option in run_options() if option.section != "data"}
    for name in SET_BY_THE_COMPARISON:
        del known[name]
    changes: dict[str, Any] = {}
    for part in settings.split(",") if settings else ():
        name, equals, value = (word.strip() for word in part.partition("="))
        name = name.replace("-", "_")
        if name not in known:
            advice = nearest(name, known) if name else "give NAME=VALUE"
            raise ConfigError(f"{name!r} is no setting to compare; {advice}")
        if name in changes:
            raise ConfigError(f"{name} is given twice; give each setting once")
        option = known[name]
        if option.is_flag and value not in ("on", "off"):
            raise ConfigError(f"{name}={value!r} is neither on nor off")
        if not equals or not value:
            raise ConfigError(f"{name} has no value; give {name}=VALUE")
        changes[name] = value == "on" if option.is_flag else convert(option, value.split())
    raise_problems(option_problems(known, changes))
    return changes


def _write(options: BenchAccuracy, comparison: AccuracyComparison, curves: Curves) -> dict[str, Any]:
    """Write the results into the folder, and return them as JSON values."""
    folder = options.out
    rows = reached(curves, options.targets, comparison.budget)
    shared = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    entries = {entry: {str(seed): asdict(one) for seed, one in cells.items()} for entry, cells in curves.items()}
    plain = {**shared, "targets": rows, "entries": entries}
    points = [
        {"entry": entry, "seed": seed, **asdict(point)}
        for entry, cells in curves.items()
        for seed, result in cells.items()
        for point in result.points
    ]
    with saving("the results", folder):
        write_json(folder / "results.json", plain)
        write_csv(folder / "targets.csv", rows)
        write_csv(folder / "curves.csv", points)
        chart = accuracy_chart(curves, options.targets, comparison.budget)
        (folder / "curves.svg").write_text(chart, encoding="utf-8")
    return plain


# The curves of `vitrail bench accuracy` as an SVG file: accuracy over time, and over counted operations.


COSTS: dict[str, Callable[[CurvePoint], float]] = {
    "seconds of training": lambda point: point.seconds,
    "counted TFLOP": lambda point: point.flops / 1e12,
}


def accuracy_chart(curves: Curves, targets: Sequence[float], budget: float | None) -> str:
    """Return an SVG picture with a chart for each cost and a line for each cell. The x axes are logarithmic, and dotted
    lines are the targets. Evaluations after the budget are not drawn."""
    charts = []
    for name, cost in COSTS.items():
        lines = []
        for entry, cells in curves.items():
            seeds = f"seed {next(iter(cells))}" if len(cells) == 1 else f"{len(cells)} seeds"
            for cell in cells.values():
                shown = [one for one in cell.points if cost(one) > 0 and (budget is None or one.seconds <= budget)]
                lines.append(Series(f"{entry}, {seeds}", [(cost(one), 100 * one.accuracy) for one in shown]))
        chart = series_chart(
            lines, label=f"Validation accuracy over {name}.", x_name=name, y_name="validation accuracy, %",
            bounds=(0.0, 100.0), is_log=True, levels=[100 * target for target in targets],
        )  # fmt: skip
        text = horizontal_text(12.0, 20.0, "no evaluation within the budget")
        charts.append(chart or svg_picture(480.0, 30.0, "", [text], fixed_size=True))
    return standalone(side_by_side(charts, "Validation accuracy over seconds of training and over counted TFLOP"))


# The tables of `vitrail bench accuracy`.


ENDS = ("low", "median", "high")

CAPTION = (
    "Medians over the seeds, with lowest..highest. seconds: time of training before the first evaluation that reaches "
    "the validation accuracy. TFLOP: counted operations in 10^12 until then. times: cost of the entry divided by the "
    "cost of the first entry with the same seed; > means that a seed does not reach it, so the ratio is a lower bound."
)


def tables(curves: Curves, rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the costs of each target in seconds and in operations, and the accuracy and length of the finished models.

    Each table fits 80 columns.
    """
    described = (
        Column("accuracy", "target", ".1%"),
        Column("entry", lambda row: escape_markup(row["entry"]), is_text=True, folds=True),
        Column("seeds", lambda row: f"{row['reached']} of {row['seeds']}"),
    )
    in_seconds = (
        Column("seconds", lambda row: _cost(_ends(row, "seconds"))),
        Column("times", lambda row: _ratio(_ends(row, "seconds_ratio"), row["seconds_ratio_is_bound"])),
    )
    in_operations = (
        Column("TFLOP", lambda row: _cost(_ends(row, "flops"), 1e12)),
        Column("times", lambda row: _ratio(_ends(row, "flops_ratio"), row["flops_ratio_is_bound"])),
    )
    finished = Column("finished model", lambda item: escape_markup(item[0]), folds=True)
    accuracies = (
        finished,
        Column("validation", lambda item: final_accuracies(item[1])[0], _accuracy),
        Column("test", lambda item: final_accuracies(item[1])[1], _accuracy),
        Column("parameters", lambda item: next(iter(item[1].values())).parameters, ",d"),
    )
    lengths = (
        finished,
        Column("seconds", lambda item: _took(item[1].values())),
        Column("epochs", lambda item: statistics.median(one.epochs for one in item[1].values()), ",.1f"),
        Column(
            "of its own length",
            lambda item: statistics.median(one.steps / one.own_steps for one in item[1].values()),
            ".0%",
        ),
    )
    return [
        terminal_table((*described, *in_seconds), rows),
        terminal_table((*described, *in_operations), rows, CAPTION),
        terminal_table(accuracies, curves.items()),
        terminal_table(lengths, curves.items()),
    ]


def _ends(row: Mapping[str, Any], name: str) -> list[float | None]:
    return [row[f"{name}_{end}"] for end in ENDS]


def _took(cells: Iterable[Curve]) -> str:
    spread = Spread.of([one.points[-1].seconds for one in cells])
    return _cost((spread.low, spread.median, spread.high))


def _cost(values: Sequence[float | None], unit: float = 1.0) -> str:
    """Return a cost from its lowest value, its median and its highest value. None is more than every number."""
    if values[0] is None:
        return "not reached"
    ends = ["not reached" if value is None else _number(value / unit) for value in values]
    return ends[1] if ends[0] == ends[2] else f"{ends[1]} ({ends[0]}..{ends[2]})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(values: Sequence[float | None], is_bound: bool | None) -> str:
    if values[0] is None:
        return ""
    low, middle, high = (f"{value:.2f}" for value in values)
    sign = "> " if is_bound else ""
    return f"{sign}{middle}" if low == high else f"{sign}{middle} ({low}..{high})"


def _accuracy(spread: Spread) -> str:
    if spread.low == spread.high:
        return f"{spread.median:.2%}"
    return f"{spread.median:.2%} ({spread.low:.2%}..{spread.high:.2%})"
