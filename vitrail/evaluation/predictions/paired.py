"""The difference between two models that were measured on the same images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from vitrail.evaluation.predictions.bootstrap import Metric, interval, resampled_means

__all__ = ["PairedDifference", "mcnemar", "paired_difference"]


@dataclass(frozen=True)
class PairedDifference:
    """The images on which two models are right, and the difference of their accuracies."""

    both: int
    """Number of images on which both models are right."""
    only_first: int
    only_second: int
    neither: int
    difference: Metric
    """Accuracy of the first model minus that of the second, with a bootstrap interval over images."""
    p: float
    """Probability of a difference of this size or more if both models are equally accurate (`mcnemar`)."""

    @property
    def images(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither


def paired_difference(
    first: Bool[np.ndarray, " n"], second: Bool[np.ndarray, " n"], *, resamples: int = 1000, seed: int = 0
) -> PairedDifference:
    """Return the paired difference of two models. The arrays are True for each image on which a model is right.

    Each resample draws images with the answers of both models, so the interval is narrower than two intervals that are
    compared. With 0 resamples there is no interval.
    """
    gains = first.astype(np.float64) - second.astype(np.float64)
    means = resampled_means(gains[:, None], resamples=resamples, seed=seed)[:, 0]
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    both = int((first & second).sum())
    return PairedDifference(
        both=both,
        only_first=only_first,
        only_second=only_second,
        neither=len(first) - both - only_first - only_second,
        difference=interval(float(gains.mean()), means),
        p=mcnemar(only_first, only_second),
    )


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
