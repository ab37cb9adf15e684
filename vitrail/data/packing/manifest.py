"""What a folder of packed shards says of itself: classes, splits, and each shard's size and checksum."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from vitrail.data.splits import SPLITS
from vitrail.errors import ConfigError, DataError
from vitrail.plain import from_plain

__all__ = ["FILE", "FORMAT", "NUMBERS", "UNFINISHED", "Manifest", "Packing", "ShardRecord", "parse"]

FILE = "dataset.json"
UNFINISHED = "dataset.unfinished.json"
"""The same while shards are missing; it becomes `FILE` with the last of them."""

FORMAT = "vitrail shards 1"

NUMBERS = "__numbers__"
"""Field of a sample's JSON: a list of the numbers to learn, null for a number that is unknown."""


@dataclass(frozen=True)
class Packing:
    """What decides every byte of the shards: the samples and how they are written."""

    fingerprint: str
    """`vitrail.data.source.fingerprint` of the splits."""
    shard_size: int
    """No shard is larger, in bytes, unless one sample is."""
    max_side: int | None
    """Larger images were scaled down to this, in pixels, and encoded anew."""
    jpeg_quality: int | None
    """With which they were."""


@dataclass(frozen=True)
class ShardRecord:
    """One shard, whole."""

    name: str
    samples: int
    size: int
    sha256: str
    rescaled: int
    """Images that were larger than `max_side`."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Why images could not be rescaled, by their keys; they are there as they were."""


@dataclass(frozen=True)
class Manifest:
    """`dataset.json`."""

    classes: tuple[str, ...]
    samples: dict[str, int]
    """How many, of each split that there is."""
    packing: Packing
    shards: dict[str, tuple[ShardRecord, ...]]
    """Of each split, in order."""
    format: str = FORMAT


def parse(where: str, data: bytes) -> Manifest:
    """The manifest in a file's bytes. Raises `DataError` where it is none, or contradicts itself."""
    try:
        manifest = from_plain(Manifest, json.loads(data))
    except (ValueError, RecursionError, ConfigError) as error:
        raise DataError(f"{where} is not the description of packed shards: {error}") from error
    if manifest.format != FORMAT:
        raise DataError(f"{where} has the format {manifest.format!r}; this version of Vitrail reads {FORMAT!r}")
    names = [record.name for records in manifest.shards.values() for record in records]
    if set(manifest.shards) - set(SPLITS) or any("/" in name or not name.endswith(".tar") for name in names):
        raise DataError(f"{where} names splits or shards that cannot be: {', '.join([*manifest.shards, *names][:4])}")
    if "train" not in manifest.shards:
        raise DataError(f"{where} has no training split")
    return manifest
