"""Tests of few-shot least squares against the normal equations in numpy, and against explicit leave-one-out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.weights import tensor
from tests.targets import single_labels
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.classifiers.linear import LOO_GRID, draw_shots, few_shot, fit_least_squares

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "pipeline" / "fewshot.json").read_text())
"""Results of big_vision's evaluator, in float32 and solved exactly in float64."""


def fewshot_data(spec: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training features and labels, and test features and labels, of a few-shot case."""
    n, m, d, classes, tag = spec["train"], spec["test"], spec["dim"], spec["classes"], spec["tag"]
    train_labels, test_labels = np.arange(n) % classes, (np.arange(m) * 3 + 1) % classes
    centres = tensor(f"{tag}/centres", (classes, d))
    scale = (1 + np.arange(d) % 5).astype(np.float32)
    shift = (0.25 * (np.arange(d) % 7)).astype(np.float32)
    pull = np.float32(spec["pull"])
    train = (tensor(f"{tag}/train", (n, d)) + pull * centres[train_labels]) * scale + shift
    test = (tensor(f"{tag}/test", (m, d)) + pull * centres[test_labels]) * scale + shift
    for column in spec["constant_features"]:
        train[:, column] = 0.25
        test[:, column] = 0.25
    return train.astype(np.float32), train_labels, test.astype(np.float32), test_labels


def clusters(
    per_class: int, width: int, classes: int, *, seed: int = 0, spread: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return shuffled features around a centre for each class, with different scales and means, and their labels."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    labels = random.permutation(np.repeat(np.arange(classes), per_class))
    scales, means = np.geomspace(0.01, 30, width), np.linspace(-50, 50, width)
    features = (centres[labels] + spread * random.normal(size=(len(labels), width))) * scales + means
    return features.astype(np.float32), labels.astype(np.int64)


def measured(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray, *, num_classes: int, **settings: Any
) -> dict[int, tuple[float, ...]]:
    return few_shot(train, single_labels(labels, num_classes), test, single_labels(truth, num_classes), **settings)


def normal_equations(
    features: np.ndarray, labels: np.ndarray, classes: int, l2: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return standardised features with the constant, y, and weights and intercepts for raw features.

    The weights are (X^T X + l2)^-1 X^T y.
    """
    raw = features.astype(np.float64)
    mean, scale = raw.mean(axis=0), raw.std(axis=0) + 1e-5
    x = np.hstack([(raw - mean) / scale, np.full((len(raw), 1), 100.0)])
    y = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)
    w = np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ y)
    weight = w[:-1] / scale[:, None]
    return x, y, weight, 100 * w[-1] - mean @ weight


@given(
    rows=st.integers(1, 12), width=st.integers(1, 12), classes=st.integers(1, 4), seed=st.integers(0, 1000),
    l2=st.sampled_from([2.0**-3, 1024.0, 2.0**15]),
)  # fmt: skip
def test_any_sizes_equal_the_normal_equations(rows: int, width: int, classes: int, seed: int, l2: float) -> None:
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, width)).astype(np.float32)
    features[:, random.integers(width)] = 0.1  # a constant, which float32 cannot hold exactly
    labels = random.integers(0, classes, rows)
    classifier, _ = fit_least_squares(features, labels, num_classes=classes, l2=l2)
    _, _, weight, bias = normal_equations(features, labels, classes, l2)
    expected = features.astype(np.float64) @ weight + bias
    np.testing.assert_allclose(classifier.scores(features), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("per_class", "width", "spread"), [(20, 8, 2), (4, 50, 2), (4, 50, 0.3), (1, 9, 1), (3, 8, 9)])
def test_loo_chooses_what_errs_least_on_rows_left_out(per_class: int, width: int, spread: float) -> None:
    features, labels = clusters(per_class, width, 3, spread=spread)
    errors = {}
    for l2 in LOO_GRID:
        x, y, _, _ = normal_equations(features, labels, 3, l2)
        errors[l2] = 0.0
        for row in range(len(x)):
            others = np.arange(len(x)) != row
            w = np.linalg.solve(x[others].T @ x[others] + l2 * np.eye(x.shape[1]), x[others].T @ y[others])
            errors[l2] += float(((y[row] - x[row] @ w) ** 2).sum())
    classifier, chosen = fit_least_squares(features, labels, num_classes=3, l2="loo")
    assert chosen == min(LOO_GRID, key=errors.__getitem__)
    fixed, _ = fit_least_squares(features, labels, num_classes=3, l2=chosen)
    assert np.array_equal(classifier.weight, fixed.weight)


@given(labels=st.lists(st.integers(0, 3), max_size=60), seed=st.integers(0, 10**6))
def test_shots_are_of_each_class_and_nested(labels: list[int], seed: int) -> None:
    array = np.array(labels, np.int64)
    before: set[int] = set()
    for shots in (1, 2, 5, 25):
        drawn = draw_shots(array, shots, seed)
        assert list(drawn) == sorted(set(drawn)) and before <= set(drawn)
        assert all((array[drawn] == label).sum() == min(shots, labels.count(label)) for label in range(4))
        before = set(drawn)


@pytest.mark.parametrize("draw", GOLDEN["selection"]["draws"], ids=lambda draw: f"seed {draw['seed']}, {draw['shots']}")
def test_the_original_draws_the_same_images_and_measures_the_same(draw: dict[str, Any]) -> None:
    classes, rows = GOLDEN["selection"]["classes"], np.arange(GOLDEN["selection"]["examples"])
    labels, truth = (rows * 7 % 11) % classes, np.arange(20) % classes
    assert draw_shots(labels, draw["shots"], draw["seed"]).tolist() == sorted(draw["picked"])
    train = np.hstack([tensor("fs_select/public", (len(rows), 16)), rows[:, None]]).astype(np.float32)
    test = np.hstack([tensor("fs_select_test/public", (20, 16)), np.zeros((20, 1))]).astype(np.float32)
    settings: dict[str, Any] = {"shots": [draw["shots"]], "seeds": [draw["seed"]], "l2": 1024.0}
    ((accuracy,),) = measured(train, labels, test, truth, num_classes=classes, **settings).values()
    assert accuracy == pytest.approx(draw["accuracy"], abs=1e-6)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["data"]["tag"])
def test_the_original_solves_the_same_least_squares(case: dict[str, Any]) -> None:
    train, labels, test, truth = fewshot_data(case["data"])
    for result in case["results"]:
        solved, _ = fit_least_squares(train, labels, num_classes=case["data"]["classes"], l2=float(result["l2"]))
        scores = test.astype(np.float64) @ solved.weight + solved.bias
        assert (scores.argmax(axis=1) == truth).sum() == result["exact_correct_float64"]
        first = scores.reshape(-1)[:20]
        assert first == pytest.approx(np.asarray(result["float64_logits_first_20"]), rel=1e-6, abs=1e-6)
        if result["l2"] >= 1024:  # the original's float32 is far from exact with a small l2
            bound = 2 * result["max_difference_from_float64"]
            assert np.abs(first - result["logits_first_20"]).max() <= bound
            assert scores.argmax(axis=1).tolist() == result["predictions"]


def test_the_whole_equals_its_parts() -> None:
    train, labels = clusters(30, 20, 4, spread=3)
    test, truth = clusters(25, 20, 4, seed=5, spread=3)
    seeds = (3, 8, 11, 12)
    found = measured(train, labels, test, truth, num_classes=4, shots=(1, 10, 25), seeds=seeds)
    assert list(found) == [1, 10, 25]
    for shots, accuracies in found.items():
        expected = []
        for seed in seeds:
            drawn = draw_shots(labels, shots, seed)
            assert len(drawn) == 4 * shots
            _, _, weight, bias = normal_equations(train[drawn], labels[drawn], 4, 1024)
            expected.append(np.mean((test.astype(np.float64) @ weight + bias).argmax(axis=1) == truth))
        assert accuracies == tuple(expected)
    assert sum(found[1]) < sum(found[10]) < sum(found[25]) < 4


def test_features_that_are_all_the_same_guess_the_first_class() -> None:
    features, labels = np.full((12, 3), 0.1, np.float32), np.arange(12) % 3
    assert measured(features, labels, features, labels, num_classes=3, shots=[4]) == {4: (1 / 3,) * 3}


def test_too_few_images_are_named_and_counted() -> None:
    labels = np.array([0] * 5 + [1] * 2 + [2] * 3, np.int64)
    features = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    settings: dict[str, Any] = {"num_classes": 4, "shots": (1, 5), "class_names": ("ash", "birch", "cedar", "oak")}
    message = r"5 shots need 5 training images .* fewer: birch \(2\), cedar \(3\), oak \(0\)\. .* --allow-fewer"
    with pytest.raises(DataError, match=message):
        measured(features, labels, features, labels, **settings)
    found = measured(features, labels, features, labels, **settings, allow_fewer=True)
    assert list(found) == [1, 5] and [len(draw_shots(labels, count, 0)) for count in (1, 5)] == [3, 10]


@pytest.mark.parametrize("settings", [{"shots": ()}, {"seeds": (1, -1)}, {"l2": 0.0}, {"l2": math.nan}, {"l2": "auto"}])
def test_settings_out_of_range_are_refused(settings: dict[str, object], types_unchecked: None) -> None:
    train, labels = clusters(5, 6, 2)
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))}=.* must be"):
        measured(train, labels, train, labels, num_classes=2, **settings)
