"""Claims about the results of a study, and their verdict, which is computed from the numbers.

A claim is "shown" if the 95 % interval of the paired difference over seeds lies wholly on its side, "contradicted" if
the interval lies wholly on the other side, and "not shown" in all other cases. A claim of several comparisons is shown
if every comparison shows it, which needs no correction for their number. It is contradicted if one comparison
contradicts it. The interval for that misses the true difference with a probability of 5 % divided by the number of
comparisons (Bonferroni).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import LinearRegression
from typing import Literal

# Claims about compute: power laws of the error along the frontier of an arm, and the compute for equal accuracy.


MAX_LOG = 700.0
"""Largest logarithm of a ratio that is shown as a number."""


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of compute and error that have a smaller error than every point of less compute, in the order
    of compute."""
    found: list[tuple[float, float]] = []
    for x, error in sorted(points):
        if not found or error < found[-1][1]:
            found.append((x, error))
    return found


def _lines(results: Results, arm: str) -> dict[int, list[tuple[float, float]]]:
    """Return the frontier of an arm for each seed. All points of the arm have all seeds."""
    points = results.of_arm(arm)
    return {
        seed: frontier([(point.x or 0.0, 1 - point.values("accuracy")[seed]) for point in points])
        for seed in sorted(points[0].metrics)
    }


def _laws(results: Results, arm: str) -> dict[int, LinearRegression]:
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
        if problem := _unmeasured(results, *results.names_of(self.arm)):
            return Finding(self.text, "not shown", (problem,))
        laws = _laws(results, self.arm)
        if not laws:
            return Finding(self.text, "not shown", (f"{self.arm} has no two points of different compute and error",))
        found = estimate([law.slope for law in laws.values()])
        return Finding(
            self.text,
            _sign(estimate([-law.slope for law in laws.values()])),
            (f"exponent of the error of {self.arm}: {found.mean:.3f}{_interval(found, '{:.3f}'.format)}",),
        )


@dataclass(frozen=True)
class LessCompute:
    """The first arm needs less compute than the second for the same error, by the power laws of both."""

    text: str
    first: str
    second: str

    def check(self, results: Results) -> Finding:
        """Return the verdict on the ratio of the compute. The error is the smallest one that both arms reach."""
        if problem := _unmeasured(results, *results.names_of(self.first), *results.names_of(self.second)):
            return Finding(self.text, "not shown", (problem,))
        lines = [_lines(results, arm) for arm in (self.first, self.second)]
        laws = [_laws(results, arm) for arm in (self.first, self.second)]
        seeds = sorted(seed for seed in laws[0] if seed in laws[1] and laws[0][seed].slope < 0 > laws[1][seed].slope)
        if not seeds:
            return Finding(self.text, "not shown", ("no seed has a falling error of both arms",))
        error = max(sum(min(error for _, error in line[seed]) for seed in seeds) / len(seeds) for line in lines)
        if not error:
            return Finding(self.text, "not shown", ("both arms reach an error of 0, which no power law has",))
        found = estimate([log_x_at(laws[1][seed], error) - log_x_at(laws[0][seed], error) for seed in seeds])
        mean = math.exp(min(found.mean, MAX_LOG))
        ratio = f"{mean:.2f}" if 0.1 <= mean < 1000 else f"{mean:.2g}"
        return Finding(
            self.text,
            _sign(found),
            (
                f"compute of {self.second} divided by that of {self.first} at an error of {error:.2%}: {ratio}"
                + _interval(found, lambda end: f"{math.exp(min(end, MAX_LOG)):.2g}"),
            ),
        )


# Statistics over seeds: means with their intervals, paired differences, and power laws.


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


def log_x_at(law: LinearRegression, y: float) -> float:
    """Return the logarithm of the x at which a power law has the value y. The x itself can be too large for a float."""
    return (math.log(y) - law.intercept) / law.slope


def power_law(points: Sequence[tuple[float, float]]) -> LinearRegression | None:
    """Return the least-squares line through the logarithms of the points, log y = intercept + slope log x, or None
    without two different positive x."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    return statistics.linear_regression([x for x, _ in logs], [y for _, y in logs])


Outcome = Literal["shown", "not shown", "contradicted"]


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim."""

    claim: str
    outcome: Outcome
    evidence: tuple[str, ...]
    """The numbers that the verdict is computed from, a sentence for each comparison."""


@dataclass(frozen=True)
class Better:
    """The first point of each pair has a higher metric than the second."""

    text: str
    pairs: tuple[tuple[str, str], ...]
    metric: str = "accuracy"

    def check(self, results: Results) -> Finding:
        """Return the verdict over all pairs."""
        outcomes: list[Outcome] = []
        evidence = []
        level = LEVEL / max(1, len(self.pairs))
        for first, second in self.pairs:
            if problem := _unmeasured(results, first, second):
                outcomes.append("not shown")
                evidence.append(problem)
                continue
            found = results.difference(first, second, self.metric)
            strict = results.difference(first, second, self.metric, level)
            against = strict is not None and strict.high < 0
            outcomes.append(
                "contradicted" if against else "shown" if found is not None and found.low > 0 else "not shown"
            )
            shown, size = (strict, level) if against else (found, LEVEL)
            evidence.append(f"{first} minus {second}: {difference_text(shown, size)}")
        return Finding(self.text, _all_of(outcomes), tuple(evidence))


@dataclass(frozen=True)
class Alike:
    """All points have the same metric within a margin: every interval of a difference lies inside the margin."""

    text: str
    points: tuple[str, ...]
    margin: float = 0.01
    """Largest difference that counts as equal, as a fraction of the images."""
    metric: str = "accuracy"

    def check(self, results: Results) -> Finding:
        """Return the verdict over all pairs. The evidence is a pair that contradicts the claim, or else the pair whose
        interval extends farthest."""
        if problem := _unmeasured(results, *self.points):
            return Finding(self.text, "not shown", (problem,))
        pairs = list(itertools.combinations(self.points, 2))
        level = LEVEL / max(1, len(pairs))
        outcomes: list[Outcome] = []
        evidence: list[tuple[bool, float, str]] = []
        for first, second in pairs:
            found = results.difference(first, second, self.metric)
            strict = results.difference(first, second, self.metric, level)
            if found is None or strict is None:
                outcomes.append("not shown")
                continue
            inside = -self.margin < found.low and found.high < self.margin
            outside = strict.low > self.margin or strict.high < -self.margin
            outcomes.append("shown" if inside else "contradicted" if outside else "not shown")
            text = difference_text(strict, level) if outside else difference_text(found)
            extent = max(abs(found.low), abs(found.high))
            evidence.append((outside, extent, f"{first} minus {second}: {text}"))
        which = f"one of {len(pairs)} comparisons: " if len(pairs) > 1 else ""
        margin = f"differences of less than {100 * self.margin:g}% of the images count as equal"
        widest = max(evidence, default=(False, 0.0, "nothing to compare"))[2]
        return Finding(self.text, _all_of(outcomes), (f"{which}{widest}; {margin}",))


@dataclass(frozen=True)
class GainShrinks:
    """The gain of the first pair is larger than the gain of the second pair."""

    text: str
    few: tuple[str, str]
    many: tuple[str, str]
    metric: str = "accuracy"

    def check(self, results: Results) -> Finding:
        """Return the verdict on the difference of both gains."""
        if problem := _unmeasured(results, *self.few, *self.many):
            return Finding(self.text, "not shown", (problem,))
        gains = []
        for first, second in (self.few, self.many):
            one, two = results.point(first), results.point(second)
            assert one is not None and two is not None
            values, base = one.values(self.metric), two.values(self.metric)
            # Equal gains differ by rounding errors, which would be a certain difference if all seeds had them.
            gains.append({seed: round(value - base[seed], 12) for seed, value in values.items() if seed in base})
        found = paired(gains[0], gains[1])
        text = f"gain of {self.few[0]} minus gain of {self.many[0]}: {difference_text(found)}"
        return Finding(self.text, _sign(found), (text,))


Claim = Better | Alike | GainShrinks | PowerLawFit | LessCompute
"""A statement that results confirm or not."""


def difference_text(found: Estimate | None, level: float = LEVEL) -> str:
    """Return a difference in points with its interval and the number of seeds. The interval misses the true difference
    with the probability `level`."""
    if found is None:
        return "no seed has both"
    return f"{100 * found.mean:+.2f} points{_interval(found, lambda end: f'{100 * end:+.2f}', level)}"


def _interval(found: Estimate, text: Callable[[float], str], level: float = LEVEL) -> str:
    """Return the end of a sentence with the interval of an estimate. `text` formats its ends."""
    if found.count < 2:
        return " with one seed, which has no interval"
    return f", {100 * (1 - level):.4g} % interval {text(found.low)} to {text(found.high)} ({found.count} seeds)"


def _sign(found: Estimate | None) -> Outcome:
    """Return the verdict on the claim that a value is above 0."""
    if found is None:
        return "not shown"
    return "shown" if found.low > 0 else "contradicted" if found.high < 0 else "not shown"


def _all_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Return "shown" if all comparisons show the claim, and "contradicted" if one contradicts it."""
    if "contradicted" in outcomes:
        return "contradicted"
    return "shown" if outcomes and all(one == "shown" for one in outcomes) else "not shown"


def _unmeasured(results: Results, *names: str) -> str:
    """Return the reason why points cannot be compared, or an empty text."""
    for name in names:
        point = results.point(name)
        if point is None:
            return f"{name} was not measured"
        if point.diverged:
            return f"{name} diverged with {len(point.diverged)} of {len(point.cells)} seeds"
    return ""


# The results of a study: metrics of every point by seed, and the trials that chose the learning rates.


@dataclass(frozen=True)
class TuningTrial:
    """A learning rate that was tried for a stage, with the result on the cut of the training split. It is a row of
    trials.csv."""

    point: str
    """Name under which points share the chosen learning rates."""
    stage: int
    """Number of the stage, from 1."""
    learning_rate: float
    validation_accuracy: float | None
    """None if training diverged."""
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
    trials: Sequence[TuningTrial] = ()
    machines: Sequence[str] = ()
    """Device and number format of the machines that ran the cells, without duplicates."""

    def point(self, name: str) -> PointResult | None:
        """Return the point of this name, or None if it was not measured."""
        return next((point for point in self.points if point.name == name), None)

    def of_arm(self, arm: str) -> list[PointResult]:
        """Return the points of an arm, in the order of the x axis."""
        return sorted((point for point in self.points if point.arm == arm), key=lambda point: point.x or 0.0)

    def names_of(self, arm: str) -> list[str]:
        """Return the names of the points of an arm, or the arm itself if it was not measured."""
        return [point.name for point in self.of_arm(arm)] or [arm]

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(point.arm for point in self.points))

    def difference(self, first: str, second: str, metric: str, level: float = LEVEL) -> Estimate | None:
        """Return the paired difference of two points over seeds, or None if one of them was not measured. Its interval
        misses the true difference with the probability `level`."""
        one, two = self.point(first), self.point(second)
        return None if one is None or two is None else paired(one.values(metric), two.values(metric), level)
