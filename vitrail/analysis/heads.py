"""Attention distance and entropy of each head (paper Appendix D.7), and effective receptive fields of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from vitrail.analysis.tracing import BATCH, Trace, TracePrecision, chosen_blocks, detached_copy, traces


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

    @property
    def by_layer(self) -> list[tuple[int, float]]:
        """Each layer with the mean over its heads."""
        return list(zip(self.layers, self.mean.mean(axis=1).tolist(), strict=True))


def attention_distance(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    precision: TracePrecision = "float32",
    batch_size: int = BATCH,
) -> HeadStatistic:
    """Return the mean distance in pixels from a query patch to the patches that it attends to, weighted by attention.

    As in the paper, the distance is the mean over query patches and images. Class token and registers are dropped from
    rows and columns, and the remaining weights are not normalised again. Distances between patches that are not square
    count height and width in pixels. For the other arguments and the errors, see `vitrail.analysis.tracing.trace`.
    """
    pieces = traces(network, images, layers=layers, heads=heads, precision=precision, batch_size=batch_size)
    return _over_images(
        "attention distance",
        "pixels",
        pieces,
        lambda attention, piece: mean_distances(attention, piece.grid, piece.patch, piece.prefix),
    )


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
    pieces = traces(network, images, layers=layers, heads=heads, precision=precision, batch_size=batch_size)
    return _over_images(
        "attention entropy", "nats", pieces, lambda attention, piece: entropies(attention, piece.prefix)
    )


def mean_distances(
    attention: Float[Tensor, "*heads n n"], grid: tuple[int, int], patch: tuple[int, int], prefix: int
) -> Float64[Tensor, "*heads"]:
    """Return the attention distance in pixels, a mean over the query patches, of each map of weights."""
    rows = patch[0] * torch.arange(grid[0], dtype=torch.float64).repeat_interleave(grid[1])
    columns = patch[1] * torch.arange(grid[1], dtype=torch.float64).repeat(grid[0])
    between = torch.hypot(rows[:, None] - rows, columns[:, None] - columns).to(attention.device)
    return (attention[..., prefix:, prefix:].double() * between).sum(dim=-1).mean(dim=-1)


def entropies(attention: Float[Tensor, "*heads n n"], prefix: int) -> Float64[Tensor, "*heads"]:
    """Return the entropy in nats, a mean over the query patches, of each map of weights."""
    return torch.special.entr(attention[..., prefix:, :].double()).sum(dim=-1).mean(dim=-1)


def _over_images(
    name: str, unit: str, pieces: Iterable[Trace], measure: Callable[[Tensor, Trace], Tensor]
) -> HeadStatistic:
    """Return mean and spread of what `measure` returns from the attention of each image, layer and head."""
    found, piece = [], None
    for piece in pieces:
        assert piece.attention is not None
        found.append(measure(piece.attention, piece).cpu().numpy())
    assert piece is not None
    values = np.concatenate(found)
    return HeadStatistic(name, unit, piece.layers, piece.heads, values.mean(axis=0), values.std(axis=0), len(values))


# Effective receptive fields: the pixels that a cell of a feature map depends on, by gradients (1701.04128).


@dataclass(frozen=True, eq=False)
class ReceptiveField:
    """The effective receptive field of the central cell after chosen layers."""

    name: str
    unit: str
    """Unit of `distance`."""
    layers: tuple[int, ...]
    values: Float64[np.ndarray, "layers height width"]
    """Fraction of the gradient at each pixel of the image. Each map adds up to 1."""
    distance: Float64[np.ndarray, " layers"]
    """Mean distance of pixels from the centre of the map, weighted by the map. It can be compared with attention
    distance."""
    centre: Float64[np.ndarray, "layers 2"]
    """Row and column of the centre of each map, in pixels."""
    images: int
    """Number of images."""

    @property
    def by_layer(self) -> list[tuple[int, float]]:
        """Each layer with its distance."""
        return list(zip(self.layers, self.distance.tolist(), strict=True))


@torch.inference_mode(False)
def effective_receptive_field(
    network: nn.Module, images: Float[Tensor, "b c h w"], layers: Sequence[int] | None = None
) -> ReceptiveField:
    """Return how strongly each pixel changes the central cell, or patch, after each layer.

    The gradient of the sum over the cell's channels is computed for each image. The map is the mean over images of the
    sum over colours of its absolute value. `layers` are blocks, or residual units of a ResNet, from 0 or backward from
    -1. One image at a time is computed, so the memory does not grow. Raises `ConfigError` for a layer that does not
    exist.
    """
    copied: Any = detached_copy(network)
    chosen = chosen_blocks(copied, layers)
    height, width = images.shape[2:]
    total = torch.zeros(len(chosen), height, width, dtype=torch.float64)
    for image in torch.split(images, 1):
        pixels = image.detach().clone().requires_grad_()
        with torch.enable_grad():
            for place, one in enumerate(copied.features(pixels, chosen)):
                rows, columns = one.grid
                cell = one.patches[0, rows // 2 * columns + columns // 2].sum()
                (gradient,) = torch.autograd.grad(cell, pixels, retain_graph=place < len(chosen) - 1)
                total[place] += gradient[0].double().abs().sum(dim=0).cpu()
    maps = total / total.sum(dim=(1, 2), keepdim=True).clamp(min=1e-300)
    down, across = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    centres = torch.stack([(maps.sum(dim=2) * down).sum(dim=1), (maps.sum(dim=1) * across).sum(dim=1)], dim=1)
    between = torch.hypot(down[None, :, None] - centres[:, :1, None], across[None, None] - centres[:, 1:, None])
    distance = (maps * between).sum(dim=(1, 2))
    return ReceptiveField(
        "effective receptive field", "pixels", tuple(chosen), maps.numpy(), distance.numpy(), centres.numpy(),
        len(images),
    )  # fmt: skip
