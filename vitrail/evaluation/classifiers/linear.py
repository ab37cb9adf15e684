"""Linear models of frozen features: the linear probe, whose penalty is chosen on held-out rows, and few-shot least
squares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitrail.data.targets import Targets
from vitrail.errors import ConfigError, DataError, listed
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
from vitrail.machine import autocast

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
    """The result of `fit_linear` and of `linear_probe`."""

    penalty: float
    sweep: dict[float, dict[str, float]]
    """Metrics on the held-out rows by penalty, strongest penalty first. Empty if there was only one penalty."""
    model: LinearMap
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics on the test features of `linear_probe`. They are measured only with the chosen penalty."""


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
) -> LinearFit:
    """Fit a linear model to the training features by `fit_linear`, and measure it on the test features.

    Raise the errors of `fit_linear`, and `DataError` if the test features or targets do not fit the training features.
    """
    check_both(train_features, train_truth, test_features, test_truth)
    fit = fit_linear(train_features, train_truth, penalties=penalties, held_out=held_out, seed=seed, device=device)
    return replace(fit, metrics=fit.model.measure(test_features, test_truth))


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
    with autocast("float32", torch.device(device)):  # the caller's may be on
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
        standardised = torch.empty(len(rows), features.shape[1], dtype=torch.float32, device=device)
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


# Few-shot accuracy: a least-squares classifier, in closed form, of the features of a few images per class.


CONSTANT = 100.0
"""Value of the constant feature that gives the intercept. A large constant needs only a small weight, so that
regularisation hardly affects the intercept."""
LOO_GRID = tuple(2.0**power for power in range(20, -11, -1))
"""The regularisation strengths that "loo" tries, strongest first."""
NAMED = 10
"""Maximum number of classes that a message names."""

Strength = float | Literal["loo"]


def few_shot(
    train_features: Float[np.ndarray, "n d"],
    train_truth: Targets,
    test_features: Float[np.ndarray, "m d"],
    test_truth: Targets,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int | Sequence[int] = 3,
    l2: Strength = 1024.0,
    allow_fewer: bool = False,
    class_names: Sequence[str] | None = None,
    of_rows: Int64[np.ndarray, " n"] | None = None,
) -> dict[int, tuple[float, ...]]:
    """Measure few-shot linear regression as in section 4.1 of the paper (2010.11929), with big_vision's settings.

    Return the accuracies of all seeds on the test features, by the number of training images per class.

    The classifier is `fit_least_squares`. `seeds` is a list of seeds, or a number n for the seeds 0 to n - 1. `l2` is
    the strength of the regularisation, or "loo" to choose it from 2^-10 to 2^20 for each draw. `train_features` may
    contain only the features of the images that `draw_shots` draws. `of_rows` then lists the rows of these images in
    `train_truth`, in ascending order.

    With `allow_fewer`, a class with fewer images than shots uses all its images. Otherwise such a class raises
    `DataError`. Unknown labels, different widths and features that are not finite raise `DataError`. Settings out of
    range raise `ConfigError`.
    """
    shots = tuple(shots)
    seeds = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    check_few_shot(shots, seeds, l2)
    held = np.arange(len(train_truth)) if of_rows is None else of_rows
    check_both(train_features, train_truth.rows(held), test_features, test_truth)
    train_labels, num_classes = train_truth.values, train_truth.columns
    if not allow_fewer:
        check_counts(np.bincount(train_labels, minlength=num_classes), max(shots), class_names)
    found: dict[int, tuple[float, ...]] = {}
    for count in shots:
        accuracies = []
        for seed in seeds:
            drawn = draw_shots(train_labels, count, seed)
            places = np.searchsorted(held, drawn)
            assert np.array_equal(held[places], drawn), "of_rows must contain all drawn rows"
            classifier, _ = fit_least_squares(
                train_features[places], train_labels[drawn], num_classes=num_classes, l2=l2
            )
            accuracies.append(classifier.measure(test_features, test_truth)["accuracy"])
        found[count] = tuple(accuracies)
    return found


def draw_shots(labels: Int64[np.ndarray, " n"], shots: int, seed: int) -> Int64[np.ndarray, " drawn"]:
    """Return the rows of `shots` images per class, in ascending order. A class with fewer images contributes all its
    rows.

    These are the rows that big_vision's evaluator draws with the same seed: one generator shuffles the rows of each
    class, class after class, and the first rows of each class are used. A draw with more shots therefore contains the
    draw with fewer shots.
    """
    generator = np.random.default_rng(seed)
    rows = np.argsort(labels, kind="stable")
    classes = np.split(rows, np.flatnonzero(np.diff(labels[rows])) + 1)
    return np.sort(np.concatenate([generator.permutation(members)[:shots] for members in classes]))


def fit_least_squares(
    features: Float[np.ndarray, "n d"], labels: Int64[np.ndarray, " n"], *, num_classes: int, l2: Strength
) -> tuple[LinearMap, float]:
    """Return the least-squares map onto +1 for the true class and -1 for every other class, and the l2 that was used.

    Features are standardised: (x - mean) / (std + 1e-5), with the mean and std of these rows. A constant feature of 100
    is appended. The map w minimises ||X w - y||^2 + l2 ||w||^2. It is computed in float64 from the eigenvectors of X^T
    X or X X^T, whichever is smaller.

    With l2="loo", the strength with the smallest leave-one-out squared error is chosen. The strongest one wins a tie.
    The mean and standard deviation are those of all rows, including the row that is left out, so the errors have a
    closed form: e_i = r_i / (1 - h_ii), where r are the residuals and h_ii is the leverage of row i. Squared error is
    used instead of accuracy because leave-one-out accuracy is always 0 for a class with one image.
    """
    mean, std = moments(features, np.arange(len(features)))
    scale = std + 1e-5
    x = F.pad((tensor(features) - mean) / scale, (0, 1), value=CONSTANT)
    y = 2 * F.one_hot(torch.from_numpy(labels), num_classes).double() - 1
    system = _LeastSquares(x, y)
    strength = min(LOO_GRID, key=system.left_out_error) if isinstance(l2, str) else l2
    w = system.solve(strength)
    weight = w[:-1] / scale[:, None]
    return LinearMap(weight.numpy(), (CONSTANT * w[-1] - mean @ weight).numpy()), strength


class _LeastSquares:
    """The least-squares problem in the basis of eigenvectors.

    For at least as many rows as features, X^T X = q diag(lambda) q^T, and w = q (lambda + l2)^-1 q^T X^T y. For fewer
    rows, X X^T = q diag(lambda) q^T, and w = X^T q (lambda + l2)^-1 q^T y.
    """

    def __init__(self, x: Float64[Tensor, "n d"], y: Float64[Tensor, "n classes"]) -> None:
        self.x, self.y = x, y
        self.is_tall = x.shape[0] >= x.shape[1]
        values, self.vectors = torch.linalg.eigh(x.t() @ x if self.is_tall else x @ x.t())
        self.values = values.clamp(min=0)
        self.rotated = x @ self.vectors if self.is_tall else self.vectors
        self.projected = self.rotated.t() @ y

    def solve(self, l2: float) -> Float64[Tensor, "d classes"]:
        found = self.vectors @ (self.projected / (self.values + l2)[:, None])
        return found if self.is_tall else self.x.t() @ found

    def left_out_error(self, l2: float) -> float:
        """Return the sum of the squared leave-one-out errors."""
        fitted = self.rotated @ (self.projected / (self.values + l2)[:, None])
        leverage = self.rotated.square() @ (1 / (self.values + l2))
        if self.is_tall:
            fitted, leverage = self.y - fitted, 1 - leverage
        return float((fitted / leverage[:, None]).square().sum())  # otherwise, both are divided by l2


def check_few_shot(shots: Sequence[int], seeds: Sequence[int], l2: Strength) -> None:
    """Raise `ConfigError` for settings out of range."""
    if not shots or min(shots) < 1:
        raise ConfigError(f"shots={tuple(shots)} must be whole numbers of images per class, 1 or more")
    if not seeds or min(seeds) < 0:
        raise ConfigError(f"seeds={tuple(seeds)} must be one or more whole numbers, 0 or more")
    if not (l2 == "loo" if isinstance(l2, str) else 0 < l2 < math.inf):
        raise ConfigError(f"l2={l2!r} must be a number above 0, or 'loo' to choose it by leave-one-out error")


def check_counts(counts: Int64[np.ndarray, " classes"], shots: int, names: Sequence[str] | None) -> None:
    """Raise `DataError` with the names of all classes that have fewer images than shots, if there are any."""
    few = np.flatnonzero(counts < shots)
    if not len(few):
        return
    named = [f"{names[index] if names else f'class {index}'} ({counts[index]})" for index in few.tolist()]
    raise DataError(
        f"{shots} shots need {shots} training images per class; these classes have fewer: {listed(named, NAMED)}. "
        "Choose fewer shots, or use --allow-fewer to take all images of such classes"
    )
