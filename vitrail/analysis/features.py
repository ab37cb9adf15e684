"""Analysis of features: norms, principal components and linear probes; filters and position embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor, nn

from vitrail.analysis.tracing import checked_count, chosen_blocks, transformer_of
from vitrail.data.targets import Targets
from vitrail.errors import ConfigError
from vitrail.evaluation.classifiers.linear import linear_probe
from vitrail.evaluation.metrics.intervals import Metric, mean_interval
from vitrail.models.network import Features, block_numbers
from vitrail.models.predictor import Predictor

BATCH = 16
"""Default number of images in a forward pass."""

OUTLIER = 3.0
"""Multiple of the median norm above which a patch token counts as an outlier."""


@dataclass(frozen=True, eq=False)
class TokenNorms:
    """The Euclidean norm of each token after each layer."""

    name: str
    unit: str
    layers: tuple[int, ...]
    grid: tuple[int, int]
    cls: Float32[np.ndarray, "b layers"] | None
    """Norms of the class token, or None if the network has none."""
    registers: Float32[np.ndarray, "b layers registers"]
    patches: Float32[np.ndarray, "b layers patches"]

    def outliers(self, factor: float = OUTLIER) -> Float32[np.ndarray, " layers"]:
        """Return the fraction of patch tokens in each layer whose norm exceeds `factor` times the layer's median."""
        median = np.median(self.patches, axis=(0, 2), keepdims=True)
        return (self.patches > factor * median).mean(axis=(0, 2)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class PatchColours:
    """The principal components of patch tokens, with one basis for all images."""

    values: Float32[np.ndarray, "b rows columns components"]
    explained: Float32[np.ndarray, " components"]
    """Fraction of the variance along each component."""

    def pictures(self) -> Float32[np.ndarray, "b rows columns components"]:
        """Return the components with numbers from 0 to 1. All images have the same scale."""
        low, high = self.values.min(axis=(0, 1, 2)), self.values.max(axis=(0, 1, 2))
        return ((self.values - low) / np.maximum(high - low, 1e-12)).astype(np.float32)


@dataclass(frozen=True)
class LayerProbe:
    """Accuracy of a linear model on the tokens of one layer."""

    layer: int
    accuracy: Metric
    """Accuracy on the held-out images, with a 95 % bootstrap interval."""


def token_norms(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    layers: Sequence[int] | None = None,
    *,
    batch_size: int = BATCH,
) -> TokenNorms:
    """Return the norms of all tokens after chosen blocks, by default after every block.

    Large norms of a few patch tokens mark patches that a network without registers uses as memory (2309.16588).
    `layers` count from 0, or backward from -1. Raises `ConfigError` for a block that does not exist, and for a ResNet,
    whose layers have different cells.
    """
    chosen = chosen_blocks(transformer_of(network), layers)
    parts: dict[str, list[Tensor]] = {"cls": [], "registers": [], "patches": []}
    grid = (0, 0)
    for batch in _features(network, images, chosen, batch_size):
        grid = batch[0].grid
        for kind, rows in parts.items():
            tokens = [getattr(one, kind) for one in batch]
            if tokens[0] is not None:
                rows.append(torch.stack([one.float().norm(dim=-1) for one in tokens], dim=1).cpu())
    cls = torch.cat(parts["cls"]).numpy() if parts["cls"] else None
    registers, patches = (torch.cat(parts[kind]).numpy() for kind in ("registers", "patches"))
    return TokenNorms("token norm", "Euclidean norm", tuple(chosen), grid, cls, registers, patches)


def patch_colours(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    layer: int | None = None,
    *,
    components: int = 3,
    batch_size: int = BATCH,
) -> PatchColours:
    """Return the first principal components of the patch tokens of all images.

    The basis is computed from the patches of all images together, so equal colours mean equal features in all of them.
    The number of each component with the largest absolute value is positive, so results do not change their signs
    between machines. `layer` is a block, from 0 or backward from -1; by default, the tokens are those after the final
    norm.
    """
    checked_count(components, "components")
    chosen = None if layer is None else chosen_blocks(network, [layer])
    parts, grid = [], (0, 0)
    for (one,) in _features(network, images, chosen, batch_size):
        parts.append(one.patches.double().cpu())
        grid = one.grid
    patches = torch.cat(parts)
    count, places, width = patches.shape
    if components > (most := min(width, count * places - 1)):
        raise ConfigError(f"components={components} is more than {most}, the number of directions of these tokens")
    flat = patches.reshape(-1, width)
    basis, explained = principal_components(flat, components)
    values = ((flat - flat.mean(dim=0)) @ basis.T).reshape(count, *grid, components)
    return PatchColours(values.float().numpy(), explained.float().numpy())


def probe_layers(
    network: nn.Module,
    train_images: Float[Tensor, "n c h w"],
    train_labels: Int64[np.ndarray, " n"],
    test_images: Float[Tensor, "m c h w"],
    test_labels: Int64[np.ndarray, " m"],
    layers: Sequence[int] | None = None,
    *,
    batch_size: int = BATCH,
) -> list[LayerProbe]:
    """Return the accuracy of a linear model of the mean patch token after each block, on held-out images.

    The penalty of each linear model is chosen on a tenth of the training images. Raises `ConfigError` for a block that
    does not exist, and the errors of `vitrail.evaluation.classifiers.linear.linear_probe`.
    """
    chosen = chosen_blocks(network, layers)
    names = tuple(map(str, range(int(max(train_labels.max(), test_labels.max())) + 1)))
    train, test = (_mean_patches(network, images, chosen, batch_size) for images in (train_images, test_images))
    known, held_out = (Targets("class", names, labels) for labels in (train_labels, test_labels))
    found = []
    for place, layer in enumerate(chosen):
        fit = linear_probe(train[place], known, test[place], held_out)
        found.append(LayerProbe(layer, mean_interval(fit.model.scores(test[place]).argmax(axis=1) == test_labels)))
    return found


def _mean_patches(
    network: nn.Module, images: Tensor, layers: Sequence[int], batch_size: int
) -> list[Float32[np.ndarray, "n _"]]:
    """Return the mean patch token of each image after each layer. The layers of a ResNet differ in width."""
    rows: list[list[Tensor]] = [[] for _ in layers]
    for batch in _features(network, images, layers, batch_size):
        for place, one in enumerate(batch):
            rows[place].append(one.patches.mean(dim=1).float().cpu())
    return [torch.cat(each).numpy() for each in rows]


def _features(
    network: nn.Module, images: Tensor, layers: Sequence[int] | None, batch_size: int
) -> Iterator[tuple[Features, ...]]:
    """Yield the tokens of the layers for each batch, or the tokens after the final norm if `layers` is None."""
    predictor = Predictor(network)
    for batch in torch.split(images, checked_count(batch_size)):
        yield (predictor.features(batch),) if layers is None else predictor.features(batch, layers)


# The filters of the patch embedding and the similarity of position embeddings (paper, figure 7).


COUNT = 28
"""Number of components that the paper shows."""


@dataclass(frozen=True, eq=False)
class Filters:
    """The first principal components of the filters that turn a patch into a token."""

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
    checked_count(count, "count")
    config = vit.config
    filters = vit.patches.projection.weight.detach().double().cpu()
    components, explained = principal_components(filters, min(count, *filters.shape))
    tiles = components.reshape(-1, config.channels, *config.patch_size).permute(0, 2, 3, 1)
    return Filters(tiles.float().numpy(), explained.float().numpy())


def position_similarity(
    network: nn.Module, grid: tuple[int, int] | None = None, *, layer: int = 0
) -> PositionSimilarity:
    """Return the cosine similarity of the vectors that a block adds to the patches for their positions.

    `grid` is the number of rows and columns of patches, by default those of the network's image size. `layer` is a
    block, from 0 or backward from -1, and matters if every layer adds its own positions. Raises `ConfigError` if the
    positions are not vectors that are added.
    """
    vit = transformer_of(network)
    rows, columns = grid or vit.config.grid
    (layer,) = block_numbers([layer], vit.config.num_blocks, field="layer")
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
    return PositionSimilarity(values.float().numpy())


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
