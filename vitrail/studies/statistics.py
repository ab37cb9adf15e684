"""Statistics over seeds: means with their intervals, paired differences, and power laws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["LEVEL", "Estimate", "PowerLaw", "estimate", "paired", "power_law", "student_t"]

LEVEL = 0.05
"""Probability that a 95 % interval misses the true value."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval (Student's t), by default of 95 %. It is infinite with one seed."""

    mean: float
    deviation: float
    """Standard deviation over seeds, with n - 1 in the denominator. NaN with one seed."""
    low: float
    high: float
    count: int
    """Number of seeds."""


def student_t(freedom: int, level: float = LEVEL) -> float:
    """Return the value that Student's t exceeds on either side with the probability `level`, for a whole number of
    degrees of freedom. It is infinite without a degree of freedom."""
    if freedom < 1:
        return math.inf
    low, high = 0.0, 1.0
    while _inside(high, freedom) < 1 - level:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < 1 - level else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """Return the probability that Student's t lies between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for number in range(3 if is_odd else 2, freedom - 1, 2):
        term *= (number - 1) / number * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def estimate(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """Return the mean of at least one value with its interval, which misses the true mean with the probability
    `level`."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan, -math.inf, math.inf, len(values))
    deviation = statistics.stdev(values)
    half = student_t(len(values) - 1, level) * deviation / math.sqrt(len(values))
    return Estimate(mean, deviation, mean - half, mean + half, len(values))


def paired(first: Mapping[int, float], second: Mapping[int, float], level: float = LEVEL) -> Estimate | None:
    """Return the mean difference of values with the same seed, or None if no seed has both values."""
    differences = [value - second[seed] for seed, value in first.items() if seed in second]
    return estimate(differences, level) if differences else None


@dataclass(frozen=True)
class PowerLaw:
    """A line in logarithms: log y = intercept + slope log x."""

    slope: float
    intercept: float

    def log_x_at(self, y: float) -> float:
        """Return the logarithm of the x at which the law has the value y. The x itself can be too large for a float."""
        return (math.log(y) - self.intercept) / self.slope


def power_law(points: Sequence[tuple[float, float]]) -> PowerLaw | None:
    """Return the least-squares fit to the logarithms of the points, or None without two different positive x."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    slope, intercept = statistics.linear_regression([x for x, _ in logs], [y for _, y in logs])
    return PowerLaw(slope, intercept)
