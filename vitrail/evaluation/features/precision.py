"""The choice of the number format for the extraction of features: bfloat16 if that changes them little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from vitrail.data.pixels.preprocess import Pixels, Preprocess
from vitrail.data.source import Source
from vitrail.errors import UndecodableImage
from vitrail.models.predictor import Predictor

COMPARED = 8
"""Largest number of images whose features are compared."""

TRIED = 32
"""Largest number of images that are read to find images that can be decoded."""

SAFE_COSINE = 0.999
"""Smallest cosine between the bfloat16 and float32 features of an image with which bfloat16 is used."""


class Comparison(NamedTuple):
    """Comparison of bfloat16 features with float32 features."""

    images: int
    """Number of compared images. 0 if none could be decoded."""
    cosine: float
    """Smallest cosine over these images."""

    @property
    def is_safe(self) -> bool:
        """True if bfloat16 features can replace float32 features. A cosine that is not a number is not safe."""
        return self.cosine >= SAFE_COSINE


def compare_precisions(
    network: nn.Module, source: Source, preprocess: Preprocess, *, at_most: int, by_head: bool = False
) -> Comparison:
    """Compare the features of up to eight images that are evenly spaced in the source, and at most `at_most`.

    The features are embeddings, or with `by_head` the inputs of the head.
    """
    pixels = []
    for item in _decoded(source, preprocess):
        pixels.append(item)
        if len(pixels) >= min(COMPARED, at_most):
            break
    if not pixels:
        return Comparison(0, 0.0)
    exact = _features(Predictor(network, "float32"), pixels, preprocess, by_head)
    rounded = _features(Predictor(network, "bf16"), pixels, preprocess, by_head)
    return Comparison(len(pixels), float(cosine_similarity(exact, rounded, dim=1).min()))


def _decoded(source: Source, preprocess: Preprocess) -> Iterator[Pixels]:
    """Yield the pixels of images that are evenly spaced in the source. Images that cannot be decoded are skipped."""
    spread = np.unique(np.linspace(0, max(len(source) - 1, 0), min(TRIED, len(source))).round().astype(int))
    first = spread[:: max(1, len(spread) // COMPARED)]
    for index in (*first.tolist(), *np.setdiff1d(spread, first).tolist()):
        try:
            yield preprocess.pixels(source[index].image)
        except UndecodableImage:
            continue


def _features(predictor: Predictor, pixels: list[Pixels], preprocess: Preprocess, by_head: bool) -> Tensor:
    images = preprocess.normalise(torch.from_numpy(np.stack(pixels)).to(predictor.device))
    return (predictor.head_inputs(images) if by_head else predictor.embed(images)).float()
