"""The index of a tar shard: the position of each sample, saved in a file so that the shard is scanned only once.

The index of `a.tar` is `a.tar.index`, in the format .npz. If that file cannot be written or belongs to another program,
the index is in the cache folder (`$VITRAIL_DATA`, else ~/.cache/vitrail) under a hash of the shard's path. An index is
valid only for one size and version of the shard.
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
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data import remote
from vitrail.data.packing.manifest import NUMBERS
from vitrail.data.pixels.formats import SUFFIXES
from vitrail.data.sources.shards.tar_members import Member, Read, members
from vitrail.errors import DataError
from vitrail.files import cache_folder

RawLabel = int | str | tuple[int | str, ...] | tuple[float | None, ...]
"""A label as stored in a shard: the number or name of a class, a tuple of class numbers or names, or a tuple of numbers
to learn. An unknown number is None."""

FORMAT = 3
WINDOW = 16 * 1024
"""Number of bytes that are requested from a server to read a header. If samples are small, one request contains several
headers."""

LABELS = ("label", "cls", "class")
"""Fields of a sample's JSON that can hold the label. The first one that is present is used."""

KEY = "__key__"
"""Field of a sample's JSON that holds the key if the key cannot be the name of a member."""

LONGEST_LABEL = 2**20

ZIP = b"PK\x03\x04"
"""First bytes of an index, which is a ZIP archive."""


@dataclass(frozen=True)
class ShardIndex:
    """The samples of a shard that have an image, in order."""

    keys: np.ndarray
    """All keys, one after the other, as UTF-8 (uint8)."""
    key_ends: np.ndarray
    """End of each key in `keys` (int64)."""
    hashes: np.ndarray
    """Hash of each key (uint64), to find duplicate keys."""
    offsets: np.ndarray
    """Offset of each image in the shard in bytes (int64)."""
    sizes: np.ndarray
    """Size of each image in bytes (int64)."""
    codes: np.ndarray
    """Index in `labels` of each image's label (int32), or -1 for no label."""
    labels: tuple[RawLabel, ...]
    ignored: int
    """Number of tar members that are neither images nor labels of images."""

    def __len__(self) -> int:
        return len(self.codes)


COLUMNS = {
    "key_ends": np.int64, "hashes": np.uint64, "offsets": np.int64, "sizes": np.int64, "codes": np.int32,
}  # fmt: skip
"""Names of the columns that are saved together as one int64 array. A file with fewer arrays loads faster."""


class Version(NamedTuple):
    """The version of a shard for which an index is valid."""

    size: int
    tag: str
    """Modification time of a local file, or the version that the server states for a remote file."""


@dataclass(frozen=True)
class Shard:
    """A tar with its path or URL, version and index."""

    path: str
    version: Version
    index: ShardIndex


def is_numbers(label: RawLabel) -> bool:
    """Return True for numbers to learn, and False for classes."""
    return isinstance(label, tuple) and any(isinstance(one, float) for one in label)


def open_shard(path: str) -> Shard:
    """Open the shard at a path or URL. A valid saved index is read. Otherwise the headers of the tar are scanned.

    Raises `DataError` if the file does not exist, is not a usable tar (see `members`), or has unreadable labels.
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
    """Return the version of a path, a URL or an open file. Raises `OSError`, and `DataError` if a server fails."""
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
    for member, key, suffix in _parts(shard, read, size, rows):
        if key is None:
            ignored += 1
            continue
        is_image = f".{suffix}" in SUFFIXES
        row = rows.setdefault(key, len(rows))
        part = (row, "image" if is_image else suffix)
        if part in seen:
            raise DataError(
                f"{shard} has the sample {key!r} twice: {member.name!r} belongs to the second one; give each sample a "
                "name of its own"
            )
        seen.add(part)
        if is_image:
            images[row] = member
            continue
        if member.size > LONGEST_LABEL:
            raise DataError(
                f"{shard}: {member.name!r} has {member.size:,} bytes, but a label may have at most {LONGEST_LABEL:,}"
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


def _parts(shard: str, read: Read, size: int, rows: Collection[str]) -> Iterator[tuple[Member, str | None, str]]:
    """Yield the files of a shard with the key of their sample and their suffix, or without a key for other files.

    The key ends at the first dot of the file's name. A name such as "v1.2.png" follows with the key that ends at its
    last dot, unless `rows`, the keys of samples so far, has the shorter one, to which "1.mask.png" belongs.
    """
    dotted: list[tuple[Member, str, str, str]] = []
    for member in members(shard, read, size):
        folder, slash, base = member.name.rpartition("/")
        stem, _, suffix = base.lower().partition(".")
        key = folder + slash + base[: len(stem)]
        before, _, last = base.rpartition(".")
        if stem and _is_part(suffix):
            yield member, key, suffix
        elif stem and _is_part(last.lower()):
            dotted.append((member, key, folder + slash + before, last.lower()))
        else:
            yield member, None, suffix
    short = frozenset(rows)
    for member, key, longer, suffix in dotted:
        yield member, None if key in short else longer, suffix


def _is_part(suffix: str) -> bool:
    return f".{suffix}" in SUFFIXES or suffix in ("cls", "json")


def _collect(
    shard: str, keys: list[str], found: list[tuple[Member, int]], labels: tuple[RawLabel, ...], ignored: int
) -> ShardIndex:
    encoded = [os.fsencode(key) for key in keys]
    if len(set(encoded)) < len(encoded):
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"{shard} has two samples with the key {repeated!r}; keys must be unique")
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
    """Return the label in the .cls or .json file of a sample, and the key in the .json file. Raises `DataError`."""
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
        os.fsencode(key)  # not every JSON string can be encoded
        return label, key
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{shard}: the label in {name!r} cannot be read ({error}); a label is the number or name of a class, or a "
            "list of them"
        ) from error


def _one(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError(f"it is {value!r}")
    return value


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _places(shard: str) -> list[Path]:
    """Return the possible paths of a shard's index, in the order in which they are tried."""
    location = shard if remote.is_remote(shard) else os.path.abspath(shard)  # noqa: PTH100 (a Path would follow links)
    hashed = cache_folder("shards") / f"{hashlib.sha256(os.fsencode(location)).hexdigest()}.index"
    return [hashed] if remote.is_remote(shard) else [Path(f"{shard}.index"), hashed]


def _save(shard: str, version: Version, index: ShardIndex) -> None:
    """Save the index of a shard. If no path is writable, the shard is scanned again the next time it is opened.

    A file of another program is not replaced.
    """
    about = {"format": FORMAT, "version": version, "labels": index.labels, "ignored": index.ignored}
    columns = np.stack([getattr(index, name).astype(np.int64) for name in COLUMNS])
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    for place in _places(shard):
        if not _is_free(place):
            continue
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


def _is_free(place: Path) -> bool:
    """Return True if there is no file, an empty file, or an index, which can be out of date or damaged."""
    try:
        with place.open("rb") as file:
            return file.read(len(ZIP)) in (b"", ZIP)
    except OSError:
        return not place.exists()


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
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):  # missing or damaged
            continue
    return None


def _fits(index: ShardIndex, size: int) -> bool:
    """Return True if an index is consistent and fits a shard of `size` bytes. The file may be damaged or from another
    program."""
    lengths = np.diff(index.key_ends, prepend=0)
    return (
        index.keys.dtype == np.uint8
        and bool((lengths > 0).all())
        and int(lengths.sum()) == len(index.keys)
        and bool(((index.offsets >= 0) & (index.sizes >= 0) & (index.offsets + index.sizes <= size)).all())
        and bool(((index.codes >= -1) & (index.codes < len(index.labels))).all())
    )
