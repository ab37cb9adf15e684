"""The identity of features: everything that determines them, with hashes of the data and of the weights."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from vitrail.data.pixels.decode import pixel_limit
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, fingerprint, stamp_of
from vitrail.weights.bundle import weights_sha256

FORMAT = 2
"""Version of the entries and of the computation in `embed`. Entries of other versions are ignored."""

SAMPLED = 16
"""Number of images that are hashed if a source has no method `stamp_of`."""


@dataclass(frozen=True)
class Identity:
    """Everything that determines the features. A cache entry is used only if its identity equals the requested
    identity."""

    data: str
    weights: str
    preprocess: Preprocess
    precision: str
    layer: str = "embedding"
    max_pixels: int = field(default_factory=pixel_limit)
    """Larger images are skipped."""
    format: int = FORMAT


def weights_fingerprint(network: nn.Module) -> str:
    """Return a hash of the network's config and weights."""
    kind = f"{type(network).__qualname__} {getattr(network, 'config', None)!r}"
    return hashlib.sha256(f"{kind}\n{weights_sha256(network)}".encode()).hexdigest()


def data_fingerprint(source: Source) -> str:
    """Return a hash of all keys and targets in order, and of the images' identities, without decoding any image.

    Files, shards and Parquet files are identified by size and modification time. Arrays are identified by their pixels.
    If a source has no `stamp_of`, 16 evenly spaced images are read and hashed. A change to any other image is then not
    detected.
    """
    digest = hashlib.sha256(fingerprint(source).encode())
    if isinstance(getattr(source, "identity", None), str):  # the source's own fingerprint includes the images
        return digest.hexdigest()
    for index in range(len(source)):
        stamp = stamp_of(source, index)
        if stamp is None:
            break
        digest.update(os.fsencode(f"{stamp}\n"))
    else:
        return digest.hexdigest()
    for index in np.unique(np.linspace(0, len(source) - 1, SAMPLED).round().astype(int)).tolist():
        image = source[index].image
        shape = "" if isinstance(image, bytes) else str(image.shape)
        digest.update(f"{index} {shape}\n".encode())
        digest.update(image if isinstance(image, bytes) else np.ascontiguousarray(image).data)
    return digest.hexdigest()
