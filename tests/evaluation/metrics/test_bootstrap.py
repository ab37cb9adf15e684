"""Tests of intervals and paired differences against exact distributions, plain resampling, and their coverage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import binomtest

from vitrail.evaluation.metrics.classes import balanced_accuracy, expected_calibration_error
from vitrail.evaluation.metrics.intervals import (
    balanced_accuracy_interval,
    calibration_error_interval,
    difference_interval,
    mcnemar,
    mean_interval,
    paired_difference,
)


def test_resampled_balanced_accuracy_has_the_distribution_of_resampled_samples() -> None:
    random = np.random.default_rng(0)
    labels = np.array([0] * 30 + [3] * 8 + [5] * 2)
    predicted = np.where(random.random(40) < 0.7, labels, 1)
    found = balanced_accuracy_interval(labels, predicted, 6, resamples=4000)
    direct = []
    for _ in range(2000):
        rows = random.integers(0, 40, 40)
        direct.append(balanced_accuracy(labels[rows], predicted[rows], 6))
    assert found.value == balanced_accuracy(labels, predicted, 6)
    np.testing.assert_allclose((found.low, found.high), np.quantile(direct, [0.025, 0.975]), atol=0.02)


def test_resampled_calibration_error_equals_that_of_resampled_samples() -> None:
    random = np.random.default_rng(2)
    confidence = random.uniform(0.3, 1, 51)
    correct = random.random(51) < confidence - 0.2
    found = calibration_error_interval(confidence, correct, bins=7, resamples=200, seed=9)
    again = np.random.default_rng(9)
    errors = []
    for _ in range(200):
        rows = again.integers(0, 51, 51)
        errors.append(expected_calibration_error(confidence[rows], correct[rows], bins=7))
    assert found.value == expected_calibration_error(confidence, correct, bins=7)
    bias = np.median(errors) - found.value
    np.testing.assert_allclose((found.low, found.high), np.quantile(errors, [0.025, 0.975]) - bias, atol=1e-14)


@given(st.integers(1, 60), st.integers(0, 10_000), st.floats(0, 1), st.sampled_from((1, 20, 99)))
def test_the_calibration_error_lies_in_its_interval(n: int, seed: int, hits: float, resamples: int) -> None:
    """The percentiles alone lie above the error in about a tenth of such samples."""
    random = np.random.default_rng(seed)
    confidence, correct = random.random(n), random.random(n) < hits
    found = calibration_error_interval(confidence, correct, resamples=resamples, seed=seed)
    assert 0 <= found.low <= found.value <= found.high <= 1


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_fraction_has_the_interval_of_wilson(counts: tuple[int, int]) -> None:
    right, n = counts
    found = mean_interval(np.arange(n) < right)
    expected = stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    np.testing.assert_allclose((found.low, found.high), (expected.low, expected.high), rtol=1e-9, atol=1e-12)
    assert found.low <= found.value <= found.high and found.low < found.high


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_claim() -> None:
    """There are 800 data sets of 150 samples. A fraction near 0.95 of 800 has a standard error of 0.8 points, and
    percentiles of so few samples cover a little less than stated.
    """
    random = np.random.default_rng(0)
    held = {"mean": 0, "accuracy": 0, "balanced": 0}
    for trial in range(800):
        labels = random.choice(3, 150, p=(0.6, 0.3, 0.1))
        right = random.random(150) < np.array([0.9, 0.7, 0.5])[labels]
        losses = random.exponential(2.0, 150)
        balanced = balanced_accuracy_interval(labels, np.where(right, labels, 3), 4, seed=trial, resamples=400)
        cases = {
            "mean": (mean_interval(losses, seed=trial, resamples=400), 2.0),
            "accuracy": (mean_interval(right, seed=trial, resamples=400), 0.6 * 0.9 + 0.3 * 0.7 + 0.1 * 0.5),
            "balanced": (balanced, (0.9 + 0.7 + 0.5) / 3),
        }
        for name, (figure, truth) in cases.items():
            held[name] += figure.low <= truth <= figure.high
    assert all(0.91 <= count / 800 <= 0.975 for count in held.values()), held


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
