"""Claims about compute: power laws of the error along the frontier of an arm, and the compute for equal accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitrail.studies.claims import Finding, Outcome
from vitrail.studies.results import Results
from vitrail.studies.statistics import PowerLaw, estimate, power_law

__all__ = ["LessCompute", "PowerLawFit", "frontier"]

MAX_LOG = 700.0
"""Largest logarithm of a ratio that is shown as a number."""

Line = Sequence[tuple[float, float]]
"""Points of compute and error."""


def frontier(points: Line) -> list[tuple[float, float]]:
    """Return the points with a smaller error than every point of less compute, in the order of compute."""
    found: list[tuple[float, float]] = []
    for x, error in sorted(points):
        if not found or error < found[-1][1]:
            found.append((x, error))
    return found


def _lines(results: Results, arm: str) -> dict[int, list[tuple[float, float]]]:
    """Return the frontier of an arm for each seed that all its points have."""
    points = results.of_arm(arm)
    seeds = set.intersection(*(set(point.values("accuracy")) for point in points)) if points else set()
    return {
        seed: frontier([(point.x or 0.0, 1 - point.values("accuracy")[seed]) for point in points])
        for seed in sorted(seeds)
    }


def _laws(results: Results, arm: str) -> dict[int, PowerLaw]:
    """Return the power law of the error of an arm for each seed."""
    laws = {seed: power_law(line) for seed, line in _lines(results, arm).items()}
    return {seed: law for seed, law in laws.items() if law is not None}


@dataclass(frozen=True)
class PowerLawFit:
    """The error of an arm falls with compute: the exponent of the power law is negative."""

    text: str
    arm: str

    def check(self, results: Results) -> Finding:
        """Return the verdict on the exponent over seeds."""
        laws = _laws(results, self.arm)
        if not laws:
            return Finding(self.text, "not shown", (f"{self.arm} has no two points of different compute and error",))
        found = estimate([law.slope for law in laws.values()])
        text = f"exponent of the error of {self.arm}: {found.mean:.3f}"
        if found.count < 2:
            return Finding(self.text, "not shown", (f"{text} with one seed, which has no interval",))
        interval = f"95 % interval {found.low:.3f} to {found.high:.3f} ({found.count} seeds)"
        outcome: Outcome = "shown" if found.high < 0 else "contradicted" if found.low > 0 else "not shown"
        return Finding(self.text, outcome, (f"{text}, {interval}",))


@dataclass(frozen=True)
class LessCompute:
    """The first arm needs less compute than the second for the same error, by the power laws of both."""

    text: str
    first: str
    second: str

    def check(self, results: Results) -> Finding:
        """Return the verdict on the ratio of the compute. The error is the smallest one that both arms reach."""
        if missing := [arm for arm in (self.first, self.second) if not results.of_arm(arm)]:
            return Finding(self.text, "not shown", (f"{missing[0]} was not measured",))
        lines = [_lines(results, arm) for arm in (self.first, self.second)]
        laws = [_laws(results, arm) for arm in (self.first, self.second)]
        seeds = sorted(seed for seed in laws[0] if seed in laws[1] and laws[0][seed].slope < 0 > laws[1][seed].slope)
        if not seeds:
            return Finding(self.text, "not shown", ("no seed has a falling error of both arms",))
        error = max(_mean_of_best([line[seed] for seed in seeds]) for line in lines)
        if not error:
            return Finding(self.text, "not shown", ("both arms reach an error of 0, which no power law has",))
        found = estimate([laws[1][seed].log_x_at(error) - laws[0][seed].log_x_at(error) for seed in seeds])
        mean, low, high = (math.exp(min(end, MAX_LOG)) for end in (found.mean, found.low, found.high))
        text = f"compute of {self.second} divided by that of {self.first} at an error of {error:.2%}: "
        text += f"{mean:.2f}" if mean < 1000 else f"{mean:.2g}"
        if found.count < 2:
            return Finding(self.text, "not shown", (f"{text} with one seed, which has no interval",))
        outcome: Outcome = "shown" if found.low > 0 else "contradicted" if found.high < 0 else "not shown"
        text += f", 95 % interval {low:.2g} to {high:.2g} ({found.count} seeds)"
        return Finding(self.text, outcome, (text,))


def _mean_of_best(lines: Sequence[Line]) -> float:
    """Return the mean over seeds of the smallest error."""
    return sum(min(error for _, error in line) for line in lines) / len(lines)
