"""Tests of claims and their verdict."""

from __future__ import annotations

import pytest

from tests.studies.measured import measured, results_of
from vitrail.studies.claims import Alike, Better, GainShrinks, Results

FAR = {"a": (0.80, 0.81, 0.82), "b": (0.70, 0.72, 0.71), "c": (0.79, 0.83, 0.81)}


@pytest.mark.parametrize(
    ("pair", "outcome"), [(("a", "b"), "shown"), (("b", "a"), "contradicted"), (("a", "c"), "not shown")]
)
def test_an_interval_on_one_side_of_zero_decides(pair: tuple[str, str], outcome: str) -> None:
    assert Better("first is better", (pair,)).check(results_of(FAR)).outcome == outcome


def test_the_evidence_has_the_numbers() -> None:
    (text,) = Better("a is better", (("a", "b"),)).check(results_of(FAR)).evidence
    assert text == "a minus b: +10.00 points, 95 % interval +7.52 to +12.48 (3 seeds)"


def test_all_pairs_must_show_a_claim() -> None:
    shown, open_, against = ("a", "b"), ("a", "c"), ("b", "a")
    assert Better("", (shown, open_)).check(results_of(FAR)).outcome == "not shown"
    assert Better("", (shown, against)).check(results_of(FAR)).outcome == "contradicted"
    assert Better("", ()).check(results_of(FAR)).outcome == "not shown"


def test_one_seed_shows_nothing() -> None:
    found = Better("a is better", (("a", "b"),)).check(results_of({"a": (0.9,), "b": (0.1,)}))
    assert found.outcome == "not shown" and found.evidence == (
        "a minus b: +80.00 points with one seed, which has no interval",
    )


def test_points_that_were_not_measured_or_diverged_show_nothing() -> None:
    results = results_of({"a": (0.9, 0.9, None), "b": (0.1, 0.1, 0.1)})
    found = Better("a is better", (("a", "b"), ("x", "b"))).check(results)
    assert found.outcome == "not shown"
    assert found.evidence == ("a diverged with 1 of 3 seeds", "x was not measured")
    assert Alike("both are equal", ("b", "a")).check(results).evidence == ("a diverged with 1 of 3 seeds",)


@pytest.mark.parametrize(
    ("second", "outcome"),
    [((0.801, 0.799, 0.800), "shown"), ((0.84, 0.76, 0.80), "not shown"), ((0.75, 0.751, 0.749), "contradicted")],
)
def test_equality_needs_an_interval_inside_the_margin(second: tuple[float, ...], outcome: str) -> None:
    found = Alike("equal", ("a", "b")).check(results_of({"a": (0.8, 0.8, 0.8), "b": second}))
    assert found.outcome == outcome and "less than 1 percentage points count as equal" in found.evidence[0]


def test_equality_names_the_widest_pair() -> None:
    results = results_of({"a": (0.8, 0.8), "b": (0.8, 0.8), "c": (0.803, 0.803)})
    (text,) = Alike("equal", ("a", "b", "c")).check(results).evidence
    assert text.startswith("one of 3 comparisons: b minus c: -0.30 points")


def test_a_contradiction_among_many_comparisons_needs_a_stricter_interval() -> None:
    values = {"a": (0.80, 0.81, 0.82), "b": (0.86, 0.87, 0.90), "c": (0.1, 0.1, 0.1)}  # b - a: 6, 6 and 8 points
    alone, many = (("a", "b"),), (("a", "b"), *[("a", "c")] * 9)
    assert Better("", alone).check(results_of(values)).outcome == "contradicted"
    found = Better("", many).check(results_of(values))
    assert found.outcome == "not shown"
    assert found.evidence[0] == "a minus b: -6.67 points, 95 % interval -9.54 to -3.80 (3 seeds)"
    values |= {"b": (0.90, 0.91, 0.92)}
    found = Better("", many).check(results_of(values))
    assert found.outcome == "contradicted"
    assert found.evidence[0] == "a minus b: -10.00 points, 99.5 % interval -10.00 to -10.00 (3 seeds)"


def gains(few: tuple[float, ...]) -> Results:
    return Results(
        [
            measured("pre-trained", few, label="10"), measured("scratch", (0.5, 0.5, 0.5), label="10"),
            measured("pre-trained", (0.9, 0.91, 0.9), label="99"), measured("scratch", (0.89, 0.9, 0.89), label="99"),
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("few", "outcome"),
    [((0.6, 0.61, 0.6), "shown"), ((0.5, 0.52, 0.5), "not shown"), ((0.4, 0.4, 0.41), "contradicted")],
)
def test_gains_are_compared_seed_by_seed(few: tuple[float, ...], outcome: str) -> None:
    claim = GainShrinks("", ("pre-trained at 10", "scratch at 10"), ("pre-trained at 99", "scratch at 99"))
    assert claim.check(gains(few)).outcome == outcome


def test_gains_need_all_four_points() -> None:
    claim = GainShrinks("", ("pre-trained at 10", "scratch at 10"), ("pre-trained at 50", "scratch at 99"))
    assert claim.check(gains((0.5,))).evidence == ("pre-trained at 50 was not measured",)
