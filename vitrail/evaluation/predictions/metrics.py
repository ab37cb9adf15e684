"""Figures of logits and labels: top-k, confusion, figures of each class, and those of images with several labels.

Everywhere the likeliest class is the first of those with the largest logit, as argmax has it. Labels are columns of the
logits; a label that is not one raises `DataError`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64, UInt8

from vitrail.errors import DataError

__all__ = [
    "ClassMetrics",
    "average_precision",
    "balanced_accuracy",
    "check_labels",
    "confusion",
    "exact_match",
    "f1_scores",
    "mean_average_precision",
    "per_class",
    "per_class_of_targets",
    "top_k",
]


def check_labels(labels: Int64[np.ndarray, " n"], num_classes: int) -> None:
    """Raises `DataError` unless all are in [0, num_classes)."""
    if not len(labels):
        raise DataError("there is no sample with a label, so there is nothing to measure")
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        raise DataError(
            f"label {labels[wrong][0]} is not one of {num_classes} classes, numbered from 0; leave out samples without "
            "a label"
        )


def top_k(logits: Float[np.ndarray, "n classes"], labels: Int64[np.ndarray, " n"], k: int) -> Bool[np.ndarray, " n"]:
    """Whether each label is among the `k` classes of the largest logits; of equal ones the first count as larger."""
    check_labels(labels, logits.shape[1])
    own = np.take_along_axis(logits, labels[:, None], axis=1)
    earlier = np.arange(logits.shape[1]) < labels[:, None]
    rank = (logits > own).sum(axis=1) + ((logits == own) & earlier).sum(axis=1)
    return rank < k


def confusion(
    labels: Int64[np.ndarray, " n"], predicted: Int64[np.ndarray, " n"], num_classes: int
) -> Int64[np.ndarray, "classes classes"]:
    """How many samples of each true class (row) were taken for each class (column)."""
    check_labels(labels, num_classes)
    cells = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes)


@dataclass(frozen=True, eq=False)
class ClassMetrics:
    """Figures of each class, in [0, 1]; NaN where they would be 0 / 0."""

    images: Int64[np.ndarray, " classes"]
    """Samples of the class."""
    predicted: Int64[np.ndarray, " classes"]
    """Samples that were taken for it."""
    recall: Float64[np.ndarray, " classes"]
    """The share of its samples that were taken for it: the accuracy within the class."""
    precision: Float64[np.ndarray, " classes"]
    """The share of what was taken for it that is of it."""
    f1: Float64[np.ndarray, " classes"]
    """The harmonic mean of the two: 2 right / (images + predicted)."""


def per_class(labels: Int64[np.ndarray, " n"], predicted: Int64[np.ndarray, " n"], num_classes: int) -> ClassMetrics:
    """The figures of each class, where a sample has one label."""
    check_labels(labels, num_classes)
    counts = [np.bincount(some, minlength=num_classes) for some in (labels, predicted, labels[labels == predicted])]
    return _class_metrics(*counts)


def per_class_of_targets(
    predicted: Bool[np.ndarray, "n classes"], targets: UInt8[np.ndarray, "n classes"]
) -> ClassMetrics:
    """The same where a sample can have several labels."""
    truth = targets > 0
    return _class_metrics(truth.sum(axis=0), predicted.sum(axis=0), (truth & predicted).sum(axis=0))


def balanced_accuracy(labels: Int64[np.ndarray, " n"], predicted: Int64[np.ndarray, " n"], num_classes: int) -> float:
    """The mean over the classes that have samples of the accuracy within each (Brodersen et al. 2010)."""
    return float(np.nanmean(per_class(labels, predicted, num_classes).recall))


def average_precision(
    scores: Float[np.ndarray, "n classes"], truth: Bool[np.ndarray, "n classes"]
) -> Float64[np.ndarray, " classes"]:
    """Of each class: the share of true samples among those ranked at least as high, averaged over the true ones.

    Samples of equal score stand in their order. NaN for a class without a true sample.
    """
    result = np.full(scores.shape[1], np.nan)
    ranks = np.arange(1, len(scores) + 1)
    for number in np.flatnonzero(truth.any(axis=0)):
        hits = truth[np.argsort(-scores[:, number], kind="stable"), number]
        result[number] = (np.cumsum(hits)[hits] / ranks[hits]).mean()
    return result


def mean_average_precision(scores: Float[np.ndarray, "n classes"], truth: Bool[np.ndarray, "n classes"]) -> float:
    """Return the mean of `average_precision` over the classes that have a true sample; 0 if none has one."""
    return float(np.nanmean(average_precision(scores, truth))) if truth.any() else 0.0


def exact_match(
    predicted: Bool[np.ndarray, "n classes"], targets: UInt8[np.ndarray, "n classes"]
) -> Bool[np.ndarray, " n"]:
    """Whether a sample is taken for all of its classes and for no other."""
    return (predicted == (targets > 0)).all(axis=1)


def f1_scores(predicted: Bool[np.ndarray, "n classes"], targets: UInt8[np.ndarray, "n classes"]) -> tuple[float, float]:
    """F1 of all decisions together (micro), and its mean over classes (macro), without those that are neither true nor
    predicted of any sample. NaN where there is nothing to tell."""
    figures = per_class_of_targets(predicted, targets)
    total = int(figures.images.sum() + figures.predicted.sum())
    micro = 2 * int((predicted & (targets > 0)).sum()) / total if total else np.nan
    told = figures.f1[~np.isnan(figures.f1)]
    return micro, float(told.mean()) if len(told) else np.nan


def _class_metrics(
    images: Int64[np.ndarray, " classes"],
    predicted: Int64[np.ndarray, " classes"],
    right: Int64[np.ndarray, " classes"],
) -> ClassMetrics:
    with np.errstate(invalid="ignore"):
        return ClassMetrics(images, predicted, right / images, right / predicted, 2 * right / (images + predicted))
