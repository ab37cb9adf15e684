"""Metrics of predicted numbers: R², mean absolute error and root mean squared error. Unknown numbers are skipped.

Errors have the units of their numbers, so they are stated for each output. Over several outputs, only metrics without a
unit are averaged: R² and the standardised error, which is the mean absolute error divided by the standard deviation of
the true numbers.

R² is 1 - (sum of squared errors) / (sum of squared deviations of the true numbers from their mean). If all true numbers
of an output are equal, R² is 1 without errors and 0 with errors, as in scikit-learn, and the standardised error is 0 or
1.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from vitrail.data.targets import TargetKind, Targets
from vitrail.evaluation.metrics.classes import mean_average_precision
from vitrail.evaluation.metrics.intervals import Metric, interval, resampled_means

MEANS = ("r2", "standardised_error")
"""Metrics without a unit, which are averaged over the outputs with known numbers."""

OF_EACH = ("r2", "mean_absolute_error", "root_mean_squared_error")
"""Metrics of one output. The errors have the unit of its numbers."""


def number_metrics(
    predicted: Float[np.ndarray, "n outputs"],
    truth: Float64[np.ndarray, "n outputs"],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[dict[str, Metric], tuple[dict[str, Metric] | None, ...]]:
    """Return `MEANS` over all outputs and `OF_EACH` output, with bootstrap intervals.

    NaN in `truth` marks an unknown number, which is skipped. The metrics of an output without known numbers are None,
    and the means skip this output. At least one number is known.
    """
    known = ~np.isnan(truth)
    there = known.any(axis=0)
    # Deviations from the mean keep the digits that squares of large numbers would lose.
    mean = mean_of_known(truth, known)
    deviations = np.where(known, truth - mean, 0)
    errors = np.where(known, predicted - truth, 0)
    columns = np.concatenate([known, np.abs(errors), errors**2, deviations, deviations**2], axis=1, dtype=np.float64)
    resampled = resampled_means(columns, resamples=resamples, seed=seed)
    values = _metrics(columns.mean(axis=0)[None], mean)
    spread = _metrics(resampled, mean)

    def metrics_of(names: tuple[str, ...], outputs: Bool[np.ndarray, " outputs"]) -> dict[str, Metric]:
        def metric(name: str) -> Metric:
            value, many = (np.nanmean(some[name][:, outputs], axis=1) for some in (values, spread))
            return interval(float(value[0]), many[~np.isnan(many)])

        return {name: metric(name) for name in names}

    each = np.eye(len(there), dtype=np.bool_)
    with warnings.catch_warnings():  # a resample may have no known number of an output
        warnings.simplefilter("ignore", RuntimeWarning)
        rows = tuple(metrics_of(OF_EACH, one) if (one & there).any() else None for one in each)
        return metrics_of(MEANS, there), rows


class StreamingErrors:
    """The metrics of numbers, added up batch by batch."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._sums: Float64[np.ndarray, "5 outputs"] | None = None

    def add(self, outputs: Float[np.ndarray, "b outputs"], truth: Targets) -> None:
        """Add a batch of samples: their predicted numbers and their true numbers."""
        self._names = truth.names
        known = ~np.isnan(truth.values)
        errors = np.where(known, outputs - truth.values, 0)
        mean = mean_of_known(truth.values, known)
        squares = np.where(known, truth.values - mean, 0) ** 2
        part = np.stack([known, np.abs(errors), errors**2, squares], dtype=np.float64).sum(axis=1)
        part = np.concatenate([part, mean[None]])
        self._sums = part if self._sums is None else _joined(self._sums, part)

    def result(self) -> dict[str, float]:
        """Return the metrics of all samples so far, or an empty dictionary if no number is known.

        These are the means of `r2` and `standardised_error` over the outputs. A single output also has
        `mean_absolute_error` and `root_mean_squared_error`; if there are several, each one with known numbers has
        `NAME:mean_absolute_error`.
        """
        if self._sums is None or not self._sums[0].any():
            return {}
        there = self._sums[0] > 0
        count, absolute, squared, squares, mean = self._sums[:, there]
        error, variance = absolute / count, squares / count
        result = {
            "r2": float(_r2(squared / count, variance, mean).mean()),
            "standardised_error": float(_standardised(error, variance, mean).mean()),
        }
        if len(there) > 1:
            names = (name for name, known in zip(self._names, there, strict=True) if known)
            return result | {f"{name}:mean_absolute_error": float(one) for name, one in zip(names, error, strict=True)}
        rooted = float(np.sqrt(squared / count).item())
        return result | {"mean_absolute_error": float(error.item()), "root_mean_squared_error": rooted}


def _metrics(
    means: Float64[np.ndarray, "resamples columns"], mean: Float64[np.ndarray, " outputs"]
) -> dict[str, Float64[np.ndarray, "resamples outputs"]]:
    """Return the values of `MEANS` and `OF_EACH` by name. They are NaN for an output without known numbers.
    `means` has, for all outputs, the means of five values: known (0 or 1), |error|, error², deviation and deviation².
    """
    known, absolute, squared, deviation, squares = np.split(means, 5, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = squared / known
        raw = squares / known
        variance = raw - (deviation / known) ** 2
        variance = np.where(variance > 1e-12 * raw, variance, 0)  # a resample of equal numbers leaves rounding errors
        error = absolute / known
        return {
            "r2": np.where(known > 0, _r2(errors, variance, mean), np.nan),
            "standardised_error": _standardised(error, variance, mean),
            "mean_absolute_error": error,
            "root_mean_squared_error": np.sqrt(errors),
        }


def _r2(
    errors: Float64[np.ndarray, "*shape"],
    variance: Float64[np.ndarray, "*shape"],
    mean: Float64[np.ndarray, " outputs"],
) -> Float64[np.ndarray, "*shape"]:
    """Return R² from mean squared errors and variances."""
    varies = _varies(variance, mean)
    ratio = 1 - errors / np.where(varies, variance, 1)
    return np.where(varies, ratio, np.where(errors > 0, 0.0, 1.0))


def _standardised(
    error: Float64[np.ndarray, "*shape"],
    variance: Float64[np.ndarray, "*shape"],
    mean: Float64[np.ndarray, " outputs"],
) -> Float64[np.ndarray, "*shape"]:
    """Return the standardised error from mean absolute errors and variances. An error that is not finite stays so."""
    scale = np.where(_varies(variance, mean), np.sqrt(variance), np.where(error == 0, 1.0, error))
    return error / scale


def _varies(
    variance: Float64[np.ndarray, "*shape"], mean: Float64[np.ndarray, " outputs"]
) -> Bool[np.ndarray, "*shape"]:
    """Return True for numbers that differ. The variance of equal numbers can be slightly above 0 because of rounding
    errors; such a variance counts as 0."""
    return variance > (1e-13 * mean) ** 2


def mean_of_known(
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


# Metrics that are added up batch by batch, so that the outputs of all samples need not be in memory at once.


SELECTING: dict[TargetKind, str] = {"class": "accuracy", "classes": "mean_average_precision", "numbers": "r2"}
"""The metric by which the best model is chosen, for each kind of target. A larger value is better."""


def merit(value: float | None, loss: float | None, *, higher_is_better: bool = True) -> tuple[float, float]:
    """Return a pair that is larger for a better model: the metric that selects decides, and the loss decides between
    equal values. None and NaN are worse than every number."""
    score = -math.inf if value is None or math.isnan(value) else value if higher_is_better else -value
    return score, -math.inf if loss is None or math.isnan(loss) else -loss


class StreamingAccuracy:
    """Top-1 accuracy: the fraction of the labelled samples whose likeliest class is a true class.

    The likeliest class is the first one with the largest output. If samples can have several labels,
    `mean_average_precision` is measured too, which keeps all outputs in memory.
    """

    def __init__(self) -> None:
        self.right = self.count = 0
        self._several: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, outputs: Float[np.ndarray, "b classes"], truth: Targets) -> None:
        self.add_likeliest(outputs.argmax(axis=1), truth)
        if truth.kind == "classes":
            self.add_ranking(outputs, truth.dense > 0)

    def add_likeliest(self, likeliest: Int64[np.ndarray, " b"], truth: Targets) -> None:
        """Add samples for which only the likeliest class is given."""
        known = truth.known
        self.right += int(truth.hits(likeliest)[known].sum())
        self.count += int(known.sum())

    def add_ranking(self, outputs: Float[np.ndarray, "b classes"], truth: Bool[np.ndarray, "b classes"]) -> None:
        """Add the outputs and true classes from which `mean_average_precision` is computed."""
        self._several.append((outputs, truth))

    def result(self) -> dict[str, float]:
        metrics = {"accuracy": self.right / max(self.count, 1)}
        if self._several:
            outputs, truth = (np.concatenate(parts) for parts in zip(*self._several, strict=True))
            metrics["mean_average_precision"] = mean_average_precision(outputs, truth)
        return metrics


def streaming_metrics(truth: Targets) -> StreamingErrors | StreamingAccuracy:
    """Return an empty accumulator of the metrics for this kind of target."""
    return StreamingErrors() if truth.kind == "numbers" else StreamingAccuracy()
