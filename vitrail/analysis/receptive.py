"""Effective receptive fields: the pixels that a cell of a feature map depends on, by gradients (1701.04128)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from vitrail.analysis.copies import detached_copy
from vitrail.models.network import block_numbers


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
    chosen = block_numbers(range(copied.config.num_blocks) if layers is None else layers, copied.config.num_blocks)
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
        "effective receptive field", "pixels", tuple(chosen), maps.numpy(), distance.numpy(), centres.numpy()
    )
