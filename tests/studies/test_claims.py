"""Tests of claims, their verdict, and the statistics over seeds behind them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scipy import stats

from tests.studies.measured import measured, results_of
from vitrail.studies.claims import (
    Alike,
    Better,
    GainShrinks,
    LessCompute,
    PointResult,
    PowerLawFit,
    Results,
    estimate,
    frontier,
    paired,
    student_t,
)

FAR = {"a": (0.80, 0.81, 0.82), "b": (0.70, 0.72, 0.71), "c": (0.79, 0.83, 0.81)}


SHOWN, OPEN, AGAINST = ("a", "b"), ("a", "c"), ("b", "a")


@pytest.mark.parametrize(
    ("pairs", "outcome"),
    [
        ((SHOWN,), "shown"), ((AGAINST,), "contradicted"), ((OPEN,), "not shown"), ((), "not shown"),
        ((SHOWN, OPEN), "not shown"), ((SHOWN, AGAINST), "contradicted"), ((SHOWN, ("x", "b")), "not shown"),
    ],
)  # fmt: skip
def test_all_pairs_need_an_interval_on_one_side_of_zero(pairs: tuple[tuple[str, str], ...], outcome: str) -> None:
    assert Better("first is better", pairs).check(results_of(FAR)).outcome == outcome


def test_the_evidence_has_the_numbers() -> None:
    (text,) = Better("a is better", (SHOWN,)).check(results_of(FAR)).evidence
    assert text == "a minus b: +10.00 points, 95 % interval +7.52 to +12.48 (3 seeds)"
    found = Better("a is better", (SHOWN,)).check(results_of({"a": (0.9,), "b": (0.1,)}))
    assert found.outcome == "not shown" and "+80.00 points with one seed, which has no interval" in found.evidence[0]


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
    assert found.outcome == outcome and "less than 1%" in found.evidence[0]


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


def test_equal_gains_show_nothing() -> None:
    """0.3 - 0.2 is less than 0.2 - 0.1 by a rounding error."""
    rates = {"pre-trained at 10": 0.3, "scratch at 10": 0.2, "pre-trained at 99": 0.2, "scratch at 99": 0.1}
    found = results_of({name: (rate, rate) for name, rate in rates.items()})
    assert (
        GainShrinks("", ("pre-trained at 10", "scratch at 10"), ("pre-trained at 99", "scratch at 99"))
        .check(found)
        .outcome
        == "not shown"
    )


def test_gains_need_all_four_points() -> None:
    claim = GainShrinks("", ("pre-trained at 10", "scratch at 10"), ("pre-trained at 50", "scratch at 99"))
    assert claim.check(gains((0.5,))).evidence == ("pre-trained at 50 was not measured",)


COMPUTE = (1e9, 1e10, 1e11)


def arm(name: str, error: Callable[[float], float], *, seeds: int = 3, noise: float = 0.01) -> list[PointResult]:
    """Points whose error follows a law, up to a factor that differs by seed."""
    return [
        measured(name, [1 - error(x) * (1 + noise * seed) for seed in range(seeds)], x=x, label=f"{x:g}")
        for x in COMPUTE
    ]


def law(factor: float) -> Callable[[float], float]:
    """An error that falls with the power -0.25 of the compute, reached with 1 / `factor` of the compute."""
    return lambda x: 0.5 * (factor * x / 1e9) ** -0.25


def test_the_frontier_leaves_out_what_less_compute_achieves() -> None:
    points = [(4.0, 0.3), (1.0, 0.5), (2.0, 0.5), (3.0, 0.6), (8.0, 0.29)]
    assert frontier(points) == [(1.0, 0.5), (4.0, 0.3), (8.0, 0.29)] and frontier([]) == []


def test_the_exponent_is_found_again() -> None:
    found = PowerLawFit("falls", "vit").check(Results(arm("vit", law(1.0))))
    assert found.outcome == "shown" and "of vit: -0.250, 95 % interval" in found.evidence[0]


def test_an_exponent_needs_two_points_and_two_seeds() -> None:
    results = Results(arm("vit", law(1.0), seeds=1))
    assert "one seed" in PowerLawFit("falls", "vit").check(results).evidence[0]
    results = Results(arm("vit", lambda x: 0.5, noise=0.0))
    found = PowerLawFit("falls", "vit").check(results)
    assert found.outcome == "not shown" and "no two points" in found.evidence[0]
    assert PowerLawFit("falls", "bit").check(results).outcome == "not shown"


@pytest.mark.parametrize(("first", "second", "outcome"), [("vit", "bit", "shown"), ("bit", "vit", "contradicted")])
def test_the_ratio_of_compute_is_found_again(first: str, second: str, outcome: str) -> None:
    results = Results([*arm("vit", law(3.0)), *arm("bit", law(1.0))])
    found = LessCompute("less", first, second).check(results)
    ratio = "3.00" if first == "vit" else "0.33"
    assert found.outcome == outcome and f": {ratio}, 95 % interval" in found.evidence[0]


def test_a_small_ratio_of_compute_is_not_rounded_to_0() -> None:
    found = LessCompute("less", "vit", "bit").check(Results([*arm("vit", law(0.004)), *arm("bit", law(1.0))]))
    assert found.outcome == "contradicted" and ": 0.004, 95 % interval" in found.evidence[0]


def points_of(name: str, values: dict[float, list[float]]) -> list[PointResult]:
    """Return points with these accuracies of the seeds, by their compute."""
    return [measured(name, accuracies, x=x, label=f"{x:g}") for x, accuracies in values.items()]


PERFECT = {x: [accuracy] * 2 for x, accuracy in zip(COMPUTE, (0.5, 0.75, 1.0), strict=True)}
NOISY = {x: [1 - law(1.0)(x) * factor for factor in (0.6, 1.0, 1.5)] for x in COMPUTE}


@pytest.mark.parametrize(
    ("points", "evidence"),
    [
        ([*arm("vit", law(1.0)), *points_of("bit", NOISY)], "3 seeds"),
        ([*arm("vit", law(3.0), seeds=1), *arm("bit", law(1.0), seeds=1)], "one seed"),
        ([*arm("vit", law(3.0)), *arm("bit", lambda x: 0.5, noise=0.0)], "no seed has a falling error of both arms"),
        ([*arm("vit", law(1.0), seeds=2), *points_of("bit", {1e9: [0.1, 0.1], 1e11: [0.10001, 0.7]})], ": 1e+304, "),
        ([*points_of("vit", PERFECT), *points_of("bit", PERFECT)], "both arms reach an error of 0"),
        (arm("vit", law(1.0)), "bit was not measured"),
    ],
)
def test_a_ratio_that_is_not_certain_is_not_shown(points: list[PointResult], evidence: str) -> None:
    found = LessCompute("less", "vit", "bit").check(Results(points))
    assert found.outcome == "not shown" and evidence in found.evidence[0]


def test_no_claim_about_compute_leaves_out_a_seed_that_diverged() -> None:
    good, bad = arm("vit", law(3.0)), arm("bit", law(1.0))
    bad[1] = measured("bit", [0.7, 0.7, None], x=COMPUTE[1], label="middle")
    results = Results([*good, *bad])
    for claim in (PowerLawFit("falls", "bit"), LessCompute("less", "vit", "bit"), LessCompute("less", "bit", "vit")):
        found = claim.check(results)
        assert found.outcome == "not shown" and found.evidence == ("bit at middle diverged with 1 of 3 seeds",)
    assert PowerLawFit("falls", "vit").check(results).outcome == "shown"


@pytest.mark.parametrize("level", [0.5, 0.05, 0.001])
@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 101])
def test_quantiles_are_those_of_students_t(freedom: int, level: float) -> None:
    assert student_t(freedom, level) == pytest.approx(stats.t.ppf(1 - level / 2, freedom), rel=1e-9)


def test_an_estimate_is_that_of_a_t_test() -> None:
    values = [0.71, 0.74, 0.69, 0.75]
    found = estimate(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.mean == pytest.approx(0.7225) and found.deviation == pytest.approx(stats.tstd(values))
    assert found.count == 4


def test_differences_are_paired_by_seed() -> None:
    found = paired({0: 0.5, 1: 0.75, 2: 0.25}, {1: 0.5, 2: 0.0, 3: 0.9})
    assert found is not None and (found.mean, found.deviation, found.count) == (0.25, 0.0, 2)
    assert (found.low, found.high) == (0.25, 0.25)
    assert paired({0: 1.0}, {1: 1.0}) is None
