"""Tests of metrics of numbers against scikit-learn, and of metrics that are added up batch by batch."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from tests.targets import number_targets, single_labels
from vitrail.evaluation.metrics.intervals import Metric
from vitrail.evaluation.metrics.numbers import (
    StreamingAccuracy,
    StreamingErrors,
    merit,
    number_metrics,
)


def drawn(n: int, outputs: int, *, seed: int = 0, unknown: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return predicted and true numbers with different scales and large means. Some are unknown."""
    random = np.random.default_rng(seed)
    truth = random.normal(size=(n, outputs)) * np.geomspace(0.1, 1000, outputs) + 1e6
    predicted = truth + 0.3 * random.normal(size=(n, outputs)) * np.geomspace(0.1, 1000, outputs)
    return predicted, np.where(random.random((n, outputs)) < unknown, math.nan, truth)


def references(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return R², mean absolute error and root mean squared error of each output with known numbers."""
    rows = []
    for guesses, numbers in zip(predicted.T, truth.T, strict=True):
        known = ~np.isnan(numbers)
        if known.any():
            pair = numbers[known], guesses[known]
            r2 = reference.r2_score(*pair) if known.sum() > 1 else float(pair[0][0] == pair[1][0])
            rows.append((r2, reference.mean_absolute_error(*pair), reference.root_mean_squared_error(*pair)))
    return np.array(rows)


def values(metrics: dict[str, Metric]) -> list[float]:
    return [metric.value for metric in metrics.values()]


def mean_references(predicted: np.ndarray, truth: np.ndarray) -> list[float]:
    """Return the mean R², and the mean error of numbers that are divided by their standard deviation."""
    found, deviations = references(predicted, truth), [column[~np.isnan(column)].std() for column in truth.T]
    known = [one for one in deviations if not math.isnan(one)]
    errors = [error / one if one else float(error > 0) for error, one in zip(found[:, 1], known, strict=True)]
    return [float(found[:, 0].mean()), float(np.mean(errors))]


@pytest.mark.parametrize(("n", "outputs", "unknown"), [(50, 1, 0.0), (37, 3, 0.0), (61, 2, 0.4), (5, 7, 0.5)])
def test_they_are_scikit_learns(n: int, outputs: int, unknown: float) -> None:
    predicted, truth = drawn(n, outputs, unknown=unknown)
    overall, each = number_metrics(predicted, truth, resamples=0)
    expected = references(predicted, truth)
    np.testing.assert_allclose([values(one) for one in each if one is not None], expected, rtol=1e-7)
    np.testing.assert_allclose(values(overall), mean_references(predicted, truth), rtol=1e-7)
    assert overall["r2"].low is None


@settings(max_examples=15)
@given(
    n=st.integers(1, 40), outputs=st.integers(1, 3), seed=st.integers(0, 99), unknown=st.floats(0, 0.9),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)  # fmt: skip
def test_parts_add_up_to_the_metrics_of_all(n: int, outputs: int, seed: int, unknown: float, cuts: list[int]) -> None:
    predicted, truth = drawn(n, outputs, seed=seed, unknown=unknown)
    errors = StreamingErrors()
    for first, last in itertools.pairwise([0, *sorted(min(cut, n) for cut in cuts), n]):
        errors.add(predicted[first:last], number_targets(truth[first:last], tuple("abc"[:outputs])))
    found = errors.result()
    if np.isnan(truth).all():
        assert found == {}
        return
    overall, each = number_metrics(predicted, truth, resamples=0)
    known = [(name, values(one)) for name, one in zip("abc", each, strict=False) if one is not None]
    expected = dict(zip(("r2", "standardised_error"), values(overall), strict=True))
    if outputs == 1:
        expected |= zip(("mean_absolute_error", "root_mean_squared_error"), known[0][1][1:], strict=True)
    else:
        expected |= {f"{name}:mean_absolute_error": one[1] for name, one in known}
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shift", [0.0, 0.25])
def test_equal_true_numbers_have_an_r2_of_0_or_1(shift: float) -> None:
    truth = np.full((30, 1), 0.1)
    assert number_metrics(truth + shift, truth, resamples=20)[0]["r2"].value == float(shift == 0)
    errors = StreamingErrors()
    for part in (slice(0, 7), slice(7, 30)):
        errors.add(truth[part] + shift, number_targets(truth[part]))
    assert errors.result()["r2"] == float(shift == 0)


@pytest.mark.slow
def test_intervals_are_quantiles_over_resamples() -> None:
    predicted, truth = drawn(80, 2, unknown=0.3)
    overall, each = number_metrics(predicted, truth, resamples=400, seed=3)
    random = np.random.default_rng(11)
    resampled = []
    for _ in range(150):
        rows = random.integers(0, 80, 80)
        resampled.append(references(predicted[rows], truth[rows]))
    low, high = np.quantile(resampled, [0.025, 0.975], axis=0)
    for output, one in enumerate(each):
        for number, metric in enumerate(one.values()):
            assert metric.low is not None and metric.high is not None and metric.low < metric.value < metric.high
            width = high[output, number] - low[output, number]
            assert abs(metric.low - low[output, number]) < 0.25 * width
            assert abs(metric.high - high[output, number]) < 0.25 * width
    assert overall["r2"].low is not None and overall["r2"].low < overall["r2"].value
    assert number_metrics(predicted, truth, resamples=40, seed=3) == number_metrics(
        predicted, truth, resamples=40, seed=3
    )


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_error_that_is_not_finite_stays_so(wrong: float) -> None:
    for truth in ([[1.0], [2.0]], [[1.0], [1.0]]):
        errors = StreamingErrors()
        errors.add(np.full((2, 1), wrong), number_targets(np.array(truth)))
        with np.errstate(invalid="ignore"):
            assert not math.isfinite(errors.result()["standardised_error"])


@pytest.mark.slow
def test_resamples_without_any_known_number_of_an_output_count_the_others() -> None:
    truth = np.full((20, 2), np.nan)
    truth[:, 0], truth[0, 1] = np.arange(20), 7
    predicted = truth.copy()
    predicted[:, 1] = 9  # wrong for the single known number, so that its R² is 0
    mean = number_metrics(predicted, truth, resamples=400, seed=0)[0]["r2"]
    assert (mean.value, mean.low, mean.high) == (0.5, 0.5, 1.0)


@pytest.mark.parametrize("seed", [4, 8])
def test_resamples_of_equal_numbers_have_no_huge_r2(seed: int) -> None:
    random = np.random.default_rng(seed)
    truth = random.normal(size=(3, 1))
    predicted = truth + 0.1 * random.normal(size=(3, 1))
    found, _ = number_metrics(predicted, truth, resamples=200, seed=7)
    draws = np.random.default_rng(7)
    rows = [draws.integers(0, 3, 3) for _ in range(200)]
    assert any(len(set(row.tolist())) == 1 for row in rows)
    # scikit-learn's mean of equal numbers can be rounded, too
    scores = [reference.r2_score(truth[row], predicted[row]) if len(set(row.tolist())) > 1 else 0.0 for row in rows]
    expected = np.quantile(scores, [0.025, 0.975])
    assert [found["r2"].low, found["r2"].high] == pytest.approx(expected, rel=1e-6)


def test_the_first_of_equal_outputs_is_the_likeliest_and_samples_without_a_label_are_skipped() -> None:
    accuracy = StreamingAccuracy()
    assert accuracy.result() == {"accuracy": 0}
    accuracy.add(np.array([[1.0, 1.0], [0.0, 2.0], [3.0, 1.0]]), single_labels(np.array([0, 0, -1]), 2))
    accuracy.add(np.array([[1.0, 1.0]]), single_labels(np.array([1]), 2))
    assert accuracy.result() == {"accuracy": 1 / 3} and accuracy.count == 3


def test_the_loss_decides_between_equal_metrics() -> None:
    """From the worst to the best model: a metric that is unknown or NaN is worse than every number."""
    ranked = [(None, 0.1), (0.5, None), (0.5, 0.7), (0.5, 0.2), (0.6, 3.0)]
    merits = [merit(value, loss) for value, loss in ranked]
    assert merits == sorted(set(merits)) and merit(float("nan"), 0.1) == merits[0]
    assert merit(0.5, float("nan")) == merits[1]
    falling = [merit(value, loss, higher_is_better=False) for value, loss in [(0.6, 0.1), (0.5, 0.7), (0.5, 0.2)]]
    assert falling == sorted(set(falling))
