"""Tests of claims about compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.studies.measured import measured
from vitrail.studies.claims import LessCompute, PointResult, PowerLawFit, Results, frontier

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
    assert frontier([(4.0, 0.3), (1.0, 0.5), (2.0, 0.5), (3.0, 0.6), (8.0, 0.29)]) == [
        (1.0, 0.5),
        (4.0, 0.3),
        (8.0, 0.29),
    ]
    assert frontier([]) == []


def test_the_exponent_is_found_again() -> None:
    found = PowerLawFit("falls", "vit").check(Results(arm("vit", law(1.0))))
    assert found.outcome == "shown" and found.evidence[0].startswith(
        "exponent of the error of vit: -0.250, 95 % interval"
    )


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


def test_a_ratio_that_depends_on_the_seed_is_not_shown() -> None:
    noisy = [
        measured("bit", [1 - law(1.0)(x) * factor for factor in (0.6, 1.0, 1.5)], x=x, label=f"{x:g}") for x in COMPUTE
    ]
    found = LessCompute("less", "vit", "bit").check(Results([*arm("vit", law(1.0)), *noisy]))
    assert found.outcome == "not shown" and "3 seeds" in found.evidence[0]


def test_a_ratio_needs_falling_errors_and_two_seeds() -> None:
    one = Results([*arm("vit", law(3.0), seeds=1), *arm("bit", law(1.0), seeds=1)])
    assert "one seed" in LessCompute("less", "vit", "bit").check(one).evidence[0]
    flat = Results([*arm("vit", law(3.0)), *arm("bit", lambda x: 0.5, noise=0.0)])
    assert LessCompute("less", "vit", "bit").check(flat).evidence == ("no seed has a falling error of both arms",)


def test_an_arm_that_hardly_learns_gives_a_ratio_beyond_all_numbers() -> None:
    flat = [measured("bit", values, x=x, label=f"{x:g}") for x, values in ((1e9, [0.1, 0.1]), (1e11, [0.10001, 0.7]))]
    found = LessCompute("less", "vit", "bit").check(Results([*arm("vit", law(1.0), seeds=2), *flat]))
    assert found.outcome == "not shown" and ": 1e+304, 95 % interval 0 to 1e+304 (2 seeds)" in found.evidence[0]


def test_arms_without_errors_have_no_ratio() -> None:
    arms = [
        measured(name, [value, value], x=x, label=f"{x:g}")
        for name in ("vit", "bit")
        for x, value in zip(COMPUTE, (0.5, 0.75, 1.0), strict=True)
    ]
    found = LessCompute("less", "vit", "bit").check(Results(arms))
    assert found.outcome == "not shown" and "both arms reach an error of 0" in found.evidence[0]


def test_an_arm_that_was_not_measured_is_named() -> None:
    found = LessCompute("less", "vit", "bit").check(Results(arm("vit", law(1.0))))
    assert found.outcome == "not shown" and found.evidence == ("bit was not measured",)
