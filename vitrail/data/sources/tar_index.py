"""Where each sample of a tar shard lies, kept in a file beside the shard, so that the shard is scanned once.

The index of `a.tar` is `a.tar.index`, an .npz; or, where none can be written there, a file in the cache folder
(`$VITRAIL_DATA`, else ~/.cache/vitrail) by a hash of the shard's path. It holds for the shard's size and version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data import remote
from vitrail.data.packing.manifest import NUMBERS
from vitrail.data.pixels.decode import SUFFIXES
from vitrail.data.sources.tar_members import Member, Read, members
from vitrail.errors import DataError
from vitrail.files import cache_folder

__all__ = ["RawLabel", "Shard", "ShardIndex", "Version", "is_numbers", "open_shard", "version_of"]

RawLabel = int | str | tuple[int | str, ...] | tuple[float | None, ...]
"""A label as a shard holds it: the number or name of a class, those of several classes, or the numbers to learn, None
for a number that is unknown."""

FORMAT = 1
WINDOW = 16 * 1024
"""Bytes that a request for a header brings from a server: small samples have several headers in it."""

LABELS = ("label", "cls", "class")
"""Fields of a sample's JSON that can hold its label, the first that is there."""

KEY = "__key__"
"""The field that can hold the sample's key, where it cannot be a member's name."""

LONGEST_LABEL = 2**20


@dataclass(frozen=True)
class ShardIndex:
    """The samples of a shard that have an image, in order."""

    keys: np.ndarray
    """All keys, one after the other, as UTF-8 in uint8."""
    key_ends: np.ndarray
    """int64: where each ends in `keys`."""
    hashes: np.ndarray
    """uint64 of each key, to find keys that come twice."""
    offsets: np.ndarray
    """int64: where each image begins in the shard."""
    sizes: np.ndarray
    """int64: its bytes."""
    codes: np.ndarray
    """int32: which of `labels` it has; -1 for none."""
    labels: tuple[RawLabel, ...]
    ignored: int
    """Members that belong to no image, or say nothing of its class."""

    def __len__(self) -> int:
        return len(self.codes)


COLUMNS = {
    "key_ends": np.int64, "hashes": np.uint64, "offsets": np.int64, "sizes": np.int64, "codes": np.int32,
}  # fmt: skip
"""In a file they are the rows of one array of int64: opening many files takes a time for each array in them."""


class Version(NamedTuple):
    """What an index holds for."""

    size: int
    tag: str
    """Of a file on this machine, when it was changed; of a remote one, what its server calls this version."""


@dataclass(frozen=True)
class Shard:
    """A tar, by its path or URL."""

    path: str
    version: Version
    index: ShardIndex


def is_numbers(label: RawLabel) -> bool:
    """Return True for numbers to learn, False for classes."""
    return isinstance(label, tuple) and any(isinstance(one, float) for one in label)


def open_shard(path: str) -> Shard:
    """A shard by its path or URL, with its index: read where there is one that holds, else made by a scan of headers.

    Raises `DataError` where there is no such file, and for what `members` and labels can have wrong.
    """
    try:
        version = version_of(path)
        index = _load(path, version)
        if index is None:
            with _reader(path, version.size) as read:
                index = _scan(path, read, version.size)
            _save(path, version, index)
    except FileNotFoundError:
        raise DataError(f"shard {path} does not exist") from None
    except OSError as error:
        raise DataError(f"cannot read shard {path}: {error.strerror or error}") from error
    return Shard(path, version, index)


def version_of(shard: str | int) -> Version:
    """Of a path, a URL or an open file. Raises `OSError`, and `DataError` for a server's failure."""
    if isinstance(shard, str) and remote.is_remote(shard):
        return Version(*remote.describe(shard))
    status = os.stat(shard)  # noqa: PTH116 (an open file is no Path)
    return Version(status.st_size, f"changed at {status.st_mtime_ns}")


@contextlib.contextmanager
def _reader(path: str, size: int) -> Iterator[Read]:
    if remote.is_remote(path):
        yield _windows(path, size)
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield lambda position, count: os.pread(descriptor, count, position)
    finally:
        os.close(descriptor)


def _windows(url: str, size: int) -> Read:
    start, window = 0, b""

    def read(position: int, count: int) -> bytes:
        nonlocal start, window
        stop = min(position + count, size)
        if not start <= position <= stop <= start + len(window):
            start, window = position, remote.read(url, position, min(position + max(count, WINDOW), size))
        return window[position - start : stop - start]

    return read


def _scan(shard: str, read: Read, size: int) -> ShardIndex:
    rows: dict[str, int] = {}
    names: dict[int, str] = {}
    images: dict[int, Member] = {}
    codes: dict[int, int] = {}
    labels: dict[RawLabel, int] = {}
    seen: set[tuple[int, str]] = set()
    ignored = 0
    for member in members(shard, read, size):
        folder, slash, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        suffix = suffix.lower()
        is_image = f".{suffix}" in SUFFIXES
        if not stem or not (is_image or suffix in ("cls", "json")):
            ignored += 1
            continue
        row = rows.setdefault(folder + slash + stem, len(rows))
        part = (row, "image" if is_image else suffix)
        if part in seen:
            raise DataError(f"{shard} has the sample {folder + slash + stem!r} twice: {member.name!r} is its second")
        seen.add(part)
        if is_image:
            images[row] = member
            continue
        if member.size > LONGEST_LABEL:
            raise DataError(
                f"{shard}: {member.name!r} has {member.size:,} bytes; a label has at most {LONGEST_LABEL:,}"
            )
        label, name = _label(shard, member.name, read(member.offset, member.size))
        if name is not None:
            names[row] = name
        if label is not None and (suffix == "cls" or (row, "cls") not in seen):
            codes[row] = labels.setdefault(label, len(labels))
    ignored += sum(row not in images for row, _ in seen)
    keys = [names.get(row, key) for key, row in rows.items() if row in images]
    return _collect(shard, keys, [(images[row], codes.get(row, -1)) for row in rows.values() if row in images],
                    tuple(labels), ignored)  # fmt: skip


def _collect(
    shard: str, keys: list[str], found: list[tuple[Member, int]], labels: tuple[RawLabel, ...], ignored: int
) -> ShardIndex:
    encoded = [os.fsencode(key) for key in keys]
    if len(set(encoded)) < len(encoded):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"{shard} has two samples with the key {twice!r}")
    digests = b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in encoded)
    return ShardIndex(
        keys=np.frombuffer(b"".join(encoded), np.uint8),
        key_ends=np.cumsum([len(key) for key in encoded], dtype=np.int64),
        hashes=np.frombuffer(digests, np.uint64),
        offsets=np.array([member.offset for member, _ in found], np.int64),
        sizes=np.array([member.size for member, _ in found], np.int64),
        codes=np.array([code for _, code in found], np.int32),
        labels=labels,
        ignored=ignored,
    )


def _label(shard: str, name: str, data: bytes) -> tuple[RawLabel | None, str | None]:
    """The label in a sample's .cls or .json, and the key in its .json. Raises `DataError`."""
    try:
        if not name.lower().endswith(".json"):
            text = data.decode().strip()
            if not text or "\n" in text:
                raise ValueError(f"it holds {text[:40]!r}")
            return (int(text) if re.fullmatch("[+-]?[0-9]+", text) else text), None
        values = json.loads(data)
        if not isinstance(values, dict):
            return None, None
        found = next((values[field] for field in LABELS if values.get(field) is not None), None)
        label: RawLabel | None
        if isinstance(values.get(NUMBERS), list) and values[NUMBERS]:
            numbers = tuple(map(_number, values[NUMBERS]))
            label = None if set(numbers) == {None} else numbers
        else:
            label = tuple(map(_one, found)) if isinstance(found, list) else None if found is None else _one(found)
        key = values.get(KEY)
        if not isinstance(key, str) or not key:
            return label, None
        os.fsencode(key)  # which not every string of JSON can be
        return label, key
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{shard}: the label in {name!r} cannot be read ({error}); it is a class's number or name, or a list of "
            "them"
        ) from error


def _one(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError(f"it is {value!r}")
    return value


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"it is {value!r}, among numbers")
    return float(value)


def _places(shard: str) -> list[Path]:
    """Where a shard's index can be, the best first."""
    where = shard if remote.is_remote(shard) else os.path.abspath(shard)  # noqa: PTH100 (a Path would follow links)
    hashed = cache_folder("shards") / f"{hashlib.sha256(os.fsencode(where)).hexdigest()}.index"
    return [hashed] if remote.is_remote(shard) else [Path(f"{shard}.index"), hashed]


def _save(shard: str, version: Version, index: ShardIndex) -> None:
    """Where nothing can be written, the next one to open the shard scans it again."""
    about = {"format": FORMAT, "version": version, "labels": index.labels, "ignored": index.ignored}
    columns = np.stack([getattr(index, name).astype(np.int64) for name in COLUMNS])
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    for place in _places(shard):
        partial = place.with_name(f"{place.name}.{os.getpid()}-{threading.get_ident()}.partial")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                np.savez(file, about=text, keys=index.keys, columns=columns)
            partial.replace(place)
            return
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()


def _load(shard: str, version: Version) -> ShardIndex | None:
    for place in _places(shard):
        try:
            with place.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                about = json.loads(file["about"].tobytes())
                if about["format"] != FORMAT or Version(*about["version"]) != version:
                    continue
                labels = tuple(tuple(label) if isinstance(label, list) else label for label in about["labels"])
                rows = zip(COLUMNS.items(), file["columns"], strict=True)
                columns = {name: row.astype(kind) for (name, kind), row in rows}
                index = ShardIndex(keys=file["keys"], **columns, labels=labels, ignored=about["ignored"])
                if _fits(index, version.size):
                    return index
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):  # none, or a damaged one
            continue
    return None


def _fits(index: ShardIndex, size: int) -> bool:
    """Whether an index is one of a shard of `size` bytes, whoever wrote it."""
    lengths = np.diff(index.key_ends, prepend=0)
    return (
        index.keys.dtype == np.uint8
        and bool((lengths > 0).all())
        and int(lengths.sum()) == len(index.keys)
        and bool(((index.offsets >= 0) & (index.sizes >= 0) & (index.offsets + index.sizes <= size)).all())
        and bool(((index.codes >= -1) & (index.codes < len(index.labels))).all())
    )
