"""The layers of a model on some images: filters, positions, attention, similarity, norms, and linear models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitrail.analysis.cka import SMALLEST_BATCH, LayerSimilarity, layer_similarity
from vitrail.analysis.embedding import Filters, PositionSimilarity, embedding_filters, position_similarity
from vitrail.analysis.features import LayerProbe, TokenNorms, probe_layers, token_norms
from vitrail.analysis.receptive import ReceptiveField
from vitrail.analysis.statistics import HeadStatistic, attention_entropy
from vitrail.analysis.summaries.samples import SeenImages, evenly, in_batches, reach_of
from vitrail.data.batch import Skipped
from vitrail.data.pipeline import evaluation_batches
from vitrail.data.source import Source, Subset, Target
from vitrail.errors import ConfigError, DataError
from vitrail.weights.bundle import Bundle

READ_BATCH = 32
"""Number of training images that are decoded at once."""

T = TypeVar("T")


class Attempts:
    """Measurements that a model or the images may not allow, and the reasons for those without a result."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons without repetitions, in the order of the measurements."""
        return tuple(dict.fromkeys(self._reasons))

    def __call__(self, measure: Callable[[], T]) -> T | None:
        """Return the result of a measurement, or None if the model or the images do not allow it."""
        try:
            return measure()
        except (ConfigError, DataError) as reason:
            self.refuse(str(reason))
            return None

    def refuse(self, reason: str) -> None:
        """Note why a measurement has no result."""
        self._reasons.append(reason)


@dataclass(frozen=True, eq=False)
class LayerSummary:
    """Analyses of the layers of a model. An analysis without a result is None."""

    images: int
    """Number of images whose features and attention were computed."""
    reach: HeadStatistic | ReceptiveField
    """Attention distance of each layer and head, or the effective receptive field of each layer."""
    entropy: HeadStatistic | None
    filters: Filters | None
    positions: PositionSimilarity | None
    similarity: LayerSimilarity | None
    norms: TokenNorms | None


class LayerProbes(NamedTuple):
    """Linear models of the tokens of each layer."""

    probes: tuple[LayerProbe, ...] = ()
    """Accuracy of a linear model of each layer's tokens. Empty without linear models."""
    skipped: tuple[Skipped, ...] = ()
    """Training images that could not be decoded."""


def summarise_layers(bundle: Bundle, inputs: Float[Tensor, "n c h w"], attempt: Attempts) -> LayerSummary:
    """Return the analyses of the layers on some images."""
    network = bundle.network

    def similarity() -> LayerSimilarity:
        if len(inputs) < SMALLEST_BATCH:
            raise DataError(f"the similarity of layers, which needs at least {SMALLEST_BATCH} images")
        return layer_similarity(network, in_batches(inputs))

    return LayerSummary(
        images=len(inputs),
        reach=reach_of(bundle, inputs),
        similarity=attempt(similarity),
        entropy=attempt(lambda: attention_entropy(network, inputs)),
        filters=attempt(lambda: embedding_filters(network)),
        positions=attempt(lambda: position_similarity(network)),
        norms=attempt(lambda: token_norms(network, inputs)),
    )


def summarise_probes(
    bundle: Bundle, seen: SeenImages, train: Source | None, count: int, attempt: Attempts
) -> LayerProbes:
    """Return the accuracy of a linear model of each layer on at most `count` labelled images of `seen`.

    The models learn from at most as many labelled images of `train`, which is None if the measured images contain the
    training images. There are no models if `count` is 0.
    """
    if not count:
        return LayerProbes()
    if train is None:
        attempt.refuse("a linear model of each layer, which would be measured on images that it learned from")
        return LayerProbes()
    learned = _training_images(bundle, train, count)

    def measured() -> tuple[LayerProbe, ...]:
        if not len(learned.labels):
            raise DataError("no training image has a label and can be decoded, so no layer has a linear model")
        labelled = np.flatnonzero(seen.labels >= 0)
        if not len(labelled):
            raise DataError("no measured image has a label, so no layer has a linear model")
        tested = labelled[evenly(len(labelled), count)]
        inputs, labels = seen.inputs(bundle, tested), seen.labels[tested]
        return tuple(probe_layers(bundle.network, learned.inputs, learned.labels, inputs, labels))

    return LayerProbes(attempt(measured) or (), learned.skipped)


class _TrainingImages(NamedTuple):
    """Training images that linear models learn from."""

    inputs: Float[Tensor, "n c h w"]
    labels: Int64[np.ndarray, " n"]
    skipped: tuple[Skipped, ...]


def _training_images(bundle: Bundle, train: Source, count: int) -> _TrainingImages:
    """Return at most `count` training images with one label."""
    labelled = [index for index in range(len(train)) if isinstance(train.target(index), int)]
    chosen = [labelled[place] for place in evenly(len(labelled), count)]
    preprocess = bundle.preprocess
    inputs = [torch.empty(0, preprocess.channels, *preprocess.image_size, device=bundle.device)]
    labels: list[Target] = []
    skipped: list[Skipped] = []
    for batch in evaluation_batches(Subset(train, chosen), preprocess, batch_size=READ_BATCH):
        inputs.append(preprocess.normalise(batch.images[batch.valid].to(bundle.device)))
        labels += [train.target(chosen[place]) for place in batch.samples[batch.valid].tolist()]
        skipped += batch.skipped
    return _TrainingImages(torch.cat(inputs), np.array(labels, dtype=np.int64), tuple(skipped))
