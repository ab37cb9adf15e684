"""The difference between two models that were measured on the same images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool

from vitrail.evaluation.predictions.bootstrap import LEVEL, Metric


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


def difference_interval(only_first: int, only_second: int, images: int, level: float = LEVEL) -> tuple[float, float]:
    """Return the ends of the interval of the accuracy of one model minus that of another on the same images.

    The interval is the adjusted Wald interval of Bonett & Price (2012): one image is added to each of the two counts
    of images on which one model alone is right. Images with the same result of both models only enter the total, so the
    interval is narrower than two intervals that are compared. It has a width even if both models agree on all images.
    """
    first, second = ((count + 1) / (images + 2) for count in (only_first, only_second))
    centre = first - second
    half = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt((first + second - centre**2) / (images + 2))
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
