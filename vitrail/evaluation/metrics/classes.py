"""Metrics of logits and labels: top-k accuracy, per-class and multi-label metrics.

The likeliest class is the first one with the largest logit. Every sample has a label, which is a column of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int64, UInt8

from vitrail.errors import ConfigError
from vitrail.weights.answers import OutputKind


def top_k(logits: Float[np.ndarray, "n classes"], labels: Int64[np.ndarray, " n"], k: int) -> Bool[np.ndarray, " n"]:
    """Return True for each sample whose label is among the `k` classes with the largest logits.

    Of classes with equal logits, the first one counts as larger.
    """
    own = np.take_along_axis(logits, labels[:, None], axis=1)
    earlier = np.arange(logits.shape[1]) < labels[:, None]
    rank = (logits > own).sum(axis=1) + ((logits == own) & earlier).sum(axis=1)
    return rank < k


@dataclass(frozen=True, eq=False)
class ClassMetrics:
    """Metrics of each class, in [0, 1]. A value is NaN if its denominator is 0."""

    images: Int64[np.ndarray, " classes"]
    """Number of samples of the class."""
    predicted: Int64[np.ndarray, " classes"]
    """Number of samples that were predicted as the class."""
    recall: Float64[np.ndarray, " classes"]
    """Fraction of the class's samples that were predicted as the class. This is the accuracy within the class."""
    precision: Float64[np.ndarray, " classes"]
    """Fraction of the samples predicted as the class that belong to the class."""
    f1: Float64[np.ndarray, " classes"]
    """Harmonic mean of recall and precision: 2 correct / (images + predicted)."""


def per_class(labels: Int64[np.ndarray, " n"], predicted: Int64[np.ndarray, " n"], num_classes: int) -> ClassMetrics:
    """Return the metrics of each class for samples with one label each."""
    counts = [np.bincount(some, minlength=num_classes) for some in (labels, predicted, labels[labels == predicted])]
    return _class_metrics(*counts)


def per_class_of_targets(
    predicted: Bool[np.ndarray, "n classes"], targets: UInt8[np.ndarray, "n classes"]
) -> ClassMetrics:
    """Return the metrics of each class for samples that can have several labels."""
    truth = targets > 0
    return _class_metrics(truth.sum(axis=0), predicted.sum(axis=0), (truth & predicted).sum(axis=0))


def balanced_accuracy(labels: Int64[np.ndarray, " n"], predicted: Int64[np.ndarray, " n"], num_classes: int) -> float:
    """Return the mean of the per-class accuracies (Brodersen et al. 2010). Classes without samples are skipped."""
    return float(np.nanmean(per_class(labels, predicted, num_classes).recall))


def average_precision(
    scores: Float[np.ndarray, "n classes"], truth: Bool[np.ndarray, "n classes"]
) -> Float64[np.ndarray, " classes"]:
    """Return the average precision of each class, or NaN for a class without a positive sample.

    Average precision is the mean, over the positive samples, of the precision among all samples whose score is at least
    that of the sample. It therefore does not depend on the order of samples with equal scores, as in scikit-learn.
    """
    result = np.full(scores.shape[1], np.nan)
    for number in np.flatnonzero(truth.any(axis=0)):
        order = np.argsort(-scores[:, number], kind="stable")
        falling, hits = -scores[order, number], truth[order, number]
        ranks = np.searchsorted(falling, falling[hits], side="right")
        result[number] = (np.cumsum(hits)[ranks - 1] / ranks).mean()
    return result


def mean_average_precision(scores: Float[np.ndarray, "n classes"], truth: Bool[np.ndarray, "n classes"]) -> float:
    """Return the mean of `average_precision` over the classes that have a positive sample. Without such classes, return
    0.
    """
    return float(np.nanmean(average_precision(scores, truth))) if truth.any() else 0.0


def f1_scores(predicted: Bool[np.ndarray, "n classes"], targets: UInt8[np.ndarray, "n classes"]) -> tuple[float, float]:
    """Return the F1 score of all decisions together (micro), and the mean F1 score over classes (macro).

    Classes that are neither true nor predicted for any sample are skipped. Both scores are NaN if all classes are
    skipped.
    """
    metrics = per_class_of_targets(predicted, targets)
    total = int(metrics.images.sum() + metrics.predicted.sum())
    micro = 2 * int((predicted & (targets > 0)).sum()) / total if total else np.nan
    defined = metrics.f1[~np.isnan(metrics.f1)]
    return micro, float(defined.mean()) if len(defined) else np.nan


def _class_metrics(
    images: Int64[np.ndarray, " classes"],
    predicted: Int64[np.ndarray, " classes"],
    right: Int64[np.ndarray, " classes"],
) -> ClassMetrics:
    with np.errstate(invalid="ignore"):
        return ClassMetrics(images, predicted, right / images, right / predicted, 2 * right / (images + predicted))


# Calibration of probabilities: cross-entropy, Brier score, calibration error and temperature scaling. Sums run in
# float64 over blocks of rows, so that logits are never copied as a whole.


BINS = 15
"""Number of bins of equal width (Guo et al. 1706.04599, section 2 and table 1)."""

TEMPERATURES = (1e-3, 1e3)
"""Smallest and largest temperature that `fit_temperature` returns."""

BLOCK = 1 << 18
"""Number of float64 values in a block (2 MB), which fits in the processor's cache."""


class PerSample(NamedTuple):
    """Values for each sample, computed in one pass over the logits."""

    predicted: Int64[np.ndarray, " n"]
    """The likeliest class."""
    confidence: Float64[np.ndarray, " n"]
    """The probability of the likeliest class."""
    cross_entropy: Float64[np.ndarray, " n"]
    """Cross-entropy in nats. With sigmoid outputs, it is the sum of the binary cross-entropies of all classes."""
    brier: Float64[np.ndarray, " n"]
    """Brier score: squared difference between probabilities and one-hot labels, summed over classes (Brier 1950). With
    softmax outputs, it is between 0 and 2."""


@dataclass(frozen=True)
class CalibrationBin:
    """One bar of a reliability diagram, for the samples with a confidence above `lower` and at most `upper`."""

    lower: float
    upper: float
    images: int
    accuracy: float | None
    """Fraction of correct samples, or None for an empty bin."""
    confidence: float | None
    """Mean confidence, or None for an empty bin."""


def per_sample(
    logits: Float[np.ndarray, "n classes"],
    labels: Int64[np.ndarray, " n"],
    *,
    scores: OutputKind = "softmax",
    temperature: float = 1.0,
) -> PerSample:
    """Return the likeliest class, confidence and losses of each sample. Probabilities are those of logits /
    temperature.

    Raise `ConfigError` if the temperature is not positive.
    """
    if not (0 < temperature < math.inf):
        raise ConfigError(f"temperature={temperature} is not a positive number")
    n = len(labels)
    predicted = logits.argmax(axis=1)
    confidence, cross_entropy, brier = np.empty(n), np.empty(n), np.empty(n)
    for rows, block in _blocks(logits):
        block /= temperature
        at = np.arange(len(block))
        probabilities, loss = _probabilities(block, scores)
        cross_entropy[rows] = loss - block[at, labels[rows]]
        confidence[rows] = probabilities[at, predicted[rows]]
        own = probabilities[at, labels[rows]]
        probabilities[at, labels[rows]] = 0
        brier[rows] = np.einsum("nc,nc->n", probabilities, probabilities) + (1 - own) ** 2
    return PerSample(predicted, confidence, cross_entropy, brier)


def binary_cross_entropy(
    logits: Float[np.ndarray, "n classes"], targets: UInt8[np.ndarray, "n classes"]
) -> Float64[np.ndarray, " n"]:
    """Return the sum over classes of the binary cross-entropy of each image, in nats."""
    losses = np.empty(len(logits))
    for rows, block in _blocks(logits):
        losses[rows] = np.logaddexp(0, block).sum(axis=1) - (targets[rows] * block).sum(axis=1)
    return losses


def binary_logits(logits: Float[np.ndarray, "n classes"]) -> Float32[np.ndarray, "n classes"]:
    """Return log(p / (1 - p)) for the softmax probability p of each class. A sigmoid of it gives the probability."""
    result = np.empty(logits.shape, np.float32)
    for rows, block in _blocks(logits):
        block -= block.max(axis=1, keepdims=True)
        powers = np.exp(block)
        at, top = np.arange(len(block)), block.argmax(axis=1)
        others = powers.sum(axis=1, keepdims=True) - powers
        powers[at, top] = 0
        others[at, top] = powers.sum(axis=1)  # a difference would lose small probabilities
        result[rows] = block - np.log(np.maximum(others, np.finfo(np.float64).tiny))
    return result


def calibration_gaps(
    confidence: Float64[np.ndarray, " n"], correct: Bool[np.ndarray, " n"], *, bins: int = BINS
) -> Float64[np.ndarray, "n bins"]:
    """Return a matrix with one row per sample and one column per confidence bin.

    The column of the sample's bin holds correctness (1 or 0) minus confidence. All other columns are 0.
    """
    gaps = np.zeros((len(confidence), bins))
    gaps[np.arange(len(confidence)), _bin_of(confidence, bins)] = correct - confidence
    return gaps


def expected_calibration_error(
    confidence: Float64[np.ndarray, " n"], correct: Bool[np.ndarray, " n"], *, bins: int = BINS
) -> float:
    """Return the mean of |accuracy - confidence| over bins, weighted by samples (Guo et al. 1706.04599, equation 3)."""
    return float(np.abs(calibration_gaps(confidence, correct, bins=bins).mean(axis=0)).sum())


def calibration_bins(
    confidence: Float64[np.ndarray, " n"], correct: Bool[np.ndarray, " n"], *, bins: int = BINS
) -> tuple[CalibrationBin, ...]:
    """Return the bars of a reliability diagram, including empty ones."""
    place = _bin_of(confidence, bins)
    counts, right, claimed = (
        np.bincount(place, weights, minlength=bins).tolist() for weights in (None, correct.astype(float), confidence)
    )
    return tuple(
        CalibrationBin(number / bins, (number + 1) / bins, int(n), hits / n if n else None, sums / n if n else None)
        for number, (n, hits, sums) in enumerate(zip(counts, right, claimed, strict=True))
    )


def fit_temperature(
    logits: Float[np.ndarray, "n classes"], labels: Int64[np.ndarray, " n"], *, scores: OutputKind = "softmax"
) -> float:
    """Return the temperature that minimises the cross-entropy of logits / temperature (Guo et al. 1706.04599, 4.2).

    Fit the temperature on held-out samples, and report the metrics of other samples. The temperature does not change
    which class is likeliest. The cross-entropy is convex in 1 / temperature, so there is one minimum. Newton steps
    inside a shrinking bracket find it to a relative error below 1e-9. The result is limited to [0.001, 1000], because
    the minimum is at 0 if every sample is correct, and at infinity if the logits are worse than chance.
    """
    low, high = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0]
    if _slope(logits, labels, low, scores)[0] >= 0:
        return TEMPERATURES[1]
    if _slope(logits, labels, high, scores)[0] <= 0:
        return TEMPERATURES[0]
    inverse = 1.0
    while high / low > 1 + 1e-12:
        slope, curvature = _slope(logits, labels, inverse, scores)
        low, high = (inverse, high) if slope < 0 else (low, inverse)
        step = inverse - slope / curvature if curvature > 0 else math.inf
        proposed = step if low < step < high else math.sqrt(low * high)
        if abs(proposed - inverse) <= 1e-10 * inverse:
            return 1 / proposed
        inverse = proposed
    return 1 / inverse


def _slope(
    logits: Float[np.ndarray, "n classes"], labels: Int64[np.ndarray, " n"], inverse: float, scores: OutputKind
) -> tuple[float, float]:
    """Return the first and second derivative of the mean cross-entropy with respect to 1 / temperature."""
    slope = curvature = 0.0
    for rows, block in _blocks(logits):
        own = block[np.arange(len(block)), labels[rows]]
        probabilities, _ = _probabilities(block * inverse, scores)
        expected = np.einsum("nc,nc->n", probabilities, block)
        slope += float((expected - own).sum())
        weighted = probabilities * block
        if scores == "softmax":
            curvature += float((weighted * block).sum() - (expected**2).sum())
        else:
            curvature += float((weighted * (1 - probabilities) * block).sum())
    return slope / len(labels), curvature / len(labels)


def _probabilities(
    block: Float64[np.ndarray, "b classes"], scores: OutputKind
) -> tuple[Float64[np.ndarray, "b classes"], Float64[np.ndarray, " b"]]:
    """Return the probabilities and the logarithm of the softmax denominator."""
    if scores == "sigmoid":
        return np.exp(-np.logaddexp(0, -block)), np.logaddexp(0, block).sum(axis=1)
    top = block.max(axis=1, keepdims=True)
    powers = np.exp(block - top)
    total = powers.sum(axis=1, keepdims=True)
    return powers / total, (top + np.log(total))[:, 0]


def _blocks(logits: Float[np.ndarray, "n classes"]) -> Iterator[tuple[slice, Float64[np.ndarray, "b classes"]]]:
    rows = max(BLOCK // logits.shape[1], 1)
    for first in range(0, len(logits), rows):
        part = slice(first, min(first + rows, len(logits)))
        yield part, logits[part].astype(np.float64)


def _bin_of(confidence: Float64[np.ndarray, " n"], bins: int) -> Int64[np.ndarray, " n"]:
    edges = np.arange(bins + 1) / bins
    return np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
