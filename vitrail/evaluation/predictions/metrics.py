"""Metrics of logits and labels: top-k accuracy, the confusion matrix, per-class and multi-label metrics.

The likeliest class is the first one with the largest logit. A label that is not a column of the logits raises
`DataError`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64, UInt8

from vitrail.errors import DataError


def check_labels(labels: Int64[np.ndarray, " n"], num_classes: int) -> None:
    """Raise `DataError` unless there are labels and all of them are in [0, num_classes)."""
    if not len(labels):
        raise DataError("no sample has a label, so there is nothing to measure")
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        raise DataError(
            f"label {labels[wrong][0]} is not a class index from 0 to {num_classes - 1}; select the samples that have "
            "the label of a class"
        )


def top_k(logits: Float[np.ndarray, "n classes"], labels: Int64[np.ndarray, " n"], k: int) -> Bool[np.ndarray, " n"]:
    """Return True for each sample whose label is among the `k` classes with the largest logits.

    Of classes with equal logits, the first one counts as larger.
    """
    check_labels(labels, logits.shape[1])
    own = np.take_along_axis(logits, labels[:, None], axis=1)
    earlier = np.arange(logits.shape[1]) < labels[:, None]
    rank = (logits > own).sum(axis=1) + ((logits == own) & earlier).sum(axis=1)
    return rank < k


def confusion(
    labels: Int64[np.ndarray, " n"], predicted: Int64[np.ndarray, " n"], num_classes: int
) -> Int64[np.ndarray, "classes classes"]:
    """Return the number of samples of each true class (row) that were predicted as each class (column)."""
    check_labels(labels, num_classes)
    cells = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes)


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
    check_labels(labels, num_classes)
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


def exact_match(
    predicted: Bool[np.ndarray, "n classes"], targets: UInt8[np.ndarray, "n classes"]
) -> Bool[np.ndarray, " n"]:
    """Return True for each sample whose predicted classes are exactly its true classes."""
    return (predicted == (targets > 0)).all(axis=1)


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
