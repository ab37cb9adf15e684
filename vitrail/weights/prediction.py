"""The types of images that a model accepts, and the predictions that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitrail.errors import ConfigError, DataError

ImageLike = str | Path | bytes | np.ndarray | Image.Image
"""A path, an encoded file, a uint8 array of (h, w), (h, w, 1) or (h, w, 3), or a Pillow image."""

Images = Sequence[ImageLike] | np.ndarray | Image.Image
"""A list of images, one Pillow image, or an array of one image or of n images (`image_list`)."""

OutputKind = Literal["softmax", "sigmoid", "numbers"]
"""Meaning of a network's outputs. "softmax": logits of classes that exclude each other. "sigmoid": one yes-or-no logit
per class. "numbers": numbers in the units of the training data."""


@dataclass(frozen=True)
class Prediction:
    """The classes that a model predicts for one image."""

    label: str
    """The likeliest class."""
    probability: float
    """Probability of the likeliest class, in [0, 1]."""
    ranking: tuple[tuple[str, float], ...]
    """The `top` likeliest classes with their probabilities, the likeliest first. By default all classes."""


@dataclass(frozen=True)
class NumberPrediction:
    """The numbers that a model predicts for one image, in the units of the training data."""

    names: tuple[str, ...]
    values: tuple[float, ...]

    def __getitem__(self, name: str) -> float:
        """Return the number with this name. Raise `KeyError` if the model has no number of this name."""
        if name not in self.names:
            raise KeyError(name)
        return self.values[self.names.index(name)]


AnyPrediction = Prediction | NumberPrediction


def read_image(path: str | Path) -> bytes:
    """Return the bytes of an image file. Raise `DataError` if the file cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read image {str(path)!r}: {error.strerror}") from error


def image_list(images: Images) -> Sequence[ImageLike]:
    """Return the images of an argument that holds one image or several.

    A Pillow image and an array of (h, w), (h, w, 1) or (h, w, 3) are one image. An array of (n, h, w, 1) or
    (n, h, w, 3) holds n images. Raise `ConfigError` for anything else that is not a list or a tuple.
    """
    if isinstance(images, Image.Image):
        return [images]
    if isinstance(images, np.ndarray) and images.ndim in (2, 3, 4):
        if images.ndim == 2 or images.shape[-1] in (1, 3):
            return list(images) if images.ndim == 4 else [images]
    elif isinstance(images, Sequence) and not isinstance(images, str | bytes | bytearray):
        return images
    shape = getattr(images, "shape", None)
    raise ConfigError(
        f"images is a {type(images).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}; pass a list of "
        "paths, encoded files, uint8 arrays or Pillow images, or one Pillow image, or a uint8 array of (h, w), "
        "(h, w, 1), (h, w, 3) or, for n images, (n, h, w, 1) or (n, h, w, 3)"
    )


def rank(probabilities: Float[Tensor, "b classes"], classes: tuple[str, ...], count: int) -> list[Prediction]:
    """Return the `count` likeliest classes of each row. Equally likely classes keep the order of `classes`."""
    predictions = []
    for row in probabilities:
        values, order = _largest(row, count)
        ranking = tuple((classes[index], value) for index, value in zip(order, values, strict=True))
        predictions.append(Prediction(*ranking[0], ranking))
    return predictions


def _largest(row: Float[Tensor, " n"], count: int) -> tuple[list[float], list[int]]:
    """Return the largest values, largest first, and their indices. Equal values keep the order of their indices."""
    if count == len(row):
        values, order = row.sort(descending=True, stable=True)
        return values.tolist(), order.tolist()
    # `topk` returns equal values in any order, so it only gives the threshold. Comparisons with NaN are false.
    candidates = (~(row < row.topk(count).values[-1])).nonzero()[:, 0]
    values, order = row[candidates].sort(descending=True, stable=True)
    return values[:count].tolist(), candidates[order[:count]].tolist()
