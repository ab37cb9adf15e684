"""The table, JSON and CSV values of `vitrail bench accuracy`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from vitrail.bench.accuracy.results import Curves, Quantity, Reached, final_accuracies
from vitrail.bench.measure import Spread
from vitrail.cli.output.bench_tables import plain_table

__all__ = ["POINT_COLUMNS", "ROW_COLUMNS", "plain_accuracy", "point_rows", "tables", "target_rows"]

POINT_COLUMNS = ("entry", "seed", "step", "seconds", "cpu_seconds", "flops", "accuracy")
STATISTICS = ("median", "low", "high", "ratio_median", "ratio_low", "ratio_high", "ratio_is_bound")
ROW_COLUMNS = (
    "entry", "target", "reached", "seeds",
    *(f"{quantity}_{name}" for quantity in ("seconds", "cpu_seconds", "flops") for name in STATISTICS),
)  # fmt: skip

CAPTION = (
    "Medians over the seeds, with lowest..highest. seconds: time of training before the first evaluation that reaches "
    "the validation accuracy. TFLOP: counted operations in 10^12 until then. times: cost of the entry divided by the "
    "cost of the first entry with the same seed; > means that a seed does not reach it, so the ratio is a lower bound."
)


def tables(curves: Curves, rows: Sequence[Reached]) -> list[Table]:
    """Return the costs of each target in seconds and in operations, and the accuracy and length of the finished models.

    Each table fits 80 columns.
    """
    seconds, operations = (
        plain_table(("accuracy", "entry", "seeds", unit, "times"), caption)
        for unit, caption in (("seconds", None), ("TFLOP", CAPTION))
    )
    for row in rows:
        described = f"{row.target:.1%}", escape(row.entry), f"{row.reached} of {row.seeds}"
        seconds.add_row(*described, _cost(row.costs["seconds"]), _ratio(row, "seconds"))
        operations.add_row(*described, _cost(row.costs["flops"], 1e12), _ratio(row, "flops"))
    accuracies = plain_table(("finished model", "validation", "test", "parameters"))
    lengths = plain_table(("finished model", "seconds", "epochs", "of its own length"))
    for entry, cells in curves.items():
        validation, test = final_accuracies(cells)
        results = list(cells.values())
        accuracies.add_row(
            escape(entry), _accuracy(validation), "" if test is None else _accuracy(test), f"{results[0].parameters:,}"
        )
        lengths.add_row(
            escape(entry), _cost(Spread.of([one.points[-1].seconds for one in results])),
            f"{Spread.of([one.epochs for one in results]).median:,.1f}",
            f"{Spread.of([one.steps / one.own_steps for one in results]).median:.0%}",
        )  # fmt: skip
    return [seconds, operations, accuracies, lengths]


def plain_accuracy(curves: Curves, rows: Sequence[Reached]) -> dict[str, Any]:
    """Return the comparison as JSON values. A cost that is not known, because a target is not reached, is null."""
    return {
        "targets": list(target_rows(rows)),
        "entries": {
            entry: {str(seed): asdict(result) for seed, result in cells.items()} for entry, cells in curves.items()
        },
    }


def point_rows(curves: Curves) -> Iterator[dict[str, Any]]:
    """Yield a row for each evaluation of each cell."""
    for entry, cells in curves.items():
        for seed, result in cells.items():
            for point in result.points:
                yield {"entry": entry, "seed": seed, **asdict(point)}


def target_rows(rows: Sequence[Reached]) -> Iterator[dict[str, Any]]:
    """Yield a row for each target and entry."""
    for row in rows:
        values: dict[str, Any] = {
            "entry": row.entry, "target": row.target, "reached": row.reached, "seeds": row.seeds,
        }  # fmt: skip
        for quantity, spread in row.costs.items():
            values |= {f"{quantity}_{name}": _finite(value) for name, value in asdict(spread).items()}
            ratio = row.ratios.get(quantity)
            for name in ("median", "low", "high"):
                values[f"{quantity}_ratio_{name}"] = None if ratio is None else getattr(ratio.spread, name)
            values[f"{quantity}_ratio_is_bound"] = None if ratio is None else ratio.is_bound
        yield values


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cost(spread: Spread, unit: float = 1.0) -> str:
    if not math.isfinite(spread.low):
        return "not reached"
    low, middle, high = (_number(value / unit) for value in (spread.low, spread.median, spread.high))
    return middle if low == high else f"{middle} ({low}..{high})"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "not reached"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(row: Reached, quantity: Quantity) -> str:
    if (ratio := row.ratios.get(quantity)) is None:
        return ""
    low, middle, high = (f"{value:.2f}" for value in (ratio.spread.low, ratio.spread.median, ratio.spread.high))
    sign = "> " if ratio.is_bound else ""
    return f"{sign}{middle}" if low == high else f"{sign}{middle} ({low}..{high})"


def _accuracy(spread: Spread) -> str:
    if spread.low == spread.high:
        return f"{spread.median:.2%}"
    return f"{spread.median:.2%} ({spread.low:.2%}..{spread.high:.2%})"
