"""Tests of the difference between two models on the same images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from vitrail.evaluation.metrics.intervals import difference_interval, mcnemar, paired_difference


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_exact_test_equals_scipys(first: int, second: int) -> None:
    wanted = binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar(first, second) == pytest.approx(wanted, rel=1e-9)
    assert mcnemar(first, second) == mcnemar(second, first)


def test_large_counts_do_not_overflow() -> None:
    assert mcnemar(20_000, 20_000) == 1.0 and mcnemar(0, 5_000) == 0.0


def test_images_are_counted_and_the_difference_has_an_interval() -> None:
    first = np.array([True] * 70 + [False] * 30)
    second = np.array([True] * 50 + [False] * 40 + [True] * 10)
    found = paired_difference(first, second)
    assert (found.both, found.only_first, found.only_second, found.neither) == (50, 20, 10, 20)
    assert found.images == 100 and found.difference.value == pytest.approx(0.1)
    # The standard error of paired differences: the root of (0.3 - 0.1 ** 2) / 100.
    assert found.difference.low == pytest.approx(0.1 - 1.96 * 0.0539, abs=0.015)
    assert found.difference.high == pytest.approx(0.1 + 1.96 * 0.0539, abs=0.015)
    assert found.p == pytest.approx(binomtest(20, 30).pvalue)


def test_the_interval_covers_the_true_difference_and_is_never_empty() -> None:
    draws = np.random.default_rng(0).multinomial(40, [0.7, 0.15, 0.05, 0.1], size=4000)
    ends = [difference_interval(int(first), int(second), 40) for _, first, second, _ in draws]
    assert np.mean([low <= 0.1 <= high for low, high in ends]) == pytest.approx(0.95, abs=0.015)
    low, high = difference_interval(0, 0, 20)
    assert -0.2 < low < 0 < high < 0.2 and low == -high
    assert difference_interval(7, 0, 7)[1] == 1.0


def test_equal_answers_differ_by_nothing() -> None:
    right = np.array([True, False, True])
    found = paired_difference(right, right, has_interval=False)
    assert found.difference.value == 0 and found.difference.low is None and found.p == 1.0
