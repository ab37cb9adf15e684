"""Properties of tokens by layer: norms, principal components as colours, and the accuracy of linear models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from vitrail.analysis.embedding import principal_components
from vitrail.analysis.tracing import transformer_of
from vitrail.errors import ConfigError
from vitrail.evaluation.classifiers.linear import linear_probe
from vitrail.evaluation.predictions.bootstrap import Metric, mean_interval
from vitrail.evaluation.truth import SingleLabels
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

    name: str
    unit: str
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
    chosen = _layers(transformer_of(network), layers)
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
    if components < 1:
        raise ConfigError(f"components={components} is less than 1")
    chosen = None if layer is None else _layers(network, [layer])
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
    return PatchColours(
        "principal components of patch tokens", "feature", values.float().numpy(), explained.float().numpy()
    )


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
    chosen = _layers(network, layers)
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    train, test = (_mean_patches(network, images, chosen, batch_size) for images in (train_images, test_images))
    known, held_out = SingleLabels(train_labels, classes), SingleLabels(test_labels, classes)
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


def _layers(network: nn.Module, layers: Sequence[int] | None) -> list[int]:
    count: int = network.config.num_blocks  # type: ignore[union-attr, assignment]
    return block_numbers(range(count) if layers is None else layers, count)


def _features(
    network: nn.Module, images: Tensor, layers: Sequence[int] | None, batch_size: int
) -> Iterator[tuple[Features, ...]]:
    """Yield the tokens of the layers for each batch, or the tokens after the final norm if `layers` is None."""
    predictor = Predictor(network)
    for batch in torch.split(images, batch_size):
        yield (predictor.features(batch),) if layers is None else predictor.features(batch, layers)
