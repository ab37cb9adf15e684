"""A rate that does not swing with every report."""

from __future__ import annotations

import math

__all__ = ["SmoothedRate"]


class SmoothedRate:
    """Count per second over about the last minute, from reports of different lengths.

    Counts and seconds are summed separately, and both sums decay by exp(-seconds / 60). A short report therefore
    changes the rate little. The first report contains the start-up, so it is dropped when the second one arrives.
    """

    SECONDS = 60.0

    def __init__(self) -> None:
        self._count = 0.0
        self._seconds = 0.0
        self._reports = 0

    def add(self, count: int, seconds: float) -> float:
        """Add a report, and return the rate. `seconds` is above 0."""
        kept = 0.0 if self._reports == 1 else math.exp(-seconds / self.SECONDS)
        self._count = kept * self._count + count
        self._seconds = kept * self._seconds + seconds
        self._reports += 1
        return self._count / self._seconds
