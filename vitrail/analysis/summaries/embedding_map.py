"""The embeddings of images along their first two principal components."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64

from vitrail.analysis.embedding import principal_components
from vitrail.analysis.summaries.samples import SeenImages, evenly
from vitrail.data.pixels.decode import to_pil
from vitrail.errors import DataError

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
    picture, file = to_pil(image, 3), io.BytesIO()
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(file, "jpeg", quality=80)
    return file.getvalue()
