"""Axes of charts: their range, and ticks at round values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["UNBOUNDED", "Axis", "log_ticks", "make_axis", "short_number"]

UNBOUNDED = (-math.inf, math.inf)


@dataclass(frozen=True)
class Axis:
    """The range of values that a chart shows, and the values of its ticks."""

    low: float
    high: float
    step: float
    """Distance between two ticks."""
    ticks: tuple[float, ...]

    def fraction(self, value: float) -> float:
        """Return the position of a value on the axis: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)

    def label(self, tick: float, unit: str = "") -> str:
        """Return a tick's label, with enough digits to distinguish neighbouring ticks."""
        largest = max(abs(self.low), abs(self.high))
        if 1e-4 <= largest < 1e7:
            return f"{tick:,.{max(_decimals(self.step), 0)}f}{unit}"
        return f"{tick:.{math.floor(math.log10(largest)) + _decimals(self.step) + 1}g}{unit}"


def make_axis(
    values: Iterable[float],
    *,
    round_ends: bool = True,
    bounds: tuple[float, float] = UNBOUNDED,
    integers: bool = False,
    steps: int = 5,
) -> Axis:
    """Return an axis for finite values, with about `steps` steps of 1, 2 or 5 times a power of ten.

    With `round_ends` the axis ends at ticks, otherwise at the smallest and the largest value. The axis never leaves
    `bounds`, which contain all values. With `integers` every tick is a whole number. If all values are equal, the axis
    extends on both sides of them.
    """
    found = list(values)
    low, high = min(found), max(found)
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        margin = max(0.1 * abs(high), 1.0 if integers or not high else 0.0)
        low, high = max(low - margin, bounds[0]), min(high + margin, bounds[1])
    step = _round_step((high - low) / steps)
    step = max(step, 1.0) if integers else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(number * step, _decimals(step)) for number in range(first, last + 1))
    if round_ends:
        low, high = max(ticks[0], bounds[0]), min(ticks[-1], bounds[1])
    return Axis(low, high, step, tuple(tick for tick in ticks if low <= tick <= high))


def log_ticks(low: float, high: float) -> list[float]:
    """Return round values between two powers of ten, given by their exponents. There are at most about six."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low - 1e-9 <= math.log10(tick) <= high + 1e-9]
        if len(ticks) <= 6:
            break
    return ticks


def short_number(value: float) -> str:
    """Return the label of a tick on a logarithmic axis, such as 0.5, 200 or 2e13."""
    return f"{value:g}" if 1e-3 <= value < 1e5 else f"{value:.0e}".replace("e+", "e")


def _decimals(step: float) -> int:
    """Return the number of decimal places that a step needs. It is negative for steps of 10 and more.

    The step is 1, 2 or 5 times a power of ten.
    """
    return -math.floor(math.log10(step) + 1e-9)


def _round_step(smallest: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `smallest`."""
    power = 10.0 ** math.floor(math.log10(smallest))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest * (1 - 1e-9))
