"""How well a linear classifier does on frozen features: logistic regression, its penalty chosen on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.classifiers.arrays import (
    check_finite,
    check_pair,
    check_same_kind,
    check_truth,
    class_ranks,
    moments,
    parts,
    tensor,
)
from vitrail.evaluation.classifiers.logistic import Fit, LogisticRegression
from vitrail.evaluation.predictions.streaming import streaming_metrics
from vitrail.evaluation.truth import MultiLabels, SingleLabels, Truth

__all__ = ["PENALTIES", "LinearClassifier", "LinearResult", "SweepRow", "linear_probe"]

PENALTIES = tuple(10 ** (-step / 2) for step in range(13))
"""From 1 to 0.000001, two a decade."""


@dataclass(frozen=True)
class LinearClassifier:
    """Scores of features as they come, without standardising: features @ weight + bias."""

    weight: Float64[np.ndarray, "d classes"]
    bias: Float64[np.ndarray, " classes"]

    def scores(self, features: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n classes"]:
        """Raises `DataError` for features of another width."""
        if features.shape[1] != len(self.weight):
            raise DataError(f"features are {features.shape[1]} wide; this classifier is for {len(self.weight)}")
        return (tensor(features) @ torch.from_numpy(self.weight) + torch.from_numpy(self.bias)).numpy()

    def measure(self, features: Float[np.ndarray, "n d"], truth: Truth) -> dict[str, float]:
        """Return the metrics of its scores (`streaming_metrics`).

        Raise `DataError` for features of another width, or with numbers that are not finite.
        """
        metrics = streaming_metrics(truth)
        for part in parts(len(features), max(self.weight.shape)):
            check_finite(tensor(features[part]), np.arange(part.start, part.stop))
            metrics.add(self.scores(features[part]), truth.rows(part))
        return metrics.result()


@dataclass(frozen=True)
class SweepRow:
    """A penalty that was tried, and what became of it on the held-out rows."""

    penalty: float
    metrics: dict[str, float]
    iterations: int


@dataclass(frozen=True)
class LinearResult:
    """What `linear_probe` found."""

    metrics: dict[str, float]
    """Metrics of the test features, which are measured once."""
    penalty: float
    sweep: tuple[SweepRow, ...]
    """From the strongest penalty to the weakest; empty where there was nothing to choose."""
    classifier: LinearClassifier


def linear_probe(
    train_features: Float[np.ndarray, "n d"],
    train_truth: Truth,
    test_features: Float[np.ndarray, "m d"],
    test_truth: Truth,
    *,
    penalties: Sequence[float] = PENALTIES,
    held_out: float = 0.1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> LinearResult:
    """Fits logistic regression to the training features, and measures it on the test features.

    The truth is labels (int64, one a row) or targets (uint8, a column a class) where images can have several; those are
    fitted one-versus-rest. The objective is mean cross-entropy in nats + penalty / 2 * sum of squared weights, of
    features standardised by the mean and standard deviation of what is fitted.

    Of several penalties, the one is chosen that does best on a share `held_out` of every class of the training rows (a
    class of one row keeps it), fitted on the others: by accuracy, or by mean average precision of several labels; of
    equal ones, the strongest. With it, all training rows are fitted. A float32 copy of the training features is held on
    the device, however they are stored.

    Raises `DataError` for labels out of range, widths that differ or numbers that are not finite, and `ConfigError` for
    settings out of range.
    """
    _check_settings(penalties, held_out)
    check_truth("training features", train_features, train_truth)
    check_truth("test features", test_features, test_truth)
    check_pair(train_features, test_features)
    check_same_kind(train_truth, test_truth)
    train = partial(_Problem, train_features, train_truth, torch.device(device))
    falling = sorted(set(penalties), reverse=True)
    sweep: tuple[SweepRow, ...] = ()
    penalty, start = falling[0], None
    if len(falling) > 1:
        fitted, kept = _cut(train_truth, held_out, seed)
        sweep, penalty, start = _sweep(train(fitted), falling, train_features[kept], train_truth.rows(kept))
    problem = train(np.arange(len(train_features)))
    classifier = problem.classifier(problem.regression.fit(penalty, start=start))
    return LinearResult(classifier.measure(test_features, test_truth), penalty, sweep, classifier)


class _Problem:
    """Some rows, standardised, to fit."""

    def __init__(
        self,
        features: Float[np.ndarray, "n d"],
        truth: Truth,
        device: torch.device,
        rows: Int64[np.ndarray, " m"],
    ) -> None:
        self.mean, std = moments(features, rows)
        self.std = torch.where(std > 0, std, 1.0)
        standardised = torch.empty(len(rows), features.shape[1], device=device)
        for part in parts(len(rows), features.shape[1]):
            standardised[part] = ((tensor(features[rows[part]]) - self.mean) / self.std).float()
        assert isinstance(truth, SingleLabels | MultiLabels)
        self.regression = LogisticRegression(standardised, truth.rows(rows))

    def classifier(self, fit: Fit) -> LinearClassifier:
        weight = fit.weight / self.std[:, None]
        return LinearClassifier(weight.numpy(), (fit.bias - self.mean @ weight).numpy())


def _sweep(
    problem: _Problem,
    penalties: Sequence[float],
    features: Float[np.ndarray, "m d"],
    truth: Truth,
) -> tuple[tuple[SweepRow, ...], float, Fit]:
    """What each penalty does on held-out features; the best one, and its fit. Each fit starts where the last ended."""
    rows: list[SweepRow] = []
    best: tuple[float, float, Fit] | None = None
    fit: Fit | None = None
    for penalty in penalties:
        fit = problem.regression.fit(penalty, start=fit)
        metrics = problem.classifier(fit).measure(features, truth)
        rows.append(SweepRow(penalty, metrics, fit.iterations))
        score = metrics.get("mean_average_precision", metrics["accuracy"])
        if best is None or score > best[0]:
            best = score, penalty, fit
    assert best is not None
    return tuple(rows), best[1], best[2]


def _cut(truth: Truth, held_out: float, seed: int) -> tuple[Int64[np.ndarray, " fitted"], Int64[np.ndarray, " kept"]]:
    """Rows to fit and rows held out: of every class its share, at least one, and never all."""
    labels = truth.groups()
    counts = np.bincount(labels)
    shares = np.minimum(np.maximum(np.rint(held_out * counts), 1), counts - 1)
    is_kept = class_ranks(labels, seed) < shares[labels]
    if not is_kept.any():
        raise DataError(
            "no class has two images to learn from, so none can be held out to choose a penalty; give a single one"
        )
    return np.flatnonzero(~is_kept), np.flatnonzero(is_kept)


def _check_settings(penalties: Sequence[float], held_out: float) -> None:
    if not penalties or not all(0 < penalty < math.inf for penalty in penalties):
        raise ConfigError(f"penalties={tuple(penalties)} must be numbers above 0, at least one")
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out={held_out} must be a share above 0 and below 1")
