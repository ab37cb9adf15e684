"""Checks and statistics of arrays of features and their targets, and reading of large arrays in slices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitrail.data.augmentation.draws import keyed_uniform
from vitrail.errors import DataError
from vitrail.evaluation.truth import Truth

PART = 2**23
"""Number of float64 values in a slice (64 MB)."""


def check_truth(what: str, features: Float[np.ndarray, "n d"], truth: Truth) -> None:
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


def check_same_kind(train: Truth, test: Truth) -> None:
    """Raise `DataError` if training and test targets are of different kinds or have different numbers of columns."""
    if (train.kind, train.columns) != (test.kind, test.columns):
        raise DataError(
            f"training targets are {train.kind} with {train.columns} columns, and test targets are {test.kind} "
            f"with {test.columns}; both need the same classes or numbers"
        )


def parts(rows: int, width: int) -> Iterator[slice]:
    """Yield slices of consecutive rows, of at most 64 MB in float64."""
    step = max(1, PART // max(width, 1))
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
    ordinals = _places(labels, np.arange(len(labels)))
    order = np.argsort(keyed_uniform(seed, labels, ordinals, draws=1)[:, 0], kind="stable")
    return _places(labels, order)


def _places(labels: Int64[np.ndarray, " n"], order: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Return, for each row, the number of rows with the same label that come earlier in `order`."""
    grouped = order[np.argsort(labels[order], kind="stable")]
    values, first = np.unique(labels[grouped], return_index=True)
    places = np.empty(len(labels), np.int64)
    places[grouped] = np.arange(len(labels)) - first[np.searchsorted(values, labels[grouped])]
    return places
