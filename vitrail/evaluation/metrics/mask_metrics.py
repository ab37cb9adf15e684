"""Metrics of segmentation: intersection over union and pixel accuracy, from a confusion matrix for each image."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from vitrail.data.objects import IGNORED
from vitrail.evaluation.metrics.intervals import Metric, interval, resampled_means


def pixel_confusion(
    truth: UInt8[np.ndarray, "h w"], predicted: Int64[np.ndarray, "h w"], classes: int
) -> Int64[np.ndarray, "classes classes"]:
    """Return the number of pixels of each true class (rows) and predicted class (columns). Pixels
    without a true class are not counted."""
    known = truth != IGNORED
    pairs = truth[known].astype(np.int64) * classes + predicted[known]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def intersection_over_union(
    confusion: Int64[np.ndarray, "*n k k"] | Float64[np.ndarray, "*n k k"],
) -> Float64[np.ndarray, "*n k"]:
    """Return the intersection over union of each class. It is NaN for a class that is neither true nor predicted in any
    pixel."""
    right = np.diagonal(confusion, axis1=-2, axis2=-1).astype(np.float64)
    union = confusion.sum(axis=-1) + confusion.sum(axis=-2) - right
    return np.divide(right, union, out=np.full(right.shape, np.nan), where=union > 0)


def mask_metrics(confusions: Int64[np.ndarray, "n k k"], *, resamples: int = 1000, seed: int = 0) -> dict[str, Metric]:
    """Return the mean intersection over union (`mean_iou`) and the pixel accuracy of n images, with bootstrap
    intervals over the images.

    All pixels of all images are counted together, as usual. Classes that are neither true nor predicted in a resample
    are skipped in that resample.
    """
    count, classes, _ = confusions.shape
    total = confusions.sum(axis=0)
    means = resampled_means(confusions.reshape(count, -1).astype(np.float64), resamples=resamples, seed=seed).reshape(
        -1, classes, classes
    )
    right, all_pixels = np.trace(total), max(1, total.sum())
    pixels = means.sum(axis=(1, 2))
    accuracies = np.divide(np.trace(means, axis1=1, axis2=2), pixels, out=np.zeros(len(means)), where=pixels > 0)
    return {
        "mean_iou": interval(_mean_iou(total[None]).item(), _mean_iou(means)),
        "pixel_accuracy": interval(float(right / all_pixels), accuracies),
    }


def _mean_iou(
    confusions: Int64[np.ndarray, "n k k"] | Float64[np.ndarray, "n k k"],
) -> Float64[np.ndarray, " n"]:
    found = intersection_over_union(confusions)
    known = ~np.isnan(found)
    return np.where(known, found, 0).sum(axis=1) / np.maximum(1, known.sum(axis=1))
