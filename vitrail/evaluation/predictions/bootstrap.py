"""Percentile bootstrap intervals of metrics (Efron 1979; Efron & Tibshirani 1993).

A resample draws n of n samples with replacement, which gives each sample a weight. Metrics are functions of weighted
sums, so one product of matrices gives many metrics of many resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from vitrail.errors import ConfigError
from vitrail.evaluation.predictions.calibration import BINS, calibration_gaps, expected_calibration_error
from vitrail.evaluation.predictions.metrics import balanced_accuracy

__all__ = [
    "LEVEL",
    "Metric",
    "balanced_accuracy_interval",
    "calibration_error_interval",
    "interval",
    "mean_interval",
    "resampled_means",
]

LEVEL = 0.95
"""Fraction of resamples inside an interval."""

BLOCK = 16
"""Resamples that are drawn together: their weights for 50,000 samples take 6 MB."""


@dataclass(frozen=True)
class Metric:
    """A value, and the ends of its interval, which are None without resamples."""

    value: float
    low: float | None = None
    high: float | None = None


def mean_interval(
    values: Float[np.ndarray, " n"] | Bool[np.ndarray, " n"],
    *,
    level: float = LEVEL,
    resamples: int = 1000,
    seed: int = 0,
) -> Metric:
    """Return the mean of a value of each sample (correct or not, a loss), with its interval."""
    means = resampled_means(values[:, None].astype(np.float64), resamples=resamples, seed=seed)
    return interval(float(values.mean()), means[:, 0], level)


def balanced_accuracy_interval(
    labels: Int64[np.ndarray, " n"],
    predicted: Int64[np.ndarray, " n"],
    num_classes: int,
    *,
    level: float = LEVEL,
    resamples: int = 1000,
    seed: int = 0,
) -> Metric:
    """Return the mean over classes of the accuracy within each class, with its interval.

    A class with few samples can be missing from a resample, and is then skipped in its mean.
    """
    value = balanced_accuracy(labels, predicted, num_classes)
    return interval(value, _resampled_balanced_accuracy(labels, predicted, resamples, seed), level)


def calibration_error_interval(
    confidence: Float64[np.ndarray, " n"],
    correct: Bool[np.ndarray, " n"],
    *,
    bins: int = BINS,
    level: float = LEVEL,
    resamples: int = 1000,
    seed: int = 0,
) -> Metric:
    """Return the expected calibration error, with its interval.

    The error is a sum of absolute values, which noise only makes larger. The estimate itself is therefore too large,
    and resampling adds the same noise again, so the interval lies high, at times entirely above the estimate. In
    simulations (60 sets of 2,000 samples, 2026-11) a true error of 0 gave 0.023 with an interval of 0.019 to 0.046 on
    average; a true error of 0.1 was inside the interval of 90 % of the sets.
    """
    means = resampled_means(calibration_gaps(confidence, correct, bins=bins), resamples=resamples, seed=seed)
    value = expected_calibration_error(confidence, correct, bins=bins)
    return interval(value, np.abs(means).sum(axis=1), level)


def resampled_means(
    columns: Float64[np.ndarray, "n k"], *, resamples: int, seed: int
) -> Float64[np.ndarray, "resamples k"]:
    """Return the means of columns over each of `resamples` resamples of the rows.

    The weights are multinomial: the number of times that each row is drawn. For 50,000 rows and 1,000 resamples
    one column takes 0.23 s, 34 columns take 0.41 s; to draw each row's weight from its binomial distribution, as
    numpy's multinomial does, would take 2.5 s (one of two cores of an AMD EPYC 9004, 2026-11).
    """
    n = len(columns)

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        weights = np.empty((count, n))
        for row in weights:
            row[:] = np.bincount(random.integers(0, n, n), minlength=n)
        return weights @ columns / n

    return _in_blocks(draw, resamples, seed, BLOCK).reshape(resamples, columns.shape[1])


def _resampled_balanced_accuracy(
    labels: Int64[np.ndarray, " n"], predicted: Int64[np.ndarray, " n"], resamples: int, seed: int
) -> Float64[np.ndarray, " resamples"]:
    """Return balanced accuracies of resamples.

    They depend only on the numbers of correct and wrong samples of each class, which are multinomial.
    """
    present, places = np.unique(labels, return_inverse=True)
    cells = np.bincount(places * 2 + (labels == predicted), minlength=2 * len(present))

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        drawn = random.multinomial(len(labels), cells / len(labels), size=count).reshape(count, len(present), 2)
        images = drawn.sum(axis=2)
        recalls = drawn[:, :, 1] / np.maximum(images, 1)
        return recalls.sum(axis=1) / (images > 0).sum(axis=1)

    return _in_blocks(draw, resamples, seed, max((1 << 20) // len(cells), 1))


def interval(value: float, resampled: Float64[np.ndarray, " resamples"], level: float = LEVEL) -> Metric:
    """Return a metric with the interval that holds the fraction `level` of its values in resamples."""
    if not 0 < level < 1:
        raise ConfigError(f"level={level} is not between 0 and 1")
    if not len(resampled):
        return Metric(value)
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return Metric(value, low, high)


def _in_blocks(
    draw: Callable[[np.random.Generator, int], np.ndarray], resamples: int, seed: int, block: int
) -> np.ndarray:
    if resamples < 0:
        raise ConfigError(f"{resamples} resamples are less than 0")
    random = np.random.default_rng(seed)
    parts = [draw(random, min(block, resamples - first)) for first in range(0, resamples, block)]
    return np.concatenate(parts) if parts else np.empty(0)
