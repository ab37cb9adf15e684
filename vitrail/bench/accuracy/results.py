"""The results of a comparison: times and operations to reach an accuracy, and their ratios between entries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vitrail.bench.accuracy.cell import CellResult, Point
from vitrail.bench.measure import Spread

__all__ = ["Curves", "Quantity", "Ratio", "Reached", "final_accuracies", "first_at", "reached"]

Quantity = Literal["seconds", "cpu_seconds", "flops"]
"""A cost of reaching a target."""

Curves = Mapping[str, Mapping[int, CellResult]]
"""The results of the cells, by entry and seed."""


@dataclass(frozen=True)
class Ratio:
    """The cost of an entry divided by the cost of the first entry, over the seeds."""

    spread: Spread
    is_bound: bool
    """True if the entry does not reach the target with some seed within the budget. The ratio is then a lower bound.
    The run counts until it reaches the target after the budget, or as a whole if it never does."""


@dataclass(frozen=True)
class Reached:
    """The cost of reaching an accuracy on the validation split."""

    entry: str
    target: float
    reached: int
    """Number of seeds with which the entry reaches the target."""
    seeds: int
    costs: Mapping[Quantity, Spread]
    """Costs over the seeds. A seed that does not reach the target costs infinitely much."""
    ratios: Mapping[Quantity, Ratio]
    """Ratios to the first entry. There are none unless the first entry reaches the target with every seed."""


def first_at(points: Sequence[Point], target: float, budget: float | None) -> Point | None:
    """Return the first point within the budget whose accuracy is at least the target."""
    within = (point for point in points if budget is None or point.seconds <= budget)
    return next((point for point in within if point.accuracy >= target), None)


def reached(curves: Curves, targets: Sequence[float], budget: float | None) -> list[Reached]:
    """Return a row for each target and entry."""
    base = next(iter(curves))
    quantities: tuple[Quantity, ...] = ("seconds", "cpu_seconds", "flops")
    rows = []
    for target in targets:
        ours = {seed: first_at(result.points, target, budget) for seed, result in curves[base].items()}
        for entry, cells in curves.items():
            found = {seed: first_at(result.points, target, budget) for seed, result in cells.items()}
            count = sum(point is not None for point in found.values())
            costs = {
                quantity: Spread.of([_cost(point, quantity) for point in found.values()]) for quantity in quantities
            }
            ratios = {
                quantity: Ratio(Spread.of(values), count < len(found))
                for quantity in quantities
                if (values := _ratios(ours, found, cells, target, quantity))
            }
            rows.append(Reached(entry, target, count, len(found), costs, ratios))
    return rows


def final_accuracies(cells: Mapping[int, CellResult]) -> tuple[Spread, Spread | None]:
    """Return the accuracies of the finished models over the seeds, on the validation split and on the test split."""
    test = [result.test_accuracy for result in cells.values() if result.test_accuracy is not None]
    return Spread.of([result.validation_accuracy for result in cells.values()]), Spread.of(test) if test else None


def _cost(point: Point | None, quantity: Quantity) -> float:
    return math.inf if point is None else float(getattr(point, quantity))


def _ratios(
    ours: Mapping[int, Point | None],
    theirs: Mapping[int, Point | None],
    cells: Mapping[int, CellResult],
    target: float,
    quantity: Quantity,
) -> list[float]:
    """Return the ratio of each seed. A run that does not reach the target within the budget counts until it does, or
    as a whole if it never does."""
    values = []
    for seed, point in theirs.items():
        if (own := ours.get(seed)) is None:
            return []
        points = cells[seed].points
        until = point or first_at(points, target, None) or points[-1]
        values.append(_cost(until, quantity) / _cost(own, quantity))
    return values
