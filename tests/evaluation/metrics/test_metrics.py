"""Tests of metrics against scikit-learn and against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from vitrail.evaluation.metrics.classes import (
    average_precision,
    balanced_accuracy,
    f1_scores,
    mean_average_precision,
    per_class,
    per_class_of_targets,
    top_k,
)


@st.composite
def samples(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Return labels, predictions that are often correct, and the number of classes. Some classes may be absent."""
    count, classes = draw(st.integers(1, 60)), draw(st.integers(2, 9))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    labels = random.integers(0, draw(st.integers(1, classes)), count)
    predicted = np.where(random.random(count) < 0.6, labels, random.integers(0, classes, count))
    return labels, predicted, classes


@settings(max_examples=10)
@given(samples())
def test_figures_of_classes_equal_scikit_learn(case: tuple[np.ndarray, np.ndarray, int]) -> None:
    labels, predicted, classes = case
    names = list(range(classes))
    found = per_class(labels, predicted, classes)
    precision, recall, f1, images = reference.precision_recall_fscore_support(
        labels, predicted, labels=names, zero_division=np.nan
    )
    np.testing.assert_allclose(found.recall, recall, rtol=1e-12)
    np.testing.assert_allclose(found.precision, precision, rtol=1e-12)
    np.testing.assert_allclose(found.f1, f1, rtol=1e-12)
    assert np.array_equal(found.images, images) and np.array_equal(
        found.predicted, np.bincount(predicted, minlength=classes)
    )
    here = np.unique(labels)
    expected = reference.recall_score(labels, predicted, labels=here, average="macro")
    assert balanced_accuracy(labels, predicted, classes) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(2, 9), st.booleans())
def test_top_k_is_the_first_k_of_a_stable_ranking(seed: int, classes: int, ties: bool) -> None:
    random = np.random.default_rng(seed)
    logits = random.standard_normal((20, classes)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    labels = random.integers(0, classes, 20)
    order = np.argsort(-logits, axis=1, kind="stable")
    for k in range(1, classes + 2):
        hits = [labels[row] in order[row, :k] for row in range(20)]
        assert top_k(logits, labels, k).tolist() == hits
        if not ties and 1 < k < classes and classes > 2:
            expected = reference.top_k_accuracy_score(labels, logits, k=k, labels=range(classes))
            assert np.mean(hits) == pytest.approx(expected)
    assert np.array_equal(top_k(logits, labels, 1), logits.argmax(axis=1) == labels)


@st.composite
def several(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Return logits without ties, and targets with several labels. Some classes may be absent."""
    count, classes = draw(st.integers(1, 30)), draw(st.integers(2, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    targets = (random.random((count, classes)) < random.random(classes)).astype(np.uint8)
    logits = random.permutation(count * classes).reshape(count, classes).astype(np.float32)
    return logits - count * classes / 2 + 0.25, targets


@pytest.mark.slow
@settings(max_examples=10)
@given(several())
def test_several_labels_equal_scikit_learn(case: tuple[np.ndarray, np.ndarray]) -> None:
    logits, targets = case
    predicted = logits > 0
    found = average_precision(logits, targets > 0)
    for number in range(logits.shape[1]):
        if targets[:, number].any():
            expected = reference.average_precision_score(targets[:, number], logits[:, number])
            assert found[number] == pytest.approx(expected, rel=1e-12)
        else:
            assert np.isnan(found[number])
    micro, macro = f1_scores(predicted, targets)
    for average, value in (("micro", micro), ("macro", macro)):
        expected = reference.f1_score(targets, predicted, average=average, zero_division=np.nan)
        assert value == pytest.approx(expected, rel=1e-12, nan_ok=True)
    figures = per_class_of_targets(predicted, targets)
    precision, recall, f1, images = reference.precision_recall_fscore_support(targets, predicted, zero_division=np.nan)
    np.testing.assert_allclose(figures.recall, recall, rtol=1e-12)
    np.testing.assert_allclose(figures.precision, precision, rtol=1e-12)
    np.testing.assert_allclose(figures.f1, f1, rtol=1e-12)
    assert np.array_equal(figures.images, images)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_equal_scores_count_together(levels: int) -> None:
    random = np.random.default_rng(levels)
    scores, truth = random.integers(0, levels, (301, 1)).astype(np.float32), random.random((301, 1)) < 0.4
    expected = reference.average_precision_score(truth[:, 0], scores[:, 0])
    for order in (random.permutation(301), np.argsort(~truth[:, 0]), np.argsort(truth[:, 0])):
        assert average_precision(scores[order], truth[order])[0] == pytest.approx(expected, rel=1e-12)
    if levels == 1:  # a constant score says nothing
        assert expected == pytest.approx(truth.mean())


def test_mean_average_precision_of_known_rankings() -> None:
    scores = np.array([[3.0, 1.0, 0.0], [2.0, 2.0, 0.0], [1.0, 3.0, 0.0]])
    truth = np.array([[True, False, False], [False, True, False], [True, False, False]])
    assert mean_average_precision(scores, truth) == pytest.approx(((1 + 2 / 3) / 2 + 1 / 2) / 2)
    assert mean_average_precision(scores, np.zeros((3, 3), np.bool_)) == 0
