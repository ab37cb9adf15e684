"""An overview of one model on a data set: its metrics, analyses of its layers, and its errors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from vitrail.analysis.cka import SMALLEST_BATCH
from vitrail.analysis.features import LayerProbe, PatchColours, patch_colours
from vitrail.analysis.summaries.embedding_map import EmbeddingMap, embedding_map
from vitrail.analysis.summaries.layers import Attempts, LayerSummary, summarise_layers, summarise_probes
from vitrail.analysis.summaries.saliency import SaliencySummary, summarise_saliency
from vitrail.analysis.summaries.samples import Answer, SeenImages, answer_about, evenly, picture_of
from vitrail.data.batch import Skipped
from vitrail.data.source import Source
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features.extract import FeatureSet
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.predictions.calibration import PerSample, per_sample
from vitrail.evaluation.predictions.predict import Predictions
from vitrail.evaluation.predictions.report import ClassificationReport, report
from vitrail.evaluation.truth import SingleLabels
from vitrail.weights.bundle import Bundle

COLOURED = 8
"""Number of images whose patches are shown in the colours of their principal components."""


@dataclass(frozen=True, eq=False)
class Error:
    """An image whose predicted class is wrong."""

    key: str
    label: str
    picture: UInt8[np.ndarray, "height width 3"]
    answer: Answer


@dataclass(frozen=True, eq=False)
class ColouredPatches:
    """Images whose patches are shown in the colours of their principal components."""

    pictures: tuple[UInt8[np.ndarray, "height width 3"], ...]
    colours: PatchColours


@dataclass(frozen=True, eq=False)
class Answers:
    """The predictions of a model of classes, and their metrics."""

    report: ClassificationReport = field(repr=False)
    each: PerSample = field(repr=False)
    """Predicted class and probability of each image."""
    errors: tuple[Error, ...]
    """The wrong predictions of which the model is most certain."""


@dataclass(frozen=True, eq=False)
class Overview:
    """The result of `overview`. An analysis that the model or the images do not allow is None, and `notes` has the
    reason."""

    name: str
    bundle: Bundle = field(repr=False)
    images: int
    """Number of images that could be decoded, and have one label if the model has classes."""
    answers: Answers | None
    """The predictions, or None for a model without a head."""
    layers: LayerSummary
    probes: tuple[LayerProbe, ...]
    """Accuracy of a linear model of each layer's tokens. Empty without linear models."""
    saliency: SaliencySummary | None
    patches: ColouredPatches | None
    embedding: EmbeddingMap | None
    skipped: tuple[Skipped, ...]
    """Images that could not be decoded: those to measure, and those for the linear models."""
    notes: tuple[str, ...]


def overview(
    outputs: Outputs,
    source: Source,
    train: Source | None,
    name: str,
    *,
    images: int = 64,
    probe_images: int = 500,
    saliency_images: int = 16,
    examples: int = 12,
    bootstrap: int = 1000,
) -> Overview:
    """Measure a model of classes, or a model without a head, on the images of `source`.

    Features and attention are computed for `images` images at equal distances in the data. A linear model of each
    layer learns from at most `probe_images` of the training images `train` and is measured on as many images of
    `source`. Without `probe_images` or `train`, there are no linear models. `train` is None if `source` contains the
    training images. Saliency maps are measured on at most `saliency_images` images. `examples` is the largest number of
    errors with pictures.

    Raises `ConfigError` for a model of numbers and for fewer than four `images`, and `DataError` if no image can be
    decoded, or if no image has one label and the model has classes.
    """
    bundle = outputs.bundle
    if bundle.output == "numbers":
        raise ConfigError("a model that predicts numbers cannot be reported on; choose a model of classes")
    if images < SMALLEST_BATCH:
        raise ConfigError(f"images={images} is too small to compare layers; choose at least {SMALLEST_BATCH}")
    predictions = _labelled(outputs.predictions(source)) if bundle.classes else None
    seen = _of_features(outputs.features(source), source) if predictions is None else _of_head(predictions, source)
    chosen, attempt = evenly(len(seen), images), Attempts()
    learned = summarise_probes(bundle, seen, train, probe_images, attempt)
    return Overview(
        name=name,
        bundle=bundle,
        images=len(seen),
        answers=None if predictions is None else _answers(bundle, seen, predictions, examples, bootstrap),
        layers=summarise_layers(bundle, seen.inputs(bundle, chosen), attempt),
        probes=learned.probes,
        saliency=_saliency(bundle, seen, saliency_images, attempt),
        patches=attempt(lambda: _patches(bundle, seen, chosen)),
        embedding=attempt(lambda: embedding_map(_features_of(outputs, seen), seen)),
        skipped=(*(outputs.features(source) if predictions is None else predictions).skipped, *learned.skipped),
        notes=attempt.reasons,
    )


def _labelled(predictions: Predictions) -> Predictions:
    """Return the predictions of the images with one label. Raise `DataError` if there are none."""
    labelled = predictions.labelled()
    if not len(labelled):
        raise DataError("no image has a label and can be decoded, so there is nothing to report on")
    if not isinstance(labelled.truth, SingleLabels):
        raise DataError("images with several labels cannot be reported on; name data with one label for each image")
    return labelled


def _of_head(predictions: Predictions, source: Source) -> SeenImages:
    return SeenImages(source, predictions.indices, predictions.keys, _labels(predictions), predictions.classes)


def _of_features(features: FeatureSet, source: Source) -> SeenImages:
    """Return the images whose features are shown for a model without a head. They need no labels."""
    if not len(features):
        raise DataError("no image can be decoded, so there is nothing to report on")
    skipped = {item.key for item in features.skipped}
    indices = [index for index in range(len(source)) if source.key(index) not in skipped]
    truth = features.truth
    labels = truth.values if isinstance(truth, SingleLabels) else np.full(len(features), -1, dtype=np.int64)
    return SeenImages(source, np.array(indices, dtype=np.int64), features.keys, labels, features.classes)


def _labels(predictions: Predictions) -> Int64[np.ndarray, " n"]:
    assert isinstance(predictions.truth, SingleLabels)
    return predictions.truth.values


def _features_of(outputs: Outputs, seen: SeenImages) -> Float32[np.ndarray, "n width"]:
    """Return the embeddings of the images."""
    found = outputs.features(seen.source)
    rows = {key: row for row, key in enumerate(found.keys)}
    return found.features[[rows[key] for key in seen.keys]]


def _patches(bundle: Bundle, seen: SeenImages, chosen: Int64[np.ndarray, " n"]) -> ColouredPatches:
    """Return the colours of the patches of some of the chosen images."""
    rows = chosen[evenly(len(chosen), COLOURED)]
    colours = patch_colours(bundle.network, seen.inputs(bundle, rows))
    return ColouredPatches(tuple(map(picture_of, seen.images(rows))), colours)


def _saliency(bundle: Bundle, seen: SeenImages, count: int, attempt: Attempts) -> SaliencySummary | None:
    """Return measurements of saliency maps on at most `count` images, or None for a model without a head."""
    if not count:
        return None
    if not bundle.classes:
        attempt.refuse("measurements of saliency maps, which need the classes of a head")
        return None
    rows = evenly(len(seen), count)
    return attempt(lambda: summarise_saliency(bundle.network, seen.inputs(bundle, rows), bundle.output))


def _answers(bundle: Bundle, seen: SeenImages, predictions: Predictions, examples: int, bootstrap: int) -> Answers:
    """Return the predictions with their metrics. `examples` is the largest number of errors, most certain first."""
    judged = per_sample(predictions.logits, seen.labels, scores=predictions.scores)
    wrong = np.flatnonzero(seen.labels != judged.predicted)
    rows = wrong[np.argsort(-judged.confidence[wrong], kind="stable")][:examples]
    errors = tuple(
        Error(
            key=seen.keys[row],
            label=seen.label(row),
            picture=picture_of(image),
            answer=answer_about(bundle, image, judged, row),
        )
        for row, image in zip(map(int, rows), seen.images(rows), strict=True)
    )
    return Answers(report(predictions, bootstrap=bootstrap, worst=0), judged, errors)
