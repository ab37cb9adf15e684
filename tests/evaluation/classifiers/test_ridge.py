"""Tests of ridge regression and of neighbours of numbers against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.neighbors import KNeighborsRegressor
from sklearn.preprocessing import StandardScaler

from tests.targets import number_targets
from vitrail.data.targets import Targets
from vitrail.evaluation.classifiers import linear
from vitrail.evaluation.classifiers import logistic as arrays
from vitrail.evaluation.classifiers.linear import RIDGE_PENALTIES, RidgeRegression, linear_probe
from vitrail.evaluation.classifiers.nearest import knn
from vitrail.evaluation.metrics.numbers import StreamingErrors


def drawn(n: int, width: int, *, seed: int = 0, unknown: float = 0.0) -> tuple[np.ndarray, Targets]:
    """Return features of different scales and means, and two numbers that depend on them, some of them unknown."""
    shared, random = np.random.default_rng(7), np.random.default_rng(seed)
    mixing, truth = shared.normal(size=(width, width)), shared.normal(size=(width, 2)) * (1, 100)
    core = random.normal(size=(n, width))
    numbers = core @ truth + random.normal(size=(n, 2)) * (1, 100) + (30, -1000)
    features = (core @ mixing) * np.geomspace(0.01, 10, width) + np.linspace(-30, 30, width)
    numbers[random.random(n) < unknown, 0] = math.nan
    numbers[(random.random(n) < unknown) & ~np.isnan(numbers[:, 0]), 1] = math.nan
    return features.astype(np.float32), number_targets(numbers)


def reference(features: np.ndarray, truth: Targets, output: int, penalty: float, queries: np.ndarray) -> np.ndarray:
    """Return scikit-learn's predictions, fitted on the rows with a known number."""
    scaler = StandardScaler().fit(features.astype(np.float64))
    known = ~np.isnan(truth.values[:, output])
    fit = Ridge(alpha=penalty * known.sum(), solver="cholesky")
    fit.fit(scaler.transform(features.astype(np.float64))[known], truth.values[known, output])
    return fit.predict(scaler.transform(queries.astype(np.float64)))


@pytest.mark.parametrize(
    ("n", "width", "penalty", "unknown"), [(120, 9, 10.0, 0.0), (120, 9, 0.01, 0.3), (31, 40, 10.0, 0.3)]
)
def test_one_penalty_gives_the_predictions_of_scikit_learn(n: int, width: int, penalty: float, unknown: float) -> None:
    train, known = drawn(n, width, unknown=unknown)
    test, truth = drawn(50, width, seed=1)
    result = linear_probe(train, known, test, truth, penalties=[penalty])
    expected = np.stack([reference(train, known, output, penalty, test) for output in range(2)], axis=1)
    np.testing.assert_allclose(result.model.scores(test), expected, rtol=2e-4, atol=2e-4 * expected.std())
    assert result.metrics["r2"] == pytest.approx(r2_score(truth.values, expected), abs=1e-4)


def test_the_penalty_is_the_best_on_held_out_rows() -> None:
    train, known = drawn(90, 40)
    test, truth = drawn(50, 40, seed=1)
    result = linear_probe(train, known, test, truth, held_out=0.3, seed=2)
    assert tuple(result.sweep) == RIDGE_PENALTIES
    fitted, kept = linear._cut(known, 0.3, 2)
    assert len(kept) == 27
    scores = []
    for penalty in result.sweep:
        theirs = [reference(train[fitted], known.rows(fitted), one, penalty, train[kept]) for one in range(2)]
        scores.append(r2_score(known.values[kept], np.stack(theirs, axis=1)))
    np.testing.assert_allclose([metrics["r2"] for metrics in result.sweep.values()], scores, atol=1e-3)
    assert result.penalty == RIDGE_PENALTIES[int(np.argmax(scores))]


def test_parts_and_numbers_that_are_never_known(monkeypatch: pytest.MonkeyPatch) -> None:
    features, truth = drawn(60, 5)
    x = torch.from_numpy(features)
    whole = RidgeRegression(x, truth).fit(0.1)
    monkeypatch.setattr(arrays, "ROWS_PART", 5 * 7)
    parts = RidgeRegression(x, truth).fit(0.1)
    torch.testing.assert_close(parts.weight, whole.weight, rtol=1e-9, atol=1e-12)
    one = RidgeRegression(x, number_targets(np.where([True, False], truth.values, math.nan))).fit(0.1)
    torch.testing.assert_close(one.weight[:, 0], whole.weight[:, 0])
    assert not one.weight[:, 1].any() and one.bias[1] == 0


@pytest.mark.parametrize("temperature", [0.07, math.inf])
def test_neighbours_give_the_weighted_mean_of_scikit_learn(temperature: float) -> None:
    train, known = drawn(80, 6)
    test, truth = drawn(30, 6, seed=1)
    for k, metrics in knn(train, known, test, truth, k=(1, 5, 80), temperature=temperature).items():
        theirs = KNeighborsRegressor(
            k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
        )
        expected = theirs.fit(train.astype(np.float64), known.values).predict(test.astype(np.float64))
        errors = StreamingErrors()
        errors.add(expected, truth)
        assert metrics == pytest.approx(errors.result(), rel=1e-4)


def test_neighbours_skip_unknown_numbers() -> None:
    features = np.array([[1, 0], [1, 0.1], [0, 1]], np.float32)
    stored = number_targets(np.array([[math.nan, 4.0], [2.0, 6.0], [8.0, math.nan]]))
    query, truth = np.array([[1.0, 0.0]], np.float32), number_targets(np.array([[2.0, 5.0]]))
    found = knn(features, stored, query, truth, k=(1, 2), temperature=math.inf).values()
    first, second = ([metrics[f"{number}:mean_absolute_error"] for number in (1, 2)] for metrics in found)
    assert second == [0, 0], "(2, mean of 4 and 6)"
    assert first == pytest.approx([abs(2 - 5), abs(5 - 4)]), "5 is the mean of 2 and 8"
