"""Comparison of two models on the same images: accuracy, what their layers have in common, and where they differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from vitrail.analysis.cka import SMALLEST_BATCH, LayerSimilarity, layer_similarity
from vitrail.analysis.drawing import on_picture
from vitrail.analysis.receptive import ReceptiveField, effective_receptive_field
from vitrail.analysis.saliency import class_relevance
from vitrail.analysis.statistics import HeadStatistic, attention_distance
from vitrail.analysis.tracing import has_maps, trace
from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.predictions.calibration import PerSample, per_sample
from vitrail.evaluation.predictions.paired import PairedDifference, paired_difference
from vitrail.evaluation.predictions.predict import Predictions
from vitrail.evaluation.predictions.report import ClassificationReport, report
from vitrail.evaluation.truth import SingleLabels
from vitrail.weights.bundle import Bundle

__all__ = ["Answer", "Comparison", "Disagreement", "Measured", "check_comparable", "compare"]

BATCH = 16
"""Number of images whose features are compared at once."""

RECEPTIVE_IMAGES = 8
"""Number of images over which the effective receptive field of a ResNet is averaged."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One of the two models with its metrics."""

    name: str
    bundle: Bundle = field(repr=False)
    report: ClassificationReport = field(repr=False)
    reach: HeadStatistic | ReceptiveField
    """Attention distance of each layer and head, or the effective receptive field of each layer of a ResNet."""

    @property
    def distances(self) -> list[tuple[int, float]]:
        """Each layer with the mean distance in pixels over which it mixes information."""
        each = self.reach.mean.mean(axis=1) if isinstance(self.reach, HeadStatistic) else self.reach.distance
        return [(layer, float(value)) for layer, value in zip(self.reach.layers, each, strict=True)]


@dataclass(frozen=True, eq=False)
class Answer:
    """What a model says about an image."""

    label: str
    probability: float
    relevance: Float[np.ndarray, "height width"] | None
    """Relevance of each pixel of the picture for this answer, or None for a ResNet."""


@dataclass(frozen=True, eq=False)
class Disagreement:
    """An image on which only one of the two models is right."""

    key: str
    label: str
    first_is_right: bool
    picture: UInt8[np.ndarray, "height width 3"]
    answers: tuple[Answer, Answer]


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `compare`."""

    models: tuple[Measured, Measured]
    paired: PairedDifference
    similarity: LayerSimilarity
    """CKA of the first model's layers (rows) and the second model's layers (columns)."""
    looked_at: int
    """Number of images whose features and attention were computed."""
    disagreements: tuple[Disagreement, ...]

    @property
    def classes(self) -> list[tuple[str, int, float, float]]:
        """Name, number of images and both accuracies of each class with images, with the largest difference first."""
        first, second = (
            {row.name: row for row in one.report.per_class if row.accuracy is not None} for one in self.models
        )
        rows = [(name, row.images, row.accuracy or 0.0, second[name].accuracy or 0.0) for name, row in first.items()]
        return sorted(rows, key=lambda row: -abs(row[2] - row[3]))


def check_comparable(first: Bundle, second: Bundle) -> None:
    """Raise `ConfigError` unless both models predict the same classes, in any order."""
    for bundle in (first, second):
        if bundle.output == "numbers":
            raise ConfigError("a model that predicts numbers cannot be compared; choose two models of classes")
        if not bundle.classes:
            raise ConfigError("a model without classes cannot be compared; choose two models with a head")
    one, two = set(first.classes), set(second.classes)
    if one != two:
        listed = [
            f"only the {place} has {_few(names)}" for place, names in (("first", one - two), ("second", two - one))
        ]
        raise ConfigError(
            f"the models have different classes: {'; '.join(listed)}; choose two models of the same classes"
        )


def compare(
    outputs: tuple[Outputs, Outputs],
    sources: tuple[Source, Source],
    names: tuple[str, str],
    *,
    images: int = 64,
    examples: int = 6,
    bootstrap: int = 1000,
) -> Comparison:
    """Compare two models on the images that both could decode.

    `sources` are the same data with the classes of each model. Features and attention are computed for `images` of
    them at equal distances in the data. `examples` is the largest number of disagreements with pictures: those for
    which the answers are most certain, in turn right for the first and for the second model.

    Raises `ConfigError` for models that cannot be compared and for fewer than four `images`, and `DataError` if no
    image has a label.
    """
    check_comparable(outputs[0].bundle, outputs[1].bundle)
    if images < SMALLEST_BATCH:
        raise ConfigError(f"images={images} is too small to compare layers; choose at least {SMALLEST_BATCH}")
    first, second = _aligned(outputs[0].predictions(sources[0]), outputs[1].predictions(sources[1]))
    judged = tuple(per_sample(each.logits, _labels(each), scores=each.scores) for each in (first, second))
    right = tuple(each.truth.hits(one.predicted) for each, one in zip((first, second), judged, strict=True))
    chosen = np.unique(np.linspace(0, len(first) - 1, min(images, len(first))).round().astype(np.int64))
    seen = [_inputs(one.bundle, source, each.indices[chosen]) for one, source, each in
            zip(outputs, sources, (first, second), strict=True)]  # fmt: skip
    models = [
        Measured(name, one.bundle, report(each, bootstrap=bootstrap, worst=0), _reach(one.bundle, inputs))
        for name, one, each, inputs in zip(names, outputs, (first, second), seen, strict=True)
    ]
    rows = _most_certain(judged[0], judged[1], right[0], right[1], examples)
    return Comparison(
        models=(models[0], models[1]),
        paired=paired_difference(right[0], right[1], resamples=bootstrap),
        similarity=layer_similarity(
            outputs[0].bundle.network,
            _batches(seen[0]),
            outputs[1].bundle.network,
            other_batches=_batches(seen[1]),
        ),
        looked_at=len(chosen),
        disagreements=tuple(
            Disagreement(
                key=first.keys[row],
                label=first.classes[int(_labels(first)[row])],
                first_is_right=bool(right[0][row]),
                picture=np.asarray(to_pil(sources[0][int(first.indices[row])].image, 3)),
                answers=(
                    _answer(outputs[0].bundle, sources[0], int(first.indices[row]), judged[0], row),
                    _answer(outputs[1].bundle, sources[1], int(second.indices[row]), judged[1], row),
                ),
            )
            for row in rows
        ),
    )


def _few(names: set[str]) -> str:
    """Return the first names of a set as a text."""
    shown = ", ".join(sorted(names)[:3])
    return (shown or "none") + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _aligned(first: Predictions, second: Predictions) -> tuple[Predictions, Predictions]:
    """Return the predictions of the samples that both models could decode, in the same order."""
    first, second = first.labelled(), second.labelled()
    for each in (first, second):
        if len(each) and not isinstance(each.truth, SingleLabels):
            raise DataError("images with several labels cannot be compared; name data with one label for each image")
    shared = set(first.keys) & set(second.keys)
    if not shared:
        raise DataError("no image has a label and can be decoded, so there is nothing to compare")
    ours, theirs = (each.rows(np.array([key in shared for key in each.keys])) for each in (first, second))
    assert ours.keys == theirs.keys, "both sources have the same samples in the same order"
    return ours, theirs


def _labels(predictions: Predictions) -> Int64[np.ndarray, " n"]:
    assert isinstance(predictions.truth, SingleLabels)
    return predictions.truth.values


def _inputs(bundle: Bundle, source: Source, indices: Int64[np.ndarray, " n"]) -> Float[Tensor, "n c h w"]:
    """Return images as the network takes them."""
    pixels = np.stack([bundle.preprocess.pixels(source[int(index)].image) for index in indices])
    return bundle.preprocess.normalise(torch.from_numpy(pixels).to(bundle.device))


def _batches(images: Float[Tensor, "n c h w"]) -> Iterator[Float[Tensor, "b c h w"]]:
    """Yield batches for CKA, without a last batch that is too small for it."""
    return (batch for batch in torch.split(images, BATCH) if len(batch) >= SMALLEST_BATCH)


def _reach(bundle: Bundle, images: Float[Tensor, "n c h w"]) -> HeadStatistic | ReceptiveField:
    if has_maps(bundle.network):
        return attention_distance(bundle.network, images).pixels
    return effective_receptive_field(bundle.network, images[:RECEPTIVE_IMAGES])


def _most_certain(
    first: PerSample,
    second: PerSample,
    first_right: np.ndarray,
    second_right: np.ndarray,
    count: int,
) -> list[int]:
    """Return the rows on which one model alone is right, in turn the first and the second, most certain first."""
    certain = np.minimum(first.confidence, second.confidence)
    sides = [
        [int(row) for row in np.argsort(-certain, kind="stable") if mask[row]]
        for mask in (first_right & ~second_right, second_right & ~first_right)
    ]
    rows: list[int] = []
    while len(rows) < count and any(sides):
        rows += [side.pop(0) for side in sides if side]
    return rows[:count]


def _answer(bundle: Bundle, source: Source, index: int, judged: PerSample, row: int) -> Answer:
    """Return a model's answer for an image, with the relevance of the predicted class."""
    number = int(judged.predicted[row])
    relevance = None
    if has_maps(bundle.network):
        inputs = _inputs(bundle, source, np.array([index]))
        found = trace(bundle.network, inputs, layers=(-1,))
        values = class_relevance(bundle.network, inputs, torch.tensor([number], device=inputs.device)).values[0]
        size = to_pil(source[index].image, 3).size
        relevance = on_picture(values, found, bundle.preprocess.placement((size[1], size[0])))
    return Answer(bundle.classes[number], float(judged.confidence[row]), relevance)
