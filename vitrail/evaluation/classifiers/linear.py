"""The linear probe: a linear model of frozen features. Its penalty is chosen on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitrail.data.targets import Targets
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.classifiers.logistic import (
    Fit,
    LogisticRegression,
    check_both,
    check_finite,
    check_truth,
    class_ranks,
    moments,
    parts,
    tensor,
)
from vitrail.evaluation.metrics.numbers import SELECTING, merit, streaming_metrics

PENALTIES = tuple(10 ** (-step / 2) for step in range(13))
"""Default penalties of logistic regression, from 1 to 0.000001, two per decade."""

RIDGE_PENALTIES = tuple(10 ** (2 - step / 2) for step in range(17))
"""Default penalties of ridge regression, from 100 to 0.000001, two per decade."""

SINGLE_PENALTY = 0.01
"""Default penalty if no class has two rows, because no row can then be held out to choose a penalty."""


@dataclass(frozen=True)
class LinearMap:
    """A linear map for features that are not standardised: features @ weight + bias."""

    weight: Float64[np.ndarray, "d outputs"]
    bias: Float64[np.ndarray, " outputs"]

    def scores(self, features: Float[np.ndarray, "n d"]) -> Float64[np.ndarray, "n outputs"]:
        """Return the scores. Raise `DataError` for features of another width."""
        if features.shape[1] != len(self.weight):
            raise DataError(f"features have {features.shape[1]} columns, but this linear map takes {len(self.weight)}")
        return (tensor(features) @ torch.from_numpy(self.weight) + torch.from_numpy(self.bias)).numpy()

    def measure(self, features: Float[np.ndarray, "n d"], truth: Targets) -> dict[str, float]:
        """Return the metrics of the scores, as `streaming_metrics` computes them.

        Raise `DataError` if the features have another width or are not finite.
        """
        metrics = streaming_metrics(truth)
        for part in parts(len(features), max(self.weight.shape)):
            check_finite(tensor(features[part]), np.arange(part.start, part.stop))
            metrics.add(self.scores(features[part]), truth.rows(part))
        return metrics.result()

    def merit(self, features: Float[np.ndarray, "n d"], truth: Targets) -> tuple[float, float]:
        """Return the `merit` of the map by the metric in `SELECTING` and the mean cross-entropy. Equal R² needs no
        loss. Raise the errors of `measure`."""
        loss, answers = None, torch.from_numpy(truth.dense)
        if truth.kind == "class":
            loss = F.cross_entropy(torch.from_numpy(self.scores(features)), answers).item()
        elif truth.kind == "classes":
            loss = F.binary_cross_entropy_with_logits(torch.from_numpy(self.scores(features)), answers.double()).item()
        return merit(self.measure(features, truth)[SELECTING[truth.kind]], loss)


@dataclass(frozen=True)
class LinearFit:
    """The result of `fit_linear`."""

    penalty: float
    sweep: dict[float, dict[str, float]]
    """Metrics on the held-out rows by penalty, strongest penalty first. Empty if there was only one penalty."""
    model: LinearMap


@dataclass(frozen=True)
class LinearResult(LinearFit):
    """The result of `linear_probe`."""

    metrics: dict[str, float]
    """Metrics on the test features. They are measured only with the chosen penalty."""


def linear_probe(
    train_features: Float[np.ndarray, "n d"],
    train_truth: Targets,
    test_features: Float[np.ndarray, "m d"],
    test_truth: Targets,
    *,
    penalties: Sequence[float] | None = None,
    held_out: float = 0.1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> LinearResult:
    """Fit a linear model to the training features by `fit_linear`, and measure it on the test features.

    Raise the errors of `fit_linear`, and `DataError` if the test features or targets do not fit the training features.
    """
    check_both(train_features, train_truth, test_features, test_truth)
    fit = fit_linear(train_features, train_truth, penalties=penalties, held_out=held_out, seed=seed, device=device)
    return LinearResult(fit.penalty, fit.sweep, fit.model, fit.model.measure(test_features, test_truth))


def fit_linear(
    features: Float[np.ndarray, "n d"],
    truth: Targets,
    *,
    penalties: Sequence[float] | None = None,
    held_out: float = 0.1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> LinearFit:
    """Fit a linear model to features, and choose its penalty on held-out rows.

    Features are standardised by the mean and standard deviation of the fitted rows. Classes are fitted by logistic
    regression, which is one-versus-rest if images can have several labels. The objective is mean cross-entropy in nats
    + penalty / 2 * sum of squared weights. Numbers are fitted by ridge regression (`RidgeRegression`). The default
    penalties are `PENALTIES` and `RIDGE_PENALTIES`, or `SINGLE_PENALTY` if no class has two rows.

    If there are several penalties, a fraction `held_out` of the rows of every class is held out. No row of a class with
    a single row is held out. The remaining rows are fitted with every penalty. The penalty with the largest accuracy,
    mean average precision or R² on the held-out rows is chosen; the strongest penalty wins a tie. Finally all rows are
    fitted with the chosen penalty. A float32 copy of the features is kept on the device.

    Raise `DataError` for unknown targets and features that are not finite, and if no row can be held out. Raise
    `ConfigError` for settings out of range.
    """
    check_truth("training features", features, truth)
    if penalties is None:
        default = RIDGE_PENALTIES if truth.kind == "numbers" else PENALTIES
        penalties = default if np.bincount(truth.groups()).max(initial=0) > 1 else (SINGLE_PENALTY,)
    if not penalties or not all(0 < penalty < math.inf for penalty in penalties):
        raise ConfigError(f"penalties={tuple(penalties)} must be one or more numbers above 0")
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out={held_out} must be a fraction above 0 and below 1")
    train = partial(_Problem, features, truth, torch.device(device))
    falling = sorted(set(penalties), reverse=True)
    sweep: dict[float, dict[str, float]] = {}
    penalty, start = falling[0], None
    if len(falling) > 1:
        fitted, kept = _cut(truth, held_out, seed)
        sweep, penalty, start = _sweep(train(fitted), falling, features[kept], truth.rows(kept))
    problem = train(np.arange(len(features)))
    return LinearFit(penalty, sweep, problem.model(problem.regression.fit(penalty, start=start)))


class _Problem:
    """Standardised features and targets to fit."""

    def __init__(
        self,
        features: Float[np.ndarray, "n d"],
        truth: Targets,
        device: torch.device,
        rows: Int64[np.ndarray, " m"],
    ) -> None:
        self.mean, std = moments(features, rows)
        self.std = torch.where(std > 0, std, 1.0)
        standardised = torch.empty(len(rows), features.shape[1], device=device)
        for part in parts(len(rows), features.shape[1]):
            standardised[part] = ((tensor(features[rows[part]]) - self.mean) / self.std).float()
        fitted = truth.rows(rows)
        self.regression = (
            RidgeRegression(standardised, fitted)
            if truth.kind == "numbers"
            else LogisticRegression(standardised, fitted)
        )

    def model(self, fit: Fit) -> LinearMap:
        weight = fit.weight / self.std[:, None]
        return LinearMap(weight.numpy(), (fit.bias - self.mean @ weight).numpy())


def _sweep(
    problem: _Problem,
    penalties: Sequence[float],
    features: Float[np.ndarray, "m d"],
    truth: Targets,
) -> tuple[dict[float, dict[str, float]], float, Fit]:
    """Return the metrics of each penalty on held-out features, the best penalty and its fit.

    Each fit starts from the previous one.
    """
    found: dict[float, dict[str, float]] = {}

    def score(penalty: float) -> float:
        return found[penalty][SELECTING[truth.kind]]

    fit: Fit | None = None
    for penalty in penalties:
        fit = problem.regression.fit(penalty, start=fit)
        found[penalty] = problem.model(fit).measure(features, truth)
        if max(found, key=score) == penalty:  # of equal ones, the first
            best = penalty, fit  # the weights of all penalties would take several times the memory
    return found, *best


def _cut(truth: Targets, held_out: float, seed: int) -> tuple[Int64[np.ndarray, " fitted"], Int64[np.ndarray, " kept"]]:
    """Divide the rows into rows to fit and held-out rows. The fraction `held_out` of every class is held out. Both
    groups have at least one row.
    """
    labels = truth.groups()
    counts = np.bincount(labels)
    counts_kept = np.minimum(np.maximum(np.rint(held_out * counts), 1), counts - 1)
    is_kept = class_ranks(labels, seed) < counts_kept[labels]
    if not is_kept.any():
        raise DataError(
            "no class has two training images, so no image can be held out to choose a penalty; give a single penalty"
        )
    return np.flatnonzero(~is_kept), np.flatnonzero(is_kept)


# Ridge regression: least squares with a quadratic penalty. It is solved in closed form for every penalty.


@dataclass(frozen=True)
class _System:
    """The centred normal equations of a group of outputs. The numbers of these outputs are known for the same rows."""

    outputs: Int64[np.ndarray, " k"]
    feature_mean: Float64[Tensor, " d"]
    number_mean: Float64[Tensor, " k"]
    values: Float64[Tensor, " d"]
    """Eigenvalues of the covariance of the features."""
    vectors: Float64[Tensor, "d d"]
    projected: Float64[Tensor, "d k"]
    """Covariance of the features with the numbers, in the basis of the eigenvectors."""


class RidgeRegression:
    """Ridge regression of each output, which minimises mean squared error + penalty * sum of squared weights.

    Intercepts are not penalised. A row with an unknown number is skipped only for that output. scikit-learn's
    `Ridge(alpha=penalty * n)` has the same minimum. Sums are computed in float64.
    """

    def __init__(self, features: Float[Tensor, "n d"], truth: Targets) -> None:
        self.width, self.columns = features.shape[1], truth.columns
        known = ~np.isnan(truth.values)
        patterns, places = np.unique(known, axis=1, return_inverse=True)
        self.systems = [
            _system(features, truth.values, np.flatnonzero(pattern), np.flatnonzero(places.reshape(-1) == number))
            for number, pattern in enumerate(patterns.T)
            if pattern.any()
        ]

    def fit(self, penalty: float, *, start: Fit | None = None) -> Fit:
        """Return the weights that minimise the objective, for a penalty above 0.

        The weights of an output without known numbers are 0. `start` is ignored, because the solution has a closed
        form.
        """
        weight = torch.zeros(self.width, self.columns, dtype=torch.float64)
        bias = torch.zeros(self.columns, dtype=torch.float64)
        for one in self.systems:
            solution = one.vectors @ (one.projected / (one.values + penalty)[:, None])
            weight[:, one.outputs] = solution
            bias[one.outputs] = one.number_mean - one.feature_mean @ solution
        return Fit(weight, bias, iterations=0, gradient=0.0)


def _system(
    features: Float[Tensor, "n d"],
    numbers: Float64[np.ndarray, "n columns"],
    rows: Int64[np.ndarray, " m"],
    outputs: Int64[np.ndarray, " k"],
) -> _System:
    width = features.shape[1]
    y = torch.from_numpy(numbers[np.ix_(rows, outputs)])
    feature_mean = torch.zeros(width, dtype=torch.float64)
    for part in parts(len(rows), width):
        feature_mean += features[rows[part]].cpu().double().sum(dim=0)
    feature_mean, number_mean = feature_mean / len(rows), y.mean(dim=0)
    y = y - number_mean
    covariance = torch.zeros(width, width, dtype=torch.float64)
    products = torch.zeros(width, len(outputs), dtype=torch.float64)
    for part in parts(len(rows), width):
        x = features[rows[part]].cpu().double() - feature_mean
        covariance += x.t() @ x
        products += x.t() @ y[part]
    values, vectors = torch.linalg.eigh(covariance / len(rows))
    projected = vectors.t() @ products / len(rows)
    return _System(outputs, feature_mean, number_mean, values.clamp(min=0), vectors, projected)
