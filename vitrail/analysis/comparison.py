"""Comparison of two models on the same images: accuracy, similarity of their layers, and disagreements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, UInt8

from vitrail.analysis.heads import HeadStatistic, ReceptiveField
from vitrail.analysis.overview import (
    Answer,
    answer_about,
    in_batches,
    picture_of,
    reach_of,
    seen_images,
    with_one_label,
)
from vitrail.analysis.similarity import SMALLEST_BATCH, LayerSimilarity, layer_similarity
from vitrail.data.batch import Skipped
from vitrail.data.source import Source, evenly
from vitrail.errors import ConfigError, DataError, listed, plural
from vitrail.evaluation.metrics.classes import per_sample
from vitrail.evaluation.metrics.intervals import PairedDifference, paired_difference
from vitrail.evaluation.metrics.report import ClassificationReport, report
from vitrail.evaluation.outputs import Outputs, Predictions
from vitrail.weights.answers import check_predicts_classes
from vitrail.weights.bundle import Bundle


@dataclass(frozen=True, eq=False)
class Measured:
    """One of the two models with its metrics."""

    name: str
    bundle: Bundle = field(repr=False)
    report: ClassificationReport = field(repr=False)
    reach: HeadStatistic | ReceptiveField
    """Attention distance of each layer and head, or the effective receptive field of each layer of a ResNet."""


@dataclass(frozen=True, eq=False)
class Disagreement:
    """An image on which only one of the two models is right."""

    key: str
    label: str
    picture: UInt8[np.ndarray, "height width 3"]
    answers: tuple[Answer, Answer]


@dataclass(frozen=True, eq=False)
class ModelComparison:
    """The result of `compare`."""

    models: tuple[Measured, Measured]
    paired: PairedDifference
    similarity: LayerSimilarity
    """CKA of the first model's layers (rows) and the second model's layers (columns)."""
    looked_at: int
    """Number of images whose features and attention were computed."""
    disagreements: tuple[Disagreement, ...]

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Images that one of the models could not decode. They are not compared."""
        return tuple({item.key: item for one in self.models for item in one.report.skipped}.values())

    @property
    def classes(self) -> list[tuple[str, int, float, float]]:
        """Name, number of images and both accuracies of each class with images, with the largest difference first.
        Classes of one name, as ImageNet has them, are paired in their order."""
        first, second = ([row for row in one.report.per_class if row.accuracy is not None] for one in self.models)
        others: dict[str, list[float]] = {}
        for row in second:
            others.setdefault(row.name, []).append(row.accuracy or 0.0)
        rows = [(row.name, row.images, row.accuracy or 0.0, others[row.name].pop(0)) for row in first]
        return sorted(rows, key=lambda row: -abs(row[2] - row[3]))


def check_comparable(first: Bundle, second: Bundle) -> None:
    """Raise `ConfigError` unless both models predict the same classes, in any order."""
    for bundle in (first, second):
        check_predicts_classes(bundle.output, "compared")
        if not bundle.classes:
            raise ConfigError("a model without classes cannot be compared; choose two models with a head")
    one, two = Counter(first.classes), Counter(second.classes)
    if one != two:
        own = [
            f"only the {place} has {listed(sorted(names), 3) or 'none'}"
            for place, names in (("first", one - two), ("second", two - one))
        ]
        raise ConfigError(f"the models have different classes: {'; '.join(own)}; choose two models of the same classes")


def compare(
    outputs: tuple[Outputs, Outputs],
    sources: tuple[Source, Source],
    names: tuple[str, str],
    *,
    images: int = 64,
    examples: int = 6,
    bootstrap: int = 1000,
) -> ModelComparison:
    """Compare two models on the images that both could decode.

    `sources` are the same data with the classes of each model. Features and attention are computed for `images` images
    at equal distances in the data. `examples` is the largest number of disagreements with pictures. The most
    certain ones are chosen, alternately images on which the first and on which the second model is right.

    Raises `ConfigError` for models that cannot be compared and for fewer than four `images`, and `DataError` if fewer
    than four images have one label.
    """
    check_comparable(outputs[0].bundle, outputs[1].bundle)
    if images < SMALLEST_BATCH:
        raise ConfigError(f"images={images} is too small to compare layers; choose at least {SMALLEST_BATCH}")
    found = _aligned(outputs[0].predictions(sources[0]), outputs[1].predictions(sources[1]))
    first, second = (_Side(one.bundle, source, each) for one, source, each in zip(outputs, sources, found, strict=True))
    chosen = evenly(len(first.found), images)
    seen = [side.seen.inputs(side.bundle, chosen) for side in (first, second)]
    models = [
        Measured(name, side.bundle, report(side.found, bootstrap=bootstrap, worst=0), reach_of(side.bundle, inputs))
        for name, side, inputs in zip(names, (first, second), seen, strict=True)
    ]
    return ModelComparison(
        models=(models[0], models[1]),
        paired=paired_difference(first.right, second.right, has_interval=bootstrap > 0),
        similarity=layer_similarity(
            first.bundle.network, in_batches(seen[0]), second.bundle.network, other_batches=in_batches(seen[1])
        ),
        looked_at=len(chosen),
        disagreements=tuple(
            Disagreement(
                key=first.seen.keys[row],
                label=first.seen.label(row),
                picture=picture_of(first.image(row)),
                answers=(first.answer(row), second.answer(row)),
            )
            for row in _most_certain(first, second, examples)
        ),
    )


class _Side:
    """One of the two models with its answers for the images that both could decode, one per row."""

    def __init__(self, bundle: Bundle, source: Source, found: Predictions) -> None:
        self.bundle = bundle
        self.found = found
        self.seen = seen_images(found, source)
        self.judged = per_sample(found.logits, self.seen.labels, scores=found.scores)
        self.right: Bool[np.ndarray, " n"] = found.truth.hits(self.judged.predicted)

    def image(self, row: int) -> bytes | np.ndarray:
        return next(self.seen.images(np.array([row])))

    def answer(self, row: int) -> Answer:
        return answer_about(self.bundle, self.image(row), self.judged, row)


def _aligned(first: Predictions, second: Predictions) -> tuple[Predictions, Predictions]:
    """Return the predictions of the samples that both models could decode, in the same order."""
    first, second = (with_one_label(each, "compared") for each in (first, second))
    shared = set(first.keys) & set(second.keys)
    if len(shared) < SMALLEST_BATCH:
        raise DataError(
            f"{plural(len(shared), 'image')} with a label can be compared; the layers need at least {SMALLEST_BATCH}"
        )
    ours, theirs = (each.rows(np.array([key in shared for key in each.keys])) for each in (first, second))
    assert ours.keys == theirs.keys, "both sources have the same samples in the same order"
    return ours, theirs


def _most_certain(first: _Side, second: _Side, count: int) -> list[int]:
    """Return at most `count` rows on which one model alone is right, most certain first. Rows on which the first
    model is right alternate with rows on which the second one is right."""
    certain = np.minimum(first.judged.confidence, second.judged.confidence)
    queues = [
        [int(row) for row in np.argsort(-certain, kind="stable") if mask[row]]
        for mask in (first.right & ~second.right, second.right & ~first.right)
    ]
    rows: list[int] = []
    while len(rows) < count and any(queues):
        rows += [queue.pop(0) for queue in queues if queue]
    return rows[:count]
