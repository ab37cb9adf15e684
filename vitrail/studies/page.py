"""The page of a study: figures as SVG, tables, and their CSV and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vitrail.analysis.charts import COLOURS, STYLE, series_look, standalone
from vitrail.files import saving, write_csv, write_json
from vitrail.report.charts import (
    DIGIT_WIDTH,
    Axis,
    PlotArea,
    dot,
    horizontal_text,
    make_axis,
    make_log_axis,
    path_data,
    svg_picture,
    vertical_text,
)
from vitrail.report.page import write_page
from vitrail.studies.claims import Estimate, PointResult, Results
from vitrail.studies.engine import RECORD, StudyRun

WIDTH, ROW, TOP, BOTTOM = 640.0, 24.0, 12.0, 40.0
HEIGHT, LEGEND_LINE = 320.0, 16.0


def arms_chart(results: Results, metric: str, name: str) -> Markup:
    """Return a row for each point: a small dot for each seed, a large dot for the mean, and a line for its 95 %
    interval. An interval that is wider than the range of all seeds is cut at the edge of the chart."""
    found = [(point, point.estimate(metric)) for point in results.points]
    values = [100 * value for point, _ in found for value in point.values(metric).values()]
    if not values:
        return Markup()
    margin = max(0.25, 0.25 * (max(values) - min(values)))
    x_axis = make_axis([max(0.0, min(values) - margin), min(100.0, max(values) + margin)])
    left = 16 + DIGIT_WIDTH * max(len(point.name) for point, _ in found)
    bottom = TOP + ROW * len(found)
    area = PlotArea(left, TOP, WIDTH - 16, bottom, x_axis, Axis(0.0, float(len(found)), 1.0, ()))
    parts = [area.grid(x_unit="%")]
    parts += [f'<path class="grid" d="M{area.x(tick):.2f} {TOP:g}V{bottom:g}"/>' for tick in x_axis.ticks]
    for number, (point, mean) in enumerate(found):
        place = len(found) - number - 0.5
        y = area.y(place)
        parts.append(horizontal_text(left - 8, y + 4, point.name, "end"))
        if mean is None:
            parts.append(horizontal_text(left + 8, y + 4, "diverged"))
            continue
        colour = COLOURS[results.arms.index(point.arm) % len(COLOURS)]
        fill = f' fill="{colour}"'
        low, high = (min(max(100 * end, x_axis.low), x_axis.high) for end in (mean.low, mean.high))
        if mean.count > 1:
            parts.append(f'<path class="series" stroke="{colour}" d="M{area.x(low):.2f} {y:.2f}H{area.x(high):.2f}"/>')
        for seed, value in point.values(metric).items():
            parts.append(dot(area, (100 * value, place), 2.0, "", f"{point.name}, seed {seed}: {value:.2%}", fill))
        parts.append(dot(area, (100 * mean.mean, place), 4.0, "", f"{point.name}: {_text(mean)}", fill))
    parts.append(horizontal_text((left + area.right) / 2, bottom + 34, name, "middle"))
    return svg_picture(WIDTH, bottom + BOTTOM, f"{name} of every arm, with 95 % intervals", parts, fixed_size=True)


def lines_chart(results: Results, metric: str, name: str, x_name: str) -> Markup:
    """Return a line for each arm over a logarithmic x axis, with a band of one standard deviation over seeds."""
    points = [(point, point.estimate(metric)) for point in results.points if point.x]
    known = [(point, mean) for point, mean in points if mean is not None]
    if not known:
        return Markup()
    ends = [100 * end for _, mean in known for end in _band(mean)]
    y_axis = make_axis(ends, bounds=(0.0, 100.0))
    x_axis = make_log_axis(point.x or 1.0 for point, _ in known)
    left = 40 + DIGIT_WIDTH * max(len(y_axis.label(tick)) for tick in y_axis.ticks)
    area = PlotArea(left, TOP, WIDTH - 16, HEIGHT - BOTTOM, x_axis, y_axis)
    parts = [
        area.grid(y_unit="%"),
        horizontal_text((left + area.right) / 2, HEIGHT - 6, x_name, "middle"),
        vertical_text(12.0, (area.top + area.bottom) / 2, name),
    ]
    for number, arm in enumerate(results.arms):
        line = sorted(
            ((point.x or 1.0, mean, point) for point, mean in known if point.arm == arm),
            key=lambda one: one[0],
        )
        parts.append(_line(area, line, number))
    return svg_picture(
        WIDTH, HEIGHT + LEGEND_LINE * len(results.arms), f"{name} over {x_name}",
        [*parts, *_legend(results.arms)], fixed_size=True,
    )  # fmt: skip


def _line(area: PlotArea, line: Sequence[tuple[float, Estimate, PointResult]], number: int) -> str:
    colour, dashes = series_look(number)
    bands = [(x, *_band(mean)) for x, mean, _ in line]
    upper = path_data(area, [(x, 100 * high) for x, _, high in bands])
    lower = path_data(area, [(x, 100 * low) for x, low, _ in reversed(bands)]).replace("M", "L")
    band = f'<path fill="{colour}" fill-opacity="0.15" d="{upper}{lower}Z"/>' if len(bands) > 1 else ""
    path = path_data(area, [(x, 100 * mean.mean) for x, mean, _ in line])
    dots = "".join(
        dot(area, (x, 100 * mean.mean), 3.0, "", f"{point.name}: {_text(mean)}", f' fill="{colour}"')
        for x, mean, point in line
    )
    return f'{band}<path class="series" stroke="{colour}"{dashes} d="{path}"/>{dots}'


def _legend(arms: Sequence[str]) -> list[str]:
    parts: list[str] = []
    for number, arm in enumerate(arms):
        y = HEIGHT + LEGEND_LINE * (number + 0.6)
        colour, dashes = series_look(number)
        parts += [
            f'<path class="series" stroke="{colour}"{dashes} d="M14 {y - 4:g}h24"/>',
            horizontal_text(44.0, y, arm),
        ]
    return parts


def _band(mean: Estimate) -> tuple[float, float]:
    """Return the mean minus and plus one standard deviation. With one seed, both are the mean."""
    deviation = 0.0 if math.isnan(mean.deviation) else mean.deviation
    return max(0.0, mean.mean - deviation), min(1.0, mean.mean + deviation)


def _text(mean: Estimate) -> str:
    if mean.count < 2:
        return f"{mean.mean:.2%} with one seed"
    return f"mean {mean.mean:.2%}, 95 % interval {mean.low:.2%} to {mean.high:.2%} ({mean.count} seeds)"


# The numbers of a study as rows: for the page, for CSV and for JSON.


def point_rows(results: Results, metrics: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each point, with the mean, the deviation and the interval of every metric."""
    return [
        {
            "arm": point.arm,
            "place": point.label,
            "x": point.x,
            "learning_rates": " ".join(f"{rate:g}" for rate in point.rates),
            "seeds": len(point.cells),
            "diverged": len(point.diverged),
            "parameters": point.parameters,
            "flops": point.flops,
            **{
                f"{metric}_{field}": None if found is None else finite(getattr(found, field))
                for metric in metrics
                for found in [point.estimate(metric)]
                for field in ("mean", "deviation", "low", "high")
            },
        }
        for point in results.points
    ]


def finite(value: float) -> float | None:
    """Return the value, or None if it is infinite or NaN, which JSON does not have."""
    return value if math.isfinite(value) else None


def cell_rows(results: Results, metrics: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each point and seed."""
    return [
        {
            "arm": point.arm,
            "place": point.label,
            "x": point.x,
            "seed": seed,
            "cell": cell,
            "seconds": round(point.seconds[seed], 1),
            "diverged": point.diverged.get(seed, ""),
            **{metric: point.metrics.get(seed, {}).get(metric) for metric in metrics},
        }
        for point in results.points
        for seed, cell in point.cells.items()
    ]


def edge_notes(results: Results) -> list[str]:
    """Return a sentence for the points whose chosen learning rate is the lowest or the highest that was tried, because
    a better one may lie beyond it."""
    edges: dict[str, list[str]] = {"lowest": [], "highest": []}
    for name in dict.fromkeys(trial.point for trial in results.trials):
        trials = [trial for trial in results.trials if trial.point == name]
        for stage in {trial.stage for trial in trials}:
            rates = sorted(trial.learning_rate for trial in trials if trial.stage == stage)
            chosen = next(trial.learning_rate for trial in trials if trial.stage == stage and trial.chosen)
            if len(rates) > 2 and chosen in (rates[0], rates[-1]):
                place = f"{name} (stage {stage})" if stage > 1 else name
                edges["lowest" if chosen == rates[0] else "highest"].append(place)
    return [
        f"The chosen learning rate is the {end} of those tried, so a better one may lie beyond: {', '.join(names)}."
        for end, names in edges.items()
        if names
    ]


# Writing a study: one page with its figure and verdict, the figure as SVG, and the numbers as CSV and JSON.


PAGE, FIGURE, RESULTS = "study.html", "figure.svg", "results.json"

TONES = {"shown": "note", "not shown": "warning", "contradicted": "error"}
"""Colour of each verdict on the page."""


def write_study(folder: Path, run: StudyRun, results: Results) -> dict[str, Any]:
    """Write the page, the figure and the numbers of a study into its folder, and return the numbers as JSON values."""
    study = run.study
    findings = [claim.check(results) for claim in study.claims(run.points)]
    shared = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    rows = {
        "points": point_rows(results, study.metrics),
        "cells": cell_rows(results, study.metrics),
        "trials": [asdict(trial) for trial in results.trials],
    }
    plain = {
        **shared,
        "machines": list(results.machines),
        **rows,
        "verdict": [{"claim": one.claim, "outcome": one.outcome, "evidence": list(one.evidence)} for one in findings],
        "notes": edge_notes(results),
    }
    figures = [
        lines_chart(results, metric, name, study.x_name) if study.x_name else arms_chart(results, metric, name)
        for metric, name in study.metrics.items()
    ]
    with saving("the results", folder):
        write_json(folder / RESULTS, plain)
        for name, table in rows.items():
            write_csv(folder / f"{name}.csv", table)
        for metric, figure in zip(study.metrics, figures, strict=True):
            if figure:
                path = FIGURE if metric == next(iter(study.metrics)) else f"figure-{metric}.svg"
                (folder / path).write_text(standalone(figure), encoding="utf-8")
    has_stages = any(trial.stage > 1 for trial in results.trials)
    write_page(
        "the results",
        folder / PAGE,
        "studies/study.html",
        title=f"Study: {study.name}",
        style=Markup(STYLE),
        study=study,
        settings=run.settings,
        seeds=len(run.seeds),
        plain=plain,
        findings=findings,
        tones=TONES,
        figures=figures,
        heads=("", "learning rate", *study.metrics.values(), "GFLOP", "diverged"),
        rows=[_row(point, study.metrics) for point in results.points],
        trial_heads=("", *(["stage"] if has_stages else []), "learning rate", "validation accuracy", ""),
        trials=[
            (
                trial.point,
                *([f"{trial.stage}"] if has_stages else []),
                f"{trial.learning_rate:g}",
                "diverged" if trial.validation_accuracy is None else f"{100 * trial.validation_accuracy:.2f}",
                "chosen" if trial.chosen else "",
            )
            for trial in results.trials
        ],
    )
    return plain


def estimate_text(found: Estimate | None) -> str:
    """Return a mean in percent with its deviation, or an empty text if no seed has the metric."""
    if found is None:
        return ""
    return f"{100 * found.mean:.2f}" if found.count < 2 else f"{100 * found.mean:.2f} ± {100 * found.deviation:.2f}"


def _row(point: PointResult, metrics: Mapping[str, str]) -> tuple[str, ...]:
    return (
        point.name,
        ", ".join(f"{rate:g}" for rate in point.rates),
        *(estimate_text(point.estimate(metric)) for metric in metrics),
        f"{point.flops / 1e9:,.0f}",
        f"{len(point.diverged)} of {len(point.cells)}" if point.diverged else "",
    )
