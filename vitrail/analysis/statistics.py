"""Statistics of attention heads over images: attention distance and entropy (paper Appendix D.7, figures 7 and 11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from vitrail.analysis.tracing import BATCH, Trace, TracePrecision, traces


@dataclass(frozen=True, eq=False)
class HeadStatistic:
    """A number for each layer and head, with its spread over images."""

    name: str
    unit: str
    layers: tuple[int, ...]
    """Numbers of the blocks, from 0: the rows of the arrays."""
    heads: tuple[int, ...]
    """Numbers of the heads, from 0: the columns of the arrays."""
    mean: Float64[np.ndarray, "layers heads"]
    """Mean over the images."""
    spread: Float64[np.ndarray, "layers heads"]
    """Standard deviation over the images, with the number of images as the divisor."""
    images: int


@dataclass(frozen=True, eq=False)
class AttentionDistance:
    """The attention distance of each layer and head in two units."""

    pixels: HeadStatistic
    fraction: HeadStatistic
    """The distance as a fraction of the image width."""


def attention_distance(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    precision: TracePrecision = "float32",
    batch_size: int = BATCH,
) -> AttentionDistance:
    """Return the mean distance between a query patch and the patches that it attends to, weighted by attention.

    As in the paper, the distance is the mean over query patches and images. Class token and registers are dropped from
    rows and columns, and the remaining weights are not normalised again. Distances between patches that are not square
    count height and width in pixels. For the other arguments and the errors, see `vitrail.analysis.tracing.trace`.
    """
    pixels = _over_images(
        "attention distance",
        "pixels",
        lambda piece: mean_distances(_attention(piece), piece.grid, piece.patch, piece.prefix),
        network,
        images,
        layers,
        heads,
        precision,
        batch_size,
    )
    width = images.shape[3]
    fraction = replace(
        pixels, unit="fraction of the image width", mean=pixels.mean / width, spread=pixels.spread / width
    )
    return AttentionDistance(pixels, fraction)


def attention_entropy(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    precision: TracePrecision = "float32",
    batch_size: int = BATCH,
) -> HeadStatistic:
    """Return the mean entropy of the attention weights of a query patch, in nats.

    The weights over all tokens count, including class token and registers. The entropy is 0 if a patch attends to one
    token, and the logarithm of the number of tokens if it attends to all tokens equally. For the other arguments and
    the errors, see `vitrail.analysis.tracing.trace`.
    """
    return _over_images(
        "attention entropy",
        "nats",
        lambda piece: entropies(_attention(piece), piece.prefix),
        network,
        images,
        layers,
        heads,
        precision,
        batch_size,
    )


def patch_distances(grid: tuple[int, int], patch: tuple[int, int]) -> Float64[Tensor, "n n"]:
    """Return the distance in pixels between the centres of every two patches, in row-major order of the grid."""
    rows = patch[0] * torch.arange(grid[0], dtype=torch.float64).repeat_interleave(grid[1])
    columns = patch[1] * torch.arange(grid[1], dtype=torch.float64).repeat(grid[0])
    return torch.hypot(rows[:, None] - rows, columns[:, None] - columns)


def mean_distances(
    attention: Float[Tensor, "*heads n n"], grid: tuple[int, int], patch: tuple[int, int], prefix: int
) -> Float64[Tensor, "*heads"]:
    """Return the attention distance in pixels, a mean over the query patches, of each map of weights."""
    between = patch_distances(grid, patch).to(attention.device)
    return (attention[..., prefix:, prefix:].double() * between).sum(dim=-1).mean(dim=-1)


def entropies(attention: Float[Tensor, "*heads n n"], prefix: int) -> Float64[Tensor, "*heads"]:
    """Return the entropy in nats, a mean over the query patches, of each map of weights."""
    return torch.special.entr(attention[..., prefix:, :].double()).sum(dim=-1).mean(dim=-1)


def _attention(piece: Trace) -> Tensor:
    assert piece.attention is not None
    return piece.attention


def _over_images(
    name: str,
    unit: str,
    measure: Callable[[Trace], Tensor],
    network: nn.Module,
    images: Tensor,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    precision: TracePrecision,
    batch_size: int,
) -> HeadStatistic:
    """Return mean and spread of what `measure` returns for each image, layer and head."""
    found, piece = [], None
    for piece in traces(network, images, layers=layers, heads=heads, precision=precision, batch_size=batch_size):
        found.append(measure(piece).cpu().numpy())
    assert piece is not None
    values = np.concatenate(found)
    return HeadStatistic(name, unit, piece.layers, piece.heads, values.mean(axis=0), values.std(axis=0), len(values))
