"""Ridge regression: least squares with a quadratic penalty. It is solved in closed form for every penalty."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitrail.evaluation.classifiers.arrays import parts
from vitrail.evaluation.classifiers.logistic import Fit
from vitrail.evaluation.truth import Numbers


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
    variance: Float64[Tensor, " k"]


class RidgeRegression:
    """Ridge regression of each output, which minimises mean squared error + penalty * sum of squared weights.

    Intercepts are not penalised. A row with an unknown number is skipped only for that output. scikit-learn's
    `Ridge(alpha=penalty * n)` has the same minimum. Sums are computed in float64.
    """

    def __init__(self, features: Float[Tensor, "n d"], truth: Numbers) -> None:
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
        objective = 0.0
        for one in self.systems:
            rotated = one.projected / (one.values + penalty)[:, None]
            solution = one.vectors @ rotated
            weight[:, one.outputs] = solution
            bias[one.outputs] = one.number_mean - one.feature_mean @ solution
            objective += float((one.variance - (rotated * one.projected).sum(dim=0)).sum())
        return Fit(weight, bias, objective, iterations=0, gradient=0.0)


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
    return _System(outputs, feature_mean, number_mean, values.clamp(min=0), vectors, projected, y.square().mean(dim=0))
