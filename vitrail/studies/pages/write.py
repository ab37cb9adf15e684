"""Writing a study: one page with its figure and verdict, the figure as SVG, and the numbers as CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.analysis.charts import STYLE, standalone
from vitrail.analysis.pages.figure import NARROW, captioned
from vitrail.files import saving, write_json
from vitrail.page import document, escape, table
from vitrail.studies.claims import Finding
from vitrail.studies.engine import RECORD, StudyRun
from vitrail.studies.pages.charts import arms_chart, lines_chart
from vitrail.studies.pages.tables import cell_rows, plain_results, point_rows, trial_rows
from vitrail.studies.results import PointResult, Results
from vitrail.studies.statistics import Estimate

__all__ = ["estimate_text", "write_study"]

PAGE, FIGURE, RESULTS = "study.html", "figure.svg", "results.json"

TONES = {"shown": "note", "not shown": "warning", "contradicted": "error"}
"""Colour of each verdict on the page."""


def write_study(folder: Path, run: StudyRun, results: Results) -> dict[str, Any]:
    """Write the page, the figure and the numbers of a study into its folder, and return the numbers as JSON values."""
    study = run.study
    findings = [claim.check(results) for claim in study.claims(run.points)]
    shared = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    plain = {**shared, "machines": list(results.machines), **plain_results(results, findings, study.metrics)}
    figures = [_figure(results, metric, name, study.x_name) for metric, name in study.metrics.items()]
    with saving("the results", folder):
        write_json(folder / RESULTS, plain)
        _write_csv(folder / "points.csv", point_rows(results, study.metrics))
        _write_csv(folder / "cells.csv", cell_rows(results, study.metrics))
        _write_csv(folder / "trials.csv", trial_rows(results))
        for metric, figure in zip(study.metrics, figures, strict=True):
            if figure:
                path = FIGURE if metric == next(iter(study.metrics)) else f"figure-{metric}.svg"
                (folder / path).write_text(standalone(figure), encoding="utf-8")
        (folder / PAGE).write_text(_page(run, results, findings, figures, plain), encoding="utf-8")
    return plain


def estimate_text(found: Estimate | None) -> str:
    """Return a mean in percent with its deviation, or an empty text if no seed has the metric."""
    if found is None:
        return ""
    return f"{100 * found.mean:.2f}" if found.count < 2 else f"{100 * found.mean:.2f} ± {100 * found.deviation:.2f}"


def _figure(results: Results, metric: str, name: str, x_name: str) -> str:
    return lines_chart(results, metric, name, x_name) if x_name else arms_chart(results, metric, name)


def _page(
    run: StudyRun, results: Results, findings: Sequence[Finding], figures: Sequence[str], plain: Mapping[str, Any]
) -> str:
    study, settings = run.study, run.settings
    amount = f"{len(run.seeds)} seeds" if len(run.seeds) != 1 else "1 seed"
    parts = [
        f"<p>{escape(study.question)}</p>",
        f'<p class="dim">{escape(study.paper)}</p>',
        f"<p>{escape(_conditions(settings.scale, settings.data, amount, plain))}</p>",
        "<h2>Verdict</h2>",
        *map(_finding, findings),
        *(f'<p class="dim">{escape(note)}</p>' for note in plain["notes"]),
        "<h2>Results</h2>",
        *(captioned(figure, _caption(study.x_name)) for figure in figures if figure),
        table(
            ("", "learning rate", *study.metrics.values(), "GFLOP", "diverged"),
            [_row(point, study.metrics) for point in results.points],
        ),
    ]
    if results.trials:
        parts += ["<h2>Choice of the learning rate</h2>", _trials(results)]
    return document(f"Study: {study.name}", parts, style=STYLE + NARROW)


def _conditions(scale: str, data: str, amount: str, plain: Mapping[str, Any]) -> str:
    size = (
        "This is the quick version of the study. Its results are less certain than those of the default version. "
        if scale == "quick"
        else ""
    )
    return (
        f"{size}Data: {data}. Accuracies are percentages of the test images: means and standard deviations over "
        f"{amount}. Learning rates were chosen on a cut of the training images. "
        f"Machine: {'; '.join(plain['machines'])}."
    )


def _finding(finding: Finding) -> str:
    evidence = "".join(f"<p>{escape(text)}</p>" for text in finding.evidence)
    return (
        f'<article class="{TONES[finding.outcome]}"><h3><span class="tag">{finding.outcome}</span>: '
        f"{escape(finding.claim)}</h3>{evidence}</article>"
    )


def _caption(x_name: str) -> str:
    if x_name:
        return "Lines are means over seeds, and bands are one standard deviation on both sides."
    return "Small dots are seeds, large dots their means, and lines the 95 % intervals of the means."


def _row(point: PointResult, metrics: Mapping[str, str]) -> tuple[str, ...]:
    return (
        point.name,
        ", ".join(f"{rate:g}" for rate in point.rates),
        *(estimate_text(point.estimate(metric)) for metric in metrics),
        f"{point.flops / 1e9:,.0f}",
        f"{len(point.diverged)} of {len(point.cells)}" if point.diverged else "",
    )


def _trials(results: Results) -> str:
    has_stages = any(trial.stage for trial in results.trials)
    rows = [
        (
            trial.tuning,
            *([f"{trial.stage + 1}"] if has_stages else []),
            f"{trial.rate:g}",
            "diverged" if trial.value is None else f"{100 * trial.value:.2f}",
            "chosen" if trial.chosen else "",
        )
        for trial in results.trials
    ]
    return table(("", *(["stage"] if has_stages else []), "learning rate", "validation accuracy", ""), rows)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
