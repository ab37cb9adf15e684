"""Measurements of a model's saliency maps: their ranking of patches, and their dependence on the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from vitrail.analysis.faithfulness import (
    RANDOM,
    RandomisedWeights,
    SaliencyCurves,
    randomised_weights,
    saliency_curves,
)
from vitrail.analysis.saliency import SaliencyMaps, attention_rollout, class_relevance
from vitrail.evaluation.predictions.bootstrap import Metric, mean_interval
from vitrail.weights.prediction import OutputKind

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
