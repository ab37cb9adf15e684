"""The filters of the patch embedding and the similarity of position embeddings (paper, figure 7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor, nn

from vitrail.analysis.tracing import transformer_of
from vitrail.errors import ConfigError

COUNT = 28
"""Number of components that the paper shows."""


@dataclass(frozen=True, eq=False)
class Filters:
    """The first principal components of the filters that turn a patch into a token."""

    name: str
    unit: str
    values: Float32[np.ndarray, "count height width channels"]
    """Components of length 1, in order of falling variance. The largest number of each component is positive."""
    explained: Float32[np.ndarray, " count"]
    """Fraction of the filters' variance along each component."""

    def pictures(self) -> Float32[np.ndarray, "count height width channels"]:
        """Return the components with numbers from 0 to 1: 0.5 stands for 0, and each component has its own scale."""
        scale = np.abs(self.values).max(axis=(1, 2, 3), keepdims=True)
        return (0.5 + 0.5 * self.values / scale).astype(np.float32)


@dataclass(frozen=True, eq=False)
class PositionSimilarity:
    """The cosine of every two patches' position embeddings."""

    name: str
    unit: str
    values: Float32[np.ndarray, "rows columns rows columns"]
    """`values[i, j]` is the map of the patch in row i and column j."""


def embedding_filters(network: nn.Module, count: int = COUNT) -> Filters:
    """Return the first principal components of the patch embedding's filters.

    Each filter is one sample, and the mean filter is subtracted. Fewer components are returned if there are fewer
    filters or pixels. Raises `ConfigError` for a network without patches of pixels, such as a hybrid.
    """
    vit = transformer_of(network)
    if vit.root is not None:
        raise ConfigError("the patch embedding of a hybrid reads a feature map, so its filters have no colours to show")
    if count < 1:
        raise ConfigError(f"count={count} is less than 1; choose the number of filters")
    config = vit.config
    filters = vit.patches.projection.weight.detach().double().cpu()
    components, explained = principal_components(filters, min(count, *filters.shape))
    tiles = components.reshape(-1, config.channels, *config.patch_size).permute(0, 2, 3, 1)
    return Filters("filters of the patch embedding", "weight", tiles.float().numpy(), explained.float().numpy())


def position_similarity(
    network: nn.Module, grid: tuple[int, int] | None = None, *, layer: int = 0
) -> PositionSimilarity:
    """Return the cosine similarity of the vectors that a block adds to the patches for their positions.

    `grid` is the number of rows and columns of patches, by default those of the network's image size. `layer` matters
    if every layer adds its own positions. Raises `ConfigError` if the positions are not vectors that are added.
    """
    vit = transformer_of(network)
    rows, columns = grid or vit.config.grid
    if not 0 <= layer < vit.config.num_blocks:
        raise ConfigError(f"layer={layer} does not exist; choose from 0 to {vit.config.num_blocks - 1}")
    prefix = vit.config.prefix
    with torch.no_grad():
        blank = torch.zeros(1, prefix + rows * columns, vit.config.width, device=vit.norm.weight.device)
        added = vit.positions(blank, (rows, columns), layer)[0, prefix:].double().cpu()
    if not added.any():
        raise ConfigError(
            f"positions={vit.config.positions!r} adds no vectors in layer {layer}, so they have no similarity; "
            "learned, learned-2d and sincos-2d positions do"
        )
    unit = added / added.norm(dim=1, keepdim=True).clamp(min=1e-12)
    values = (unit @ unit.T).reshape(rows, columns, rows, columns)
    return PositionSimilarity("similarity of position embeddings", "cosine", values.float().numpy())


def principal_components(
    samples: Float64[Tensor, "n d"], count: int
) -> tuple[Float64[Tensor, "count d"], Float64[Tensor, " count"]]:
    """Return the first principal components of the samples, and the fraction of the variance along each.

    The component's number with the largest absolute value is positive, so that the result is the same on all machines.
    """
    centred = samples - samples.mean(dim=0)
    _, singular, components = torch.linalg.svd(centred, full_matrices=False)
    components, variance = components[:count], singular.square()
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    return components * largest.sign(), variance[:count] / variance.sum().clamp(min=1e-300)
