"""Tests of statistics over seeds."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from vitrail.studies.claims import estimate, log_x_at, paired, power_law, student_t


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


def test_one_seed_has_no_interval() -> None:
    found = estimate([0.5])
    assert (found.mean, found.low, found.high) == (0.5, -math.inf, math.inf) and math.isnan(found.deviation)
    assert student_t(0) == math.inf


def test_differences_are_paired_by_seed() -> None:
    found = paired({0: 0.5, 1: 0.75, 2: 0.25}, {1: 0.5, 2: 0.0, 3: 0.9})
    assert found is not None and (found.mean, found.deviation, found.count) == (0.25, 0.0, 2)
    assert (found.low, found.high) == (0.25, 0.25)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_a_power_law_is_found_again() -> None:
    law = power_law([(x, 3 * x**-0.25) for x in (10.0, 100.0, 5000.0)])
    assert law is not None and law.slope == pytest.approx(-0.25)
    assert log_x_at(law, 1.0) == pytest.approx(math.log(81.0))


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)], [(4.0, 2.0), (4.0, 3.0)], [(1.0, 1.0), (-1.0, 2.0), (0.0, 1.0)]])
def test_a_power_law_needs_two_places(points: list[tuple[float, float]]) -> None:
    assert power_law(points) is None
