"""The tables of `vitrail evaluate`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vitrail.evaluation.predictions.report import ClassificationReport, ClassRow
from vitrail.transfer.suite import SuiteResult

__all__ = ["confusion_table", "metrics_table", "per_class_table", "suite_table"]

FORMATS = {"cross_entropy": ".4f", "linear_penalty": ".3g"} | dict.fromkeys(
    ("images", "skipped", "unlabelled", "training_images", "real_images"), ",.0f"
)
"""Number formats by metric. All other metrics are fractions and shown as percentages."""

NUMBER_METRICS = ("r2", "standardised_error", "mean_absolute_error", "root_mean_squared_error")
"""Suffixes of metrics of numbers, which are not fractions."""

EXTRAS = ("_low", "_high", "_deviation")
"""Suffixes of metrics that describe another metric."""

NAMES = {
    "top5_accuracy": "top-5 accuracy",
    "real_accuracy": "ReaL accuracy",
    "real_images": "images with ReaL labels",
    "exact_match": "all labels right",
    "micro_f1": "F1 over all answers",
    "macro_f1": "F1, mean over classes",
    "cross_entropy": "cross-entropy, nats",
    "r2": "R²",
}
SEVERAL = {"accuracy": "likeliest class is a label"}
"""Display names of some metrics if images can have several labels."""

COUNTED = re.compile(r"(fewshot|knn)_(\d+)(.*)")

CONFUSED = 20
"""Maximum number of classes for which the whole confusion matrix is shown. With more classes, only this many pairs of
classes are shown."""


def metrics_table(rows: Mapping[str, Mapping[str, float]], corner: str = "") -> Table:
    """Return a table with a row per metric and a column per split or model. `corner` is the text of the first cell."""
    table = Table(corner, *map(escape, rows), box=SIMPLE_HEAD, pad_edge=False)
    names = dict.fromkeys(name for row in rows.values() for name in row if not name.endswith(EXTRAS))
    named = SEVERAL if "exact_match" in names else {}
    for name in sorted(names, key=lambda name: FORMATS.get(name) == ",.0f"):  # puts counts last
        table.add_row(named.get(name) or _named(name), *(_cell(row, name) for row in rows.values()))
    return table


def per_class_table(split: str, report: ClassificationReport) -> Table:
    """Return a table of the classes, sorted by accuracy, the lowest first. Classes without images are last; if there
    are many, only those that were predicted are shown."""
    several = report.multi_label is not None
    columns = (
        "images",
        "predicted",
        "recall" if several else "accuracy",
        "precision",
        "F1",
        *(("average precision",) if several else ()),
    )
    table = Table(f"{split}: class", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")

    def order(row: ClassRow) -> float:
        return 2.0 if row.accuracy is None else row.accuracy

    for row in sorted(report.per_class, key=order):
        shares = (row.accuracy, row.precision, row.f1, *((row.average_precision,) if several else ()))
        table.add_row(escape(row.name), f"{row.images:,}", f"{row.predicted:,}", *map(_share, shares))
    for name in _never_predicted(report):
        table.add_row(escape(name), "0", "0", *["-"] * (len(columns) - 2))
    return table


def _never_predicted(report: ClassificationReport) -> list[str]:
    """Return the classes without images that were not predicted, or nothing if there are too many for a table."""
    predicted = {row.name for row in report.per_class}
    names = [name for name in report.absent if name not in predicted]
    return names if len(names) + len(predicted) <= CONFUSED else []


def confusion_table(split: str, report: ClassificationReport, classes: tuple[str, ...]) -> RenderableType:
    """Return the confusion matrix, with a row per true class and a column per predicted class."""
    if report.multi_label is not None:
        return Text(f"{split}: there is no confusion matrix, since images can have several labels")
    there = sorted([row.index for row in report.per_class] + [classes.index(name) for name in _never_predicted(report)])
    if len(there) > CONFUSED:
        return _pairs(split, report, classes)
    counts = {(true, taken): images for true, taken, images in report.confusion}
    table = Table(f"{split}: true class", box=SIMPLE_HEAD, pad_edge=False)
    for number in there:
        table.add_column(str(number), justify="right")
    for true in there:
        cells = [_count(counts.get((true, taken), 0), own=true == taken) for taken in there]
        table.add_row(f"{true} {escape(classes[true])}", *cells)
    return table


def _pairs(split: str, report: ClassificationReport, classes: tuple[str, ...]) -> RenderableType:
    images = {row.index: row.images for row in report.per_class}
    wrong = sorted((cell for cell in report.confusion if cell[0] != cell[1]), key=lambda cell: -cell[2])
    table = Table(f"{split}: true class", "predicted", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("images", justify="right")
    table.add_column("of the class", justify="right")
    for true, taken, count in wrong[:CONFUSED]:
        table.add_row(escape(classes[true]), escape(classes[taken]), f"{count:,}", _share(count / images[true]))
    left = len(wrong) - CONFUSED
    return Group(table, Text(f"and {left:,} pairs that are confused no more often than these")) if left > 0 else table


def suite_table(result: SuiteResult) -> Table:
    """Return a table with a row per task. Each group ends with its mean, and the last row is the mean of all tasks."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(result.suite.name, no_wrap=True)
    columns, means = result.columns(), result.means()
    for column in columns:
        table.add_column(_named(column), justify="right")
    for group in result.groups():
        for row in result.in_group(group):
            cells = [_value(name, row.metrics[name]) if name in row.metrics else "-" for name in columns]
            table.add_row(escape(row.task.name), *cells)
        cells = [_mean(name, means[group], len(result.in_group(group))) for name in columns]
        table.add_row(f"mean of {escape(group)}", *cells, style="bold")
        table.add_section()
    cells = [_mean(name, means[None], len(result.rows)) for name in columns]
    table.add_row(f"mean of {len(result.rows)} tasks", *cells, style="bold")
    return table


def _mean(name: str, means: Mapping[str, tuple[float, int]], tasks: int) -> str:
    """Return a mean as text. If some tasks lack the metric, append the number of tasks that have it."""
    if name not in means:
        return "-"
    value, count = means[name]
    return _value(name, value) + ("" if count == tasks else f" ({count} of {tasks})")


def _named(name: str) -> str:
    output, _, metric = name.rpartition(":")  # "age:r2" is the metric r2 of the number "age"
    if match := COUNTED.fullmatch(metric):
        kind, number, rest = match.groups()
        text = f"knn, k = {number}" if kind == "knn" else f"fewshot, {number} shot{'s' if number != '1' else ''}"
        text += f", {NAMES.get(rest[1:]) or rest[1:].replace('_', ' ')}" if rest else ""
    else:
        text = NAMES.get(metric) or metric.replace("_", " ").replace(" r2", ", R²")
    return f"{output}: {text}" if output else text


def _cell(row: Mapping[str, float], name: str) -> str:
    """Return a metric as text, with its confidence interval or standard deviation if it has one."""
    if name not in row:
        return ""
    text = _value(name, row[name])
    if f"{name}_low" in row:
        low, high = (_value(name, row[f"{name}{end}"]) for end in ("_low", "_high"))
        return f"{text} ({low} to {high})"
    if f"{name}_deviation" in row:
        return f"{text} ± {_value(name, row[f'{name}_deviation'])}"
    return text


def _value(name: str, value: float) -> str:
    """Return the value of a metric as text. Metrics without a format are shown as percentages."""
    return format(value, ".4g" if name.endswith(NUMBER_METRICS) else FORMATS.get(name, ".2%"))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _count(images: int, *, own: bool) -> str:
    text = f"{images:,}" if images else "."
    return f"[bold]{text}[/bold]" if own else text
