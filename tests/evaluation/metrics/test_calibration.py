"""Tests of probabilities against closed forms, scikit-learn, scipy's minimisers and computations in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special
from scipy.optimize import minimize_scalar
from sklearn.metrics import log_loss

from vitrail.errors import ConfigError
from vitrail.evaluation.metrics import classes as calibration
from vitrail.evaluation.metrics.classes import (
    binary_cross_entropy,
    calibration_bins,
    calibration_gaps,
    expected_calibration_error,
    fit_temperature,
    per_sample,
)
from vitrail.weights.answers import OutputKind


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("temperature", "block"), [(1.0, 1 << 18), (0.3, 13), (4.0, 2)])
def test_each_sample_equals_a_direct_computation(
    scores: OutputKind, temperature: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "BLOCK", block)
    random = np.random.default_rng(1)
    logits, labels = random.standard_normal((23, 5)).astype(np.float32) * 6, random.integers(0, 5, 23)
    found = per_sample(logits, labels, scores=scores, temperature=temperature)
    scaled, truth = logits.astype(np.float64) / temperature, np.eye(5)[labels]
    if scores == "softmax":
        probabilities = special.softmax(scaled, axis=1)
        losses = -np.log(probabilities[truth > 0])
        if losses.max() < 30:  # where scikit-learn does not clip
            assert found.cross_entropy.mean() == pytest.approx(log_loss(labels, probabilities, labels=range(5)))
    else:
        probabilities = special.expit(scaled)
        losses = -(special.log_expit(scaled) * truth + special.log_expit(-scaled) * (1 - truth)).sum(axis=1)
    assert np.array_equal(found.predicted, logits.argmax(axis=1))
    np.testing.assert_allclose(found.confidence, probabilities.max(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.cross_entropy, losses, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.brier, ((probabilities - truth) ** 2).sum(axis=1), rtol=1e-9, atol=1e-15)


def test_huge_logits_do_not_overflow() -> None:
    logits = np.array([[1e4, -1e4], [-1e4, 1e4]], np.float32)
    found = per_sample(logits, np.array([0, 0]))
    assert found.cross_entropy.tolist() == [0, 2e4] and found.brier.tolist() == [0, 2]
    found = per_sample(logits, np.array([0, 0]), scores="sigmoid")
    assert found.cross_entropy.tolist() == [0, 2e4] and found.confidence.tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=f"temperature={temperature} is not a positive number"):
        per_sample(np.zeros((1, 2), np.float32), np.array([0]), temperature=temperature)


def test_several_labels_equal_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BLOCK", 10)
    logits = torch.randn(11, 4, generator=torch.Generator().manual_seed(0)) * 5
    targets = (torch.rand(11, 4, generator=torch.Generator().manual_seed(1)) < 0.4).to(torch.uint8)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        logits.double(), targets.double(), reduction="none"
    ).sum(dim=1)
    np.testing.assert_allclose(binary_cross_entropy(logits.numpy(), targets.numpy()), expected.numpy(), rtol=1e-12)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.integers(1, 20))
def test_bins_and_error_equal_a_loop(samples: list[tuple[float, bool]], bins: int) -> None:
    confidence, correct = np.array([one for one, _ in samples]), np.array([one for _, one in samples])
    error = 0.0
    for number, bar in enumerate(calibration_bins(confidence, correct, bins=bins)):
        low, high = number / bins, (number + 1) / bins
        inside = [(p, hit) for p, hit in samples if low < p <= high or (number == 0 and p == 0)]
        assert bar.images == len(inside) and (bar.lower, bar.upper) == pytest.approx((low, high))
        assert bar.accuracy == (pytest.approx(np.mean([hit for _, hit in inside])) if inside else None)
        assert bar.confidence == (pytest.approx(np.mean([p for p, _ in inside])) if inside else None)
        if inside:
            error += abs(sum(hit - p for p, hit in inside)) / len(samples)
    assert expected_calibration_error(confidence, correct, bins=bins) == pytest.approx(error, abs=1e-12)
    gaps = calibration_gaps(confidence, correct, bins=bins)
    np.testing.assert_allclose(gaps.sum(axis=1), correct - confidence, atol=1e-15)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@given(size=st.floats(0.01, 30), right=st.integers(11, 19))
def test_temperature_of_two_classes_is_a_closed_form(scores: OutputKind, size: float, right: int) -> None:
    """All logits are (a, -a). The probability is sigmoid(2a / T) with softmax and sigmoid(a / T) with sigmoid. The best
    T makes it equal to the fraction of correct samples.
    """
    size = float(np.float32(size))
    logits = np.tile(np.array([[size, -size]], np.float32), (20, 1))
    labels = np.array([0] * right + [1] * (20 - right))
    odds = math.log(right / (20 - right))
    expected = (2 if scores == "softmax" else 1) * size / odds
    assert fit_temperature(logits, labels, scores=scores) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 50.0])
def test_temperature_is_where_a_minimiser_finds_it(scores: OutputKind, scale: float) -> None:
    random = np.random.default_rng(3)
    labels = random.integers(0, 7, 301)
    logits = ((random.standard_normal((301, 7)) + 2 * np.eye(7)[labels]) * scale).astype(np.float32)

    def loss(log_temperature: float) -> float:
        found = per_sample(logits, labels, scores=scores, temperature=math.exp(log_temperature))
        return float(found.cross_entropy.mean())

    best = minimize_scalar(loss, bounds=(-6.9, 6.9), method="bounded", options={"xatol": 1e-10})
    found = fit_temperature(logits, labels, scores=scores)
    assert found == pytest.approx(math.exp(best.x), rel=1e-5)
    assert loss(math.log(found)) <= best.fun + 1e-13
    assert fit_temperature(logits * 4, labels, scores=scores) == pytest.approx(found * 4, rel=1e-9)


def test_temperature_stays_in_bounds_where_there_is_no_minimum() -> None:
    logits = np.array([[3.0, 0.0, -1.0], [0.0, 2.0, 1.0]], np.float32)
    assert fit_temperature(logits, np.array([0, 1])) == 1e-3
    assert fit_temperature(logits, np.array([2, 0])) == 1e3
    assert fit_temperature(np.zeros((2, 3), np.float32), np.array([0, 1])) == 1e3
