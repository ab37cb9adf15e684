"""Images that a model accepts, and the predictions that it returns for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitrail.errors import DataError

__all__ = ["AnyPrediction", "ImageLike", "NumberPrediction", "OutputKind", "Prediction", "rank", "read_image"]

ImageLike = str | Path | bytes | np.ndarray | Image.Image
"""A path, an encoded file, a uint8 array of (h, w), (h, w, 1) or (h, w, 3), or a Pillow image."""

OutputKind = Literal["softmax", "sigmoid", "numbers"]
"""Meaning of a network's outputs. "softmax": logits of classes that exclude each other. "sigmoid": one yes-or-no logit
per class. "numbers": the numbers themselves, in the units of the data."""


@dataclass(frozen=True)
class Prediction:
    """The classes that a model predicts for one image."""

    label: str
    """The likeliest class."""
    probability: float
    """Probability of the likeliest class, in [0, 1]."""
    ranking: tuple[tuple[str, float], ...]
    """Classes with their probabilities, the likeliest first: all of them, or the `top` that were asked for."""


@dataclass(frozen=True)
class NumberPrediction:
    """The numbers that a model predicts for one image, in the units of the data it was trained on."""

    names: tuple[str, ...]
    values: tuple[float, ...]

    def __getitem__(self, name: str) -> float:
        """Return the number of this name. Raise `KeyError` for a name that the model does not have."""
        if name not in self.names:
            raise KeyError(name)
        return self.values[self.names.index(name)]


AnyPrediction = Prediction | NumberPrediction


def read_image(path: str | Path) -> bytes:
    """Return the bytes of an image file. Raise `DataError` if there is no such file."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read image {str(path)!r}: {error.strerror}") from error


def rank(probabilities: Float[Tensor, "b classes"], classes: tuple[str, ...], count: int) -> list[Prediction]:
    """Return the `count` likeliest classes of each row. Of equally likely classes the first comes first."""
    predictions = []
    for row in probabilities:
        values, order = _largest(row, count)
        ranking = tuple((classes[index], value) for index, value in zip(order, values, strict=True))
        predictions.append(Prediction(*ranking[0], ranking))
    return predictions


def _largest(row: Float[Tensor, " n"], count: int) -> tuple[list[float], list[int]]:
    """Return the largest values in falling order, and their indices; equal values keep the order of their indices."""
    if count == len(row):
        values, order = row.sort(descending=True, stable=True)
        return values.tolist(), order.tolist()
    # `topk` returns equal values in any order, so it only gives the threshold. NaN is not below any threshold.
    candidates = (~(row < row.topk(count).values[-1])).nonzero()[:, 0]
    values, order = row[candidates].sort(descending=True, stable=True)
    return values[:count].tolist(), candidates[order[:count]].tolist()
