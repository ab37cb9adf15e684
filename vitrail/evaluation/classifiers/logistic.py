"""Logistic regression with a quadratic penalty, by L-BFGS preconditioned with the covariance of the features."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor

from vitrail.data.augment.draws import keyed_uniform
from vitrail.data.cuts import ranks_in_groups
from vitrail.data.targets import Targets
from vitrail.errors import DataError, listed

MEMORY = 10
"""Number of previous steps that L-BFGS uses."""
PART = 2**20
"""Number of logits in memory at once (4 MB). Smaller parts make threads wait for each other more often, and larger
parts exceed the processor's cache."""

Vector = Float64[Tensor, "coordinates classes"]
"""Weights, or a search direction. The last row has the intercepts."""


@dataclass(frozen=True)
class Fit:
    """The result of a fit."""

    weight: Float64[Tensor, "d classes"]
    bias: Float64[Tensor, " classes"]
    iterations: int
    gradient: float
    """The largest absolute derivative of the objective. If it exceeds the tolerance, the fit was ended by rounding
    errors or by the limit of iterations."""


@dataclass(frozen=True)
class _Value:
    objective: float
    gradient: Vector
    spread: Float64[Tensor, " classes"]
    """For each class, the mean over the rows of p (1 - p), where p is the probability of the class. This is the second
    derivative of the cross-entropy with respect to the logit of the class."""


class LogisticRegression:
    """Minimises mean cross-entropy + penalty / 2 * sum of squared weights, with free intercepts.

    For single labels, the objective uses the cross-entropy of the softmax. For several labels, it uses the sum of the
    binary cross-entropies of all classes (one-versus-rest). scikit-learn's `LogisticRegression(C=1 / (penalty * n))`
    has the same minimum. For single labels of two classes it fits one column of weights, the difference of the two
    here, and needs `C=2 / (penalty * n)`.

    Features should be centred and of similar scale. Matrix products run in the number format and on the device of the
    features. Weights and gradients stay in float64 on the CPU.

    L-BFGS (Liu and Nocedal 1989) starts each direction with an approximate inverse of the Hessian. Here the
    approximation for each class is the inverse of spread * covariance + penalty. It is exact if p (1 - p) does not
    depend on the features, and needs far fewer iterations than the identity.
    """

    def __init__(self, features: Float[Tensor, "n d"], truth: Targets) -> None:
        self.features, self.num_classes = features, truth.columns
        self.truth: Shaped[Tensor, "n ..."] = torch.from_numpy(truth.dense).to(features.device)
        self.is_softmax = truth.kind == "class"
        covariance = (features.t() @ features / len(features)).cpu().double()
        variances, self.directions = torch.linalg.eigh(covariance)
        self.variances = variances.clamp(min=0)

    def fit(
        self, penalty: float, *, start: Fit | None = None, tolerance: float = 1e-5, max_iterations: int = 1000
    ) -> Fit:
        """Return the minimum for a penalty above 0.

        The search starts from `start`, by default from zero weights. It ends when no derivative of the objective
        exceeds the tolerance.
        """
        point = torch.zeros(self.features.shape[1] + 1, self.num_classes, dtype=torch.float64)
        if start is not None:
            point = torch.cat([start.weight, start.bias[None]])
        value = self._value(point, penalty)
        history: list[tuple[Vector, Vector, float]] = []
        iterations = 0
        while value.gradient.abs().max() > tolerance and iterations < max_iterations:
            direction = -_inverse_product(value.gradient, history, self._preconditioner(value.spread, penalty))
            found = self._search(point, value, direction, penalty)
            if found is None:  # rounding errors hide lower values
                break
            next_point, next_value = found
            step, change = next_point - point, next_value.gradient - value.gradient
            if (curvature := _dot(step, change)) > 0:
                history = [*history[-(MEMORY - 1) :], (step, change, curvature)]
            point, value = next_point, next_value
            iterations += 1
        if self.is_softmax:  # softmax ignores a constant added to all classes; the penalty is smallest at mean 0
            point = point - point.mean(dim=1, keepdim=True)
        return Fit(point[:-1], point[-1], iterations, float(value.gradient.abs().max()))

    def _value(self, point: Vector, penalty: float) -> _Value:
        inner = point.to(self.features)
        judge = _softmax if self.is_softmax else _sigmoid
        loss = 0.0
        gradient, spread = torch.zeros_like(inner), torch.zeros_like(inner[0])
        step = max(1, PART // self.num_classes)
        for begin in range(0, len(self.features), step):
            rows = self.features[begin : begin + step]
            logits = torch.addmm(inner[-1], rows, inner[:-1])
            losses, probabilities, residuals = judge(logits, self.truth[begin : begin + step])
            loss += float(losses.cpu().double().sum())
            spread += (probabilities * (1 - probabilities)).sum(dim=0)
            gradient[:-1].addmm_(rows.t(), residuals)
            gradient[-1] += residuals.sum(dim=0)
        count = len(self.features)
        total = gradient.cpu().double() / count
        total[:-1] += penalty * point[:-1]
        objective = loss / count + penalty / 2 * float(point[:-1].square().sum())
        return _Value(objective, total, spread.cpu().double() / count)

    def _preconditioner(self, spread: Float64[Tensor, " classes"], penalty: float) -> Callable[[Vector], Vector]:
        spread = spread.clamp(min=1e-6)  # the spread is 0 for a class without samples
        curvature = self.variances[:, None] * spread + penalty

        def apply(vector: Vector) -> Vector:
            weights = self.directions @ ((self.directions.t() @ vector[:-1]) / curvature)
            return torch.cat([weights, vector[-1:] / spread])

        return apply

    def _search(self, point: Vector, value: _Value, direction: Vector, penalty: float) -> tuple[Vector, _Value] | None:
        """Search for a step that meets the weak Wolfe conditions, by halving and doubling. Return None if no such step
        is found.
        """
        slope = _dot(value.gradient, direction)
        noise = torch.finfo(self.features.dtype).eps * abs(value.objective)
        step, low, high = 1.0, 0.0, math.inf
        for _ in range(20):
            there = point + step * direction
            new = self._value(there, penalty)
            if new.objective > value.objective + 1e-4 * step * slope + noise:
                high = step
            elif _dot(new.gradient, direction) < 0.9 * slope:
                low = step
            else:
                return there, new
            step = 2 * step if high == math.inf else (low + high) / 2
        return None


def _softmax(
    logits: Float[Tensor, "b classes"], labels: Shaped[Tensor, " b"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b classes"], Float[Tensor, "b classes"]]:
    """Return cross-entropy, probabilities, and the derivative of the cross-entropy with respect to the logits."""
    logarithms = logits.log_softmax(dim=1)
    probabilities = logarithms.exp()
    residuals = probabilities.scatter_add(1, labels[:, None], -torch.ones_like(logits[:, :1]))
    return -logarithms.gather(1, labels[:, None])[:, 0], probabilities, residuals


def _sigmoid(
    logits: Float[Tensor, "b classes"], targets: Shaped[Tensor, "b classes"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b classes"], Float[Tensor, "b classes"]]:
    """Return the same values as `_softmax`, with one binary classification per class."""
    answers = targets.to(logits)
    losses = F.binary_cross_entropy_with_logits(logits, answers, reduction="none").sum(dim=1)
    probabilities = logits.sigmoid()
    return losses, probabilities, probabilities - answers


def _inverse_product(
    gradient: Vector, history: list[tuple[Vector, Vector, float]], precondition: Callable[[Vector], Vector]
) -> Vector:
    """Return the product of the approximate inverse Hessian and the gradient (the two loops of L-BFGS)."""
    result = gradient.clone()
    factors = []
    for step, change, curvature in reversed(history):
        factors.append(_dot(step, result) / curvature)
        result -= factors[-1] * change
    result = precondition(result)
    if history:
        _, change, curvature = history[-1]
        result *= curvature / _dot(change, precondition(change))
    for (step, change, curvature), factor in zip(history, reversed(factors), strict=True):
        result += (factor - _dot(change, result) / curvature) * step
    return result


def _dot(one: Vector, other: Vector) -> float:
    return float((one * other).sum())


# Checks and statistics of arrays of features and their targets, and reading of large arrays in slices.


ROWS_PART = 2**23
"""Number of float64 values in a slice (64 MB)."""


def check_truth(what: str, features: Float[np.ndarray, "n d"], truth: Targets) -> None:
    """Raise `DataError` if there are no features, or if the target of any feature is unknown.

    `what` names the features in the message.
    """
    if len(features) != len(truth) or not len(features):
        raise DataError(
            f"{what}: there are {len(features):,} features and {len(truth):,} labels; give at least one "
            "feature, and one label for each feature"
        )
    unknown = np.flatnonzero(~truth.known)
    if len(unknown):
        raise DataError(
            f"{what}: {len(unknown):,} of {len(truth):,} labels are unknown, the first in row {unknown[0]}; select the "
            "rows with a label"
        )


def check_pair(train: Float[np.ndarray, "n d"], test: Float[np.ndarray, "m e"]) -> None:
    """Raise `DataError` unless both arrays of features have the same width."""
    if train.shape[1] != test.shape[1]:
        raise DataError(
            f"training features have {train.shape[1]} columns, but test features have {test.shape[1]}; compute "
            "both with the same model"
        )


def check_both(
    train_features: Float[np.ndarray, "n d"], train: Targets, test_features: Float[np.ndarray, "m e"], test: Targets
) -> None:
    """Raise `DataError` if a target of training or test features is unknown, or if features or targets of the two
    differ in their widths, kinds or names of classes."""
    check_truth("training features", train_features, train)
    check_truth("test features", test_features, test)
    check_pair(train_features, test_features)
    if (train.kind, train.columns) != (test.kind, test.columns):
        raise DataError(
            f"training targets are {train.kind} with {train.columns} columns, and test targets are {test.kind} "
            f"with {test.columns}; both need the same classes or numbers"
        )
    if train.names != test.names:
        raise DataError(
            f"training targets are of {listed(train.names)}, and test targets of {listed(test.names)}; give both the "
            "same names in the same order, because targets are indices of them"
        )


def parts(rows: int, width: int) -> Iterator[slice]:
    """Yield slices of consecutive rows, of at most 64 MB in float64."""
    step = max(1, ROWS_PART // max(width, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def tensor(features: Float[np.ndarray, "n d"], dtype: torch.dtype = torch.float64) -> Float[Tensor, "n d"]:
    """Return a copy of the features as a tensor.

    A copy is needed because features in a memory-mapped file are read-only, and PyTorch has no read-only tensors.
    """
    return torch.from_numpy(np.array(features, copy=True)).to(dtype)


def moments(
    features: Float[np.ndarray, "n d"], rows: Int64[np.ndarray, " m"]
) -> tuple[Float64[Tensor, " d"], Float64[Tensor, " d"]]:
    """Return the mean and standard deviation (divided by n) of every column over some rows, in float64.

    Raise `DataError` with the index of the first row that is not finite.
    """
    width = features.shape[1]
    total, squares = torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for part in parts(len(rows), width):
        values = tensor(features[rows[part]])
        check_finite(values, rows[part])
        total += values.sum(dim=0)
    mean = total / len(rows)
    for part in parts(len(rows), width):
        squares += (tensor(features[rows[part]]) - mean).square().sum(dim=0)
    return mean, (squares / len(rows)).sqrt()


def check_finite(values: Float[Tensor, "m d"], rows: Int64[np.ndarray, " m"]) -> None:
    """Raise `DataError` with the index of the first row that is not finite."""
    finite = values.isfinite().all(dim=1)
    if not finite.all():
        row = rows[int(finite.int().argmin())]
        raise DataError(f"the features of row {row} are not all finite; check the model and the image")


def class_ranks(labels: Int64[np.ndarray, " n"], seed: int) -> Int64[np.ndarray, " n"]:
    """Shuffle the rows within each label, and return the position of each row among the rows of its label, from 0.

    The order within a label depends only on the seed, the label and the number of rows with that label.
    """
    ordinals = ranks_in_groups(np.arange(len(labels)), labels)
    return ranks_in_groups(keyed_uniform(seed, labels, ordinals, draws=1)[:, 0], labels)
