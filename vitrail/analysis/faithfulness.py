"""Measurements of saliency maps: deletion and insertion curves (1806.07421), and a check with random weights
(1810.03292).

A good map ranks patches by how much the prediction depends on them. Deleting the most salient patches first then lowers
the class's probability quickly, and inserting them first raises it quickly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from vitrail.analysis.saliency import SaliencyMaps, attention_rollout, class_relevance
from vitrail.analysis.tracing import check_range, checked_count, checked_targets, transformer_of
from vitrail.errors import ConfigError
from vitrail.evaluation.metrics.intervals import Metric, mean_interval
from vitrail.models.predictor import Predictor
from vitrail.weights.answers import OutputKind, check_predicts_classes, probabilities_of

STEPS = 10
"""Default number of steps in which all patches are deleted or inserted."""

RANDOM = "random"
"""Name of the random order in the results."""


@dataclass(frozen=True, eq=False)
class SaliencyCurves:
    """The probability of a class while patches are deleted or inserted in the order of a saliency map."""

    name: str
    unit: str
    methods: tuple[str, ...]
    """Names of the saliency maps, and "random" for a random order."""
    fractions: Float64[np.ndarray, " steps"]
    """Fraction of the patches that were deleted or inserted, from 0 to 1."""
    deletion: Float64[np.ndarray, "methods b steps"]
    """Probability of the class after the patches with the largest values were deleted."""
    insertion: Float64[np.ndarray, "methods b steps"]
    """Probability of the class after the patches with the largest values were inserted into an empty image."""

    def deletion_auc(self) -> Float64[np.ndarray, "methods b"]:
        """Return the area under each deletion curve. A smaller area is better."""
        return np.trapezoid(self.deletion, self.fractions, axis=2)

    def insertion_auc(self) -> Float64[np.ndarray, "methods b"]:
        """Return the area under each insertion curve. A larger area is better."""
        return np.trapezoid(self.insertion, self.fractions, axis=2)


@dataclass(frozen=True, eq=False)
class RandomisedWeights:
    """Similarity of saliency maps before and after weights were randomised from the head downward."""

    name: str
    unit: str
    stages: tuple[str, ...]
    """Names of the layers down to which the weights are random."""
    correlation: Float64[np.ndarray, "stages b"]
    """Rank correlation of each image's map with the map of the trained weights. A method that depends on the weights
    falls to about 0."""


def saliency_curves(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    maps: Mapping[str, SaliencyMaps],
    targets: Int64[Tensor, " b"] | None = None,
    *,
    output: OutputKind = "softmax",
    steps: int = STEPS,
    fill: float = 0.0,
    seed: int = 0,
    batch_size: int = 32,
) -> SaliencyCurves:
    """Return deletion and insertion curves of several saliency maps, beside a random order of the patches.

    A deleted patch is filled with `fill` in the normalised image: 0 is the mean colour. Insertion starts from an image
    that is filled completely. `targets` are the classes, by default the predicted ones. `output` is the meaning of the
    outputs, as in `Bundle.output`. Raises `ConfigError` if a name is "random", if a map has other patches than the
    images, for outputs that are numbers, and for fewer than one step.
    """
    if transformer_of(network).config.dense_head is None:
        check_predicts_classes(output, "measured by these curves, which show probabilities")
    if RANDOM in maps:
        raise ConfigError(f"maps has the name {RANDOM!r}, which stands for a random order; choose another name")
    checked_count(steps, "steps")
    hiding = _Hiding(network, images, targets, output=output, fill=fill, batch_size=batch_size)
    orders = {name: hiding.order(name, found) for name, found in maps.items()}
    random = np.random.default_rng(seed)
    orders[RANDOM] = np.stack([random.permutation(hiding.count) for _ in range(len(images))])
    changed = np.round(np.linspace(0, hiding.count, min(steps, hiding.count) + 1)).astype(int)
    deletion, insertion = (
        np.stack([hiding.curve(order, changed, delete=delete) for order in orders.values()]) for delete in (True, False)
    )
    return SaliencyCurves(
        "deletion and insertion",
        "probability of the class",
        tuple(orders),
        changed / hiding.count,
        deletion,
        insertion,
    )


class _Hiding:
    """Images of which some patches are hidden, and the probabilities of their classes."""

    def __init__(
        self,
        network: nn.Module,
        images: Float[Tensor, "b c h w"],
        targets: Int64[Tensor, " b"] | None,
        *,
        output: OutputKind,
        fill: float,
        batch_size: int,
    ) -> None:
        """`targets` are the classes, by default the predicted ones. Hidden patches are filled with `fill`."""
        config = transformer_of(network).config
        self.head = config.dense_head
        self.predictor = Predictor(network)
        self.images = images
        self.output = output
        self.fill = fill
        self.batch_size = checked_count(batch_size)
        self.grid = config.grid_of(images.shape[2], images.shape[3])
        self.count = self.grid[0] * self.grid[1]
        self.patch = config.patch_pixels
        stated = checked_targets(transformer_of(network), images, targets)
        self.targets = self._probabilities(images).argmax(dim=1) if stated is None else stated

    def order(self, name: str, maps: SaliencyMaps) -> Int64[np.ndarray, "b patches"]:
        """Return the patches of each image, most salient first. Raise `ConfigError` if the maps have other patches."""
        if maps.values.shape != (len(self.images), *self.grid):
            raise ConfigError(
                f"maps[{name!r}] has the shape {maps.values.shape}, but these images have patches of the shape "
                f"{(len(self.images), *self.grid)}"
            )
        return np.argsort(-maps.values.reshape(len(self.images), self.count), axis=1, kind="stable")

    def curve(
        self, order: Int64[np.ndarray, "b patches"], changed: Int64[np.ndarray, " steps"], *, delete: bool
    ) -> Float64[np.ndarray, "b steps"]:
        """Return the probability of each image's class after the first patches of the order were deleted, or were
        inserted into an empty image. `changed` are the numbers of these patches."""
        found = []
        for number in changed:
            hidden = torch.full(order.shape, not delete)
            hidden.scatter_(1, torch.from_numpy(order[:, :number]), delete)
            mask = _pixel_mask(hidden.reshape(-1, *self.grid), self.patch, self.images.shape[2:])
            hidden_images = self.images.masked_fill(mask.to(self.images.device)[:, None], self.fill)
            probabilities = self._probabilities(hidden_images)
            check_range(self.targets, probabilities.shape[1])
            chosen = probabilities.gather(1, self.targets[:, None])[:, 0]
            found.append(chosen.double().cpu().numpy())
        return np.stack(found, axis=1)

    def _probabilities(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b answers"]:
        """Return the probability of each class, or of each class of each row of a head of boxes or masks."""
        outputs = torch.cat([self.predictor.logits(batch).float() for batch in torch.split(images, self.batch_size)])
        return probabilities_of(outputs, self.output) if self.head is None else self.head.scores(outputs).flatten(1)


@torch.inference_mode(False)
def randomised_weights(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    method: Callable[[nn.Module, Tensor], SaliencyMaps],
    *,
    seed: int = 0,
) -> RandomisedWeights:
    """Return how similar a method's maps stay if the weights of more and more layers are random, from the head down.

    The numbers of each weight are shuffled, so their distribution stays. The network is not changed. A method whose
    maps stay similar shows the image, not what the network learned.
    """
    expected = method(network, images).values
    shuffled = copy.deepcopy(transformer_of(network))
    layers = shuffled.layers()
    stages: list[tuple[str, list[nn.Module]]] = [("head", [*layers.head, *layers.summary])]
    stages += [(f"block {number}", [layers.blocks[number]]) for number in reversed(range(len(layers.blocks)))]
    stages.append(("embedding", layers.embedding))
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _, modules in stages:
        with torch.no_grad():
            for module in modules:
                for parameter in module.parameters():
                    order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
                    parameter.copy_(parameter.flatten()[order].view_as(parameter))
        found = method(shuffled, images).values
        rows.append([rank_correlation(one, other) for one, other in zip(expected, found, strict=True)])
    return RandomisedWeights(
        "saliency with random weights", "rank correlation", tuple(name for name, _ in stages), np.array(rows)
    )


def rank_correlation(first: Float[np.ndarray, "*n"], second: Float[np.ndarray, "*n"]) -> float:
    """Return Spearman's rank correlation of two arrays, with mean ranks for equal numbers, or 0 if an array is
    constant."""
    one, two = (_ranks(values.ravel()) for values in (first, second))
    one, two = one - one.mean(), two - two.mean()
    scale = float(np.sqrt((one**2).sum() * (two**2).sum()))
    return float((one * two).sum()) / scale if scale else 0.0


def _ranks(values: Float[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def _pixel_mask(patches: Tensor, patch: tuple[int, int], size: Sequence[int]) -> Tensor:
    """Return the mask of pixels of a mask of patches. Pixels beyond the last patch belong to the last patch."""
    rows, columns = patches.shape[1:]
    down = (torch.arange(size[0]) // patch[0]).clamp(max=rows - 1)
    across = (torch.arange(size[1]) // patch[1]).clamp(max=columns - 1)
    return patches[:, down[:, None], across]


# Measurements of a model's saliency maps: their ranking of patches, and their dependence on the weights.


METHODS: Mapping[str, Callable[[nn.Module, Tensor], SaliencyMaps]] = {
    "rollout": attention_rollout,
    "relevance": class_relevance,
    "relevance, gradients alone": partial(class_relevance, form="gradient"),
}
"""Saliency methods by name."""

RANDOMISED_IMAGES = 4
"""Largest number of images whose maps are compared with those of random weights."""


class MeasuredMethod(NamedTuple):
    """Measurements of one saliency method."""

    name: str
    deletion: Metric
    """Mean area under the deletion curves, with a 95 % interval over images. A smaller area is better."""
    insertion: Metric
    """Mean area under the insertion curves. A larger area is better."""
    random_head: float | None
    """Mean rank correlation of the maps with those of a random head, or None for the random order. It is 1 for maps
    that do not depend on the class."""
    random_all: float | None
    """Mean rank correlation of the maps with those of random weights in all layers."""


@dataclass(frozen=True, eq=False)
class SaliencySummary:
    """Measurements of the saliency methods and of a random order of patches."""

    curves: SaliencyCurves
    checks: Mapping[str, RandomisedWeights]
    """Similarity of each method's maps to those of random weights."""

    @property
    def methods(self) -> list[MeasuredMethod]:
        """Measurements of each method. The last one is the random order."""
        rows = []
        areas = zip(self.curves.methods, self.curves.deletion_auc(), self.curves.insertion_auc(), strict=True)
        for name, deletion, insertion in areas:
            ends: tuple[float | None, float | None] = (None, None)
            if name != RANDOM:
                stages = self.checks[name].correlation.mean(axis=1)
                ends = float(stages[0]), float(stages[-1])
            rows.append(MeasuredMethod(name, mean_interval(deletion), mean_interval(insertion), *ends))
        return rows


def summarise_saliency(
    network: nn.Module, images: Float[Tensor, "n c h w"], output: OutputKind = "softmax"
) -> SaliencySummary:
    """Measure all saliency methods for the predicted classes of images. `output` is the meaning of the network's
    outputs, as in `Bundle.output`.

    Raises `ConfigError` for a network without a head, and the errors of `vitrail.analysis.tracing.trace`.
    """
    maps = {name: method(network, images) for name, method in METHODS.items()}
    some = images[:RANDOMISED_IMAGES]
    return SaliencySummary(
        saliency_curves(network, images, maps, output=output),
        {name: randomised_weights(network, some, method) for name, method in METHODS.items()},
    )
