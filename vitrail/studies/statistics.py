"""Statistics over seeds: means with their intervals, paired differences, and power laws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Estimate", "PowerLaw", "estimate", "paired", "power_law", "student_t"]

T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's t distribution for 1 to 30 degrees of freedom."""

NORMAL_QUANTILE = 1.96


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval (Student's t). With one seed, the interval is infinite."""

    mean: float
    deviation: float
    """Standard deviation over seeds, with n - 1 in the denominator. NaN with one seed."""
    low: float
    high: float
    count: int
    """Number of seeds."""


def student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution. Beyond 30 degrees of freedom it is an expansion."""
    if freedom < 1:
        return math.inf
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = NORMAL_QUANTILE
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value with its interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan, -math.inf, math.inf, len(values))
    deviation = statistics.stdev(values)
    half = student_t(len(values) - 1) * deviation / math.sqrt(len(values))
    return Estimate(mean, deviation, mean - half, mean + half, len(values))


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """Return the mean difference of values with the same seed, or None if no seed has both values."""
    differences = [value - second[seed] for seed, value in first.items() if seed in second]
    return estimate(differences) if differences else None


@dataclass(frozen=True)
class PowerLaw:
    """A line in logarithms: log y = intercept + slope log x."""

    slope: float
    intercept: float

    def x_at(self, y: float) -> float:
        """Return the x at which the law has the value y."""
        return math.exp((math.log(y) - self.intercept) / self.slope)

    def y_at(self, x: float) -> float:
        return math.exp(self.intercept + self.slope * math.log(x))


def power_law(points: Sequence[tuple[float, float]]) -> PowerLaw | None:
    """Return the least-squares fit to the logarithms of the points, or None without two different positive x."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    slope, intercept = statistics.linear_regression([x for x, _ in logs], [y for _, y in logs])
    return PowerLaw(slope, intercept)
