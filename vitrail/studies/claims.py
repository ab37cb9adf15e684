"""Claims about the results of a study, and their verdict, which is computed from the numbers.

A claim is "shown" if the 95 % interval of the paired difference over seeds lies wholly on its side, "contradicted" if
the interval lies wholly on the other side, and "not shown" in all other cases. A claim of several comparisons is shown
if every comparison shows it, which needs no correction for their number. It is contradicted if one comparison
contradicts it. The interval for that misses the true difference with a probability of 5 % divided by the number of
comparisons (Bonferroni).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from vitrail.studies.results import Results
from vitrail.studies.statistics import LEVEL, Estimate, paired

__all__ = ["Alike", "Better", "Claim", "Finding", "GainShrinks", "Outcome", "difference_text"]

Outcome = Literal["shown", "not shown", "contradicted"]


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim."""

    claim: str
    outcome: Outcome
    evidence: tuple[str, ...]
    """The numbers that the verdict is computed from, a sentence for each comparison."""


@runtime_checkable
class Claim(Protocol):
    """A statement that results confirm or not."""

    def check(self, results: Results) -> Finding: ...


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
        margin = f"differences of less than {100 * self.margin:g} percentage points count as equal"
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
            gains.append({seed: value - base[seed] for seed, value in values.items() if seed in base})
        found = paired(gains[0], gains[1])
        text = f"gain of {self.few[0]} minus gain of {self.many[0]}: {difference_text(found)}"
        return Finding(self.text, _sign(found), (text,))


def difference_text(found: Estimate | None, level: float = LEVEL) -> str:
    """Return a difference in points with its interval and the number of seeds. The interval misses the true difference
    with the probability `level`."""
    if found is None:
        return "no seed has both"
    if found.count < 2:
        return f"{100 * found.mean:+.2f} points with one seed, which has no interval"
    return (
        f"{100 * found.mean:+.2f} points, {100 * (1 - level):.4g} % interval {100 * found.low:+.2f} to "
        f"{100 * found.high:+.2f} ({found.count} seeds)"
    )


def _sign(found: Estimate | None) -> Outcome:
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
