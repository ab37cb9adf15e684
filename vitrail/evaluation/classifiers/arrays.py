"""Features and their labels as arrays: what must hold of them, reading them in parts, and judging scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor

from vitrail.data.augmentation.draws import keyed_uniform
from vitrail.errors import DataError
from vitrail.evaluation.predictions.accuracy import mean_average_precision

__all__ = [
    "Figures",
    "Tally",
    "check_finite",
    "check_labelled",
    "check_pair",
    "class_ranks",
    "moments",
    "parts",
    "tensor",
]

PART = 2**23
"""Numbers that are read at once: 64 MB in float64."""


def check_labelled(
    what: str, features: Float[np.ndarray, "n d"], truth: Shaped[np.ndarray, "n ..."], num_classes: int
) -> None:
    """Raises `DataError` unless there are rows, and a truth in range for each: labels in [0, num_classes), or targets
    of `num_classes` columns. `what` says which features they are."""
    if len(features) != len(truth) or not len(features):
        raise DataError(f"{what}: {len(features):,} features and {len(truth):,} labels; give a label for each, and any")
    if truth.ndim == 2:
        if truth.shape[1] != num_classes:
            raise DataError(f"{what}: targets of {truth.shape[1]} columns, not one for each of {num_classes} classes")
        return
    wrong = np.flatnonzero((truth < 0) | (truth >= num_classes))
    if len(wrong):
        label = "none" if truth[wrong[0]] == -1 else truth[wrong[0]]
        raise DataError(
            f"{what}: {len(wrong):,} of {len(truth):,} labels are not in 0 to {num_classes - 1}; the first, of row "
            f"{wrong[0]}, is {label}"
        )


def check_pair(train: Float[np.ndarray, "n d"], test: Float[np.ndarray, "m e"]) -> None:
    """Raises `DataError` unless both are of the same width."""
    if train.shape[1] != test.shape[1]:
        raise DataError(
            f"features to learn from are {train.shape[1]} wide and those to test on {test.shape[1]}; "
            "compute both with the same model"
        )


def parts(rows: int, width: int) -> Iterator[slice]:
    """Slices of consecutive rows, of 64 MB in float64 at most."""
    step = max(1, PART // max(width, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def tensor(features: Float[np.ndarray, "n d"], dtype: torch.dtype = torch.float64) -> Float[Tensor, "n d"]:
    """A copy, which a read-only map of a file needs to become a tensor."""
    return torch.from_numpy(np.array(features, copy=True)).to(dtype)


def moments(
    features: Float[np.ndarray, "n d"], rows: Int64[np.ndarray, " m"]
) -> tuple[Float64[Tensor, " d"], Float64[Tensor, " d"]]:
    """Mean and standard deviation (divided by n) of every column over some rows, in float64.

    Raises `DataError` naming the first row that has a number which is not finite.
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
    """Raises `DataError` naming the first of these rows that has a number which is not finite."""
    finite = values.isfinite().all(dim=1)
    if not finite.all():
        row = rows[int(finite.int().argmin())]
        raise DataError(f"features of row {row} are not all finite; the model or the image behind them is broken")


def class_ranks(labels: Int64[np.ndarray, " n"], seed: int) -> Int64[np.ndarray, " n"]:
    """Each row's place, from 0, among the rows of its label, in an order drawn by the seed.

    The order within a class depends on the seed, the label and the number of rows of that label alone.
    """
    ordinals = _places(labels, np.arange(len(labels)))
    order = np.argsort(keyed_uniform(seed, labels, ordinals, draws=1)[:, 0], kind="stable")
    return _places(labels, order)


def _places(labels: Int64[np.ndarray, " n"], order: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """How many rows of the same label come before each row in an order."""
    grouped = order[np.argsort(labels[order], kind="stable")]
    values, first = np.unique(labels[grouped], return_index=True)
    places = np.empty(len(labels), np.int64)
    places[grouped] = np.arange(len(labels)) - first[np.searchsorted(values, labels[grouped])]
    return places


@dataclass(frozen=True)
class Figures:
    """How well scores find the truth."""

    accuracy: float
    """How often the class of the highest score is true; of equal scores the first class counts."""
    mean_average_precision: float | None
    """Where images can have several labels, as `evaluation.accuracy` defines it; else None."""


class Tally:
    """Adds up figures over parts of the images."""

    def __init__(self) -> None:
        self.right = self.count = 0
        self.several: list[tuple[Tensor, Tensor]] = []

    def add(self, scores: Float[np.ndarray, "b classes"], truth: Shaped[np.ndarray, "b ..."]) -> None:
        """`truth` is labels (one a row) or targets (a column a class, above 0 where true)."""
        likeliest = scores.argmax(axis=1)
        self.count += len(scores)
        if truth.ndim == 1:
            self.right += int((likeliest == truth).sum())
            return
        self.right += int((truth[np.arange(len(truth)), likeliest] > 0).sum())
        self.several.append((torch.from_numpy(scores), torch.from_numpy(truth > 0)))

    def figures(self) -> Figures:
        precision = None
        if self.several:
            scores, truth = (torch.cat(one) for one in zip(*self.several, strict=True))
            precision = mean_average_precision(scores, truth)
        return Figures(self.right / max(self.count, 1), precision)
