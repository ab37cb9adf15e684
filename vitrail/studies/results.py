"""The results of a study: metrics of every point by seed, and the trials that chose the learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitrail.studies.statistics import LEVEL, Estimate, estimate, paired

__all__ = ["PointResult", "Results", "Trial"]


@dataclass(frozen=True)
class Trial:
    """A learning rate that was tried for a stage, with the result on the cut of the training split."""

    tuning: str
    stage: int
    rate: float
    value: float | None
    """Metric on the cut. None if training diverged."""
    chosen: bool
    cell: str


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """The measurements of a point."""

    arm: str
    x: float | None
    label: str
    rates: tuple[float, ...]
    """The chosen learning rate of every stage."""
    metrics: Mapping[int, Mapping[str, float]]
    """Metrics by seed, without the seeds with which training diverged."""
    diverged: Mapping[int, str]
    """Reason of each seed with which training diverged."""
    cells: Mapping[int, str]
    """Name of the cell that measured each seed."""
    flops: float
    """FLOPs of the training of one seed, with that of its first stage."""
    seconds: Mapping[int, float]
    parameters: int

    @property
    def name(self) -> str:
        return f"{self.arm} at {self.label}" if self.label else self.arm

    def values(self, metric: str) -> dict[int, float]:
        """Return the metric by seed."""
        return {seed: found[metric] for seed, found in self.metrics.items() if metric in found}

    def estimate(self, metric: str) -> Estimate | None:
        """Return the mean over the seeds that finished, or None if none did."""
        values = list(self.values(metric).values())
        return estimate(values) if values else None


@dataclass(frozen=True)
class Results:
    """All measurements of a study."""

    points: Sequence[PointResult]
    trials: Sequence[Trial] = ()
    machines: Sequence[str] = ()
    """Device and number format of the machines that ran the cells, without duplicates."""

    def point(self, name: str) -> PointResult | None:
        """Return the point of this name, or None if it was not measured."""
        return next((point for point in self.points if point.name == name), None)

    def of_arm(self, arm: str) -> list[PointResult]:
        """Return the points of an arm, in the order of the x axis."""
        return sorted((point for point in self.points if point.arm == arm), key=lambda point: point.x or 0.0)

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(point.arm for point in self.points))

    def difference(self, first: str, second: str, metric: str, level: float = LEVEL) -> Estimate | None:
        """Return the paired difference of two points over seeds, or None if one of them was not measured. Its interval
        misses the true difference with the probability `level`."""
        one, two = self.point(first), self.point(second)
        return None if one is None or two is None else paired(one.values(metric), two.values(metric), level)
