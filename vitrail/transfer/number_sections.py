"""Sections of the report for predicted numbers: summary, scatter plots, residuals and largest errors."""

from __future__ import annotations

from collections.abc import Iterator

from vitrail.data.source import Source
from vitrail.evaluation.predictions.bootstrap import Metric
from vitrail.evaluation.predictions.named import interval_text
from vitrail.evaluation.predictions.regression import QUANTILES, LargeError, OutputRow, RegressionReport
from vitrail.page import escape, figure, table, thumbnail
from vitrail.transfer.charts import scatter_plot, shorten
from vitrail.transfer.sections import MAX_MISTAKES, MAX_NAME, UNDEFINED, largest_errors, picture_of

__all__ = ["errors_section", "headline", "number_rows", "residuals_section", "scatter_section"]

MAX_PLOTS = 12
"""Maximum number of outputs that get a scatter plot."""


def headline(report: RegressionReport) -> tuple[str, str]:
    """Return the text of the main metric and of its interval."""
    r2 = report.metrics.r2
    name = "R²" if len(report.names) == 1 else "mean R²"
    return f"{name} {r2.value:.3f}", interval_text(r2, ".3f")


def number_rows(report: RegressionReport) -> list[tuple[str, str, str]]:
    """Return table rows with the name, value and interval of each metric of each number.

    If there are several numbers, the first rows are their mean R² and their mean standardised error. Errors with a unit
    are not averaged over numbers.
    """
    rows = []
    if len(report.names) > 1:
        rows.append(_row("mean R²", report.metrics.r2, ".3f"))
        rows.append(_row("mean error, in standard deviations", report.metrics.standardised_error, ".3f"))
    for output in report.per_output:
        if output.metrics is None:
            rows.append((f"{output.name}: no image has a known number", UNDEFINED, UNDEFINED))
            continue
        rows += [
            _row(f"{output.name}: R²", output.metrics.r2, ".3f"),
            _row(f"{output.name}: mean absolute error", output.metrics.mean_absolute_error, ".4g"),
            _row(f"{output.name}: root mean squared error", output.metrics.root_mean_squared_error, ".4g"),
        ]
    return rows


def scatter_section(report: RegressionReport) -> Iterator[str]:
    """Yield a scatter plot of predicted over true values for each number, at most 12."""
    yield "<h2>Predicted and true values</h2>"
    yield '<p class="dim">A dot per image. Dots on the dashed line are predicted exactly.</p>\n<div class="charts">'
    known = [output for output in report.per_output if output.metrics is not None]
    for output in known[:MAX_PLOTS]:
        shown, images = len(output.points), output.images
        caption = output.name if shown == images else f"{output.name}, {shown:,} of {images:,} images"
        titles = [f"true {true:.4g}, predicted {predicted:.4g}" for true, predicted in output.points]
        label = f"Predicted over true values of {output.name}. {_description(output)}"
        chart = scatter_plot(output.points, titles, label=label)
        yield f"<figure>\n<figcaption>{escape(caption)}</figcaption>\n{chart}\n</figure>"
    yield "</div>"
    if len(known) > MAX_PLOTS:
        yield f'<p class="dim">and {len(known) - MAX_PLOTS:,} more numbers</p>'


def residuals_section(report: RegressionReport) -> Iterator[str]:
    """Yield a table with the mean and the quantiles of each number's residuals."""
    inner = [place for place, quantile in enumerate(QUANTILES) if 0 < quantile < 1]
    heads = ("number", "images", "mean", *(f"{QUANTILES[place]:.0%} quantile" for place in inner))
    rows = [
        (
            output.name,
            f"{output.images:,}",
            f"{output.mean_residual:.4g}",
            *(f"{output.residual_quantiles[place]:.4g}" for place in inner),
        )
        for output in report.per_output
        if output.mean_residual is not None
    ]
    yield "<h2>Residuals</h2>"
    yield '<p class="dim">A residual is the predicted minus the true number.</p>'
    yield table(heads, rows)


def errors_section(report: RegressionReport, source: Source) -> Iterator[str]:
    """Yield the largest errors, in standard deviations of the true numbers. Their pictures are read from `source`."""
    figures = [_error(one, source) for one in report.worst[:MAX_MISTAKES]]
    explanation = "The largest errors, in standard deviations of the true numbers."
    yield from largest_errors(figures, explanation, "All numbers are predicted exactly.")


def _error(error: LargeError, source: Source) -> str:
    lines = [
        f"true {shorten(error.name, MAX_NAME)}: {error.true:.4g}",
        f"predicted: {error.predicted:.4g}",
        shorten(error.key, MAX_NAME),
    ]
    if error.deviations is not None:
        lines.insert(2, f"{error.deviations:.1f} standard deviations off")
    return figure(thumbnail(picture_of(error.index, source), f"{lines[0]}, {lines[1]}"), lines)


def _row(name: str, metric: Metric, form: str) -> tuple[str, str, str]:
    return name, f"{metric.value:{form}}", interval_text(metric, form) or UNDEFINED


def _description(output: OutputRow) -> str:
    """Return a sentence that describes a scatter plot to screen readers."""
    assert output.metrics is not None, "only outputs with known numbers are drawn"
    return f"R² {output.metrics.r2.value:.3f}, mean absolute error {output.metrics.mean_absolute_error.value:.4g}."
