"""Tests of the costs of reaching an accuracy, and of their ratios."""

from __future__ import annotations

from typing import Any

import pytest

from vitrail.experiments.accuracy import Curve, CurvePoint, final_accuracies, first_at, reached


def result(*points: tuple[float, float], test: float | None = None) -> Curve:
    """A cell with points of (seconds, accuracy). A second costs 10 FLOPs and two seconds of the cores."""
    return Curve(
        points=tuple(
            CurvePoint(
                step=step, seconds=float(seconds), cpu_seconds=2.0 * seconds, flops=10.0 * seconds, accuracy=accuracy
            )
            for step, (seconds, accuracy) in enumerate(points)
        ),
        validation_accuracy=points[-1][1], test_accuracy=test, steps=3, own_steps=4, epochs=1.5, batch_size=8,
        parameters=100, precision="bf16", threads=2, versions={},
    )  # fmt: skip


CURVES = {
    "ours": {0: result((1, 0.5), (2, 0.8), (3, 0.7)), 1: result((2, 0.6), (4, 0.8), (5, 0.9))},
    "theirs": {0: result((4, 0.4), (8, 0.8)), 1: result((4, 0.79), (8, 0.7))},
}


def test_the_first_evaluation_that_reaches_a_target_counts() -> None:
    points = CURVES["ours"][0].points
    found = first_at(points, 0.8, None)
    assert found is not None and (found.step, found.seconds) == (1, 2)
    assert first_at(points, 0.5, None) == points[0] and first_at(points, 0.81, None) is None


def test_a_target_reached_after_the_budget_does_not_count() -> None:
    points = CURVES["ours"][0].points
    assert first_at(points, 0.8, 2.0) == points[1]
    assert first_at(points, 0.8, 1.9) is None


def ends(row: dict[str, Any], name: str) -> tuple[Any, ...]:
    return tuple(row[f"{name}_{end}"] for end in ("low", "median", "high"))


def test_costs_and_ratios_over_seeds() -> None:
    ours, theirs = reached(CURVES, [0.8], None)
    assert (ours["entry"], ours["reached"], ours["seeds"]) == ("ours", 2, 2)
    assert ends(ours, "seconds") == (2, 3, 4) and ours["cpu_seconds_high"] == 8 and ours["flops_low"] == 20
    assert ours["seconds_ratio_median"] == 1 and not ours["seconds_ratio_is_bound"]
    # seed 0: 8 s against 2 s; seed 1 is never reached: its whole run of 8 s against 4 s
    assert theirs["reached"] == 1 and theirs["seconds_low"] == 8 and theirs["seconds_high"] is None
    assert ends(theirs, "flops_ratio") == (2, 3, 4) and theirs["flops_ratio_is_bound"]


def test_a_ratio_is_a_lower_bound_if_a_run_exceeds_the_budget() -> None:
    curves = {"ours": {0: result((2, 0.8))}, "theirs": {0: result((3, 0.7), (5, 0.8), (6, 0.9))}}
    _, theirs = reached(curves, [0.8], 4.0)
    assert theirs["reached"] == 0 and theirs["seconds_median"] is None
    assert theirs["seconds_ratio_median"] == 5 / 2 and theirs["seconds_ratio_is_bound"]


def test_no_ratio_to_an_entry_that_does_not_reach_the_target() -> None:
    ours, theirs = reached(CURVES, [0.9], None)
    assert ours["reached"] == 1 and theirs["flops_low"] is None
    assert ends(ours, "flops_ratio") == ends(theirs, "flops_ratio") == (None, None, None)
    assert theirs["flops_ratio_is_bound"] is None


def test_accuracies_of_the_finished_models() -> None:
    validation, test = final_accuracies(CURVES["ours"])
    assert (validation.low, validation.high) == (0.7, 0.9) and validation.median == pytest.approx(0.8) and test is None
    _, test = final_accuracies({0: result((1, 0.5), test=0.4)})
    assert test is not None and test.median == 0.4
