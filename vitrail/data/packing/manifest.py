"""The description of a folder of packed shards: classes, splits, and the size and checksum of each shard."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from vitrail.data.splits import SPLITS
from vitrail.errors import ConfigError, DataError, listed
from vitrail.settings import from_plain

FILE = "dataset.json"
UNFINISHED = "dataset.unfinished.json"
"""Name of the manifest until all shards are complete. It is then renamed to `FILE`."""

FORMAT = "vitrail shards 1"

NUMBERS = "__numbers__"
"""Field of a sample's JSON with the list of numbers to learn. An unknown number is null."""


@dataclass(frozen=True)
class Packing:
    """The settings that determine every byte of the shards."""

    fingerprint: str
    """`vitrail.data.source.fingerprint` of the splits."""
    shard_size: int
    """Maximum size of a shard in bytes. Only a shard with a single sample can be larger."""
    max_side: int | None
    """Maximum side in pixels, to which larger images are scaled down. None keeps all sizes."""
    jpeg_quality: int | None
    """JPEG quality of the images that are scaled down."""


@dataclass(frozen=True)
class ShardRecord:
    """The description of one complete shard."""

    name: str
    samples: int
    size: int
    sha256: str
    rescaled: int
    """Number of images that were larger than `max_side`."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Keys of images that could not be scaled down, with the reasons. The shard has the original bytes of these
    images."""


@dataclass(frozen=True)
class Manifest:
    """The content of `dataset.json`."""

    classes: tuple[str, ...]
    samples: dict[str, int]
    """Number of samples of each split."""
    packing: Packing
    shards: dict[str, tuple[ShardRecord, ...]]
    """The shards of each split, in order."""
    format: str = FORMAT


def parse(where: str, data: bytes) -> Manifest:
    """Return the manifest in the bytes of a file. Raises `DataError` if the file is not a consistent manifest."""
    try:
        manifest = from_plain(Manifest, json.loads(data))
    except (ValueError, RecursionError, ConfigError) as error:
        raise DataError(f"{where} is not a description of packed shards: {error}") from error
    if manifest.format != FORMAT:
        raise DataError(
            f"{where} has the format {manifest.format!r}, but this version of Vitrail reads {FORMAT!r}; pack the "
            "data again"
        )
    names = [record.name for records in manifest.shards.values() for record in records]
    if set(manifest.shards) - set(SPLITS) or any("/" in name or not name.endswith(".tar") for name in names):
        raise DataError(f"{where} has invalid names of splits or shards: {listed([*manifest.shards, *names], 4)}")
    if "train" not in manifest.shards:
        raise DataError(f"{where} has no training split; pack the data again")
    return manifest
