"""Similarity of the features of layers, in one network or two: centred kernel alignment (1905.00414).

The estimator of the Hilbert-Schmidt independence criterion (HSIC) is unbiased, and it is averaged over minibatches
(2010.15327).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from vitrail.analysis.tracing import chosen_blocks
from vitrail.errors import ConfigError
from vitrail.models.predictor import Predictor

SMALLEST_BATCH = 4
"""Smallest number of images for which the unbiased estimator is defined."""


@dataclass(frozen=True, eq=False)
class LayerSimilarity:
    """CKA of the layers of one network (rows) with those of another network (columns)."""

    name: str
    unit: str
    rows: tuple[int, ...]
    """Numbers of the first network's blocks."""
    columns: tuple[int, ...]
    """Numbers of the second network's blocks."""
    values: Float64[np.ndarray, "rows columns"]
    """NaN for a layer whose features are the same for all images."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Range of the values, at least from 0 to 1. Estimates can lie a little outside."""
        defined = self.values[np.isfinite(self.values)]
        return float(defined.min(initial=0.0)), float(defined.max(initial=1.0))

    def as_lists(self) -> list[list[float | None]]:
        """Return the values as rows for JSON, which has no NaN."""
        return [[round(value, 6) if math.isfinite(value) else None for value in row] for row in self.values.tolist()]


def layer_similarity(
    network: nn.Module,
    batches: Iterable[Float[Tensor, "b c h w"]],
    other: nn.Module | None = None,
    *,
    other_batches: Iterable[Float[Tensor, "b c other_h other_w"]] | None = None,
    layers: Sequence[int] | None = None,
    other_layers: Sequence[int] | None = None,
) -> LayerSimilarity:
    """Return the CKA of every two layers, with all tokens of an image as its features.

    The images of `batches` are in random order: a batch of one class does not show how features differ between classes.
    Without `other`, layers of the network are compared with each other. `other_batches` are the same images as the
    other network takes them, for example in another size; by default both networks get `batches`. Networks of different
    widths, and ResNets, can be compared. `layers` count from 0, or backward from -1. Raises `ConfigError` for a block
    that does not exist, and for a batch of fewer than four images.
    """
    rows = chosen_blocks(network, layers)
    columns = chosen_blocks(network, layers) if other is None else chosen_blocks(other, other_layers)
    one, two = Predictor(network), None if other is None else Predictor(other)
    total = MinibatchCka(len(rows), len(columns))
    pairs = ((batch, batch) for batch in batches) if other_batches is None else zip(batches, other_batches, strict=True)
    for batch, other_batch in pairs:
        first = _flat(one, batch, rows)
        total.add(first, first if two is None else _flat(two, other_batch, columns))
    return LayerSimilarity("centred kernel alignment", "CKA", tuple(rows), tuple(columns), total.result())


class MinibatchCka:
    """CKA between two lists of features, from minibatches of the same samples."""

    def __init__(self, rows: int, columns: int) -> None:
        self._cross = torch.zeros(rows, columns, dtype=torch.float64)
        self._rows = torch.zeros(rows, dtype=torch.float64)
        self._columns = torch.zeros(columns, dtype=torch.float64)
        self._batches = 0

    def add(self, first: Sequence[Float[Tensor, "b _"]], second: Sequence[Float[Tensor, "b _"]]) -> None:
        """Add a minibatch: the features of each row, and of each column. Raise `ConfigError` for fewer than four
        samples."""
        kernels = [_kernel(one) for one in first]
        others = kernels if second is first else [_kernel(one) for one in second]
        self._cross += torch.stack([torch.stack([unbiased_hsic(k, l) for l in others]) for k in kernels])  # noqa: E741
        self._rows += torch.stack([unbiased_hsic(k, k) for k in kernels])
        self._columns += torch.stack([unbiased_hsic(k, k) for k in others])
        self._batches += 1

    def result(self) -> Float64[np.ndarray, "rows columns"]:
        """Return the CKA, NaN where features do not vary. Raise `ConfigError` if there was no minibatch."""
        if not self._batches:
            raise ConfigError("there are no images, so there is nothing to compare; give at least four")
        return (self._cross / (self._rows[:, None] * self._columns).sqrt()).numpy()


def unbiased_hsic(first: Float64[Tensor, "b b"], second: Float64[Tensor, "b b"]) -> Float64[Tensor, ""]:
    """Return the unbiased estimate of HSIC from two kernel matrices whose diagonals are 0."""
    n = len(first)
    product = (first * second).sum() + first.sum() * second.sum() / ((n - 1) * (n - 2))
    return (product - 2 / (n - 2) * (first.sum(dim=0) * second.sum(dim=0)).sum()) / (n * (n - 3))


def _kernel(features: Float[Tensor, "b d"]) -> Float64[Tensor, "b b"]:
    """Return the products of all samples, with a diagonal of 0."""
    if len(features) < SMALLEST_BATCH:
        raise ConfigError(
            f"a batch of {len(features)} images is too small for unbiased CKA; give at least {SMALLEST_BATCH} at a time"
        )
    exact = features.double()
    exact = exact - exact[:1]  # CKA does not depend on shifts; features that do not vary become exactly 0
    return (exact @ exact.T).fill_diagonal_(0.0).cpu()


def _flat(predictor: Predictor, batch: Tensor, layers: Sequence[int]) -> list[Tensor]:
    found = []
    for one in predictor.features(batch, layers):
        first = [] if one.cls is None else [one.cls]
        found.append(torch.cat([*first, one.registers.flatten(1), one.patches.flatten(1)], dim=1))
    return found
