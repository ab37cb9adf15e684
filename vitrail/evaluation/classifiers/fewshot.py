"""Few-shot accuracy: a least-squares classifier, in closed form, of the frozen features of a few images per class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitrail.data.targets import Targets
from vitrail.errors import ConfigError, DataError, listed
from vitrail.evaluation.classifiers.linear import LinearMap
from vitrail.evaluation.classifiers.logistic import check_both, moments, tensor

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
    check_settings(shots, seeds, l2)
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
    system = _System(x, y)
    strength = min(LOO_GRID, key=system.left_out_error) if isinstance(l2, str) else l2
    w = system.solve(strength)
    weight = w[:-1] / scale[:, None]
    return LinearMap(weight.numpy(), (CONSTANT * w[-1] - mean @ weight).numpy()), strength


class _System:
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


def check_settings(shots: Sequence[int], seeds: Sequence[int], l2: Strength) -> None:
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
