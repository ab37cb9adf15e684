"""The curves of a run as charts, from its journal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.charts.axes import UNBOUNDED
from vitrail.charts.lines import MarkedPoint, legend, line_chart
from vitrail.charts.svg import Point, Series
from vitrail.tasks.task import TaskMetric
from vitrail.training.config import TrainConfig

__all__ = ["averaged", "health_figures", "training_figures"]

MAX_POINTS = 300
"""Maximum number of points of a line, about one per pixel. If there are more, neighbouring points are averaged."""

METRIC_NAMES = {"r2": "R²"}
"""Display names of metrics whose name in the journal cannot be shown as it is."""

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

HEALTH = {
    "gradient_norm": ("Norm of the gradients", 1.0, ""),
    "parameter_norm": ("Norm of the weights", 1.0, ""),
    "update_ratio": ("Update of the weights", 100.0, "%"),
    "attention_logit": ("Largest attention logit", 1.0, ""),
    "images_per_second": ("Images per second", 1.0, ""),
    "waiting_share": ("Time spent waiting for images", 100.0, "%"),
}
"""Captions, factors and units of the measurements of a step, by their names in the journal."""


def training_figures(
    config: TrainConfig, events: Sequence[Mapping[str, Any]], metric: TaskMetric, saved_step: int | None = None
) -> list[str]:
    """Return charts of the validation metric, the training loss and the learning rate, as far as the journal has
    them. The metric at `saved_step`, the step of the saved weights, is marked."""
    steps = [event for event in events if event["event"] == "step"]
    losses, group = averaged([(float(event["step"]), event["loss"]) for event in steps])
    rates, _ = averaged([(float(event["step"]), event["learning_rate"]) for event in steps])
    highest = max((rate for _, rate in rates), default=0.0)
    power = math.floor(math.log10(highest)) if 0 < highest < 0.01 else 0
    scaled = [(step, rate / 10**power) for step, rate in rates]
    figures = [
        _metric_chart(events, saved_step, config.run.keep, metric),
        (
            "Training loss" + (f", means of {group} reports" if group > 1 else ""),
            line_chart([Series("loss", losses)], label=_description("Training loss", losses), from_zero=True),
        ),
        (
            "Learning rate" + (f", in 10{str(power).translate(SUPERSCRIPT)}" if power else ""),
            line_chart([Series("learning rate", scaled)], label=_description("Learning rate", rates), from_zero=True),
        ),
    ]
    return [_figure(caption, chart) for caption, chart in figures if chart]


def health_figures(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return charts of the health of training and of its speed, as far as the journal has them."""
    found = []
    steps = [event for event in events if event["event"] == "step"]
    for name, (caption, scale, unit) in HEALTH.items():
        points, group = averaged([(float(step["step"]), scale * step[name]) for step in steps if name in step])
        means = f", means of {group} reports" if group > 1 else ""
        chart = line_chart([Series(caption, points)], label=_description(caption, points), unit=unit, from_zero=True)
        if chart:
            found.append(_figure(f"{caption}{means}", chart))
    return found


def _figure(caption: str, chart: str) -> str:
    return f"<figure>\n<figcaption>{caption}</figcaption>\n{chart}\n</figure>"


def _metric_chart(
    events: Sequence[Mapping[str, Any]], saved_step: int | None, keep: str, metric: TaskMetric
) -> tuple[str, str]:
    """Return the caption and the chart of a validation metric. There is one line for the averaged weights, and one for
    the weights in training.

    The point of the saved weights is marked. Fractions are drawn in percent.
    """
    name = f"Validation {METRIC_NAMES.get(metric.name) or metric.name.replace('_', ' ')}"
    scale, unit, bounds = (100, "%", (0.0, 100.0)) if metric.is_fraction else (1, "", UNBOUNDED)
    points: dict[str, list[Point]] = {"averaged": [], "trained": []}
    for event in events:
        measured = event["event"] == "evaluation" and event["split"] == "validation" and not event.get("kept")
        if measured and metric.name in event:
            points[event["weights"]].append((float(event["step"]), scale * event[metric.name]))
    series = [Series(weights, found) for weights, found in points.items() if found]
    mark = None
    if series and saved_step is not None:
        saved = [value for step, value in series[0].finite if step == saved_step]
        form = ".2f" if metric.is_fraction else ".4g"
        mark = MarkedPoint(float(saved_step), saved[0], f"{keep}, saved: {saved[0]:{form}}{unit}") if saved else None
    described = f"{name}{' in percent' * metric.is_fraction}"
    label = " ".join(_description(f"{described}, {one.name} weights", one.points) for one in series)
    chart = line_chart(series, label=label, unit=unit, bounds=bounds, mark=mark)
    caption = name if len(series) < 2 else f"{name} of the weights"
    return f"{caption}{legend([one.name for one in series])}", chart


def averaged(points: list[Point]) -> tuple[list[Point], int]:
    """Return the means of groups of n neighbouring points, and n. There are at most `MAX_POINTS` groups.

    The x of a mean is the step of the last point of the group.
    """
    size = max(math.ceil(len(points) / MAX_POINTS), 1)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups], size


def _description(name: str, points: Sequence[Point]) -> str:
    """Return a sentence that describes a line to screen readers."""
    if not points:
        return ""
    (first, start), (last, end) = points[0], points[-1]
    return f"{name}: {start:.4g} at step {first:,.0f}, {end:.4g} at step {last:,.0f}."
