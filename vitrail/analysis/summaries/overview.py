"""An overview of one model on a data set: its metrics, analyses of its layers, and its errors."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from vitrail.analysis.cka import SMALLEST_BATCH, LayerSimilarity, layer_similarity
from vitrail.analysis.embedding import (
    Filters,
    PositionSimilarity,
    embedding_filters,
    position_similarity,
    principal_components,
)
from vitrail.analysis.features import LayerProbe, PatchColours, TokenNorms, patch_colours, probe_layers, token_norms
from vitrail.analysis.receptive import ReceptiveField
from vitrail.analysis.statistics import HeadStatistic, attention_entropy
from vitrail.analysis.summaries.samples import (
    Answer,
    answer_about,
    evenly,
    images_at,
    in_batches,
    inputs_of,
    picture_of,
    reach_of,
)
from vitrail.data.batch import Skipped
from vitrail.data.pipeline import evaluation_batches
from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source, Subset, Target
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.predictions.calibration import per_sample
from vitrail.evaluation.predictions.predict import Predictions
from vitrail.evaluation.predictions.report import ClassificationReport, report
from vitrail.evaluation.truth import SingleLabels
from vitrail.weights.bundle import Bundle

__all__ = ["EmbeddingMap", "Error", "Overview", "overview"]

COLOURED = 8
"""Number of images whose patches are shown in the colours of their principal components."""

READ_BATCH = 32
"""Number of training images that are decoded at once."""

T = TypeVar("T")

MAX_POINTS = 1000
"""Maximum number of images on the map of embeddings."""

THUMBNAIL = 64
"""Longest side of an image beside the map, in pixels."""


@dataclass(frozen=True, eq=False)
class EmbeddingMap:
    """The embeddings of images along their first two principal components."""

    points: Float[np.ndarray, "n 2"]
    explained: tuple[float, float]
    """Fraction of the variance along each component."""
    labels: tuple[str, ...]
    """Class of each image."""
    keys: tuple[str, ...]
    shown: Int64[np.ndarray, " m"]
    """Rows of the images that are drawn, at equal distances in the data, with the images of a class together."""
    pictures: tuple[bytes, ...]
    """Thumbnails of the images that are drawn, as JPEG files."""


@dataclass(frozen=True, eq=False)
class Error:
    """An image whose predicted class is wrong."""

    key: str
    label: str
    picture: UInt8[np.ndarray, "height width 3"]
    answer: Answer


@dataclass(frozen=True, eq=False)
class Overview:
    """The result of `overview`. An analysis that the model or the images do not allow is None, and `notes` has the
    reason."""

    name: str
    bundle: Bundle = field(repr=False)
    report: ClassificationReport = field(repr=False)
    looked_at: int
    """Number of images whose features and attention were computed."""
    reach: HeadStatistic | ReceptiveField
    """Attention distance of each layer and head, or the effective receptive field of each layer."""
    entropy: HeadStatistic | None
    filters: Filters | None
    positions: PositionSimilarity | None
    similarity: LayerSimilarity | None
    norms: TokenNorms | None
    colours: PatchColours | None
    colour_pictures: tuple[UInt8[np.ndarray, "height width 3"], ...]
    """The images whose patches are in `colours`."""
    probes: tuple[LayerProbe, ...]
    """Accuracy of a linear model of each layer's tokens. Empty without linear models."""
    embedding: EmbeddingMap | None
    errors: tuple[Error, ...]
    """The wrong predictions of which the model is most certain."""
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
    examples: int = 12,
    bootstrap: int = 1000,
) -> Overview:
    """Measure a model of classes on the images of `source`.

    Features and attention are computed for `images` images at equal distances in the data. A linear model of each
    layer learns from at most `probe_images` of the training images `train` and is measured on as many images of
    `source`. Without `probe_images` or `train`, there are no linear models. `train` is None if `source` contains the
    training images. `examples` is the largest number of errors with pictures.

    Raises `ConfigError` for a model without classes and for fewer than four `images`, and `DataError` if no image has
    one label.
    """
    bundle = outputs.bundle
    if bundle.output == "numbers" or not bundle.classes:
        raise ConfigError("this model has no classes to report on; choose a model of classes")
    if images < SMALLEST_BATCH:
        raise ConfigError(f"images={images} is too small to compare layers; choose at least {SMALLEST_BATCH}")
    found = _single(outputs.predictions(source))
    chosen = evenly(len(found), images)
    inputs = inputs_of(bundle, images_at(source, found.indices[chosen]))
    notes: list[str] = []

    def optional(measure: Callable[[], T]) -> T | None:
        try:
            return measure()
        except (ConfigError, DataError) as reason:  # the model or the images do not allow it
            notes.append(str(reason))
            return None

    if train is None and probe_images:
        notes.append("a linear model of each layer, which would be measured on images that it learned from")
    if len(inputs) < SMALLEST_BATCH:
        notes.append(f"the similarity of layers, which needs at least {SMALLEST_BATCH} images")
    learned = _training_images(bundle, train, probe_images) if train is not None and probe_images else None
    coloured = evenly(len(chosen), COLOURED)
    return Overview(
        name=name,
        bundle=bundle,
        report=report(found, bootstrap=bootstrap, worst=0),
        looked_at=len(chosen),
        reach=reach_of(bundle, inputs),
        entropy=optional(lambda: attention_entropy(bundle.network, inputs)),
        filters=optional(lambda: embedding_filters(bundle.network)),
        positions=optional(lambda: position_similarity(bundle.network)),
        similarity=layer_similarity(bundle.network, in_batches(inputs)) if len(inputs) >= SMALLEST_BATCH else None,
        norms=optional(lambda: token_norms(bundle.network, inputs)),
        colours=optional(lambda: patch_colours(bundle.network, inputs[coloured])),
        colour_pictures=tuple(map(picture_of, images_at(source, found.indices[chosen[coloured]]))),
        probes=() if learned is None else optional(lambda: _probes(bundle, source, found, learned, probe_images)) or (),
        embedding=optional(lambda: _embedding_map(outputs, source, found)),
        errors=_errors(bundle, source, found, examples),
        skipped=found.skipped if learned is None else (*found.skipped, *learned.skipped),
        notes=tuple(dict.fromkeys(notes)),
    )


def _single(predictions: Predictions) -> Predictions:
    labelled = predictions.labelled()
    if not len(labelled):
        raise DataError("no image has a label and can be decoded, so there is nothing to report on")
    if not isinstance(labelled.truth, SingleLabels):
        raise DataError("images with several labels cannot be reported on; name data with one label for each image")
    return labelled


def _labels(predictions: Predictions) -> Int64[np.ndarray, " n"]:
    assert isinstance(predictions.truth, SingleLabels)
    return predictions.truth.values


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


def _probes(
    bundle: Bundle, source: Source, found: Predictions, learned: _TrainingImages, count: int
) -> tuple[LayerProbe, ...]:
    """Return the accuracy of a linear model of each layer on at most `count` images of `source`. Raise `DataError` if
    there are no images to learn from."""
    if not len(learned.labels):
        raise DataError("no training image has a label and can be decoded, so no layer has a linear model")
    tested = evenly(len(found), count)
    inputs = inputs_of(bundle, images_at(source, found.indices[tested]))
    return tuple(probe_layers(bundle.network, learned.inputs, learned.labels, inputs, _labels(found)[tested]))


def _embedding_map(outputs: Outputs, source: Source, found: Predictions) -> EmbeddingMap:
    """Return the embeddings of the images. Raise `DataError` if they do not span two directions."""
    features = outputs.features(source)
    rows = {key: row for row, key in enumerate(features.keys)}
    kept = [rows[key] for key in found.keys]
    values = torch.from_numpy(np.asarray(features.features[kept], dtype=np.float64))
    if min(values.shape) < 2:
        raise DataError("a map of the embeddings, which needs at least two images and two features")
    values = values - values.mean(dim=0)
    components, explained = principal_components(values, 2)
    points = (values @ components.T).numpy()
    labels = tuple(found.classes[label] for label in _labels(found))
    shown = np.array(sorted(evenly(len(labels), MAX_POINTS), key=lambda row: labels[row]), dtype=np.int64)
    return EmbeddingMap(
        points=points,
        explained=(float(explained[0]), float(explained[1])),
        labels=labels,
        keys=found.keys,
        shown=shown,
        pictures=tuple(map(_thumbnail, images_at(source, found.indices[shown]))),
    )


def _thumbnail(image: bytes | np.ndarray) -> bytes:
    """Return a small JPEG file of an image."""
    picture, file = to_pil(image, 3), io.BytesIO()
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(file, "jpeg", quality=80)
    return file.getvalue()


def _errors(bundle: Bundle, source: Source, found: Predictions, count: int) -> tuple[Error, ...]:
    """Return the wrong predictions of which the model is most certain, most certain first."""
    labels = _labels(found)
    judged = per_sample(found.logits, labels, scores=found.scores)
    wrong = np.flatnonzero(~found.truth.hits(judged.predicted))
    rows = wrong[np.argsort(-judged.confidence[wrong], kind="stable")][:count]
    return tuple(
        Error(
            key=found.keys[row],
            label=found.classes[labels[row]],
            picture=picture_of(image),
            answer=answer_about(bundle, image, judged, row),
        )
        for row, image in zip(map(int, rows), images_at(source, found.indices[rows]), strict=True)
    )
