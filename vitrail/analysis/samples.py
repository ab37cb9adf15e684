"""Images of a data set as inputs of a network, and a model's answers about them with the relevance of each pixel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from vitrail.analysis.heads import HeadStatistic, ReceptiveField, attention_distance, effective_receptive_field
from vitrail.analysis.images import PAGE_SIDE, on_picture
from vitrail.analysis.saliency import class_relevance
from vitrail.analysis.tracing import has_maps, trace
from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source
from vitrail.evaluation.metrics.classes import PerSample
from vitrail.evaluation.predictions import Predictions
from vitrail.weights.bundle import Bundle

BATCH = 16
"""Number of images whose features are computed at once."""

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
    picture = to_pil(image, 3)
    picture.thumbnail((PAGE_SIDE, PAGE_SIDE))
    return np.asarray(picture)


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
