"""Tests of the linear probe against scikit-learn's pipeline, and of the rows that it uses for each purpose."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.metrics import average_precision_score
from sklearn.preprocessing import StandardScaler

from tests.targets import multi_labels, single_labels
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.classifiers import linear
from vitrail.evaluation.classifiers import logistic as arrays
from vitrail.evaluation.classifiers.linear import LinearFit, linear_probe


def drawn(n: int, width: int, classes: int, *, seed: int = 0, noise: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Return features of different scales and means, one of them constant, and labels that depend on them."""
    shared, random = np.random.default_rng(77), np.random.default_rng(seed)
    mixing, truth = shared.normal(size=(width, width)), shared.normal(size=(width, classes))
    core = random.normal(size=(n, width))
    labels = (core @ truth + noise * random.gumbel(size=(n, classes))).argmax(axis=1)
    features = (core @ mixing) * np.geomspace(0.01, 10, width) + np.linspace(-30, 30, width)
    features[:, width // 2] = 0.1
    return features.astype(np.float32), labels.astype(np.int64)


def probed(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray, *, num_classes: int, **settings: Any
) -> LinearFit:
    """Return the result of the probe for labels, or for targets with a column for each class."""
    one, other = (
        single_labels(values, num_classes) if values.ndim == 1 else multi_labels(values) for values in (labels, truth)
    )
    return linear_probe(train, one, test, other, **settings)


def reference(features: np.ndarray, labels: np.ndarray, penalty: float) -> tuple[StandardScaler, Reference]:
    scaler = StandardScaler().fit(features.astype(np.float64))
    fit = Reference(C=1 / (penalty * len(features)), tol=1e-10, max_iter=10_000)
    return scaler, fit.fit(scaler.transform(features.astype(np.float64)), labels)


@pytest.mark.parametrize("penalty", [0.1, 0.003])
def test_one_penalty_gives_the_probabilities_of_scikit_learn(penalty: float) -> None:
    train, labels = drawn(301, 17, 4)
    test, truth = drawn(200, 17, 4, seed=1)
    result = probed(train, labels, test, truth, num_classes=4, penalties=[penalty])
    scaler, fit = reference(train, labels, penalty)
    expected = fit.predict_proba(scaler.transform(test.astype(np.float64)))
    ours = torch.from_numpy(result.model.scores(test)).softmax(dim=1).numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-4)
    assert result.metrics["accuracy"] == np.mean(expected.argmax(axis=1) == truth)
    assert result.penalty == penalty and result.sweep == {} and set(result.metrics) == {"accuracy"}


@pytest.mark.slow
def test_the_sweep_is_scikit_learns_on_the_same_cut() -> None:
    train, labels = drawn(260, 40, 3)
    test, truth = drawn(150, 40, 3, seed=1)
    penalties = (1e-4, 1.0, 0.01)
    result = probed(train, labels, test, truth, num_classes=3, penalties=penalties, held_out=0.3, seed=5)
    fitted, kept = linear._cut(single_labels(labels, 3), 0.3, 5)
    accuracies = {}
    for penalty in penalties:
        scaler, fit = reference(train[fitted], labels[fitted], penalty)
        accuracies[penalty] = fit.score(scaler.transform(train[kept].astype(np.float64)), labels[kept])
    assert list(result.sweep) == [1.0, 0.01, 1e-4]
    assert {penalty: metrics["accuracy"] for penalty, metrics in result.sweep.items()} == accuracies
    assert result.penalty == max(sorted(penalties, reverse=True), key=accuracies.__getitem__)
    scaler, fit = reference(train, labels, result.penalty)
    expected = fit.predict_proba(scaler.transform(test.astype(np.float64)))
    ours = torch.from_numpy(result.model.scores(test)).softmax(dim=1).numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-3)
    assert result.metrics["accuracy"] == np.mean(expected.argmax(axis=1) == truth)


def test_equal_penalties_choose_the_strongest() -> None:
    features = np.repeat(np.eye(3, dtype=np.float32), 10, axis=0)
    labels = np.repeat(np.arange(3), 10)
    result = probed(features, labels, features, labels, num_classes=3, penalties=[1e-3, 0.1, 0.01])
    assert [metrics["accuracy"] for metrics in result.sweep.values()] == [1, 1, 1] and result.penalty == 0.1


@given(
    labels=st.lists(st.integers(0, 3), min_size=2, max_size=50), share=st.floats(0.01, 0.99), seed=st.integers(0, 99)
)
def test_the_cut_takes_its_share_of_each_class(labels: list[int], share: float, seed: int) -> None:
    array = np.array(labels, np.int64)
    if max(labels.count(label) for label in labels) == 1:
        with pytest.raises(DataError, match="no class has two training images"):
            linear._cut(single_labels(array, 4), share, seed)
        return
    fitted, kept = linear._cut(single_labels(array, 4), share, seed)
    assert sorted([*fitted, *kept]) == list(range(len(labels)))
    for label in set(labels):
        count, held = labels.count(label), int((array[kept] == label).sum())
        assert held == (0 if count == 1 else min(max(round(share * count), 1), count - 1))


def test_several_labels_are_one_versus_rest() -> None:
    train, one = drawn(300, 10, 3)
    _, other = drawn(300, 10, 3, seed=9)
    targets = ((one[:, None] == np.arange(3)) | (other[:, None] == np.arange(3))).astype(np.uint8)
    result = probed(train[:200], targets[:200], train[200:], targets[200:], num_classes=3, penalties=[0.05])
    scores = result.model.scores(train[200:])
    precisions = []
    for number in range(3):
        scaler, fit = reference(train[:200], targets[:200, number], 0.05)
        expected = fit.decision_function(scaler.transform(train[200:].astype(np.float64)))
        np.testing.assert_allclose(scores[:, number], expected, rtol=0, atol=1e-3)
        precisions.append(average_precision_score(targets[200:, number], expected))
    assert result.metrics["mean_average_precision"] == pytest.approx(np.mean(precisions), abs=1e-9)
    hits = targets[200:][np.arange(100), scores.argmax(axis=1)]
    assert result.metrics["accuracy"] == hits.mean()


def test_several_labels_choose_by_mean_average_precision() -> None:
    train, labels = drawn(200, 30, 4, noise=5)
    targets = np.eye(4, dtype=np.uint8)[labels] | np.eye(4, dtype=np.uint8)[np.roll(labels, 1)]
    result = probed(train, targets, train, targets, num_classes=4, penalties=(1.0, 0.1, 1e-5))
    precisions = {penalty: metrics["mean_average_precision"] for penalty, metrics in result.sweep.items()}
    assert result.penalty == max(precisions, key=precisions.__getitem__)
    assert len(set(precisions)) == 3


def test_a_mapped_file_in_parts_gives_what_the_array_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels = drawn(150, 12, 3)
    np.save(tmp_path / "features.npy", train)
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    whole = probed(train, labels, train, labels, num_classes=3, penalties=[0.1, 0.01])
    monkeypatch.setattr(arrays, "ROWS_PART", 12 * 7)
    parts = probed(mapped, labels, mapped, labels, num_classes=3, penalties=[0.1, 0.01])
    assert parts.metrics == whole.metrics and parts.penalty == whole.penalty
    np.testing.assert_allclose(parts.model.weight, whole.model.weight, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"penalties": ()}, {"penalties": (0.1, 0.0)}, {"penalties": (math.inf,)}, {"held_out": 0.0}, {"held_out": 1.0}],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    train, labels = drawn(20, 4, 2)
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))}=.* must be"):
        probed(train, labels, train, labels, num_classes=2, **settings)


def test_one_row_per_class_needs_no_penalty_and_cannot_choose_one() -> None:
    train, labels = drawn(20, 4, 2)
    rows = [int(np.flatnonzero(labels == label)[0]) for label in (0, 1)]
    found = probed(train[rows], labels[rows], train, labels, num_classes=2)
    given = probed(train[rows], labels[rows], train, labels, num_classes=2, penalties=[linear.SINGLE_PENALTY])
    assert found.penalty == linear.SINGLE_PENALTY and found.sweep == {} and found.metrics == given.metrics
    with pytest.raises(DataError, match="no class has two training images"):
        probed(train[rows], labels[rows], train, labels, num_classes=2, penalties=(1.0, 0.1))
