"""Intervals of metrics: Wilson's for fractions of samples, else percentiles of resampled values (Efron 1979; Efron &
Tibshirani 1993).

If all samples are right, every resample is too, and the percentiles would claim certainty. Wilson's interval (1927) has
a width for any number of samples.

A resample draws n of n samples with replacement. The weight of a sample is the number of times that it is drawn. The
metrics here are functions of weighted sums, so one matrix product gives many metrics for many resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from vitrail.errors import ConfigError
from vitrail.evaluation.metrics.classes import BINS, balanced_accuracy, calibration_gaps, expected_calibration_error

LEVEL = 0.95
"""Fraction of the resamples that an interval contains."""

QUANTILE = NormalDist().inv_cdf((1 + LEVEL) / 2)
"""Half of the width of an interval of a normal distribution, in standard deviations."""

BLOCK = 16
"""Number of resamples that are drawn together."""


@dataclass(frozen=True)
class Metric:
    """The value of a metric, and the ends of its interval. Without resamples, the ends are None."""

    value: float
    low: float | None = None
    high: float | None = None


def with_intervals(metrics: Mapping[str, Metric], prefix: str = "") -> dict[str, float]:
    """Return the values of metrics as PREFIXNAME. If a metric has an interval, also return its ends as
    PREFIXNAME_low and PREFIXNAME_high."""
    found = {}
    for name, metric in metrics.items():
        found[f"{prefix}{name}"] = metric.value
        if metric.low is not None and metric.high is not None:
            found |= {f"{prefix}{name}_low": metric.low, f"{prefix}{name}_high": metric.high}
    return found


def mean_interval(
    values: Float[np.ndarray, " n"] | Bool[np.ndarray, " n"],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Metric:
    """Return the mean of per-sample values, such as correctness or loss, with an interval.

    For true and false values, it is Wilson's interval of a fraction, unless `resamples` is 0. Otherwise it is a
    bootstrap interval.
    """
    if values.dtype == bool and resamples > 0:
        return wilson_interval(float(values.mean()), float(len(values)))
    means = resampled_means(values[:, None].astype(np.float64), resamples=resamples, seed=seed)
    return interval(float(values.mean()), means[:, 0])


def balanced_accuracy_interval(
    labels: Int64[np.ndarray, " n"],
    predicted: Int64[np.ndarray, " n"],
    num_classes: int,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Metric:
    """Return the mean of the per-class accuracies, with a bootstrap interval.

    Classes without samples in a resample are skipped in that resample. If every resample has the same value, because
    all samples are right or all are wrong, the interval is Wilson's for as many samples as would give the variance of a
    mean over the classes.
    """
    resampled = _resampled_balanced_accuracy(labels, predicted, resamples, seed)
    counts = np.unique(labels, return_counts=True)[1]
    count = float(len(counts) ** 2 / (1 / counts).sum())
    return interval_or_wilson(balanced_accuracy(labels, predicted, num_classes), resampled, count)


def wilson_interval(fraction: float, count: int | float) -> Metric:
    """Return a fraction of `count` independent samples with Wilson's score interval."""
    return Metric(fraction, *wilson_ends(fraction, count))


def wilson_ends(fraction: float, count: int | float) -> tuple[float, float]:
    """Return the ends of Wilson's score interval (1927, equation 5) of a fraction of `count` independent samples."""
    square = QUANTILE**2 / count
    centre = (fraction + square / 2) / (1 + square)
    half = math.sqrt(square * fraction * (1 - fraction) + square**2 / 4) / (1 + square)
    return min(max(centre - half, 0.0), fraction), max(min(centre + half, 1.0), fraction)


def calibration_error_interval(
    confidence: Float64[np.ndarray, " n"],
    correct: Bool[np.ndarray, " n"],
    *,
    bins: int = BINS,
    resamples: int = 1000,
    seed: int = 0,
) -> Metric:
    """Return the expected calibration error, with a bootstrap interval that contains it.

    The error is a sum of absolute values, so noise makes the estimate too large (Kumar et al. 1909.10155).
    Resampling adds the same noise again, and percentiles of the resampled errors can all lie above the estimate. The
    bootstrap estimate of this bias (Efron & Tibshirani 1993, section 10.2) is the median of the resampled errors minus
    the estimate. The interval is that of the percentiles, shifted down by this bias, and limited to [0, 1]. It is an
    interval for the mean error over data sets with the same number of samples.
    """
    means = resampled_means(calibration_gaps(confidence, correct, bins=bins), resamples=resamples, seed=seed)
    value = expected_calibration_error(confidence, correct, bins=bins)
    found = interval(value, resampled := np.abs(means).sum(axis=1))
    if found.low is None or found.high is None:
        return found
    median = float(np.median(resampled))
    return Metric(value, max(value - (median - found.low), 0.0), min(value + (found.high - median), 1.0))


def resampled_means(
    columns: Float64[np.ndarray, "n k"], *, resamples: int, seed: int
) -> Float64[np.ndarray, "resamples k"]:
    """Return the means of columns over each of `resamples` resamples of the rows.

    The weights of the rows in a resample have a multinomial distribution. They are counted from drawn indices, because
    numpy's `multinomial` is slower.
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
    """Return the balanced accuracy of each resample.

    Balanced accuracy depends only on the numbers of correct and wrong samples per class. These numbers have a
    multinomial distribution.
    """
    present, places = np.unique(labels, return_inverse=True)
    cells = np.bincount(places * 2 + (labels == predicted), minlength=2 * len(present))

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        drawn = random.multinomial(len(labels), cells / len(labels), size=count).reshape(count, len(present), 2)
        images = drawn.sum(axis=2)
        recalls = drawn[:, :, 1] / np.maximum(images, 1)
        return recalls.sum(axis=1) / (images > 0).sum(axis=1)

    return _in_blocks(draw, resamples, seed, max((1 << 20) // len(cells), 1))


def interval(value: float, resampled: Float64[np.ndarray, " resamples"]) -> Metric:
    """Return a metric with its interval, which contains the fraction `LEVEL` of its values in resamples."""
    if not len(resampled):
        return Metric(value)
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return Metric(value, low, high)


def interval_or_wilson(value: float, resampled: Float64[np.ndarray, " resamples"], count: int | float) -> Metric:
    """Return a metric with its interval, which is Wilson's for `count` samples if all resamples have the same value."""
    found = interval(value, resampled)
    return wilson_interval(value, count) if found.low is not None and found.low == found.high else found


def _in_blocks(
    draw: Callable[[np.random.Generator, int], np.ndarray], resamples: int, seed: int, block: int
) -> np.ndarray:
    if resamples < 0:
        raise ConfigError(f"resamples={resamples} is less than 0")
    random = np.random.default_rng(seed)
    parts = [draw(random, min(block, resamples - first)) for first in range(0, resamples, block)]
    return np.concatenate(parts) if parts else np.empty(0)


# The difference between two models that were measured on the same images.


@dataclass(frozen=True)
class PairedDifference:
    """The images on which two models are right, and the difference of their accuracies."""

    both: int
    """Number of images on which both models are right."""
    only_first: int
    only_second: int
    neither: int
    difference: Metric
    """Accuracy of the first model minus that of the second, with its interval (`difference_interval`)."""
    p: float
    """Probability of a difference of this size or more if both models are equally accurate (`mcnemar`)."""

    @property
    def images(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither


def paired_difference(
    first: Bool[np.ndarray, " n"], second: Bool[np.ndarray, " n"], *, has_interval: bool = True
) -> PairedDifference:
    """Return the paired difference of two models. The arrays are True for each image on which a model is right."""
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    both = int((first & second).sum())
    ends = difference_interval(only_first, only_second, len(first)) if has_interval else ()
    return PairedDifference(
        both=both,
        only_first=only_first,
        only_second=only_second,
        neither=len(first) - both - only_first - only_second,
        difference=Metric((only_first - only_second) / len(first), *ends),
        p=mcnemar(only_first, only_second),
    )


def difference_interval(only_first: int, only_second: int, images: int) -> tuple[float, float]:
    """Return the ends of the interval of the accuracy of one model minus that of another on the same images.

    The interval is the adjusted Wald interval of Bonett & Price (2012): one image is added to each of the two counts
    of images on which one model alone is right. Images with the same result of both models only enter the total, so the
    interval is narrower than two intervals that are compared. It has a width even if both models agree on all images.
    """
    first, second = ((count + 1) / (images + 2) for count in (only_first, only_second))
    centre = first - second
    half = QUANTILE * math.sqrt((first + second - centre**2) / (images + 2))
    return max(centre - half, -1.0), min(centre + half, 1.0)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    If both models are equally accurate, the images on which one model alone is right are fair coins. Other images have
    no information about the difference. The value is 1 if there is no such image.
    """
    tosses = only_first + only_second
    ways = tail = 1  # of 0 heads, exactly and at most
    for heads in range(1, min(only_first, only_second) + 1):
        ways = ways * (tosses - heads + 1) // heads
        tail += ways
    return min(1.0, 2 * tail / 2**tosses)
