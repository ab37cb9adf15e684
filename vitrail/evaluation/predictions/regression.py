"""The report of predicted numbers: metrics, residuals and largest errors. Its plain values can be printed, drawn or
saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from vitrail.data.batch import Skipped
from vitrail.errors import DataError
from vitrail.evaluation.predictions.number_metrics import MeanMetrics, NumberMetrics, number_metrics
from vitrail.evaluation.predictions.predict import Predictions
from vitrail.evaluation.truth import Numbers

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Quantiles of the residuals that a report contains."""


@dataclass(frozen=True)
class OutputRow:
    """The metrics and residuals of one output, which is one of the numbers that the model predicts. A residual is the
    predicted minus the true number."""

    index: int
    name: str
    images: int
    """Number of images for which the number is known."""
    metrics: NumberMetrics | None
    """Metrics of the number. If the number is unknown for all images, this field and the following fields are None or
    empty."""
    mean: float | None
    """Mean of the true numbers."""
    deviation: float | None
    """Standard deviation of the true numbers (divided by n)."""
    mean_residual: float | None
    residual_quantiles: tuple[float, ...]
    """Values of the residuals at the quantiles `QUANTILES`."""
    points: tuple[tuple[float, float], ...]
    """Pairs of true and predicted numbers, for a scatter plot. If there are many images, evenly spaced ones are
    used."""


@dataclass(frozen=True)
class LargeError:
    """One of the largest errors."""

    index: int
    """Index of the sample in the source."""
    key: str
    name: str
    """Name of the number."""
    true: float
    predicted: float
    deviations: float | None
    """Absolute error divided by the standard deviation of the true numbers, or None if all true numbers are equal."""


@dataclass(frozen=True)
class RegressionReport:
    """The result of `regression_report`. `vitrail.settings.to_plain` converts it to JSON values."""

    images: int
    """Number of measured images."""
    unlabelled: int
    """Number of images without any known number. They are skipped."""
    skipped: tuple[Skipped, ...]
    """Images that could not be decoded."""
    names: tuple[str, ...]
    """Names of the numbers."""
    metrics: MeanMetrics
    """Means over the numbers of the metrics without a unit."""
    per_output: tuple[OutputRow, ...]
    """A row for each number, in the order of the outputs."""
    worst: tuple[LargeError, ...]
    """The largest errors, measured in standard deviations, largest first."""


def regression_report(
    predictions: Predictions, *, bootstrap: int = 1000, seed: int = 0, worst: int = 20, points: int = 1000
) -> RegressionReport:
    """Return all metrics of predicted numbers, with 95 % intervals from `bootstrap` resamples that `seed` draws.

    `points` is the maximum number of points of a scatter plot. Raise `DataError` if the targets are not numbers, or if
    no number is known.
    """
    if not isinstance(predictions.truth, Numbers):
        raise DataError("a regression report needs numbers, but these samples have classes; use report")
    labelled = predictions.labelled()
    if not len(labelled):
        raise DataError(f"none of {len(predictions):,} images has a known number, so there is nothing to measure")
    truth, predicted = labelled.truth.values, labelled.logits.astype(np.float64)
    metrics, each = number_metrics(predicted, truth, resamples=bootstrap, seed=seed)
    rows = tuple(
        _row(index, name, predicted[:, index], truth[:, index], one, points)
        for index, (name, one) in enumerate(zip(predictions.classes, each, strict=True))
    )
    return RegressionReport(
        images=len(labelled),
        unlabelled=len(predictions) - len(labelled),
        skipped=predictions.skipped,
        names=predictions.classes,
        metrics=metrics,
        per_output=rows,
        worst=_worst(labelled, predicted - truth, rows, worst),
    )


def _row(
    index: int,
    name: str,
    predicted: Float64[np.ndarray, " n"],
    truth: Float64[np.ndarray, " n"],
    metrics: NumberMetrics | None,
    points: int,
) -> OutputRow:
    known = np.flatnonzero(~np.isnan(truth))
    if metrics is None:
        return OutputRow(index, name, 0, None, None, None, None, (), ())
    true, residuals = truth[known], predicted[known] - truth[known]
    shown = known[np.unique(np.linspace(0, len(known) - 1, min(points, len(known))).round().astype(int))]
    return OutputRow(
        index=index,
        name=name,
        images=len(known),
        metrics=metrics,
        mean=float(true.mean()),
        deviation=float(true.std()),
        mean_residual=float(residuals.mean()),
        residual_quantiles=tuple(np.quantile(residuals, QUANTILES).tolist()),
        points=tuple(zip(truth[shown].tolist(), predicted[shown].tolist(), strict=True)),
    )


def _worst(
    predictions: Predictions, residuals: Float64[np.ndarray, "n outputs"], rows: tuple[OutputRow, ...], count: int
) -> tuple[LargeError, ...]:
    """Return the largest errors that are not 0. Equal errors keep the order of the samples."""
    scale = np.array([row.deviation or 0.0 for row in rows])
    errors = np.nan_to_num(np.abs(residuals), nan=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        deviations = np.where(errors > 0, errors / scale, 0.0)
    order = np.argsort(-deviations, axis=None, kind="stable")[:count]
    found = [(int(one) // len(rows), int(one) % len(rows)) for one in order if deviations.flat[one] > 0]
    return tuple(
        LargeError(
            index=int(predictions.indices[row]),
            key=predictions.keys[row],
            name=rows[output].name,
            true=float(predictions.truth.values[row, output]),
            predicted=float(predictions.logits[row, output]),
            deviations=float(deviations[row, output]) if scale[output] else None,
        )
        for row, output in found
    )
