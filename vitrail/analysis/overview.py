"""All measurements of one model: layers, heads, maps, features and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from vitrail.analysis.faithfulness import SaliencySummary, summarise_saliency
from vitrail.analysis.features import (
    BATCH,
    Filters,
    LayerProbe,
    PatchColours,
    PositionSimilarity,
    TokenNorms,
    embedding_filters,
    patch_colours,
    position_similarity,
    principal_components,
    probe_layers,
    token_norms,
)
from vitrail.analysis.heads import (
    HeadStatistic,
    ReceptiveField,
    attention_distance,
    attention_entropy,
    effective_receptive_field,
)
from vitrail.analysis.images import PAGE_SIDE, on_picture
from vitrail.analysis.saliency import class_relevance
from vitrail.analysis.similarity import SMALLEST_BATCH, LayerSimilarity, layer_similarity
from vitrail.analysis.tracing import has_maps, trace
from vitrail.data.batch import Skipped
from vitrail.data.pipeline import evaluation_batches
from vitrail.data.pixels.decode import small_picture
from vitrail.data.source import Source, evenly, subset
from vitrail.data.targets import Target
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features.extract import FeatureSet
from vitrail.evaluation.metrics.classes import PerSample, per_sample
from vitrail.evaluation.metrics.report import ClassificationReport, report
from vitrail.evaluation.outputs import Outputs, Predictions
from vitrail.report.page import jpeg
from vitrail.weights.answers import check_predicts_classes
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
    check_predicts_classes(bundle.output, "reported on")
    if images < SMALLEST_BATCH:
        raise ConfigError(f"images={images} is too small to compare layers; choose at least {SMALLEST_BATCH}")
    predictions = with_one_label(outputs.predictions(source), "reported on") if bundle.classes else None
    seen = _of_features(outputs.features(source), source) if predictions is None else seen_images(predictions, source)
    chosen, attempt = evenly(len(seen), images), Attempts()
    probes, undecodable = summarise_probes(bundle, seen, train, probe_images, attempt)
    return Overview(
        name=name,
        bundle=bundle,
        images=len(seen),
        answers=None if predictions is None else _answers(bundle, seen, predictions, examples, bootstrap),
        layers=summarise_layers(bundle, seen.inputs(bundle, chosen), attempt),
        probes=probes,
        saliency=_saliency(bundle, seen, saliency_images, attempt),
        patches=attempt(lambda: _patches(bundle, seen, chosen)),
        embedding=attempt(lambda: embedding_map(_features_of(outputs, seen), seen)),
        skipped=(*(outputs.features(source) if predictions is None else predictions).skipped, *undecodable),
        notes=tuple(attempt.reasons),
    )


def with_one_label(predictions: Predictions, action: str) -> Predictions:
    """Return the predictions of the images with one label. Raise `DataError` if there are none. `action` is the
    participle of what needs them, such as "compared"."""
    labelled = predictions.labelled()
    if not len(labelled):
        raise DataError(f"no image has a label and can be decoded, so none can be {action}")
    if labelled.truth.kind != "class":
        raise DataError(f"images with several labels cannot be {action}; name data with one label for each image")
    return labelled


def _of_features(features: FeatureSet, source: Source) -> SeenImages:
    """Return the images whose features are shown for a model without a head. They need no labels."""
    if not len(features):
        raise DataError("no image can be decoded, so there is nothing to report on")
    skipped = {item.key for item in features.skipped}
    indices = [index for index in range(len(source)) if source.key(index) not in skipped]
    truth = features.truth
    labels = truth.values if truth.kind == "class" else np.full(len(features), -1, dtype=np.int64)
    return SeenImages(source, np.array(indices, dtype=np.int64), features.keys, labels, features.classes)


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


# The layers of a model on some images: filters, positions, attention, similarity, norms, and linear models.


READ_BATCH = 32
"""Number of training images that are decoded at once."""

T = TypeVar("T")


class Attempts:
    """Measurements that a model or the images may not allow, and the reasons for those without a result."""

    def __init__(self) -> None:
        self.reasons: dict[str, None] = {}
        """The reasons without repetitions, in the order of the measurements."""

    def __call__(self, measure: Callable[[], T]) -> T | None:
        """Return the result of a measurement, or None if the model or the images do not allow it."""
        try:
            return measure()
        except (ConfigError, DataError) as reason:
            self.refuse(str(reason))
            return None

    def refuse(self, reason: str) -> None:
        """Note why a measurement has no result."""
        self.reasons[reason] = None


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
) -> tuple[tuple[LayerProbe, ...], tuple[Skipped, ...]]:
    """Return the accuracy of a linear model of each layer on at most `count` labelled images of `seen`, and the
    training images that could not be decoded.

    The models learn from at most as many labelled images of `train`, which is None if the measured images contain the
    training images. There are no models if `count` is 0.
    """
    if not count:
        return (), ()
    if train is None:
        attempt.refuse("a linear model of each layer, which would be measured on images that it learned from")
        return (), ()
    known, known_labels, skipped = _training_images(bundle, train, count)

    def measured() -> tuple[LayerProbe, ...]:
        if not len(known_labels):
            raise DataError("no training image has a label and can be decoded, so no layer has a linear model")
        labelled = np.flatnonzero(seen.labels >= 0)
        if not len(labelled):
            raise DataError("no measured image has a label, so no layer has a linear model")
        tested = labelled[evenly(len(labelled), count)]
        inputs, labels = seen.inputs(bundle, tested), seen.labels[tested]
        return tuple(probe_layers(bundle.network, known, known_labels, inputs, labels))

    return attempt(measured) or (), skipped


def _training_images(
    bundle: Bundle, train: Source, count: int
) -> tuple[Float[Tensor, "n c h w"], Int64[np.ndarray, " n"], tuple[Skipped, ...]]:
    """Return at most `count` training images with one label, their labels, and those that could not be decoded."""
    labelled = [index for index in range(len(train)) if isinstance(train.target(index), int)]
    chosen = [labelled[place] for place in evenly(len(labelled), count)]
    preprocess = bundle.preprocess
    inputs = [torch.empty(0, preprocess.channels, *preprocess.image_size, device=bundle.device)]
    labels: list[Target] = []
    skipped: list[Skipped] = []
    for batch in evaluation_batches(subset(train, chosen), preprocess, batch_size=READ_BATCH):
        inputs.append(preprocess.normalise(batch.images[batch.valid].to(bundle.device)))
        labels += [train.target(chosen[place]) for place in batch.samples[batch.valid].tolist()]
        skipped += batch.skipped
    return torch.cat(inputs), np.array(labels, dtype=np.int64), tuple(skipped)


# The embeddings of images along their first two principal components.


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
    """Class of each image, or "" for an image without a label."""
    keys: tuple[str, ...]
    features: Float32[np.ndarray, "n width"] = field(repr=False)
    """The embeddings themselves."""
    shown: Int64[np.ndarray, " m"]
    """Rows of the images that are drawn, at equal distances in the data, with the images of a class together."""
    pictures: tuple[bytes, ...] = field(repr=False)
    """Thumbnails of the images that are drawn, as JPEG files."""


def embedding_map(features: Float32[np.ndarray, "n width"], seen: SeenImages) -> EmbeddingMap:
    """Return the map of the embeddings of images. Raise `DataError` if they do not span two directions."""
    values = torch.from_numpy(np.asarray(features, dtype=np.float64))
    if min(values.shape) < 2:
        raise DataError("a map of the embeddings, which needs at least two images and two features")
    values = values - values.mean(dim=0)
    components, explained = principal_components(values, 2)
    labels = tuple(map(seen.label, range(len(seen))))
    shown = np.array(sorted(evenly(len(labels), MAX_POINTS), key=lambda row: labels[row]), dtype=np.int64)
    return EmbeddingMap(
        points=(values @ components.T).numpy(),
        explained=(float(explained[0]), float(explained[1])),
        labels=labels,
        keys=seen.keys,
        features=features,
        shown=shown,
        pictures=tuple(map(_thumbnail, seen.images(shown))),
    )


def _thumbnail(image: bytes | np.ndarray) -> bytes:
    """Return a small JPEG file of an image."""
    return jpeg(small_picture(image, THUMBNAIL), quality=80)


# Images of a data set as inputs of a network, and a model's answers about them with the relevance of each pixel.


RECEPTIVE_IMAGES = 8
"""Number of images over which the effective receptive field of a network without attention maps is averaged."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The class that a model predicts for an image."""

    label: str
    probability: float
    relevance: Float[np.ndarray, "height width"] | None
    """Relevance of each pixel of the picture for this answer, or None for a network without attention maps."""


@dataclass(frozen=True, eq=False)
class SeenImages:
    """The images of a data set that could be decoded."""

    source: Source = field(repr=False)
    indices: Int64[np.ndarray, " n"]
    """Indices of the images in the source."""
    keys: tuple[str, ...]
    labels: Int64[np.ndarray, " n"]
    """Class of each image, or -1 for an image without one label."""
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def label(self, row: int) -> str:
        """Return the name of an image's class, or "" for an image without one label."""
        return self.classes[self.labels[row]] if self.labels[row] >= 0 else ""

    def images(self, rows: Int64[np.ndarray, " m"]) -> Iterator[bytes | np.ndarray]:
        """Yield chosen images: bytes of image files, or arrays of pixels."""
        return images_at(self.source, self.indices[rows])

    def inputs(self, bundle: Bundle, rows: Int64[np.ndarray, " m"]) -> Float[Tensor, "m c h w"]:
        """Return chosen images as the network takes them."""
        return inputs_of(bundle, self.images(rows))


def seen_images(predictions: Predictions, source: Source) -> SeenImages:
    """Return the images with one label for which a model has made these predictions."""
    assert predictions.truth.kind == "class"
    return SeenImages(source, predictions.indices, predictions.keys, predictions.truth.values, predictions.classes)


def images_at(source: Source, indices: Sequence[int] | Int64[np.ndarray, " n"]) -> Iterator[bytes | np.ndarray]:
    """Yield the images of a source at the given indices: bytes of image files, or arrays of pixels."""
    return (source[int(index)].image for index in indices)


def inputs_of(bundle: Bundle, images: Iterable[bytes | np.ndarray]) -> Float[Tensor, "n c h w"]:
    """Return images as the network takes them. An image is the bytes of a file, or an array of pixels."""
    return bundle.inputs([bundle.preprocess.pixels(image) for image in images])


def in_batches(images: Float[Tensor, "n c h w"]) -> Iterator[Float[Tensor, "b c h w"]]:
    """Yield batches of about one size for CKA. The images are in random order, the same for each model: batches of
    neighbours in data sorted by class would not show how features differ between classes."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return (images[rows] for rows in order.tensor_split(math.ceil(len(images) / BATCH)))


def picture_of(image: bytes | np.ndarray) -> UInt8[np.ndarray, "height width 3"]:
    """Return the colours of an image, reduced to the largest size of a picture on a page."""
    return np.asarray(small_picture(image, PAGE_SIDE))


def reach_of(bundle: Bundle, images: Float[Tensor, "n c h w"]) -> HeadStatistic | ReceptiveField:
    """Return the attention distance of each layer and head in pixels, or the effective receptive field of each layer of
    a network without attention maps."""
    if has_maps(bundle.network):
        return attention_distance(bundle.network, images)
    return effective_receptive_field(bundle.network, images[:RECEPTIVE_IMAGES])


def answer_about(bundle: Bundle, image: bytes | np.ndarray, judged: PerSample, row: int) -> Answer:
    """Return a model's answer for an image, with the relevance of the predicted class. `row` is the image's row in
    `judged`."""
    number = int(judged.predicted[row])
    relevance = None
    if has_maps(bundle.network):
        inputs = inputs_of(bundle, [image])
        found = trace(bundle.network, inputs, layers=(-1,))
        values = class_relevance(bundle.network, inputs, torch.tensor([number], device=inputs.device)).values[0]
        relevance = on_picture(values, found, bundle.preprocess.placement(picture_of(image).shape[:2]))
    return Answer(bundle.classes[number], float(judged.confidence[row]), relevance)
