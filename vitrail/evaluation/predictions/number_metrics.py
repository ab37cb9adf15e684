"""Metrics of predicted numbers: R², mean absolute error and root mean squared error. Unknown numbers are skipped.

R² is 1 - (sum of squared errors) / (sum of squared deviations of the true numbers from their mean). If all true numbers
of an output are equal, R² is 1 without errors and 0 with errors, as in scikit-learn.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64

from vitrail.errors import DataError
from vitrail.evaluation.predictions.bootstrap import LEVEL, Metric, interval, resampled_means
from vitrail.evaluation.truth import Truth

__all__ = ["NumberMetrics", "StreamingErrors", "number_metrics"]


@dataclass(frozen=True)
class NumberMetrics:
    """Metrics of one output, or the means of the metrics over all outputs with known numbers."""

    r2: Metric
    mean_absolute_error: Metric
    root_mean_squared_error: Metric


def number_metrics(
    predicted: Float[np.ndarray, "n outputs"],
    truth: Float64[np.ndarray, "n outputs"],
    *,
    level: float = LEVEL,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[NumberMetrics, tuple[NumberMetrics | None, ...]]:
    """Return the metrics over all outputs and the metrics of each output, with bootstrap intervals.

    NaN in `truth` marks an unknown number, which is skipped. The metrics of an output without known numbers are None,
    and the means skip this output. Raise `DataError` if no number is known.
    """
    known = ~np.isnan(truth)
    there = known.any(axis=0)
    if not there.any():
        raise DataError("no true number is known, so there is nothing to measure")
    # Deviations from the mean keep the digits that squares of large numbers would lose.
    mean = _mean(truth, known)
    deviations = np.where(known, truth - mean, 0)
    errors = np.where(known, predicted - truth, 0)
    columns = np.concatenate([known, np.abs(errors), errors**2, deviations, deviations**2], axis=1, dtype=np.float64)
    resampled = resampled_means(columns, resamples=resamples, seed=seed)
    values = _metrics(columns.mean(axis=0)[None], mean)  # axes: metric, 1, output
    spread = _metrics(resampled, mean)  # axes: metric, resample, output

    def metrics_of(outputs: Bool[np.ndarray, " outputs"]) -> NumberMetrics:
        means = (np.nanmean(some[:, :, outputs], axis=2) for some in (values, spread))
        return NumberMetrics(
            *(interval(float(one[0]), many[~np.isnan(many)], level) for one, many in zip(*means, strict=True))
        )

    each = np.eye(len(there), dtype=np.bool_)
    with warnings.catch_warnings():  # a resample may have no known number of an output
        warnings.simplefilter("ignore", RuntimeWarning)
        return metrics_of(there), tuple(metrics_of(one) if (one & there).any() else None for one in each)


class StreamingErrors:
    """The metrics over all outputs, added up batch by batch."""

    def __init__(self) -> None:
        self._sums: Float64[np.ndarray, "5 outputs"] | None = None

    def add(self, outputs: Float[np.ndarray, "b outputs"], truth: Truth) -> None:
        """Add a batch of samples: their predicted numbers and their true numbers."""
        known = ~np.isnan(truth.values)
        errors = np.where(known, outputs - truth.values, 0)
        mean = _mean(truth.values, known)
        squares = np.where(known, truth.values - mean, 0) ** 2
        part = np.stack([known, np.abs(errors), errors**2, squares], dtype=np.float64).sum(axis=1)
        part = np.concatenate([part, mean[None]])
        self._sums = part if self._sums is None else _joined(self._sums, part)

    def result(self) -> dict[str, float]:
        """Return the metrics of all samples so far, or an empty dictionary if no number is known."""
        if self._sums is None or not self._sums[0].any():
            return {}
        count, absolute, squared, squares, mean = self._sums[:, self._sums[0] > 0]
        return {
            "r2": float(_r2(squared / count, squares / count, mean).mean()),
            "mean_absolute_error": float((absolute / count).mean()),
            "root_mean_squared_error": float(np.sqrt(squared / count).mean()),
        }


def _metrics(
    means: Float64[np.ndarray, "resamples columns"], mean: Float64[np.ndarray, " outputs"]
) -> Float64[np.ndarray, "3 resamples outputs"]:
    """Return R², mean absolute error and root mean squared error. They are NaN for an output without known numbers.
    `means` has, for all outputs, the means of five values: known (0 or 1), |error|, error², deviation and deviation².
    """
    known, absolute, squared, deviation, squares = np.split(means, 5, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = squared / known
        raw = squares / known
        variance = raw - (deviation / known) ** 2
        variance = np.where(variance > 1e-12 * raw, variance, 0)  # a resample of equal numbers leaves rounding errors
        return np.stack([np.where(known > 0, _r2(errors, variance, mean), np.nan), absolute / known, np.sqrt(errors)])


def _r2(
    errors: Float64[np.ndarray, "*shape"],
    variance: Float64[np.ndarray, "*shape"],
    mean: Float64[np.ndarray, " outputs"],
) -> Float64[np.ndarray, "*shape"]:
    """Return R² from mean squared errors and variances.

    The variance of equal numbers can be slightly above 0 because of rounding errors. Such a variance counts as 0.
    """
    varies = variance > (1e-13 * mean) ** 2
    ratio = 1 - errors / np.where(varies, variance, 1)
    return np.where(varies, ratio, np.where(errors > 0, 0.0, 1.0))


def _mean(
    values: Float64[np.ndarray, "n outputs"], known: Bool[np.ndarray, "n outputs"]
) -> Float64[np.ndarray, " outputs"]:
    """Return the mean of the known numbers of each output, or 0 if there are none."""
    return np.where(known, values, 0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)


def _joined(
    one: Float64[np.ndarray, "5 outputs"], other: Float64[np.ndarray, "5 outputs"]
) -> Float64[np.ndarray, "5 outputs"]:
    """Add the sums of two batches, whose squared deviations are from different means (Chan, Golub and LeVeque 1979)."""
    total = one + other
    counts = np.maximum(total[0], 1)
    difference = other[4] - one[4]
    total[3] += difference**2 * one[0] * other[0] / counts
    total[4] = (one[4] * one[0] + other[4] * other[0]) / counts
    return total
