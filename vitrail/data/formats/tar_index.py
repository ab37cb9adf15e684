"""The index of a tar shard: the position of each sample, saved in a file so that the shard is scanned only once.

The index of `a.tar` is `a.tar.index`, in the format .npz. If that file cannot be written or belongs to another program,
the index is in the cache folder (`$VITRAIL_DATA`, else ~/.cache/vitrail) under a hash of the shard's path. An index is
valid only for one size and time of the shard, and only if it was written or copied after the shard was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data import remote
from vitrail.data.formats.pack import NUMBERS
from vitrail.data.pixels.decode import SUFFIXES
from vitrail.data.texts import TEXTS, TextReader, TextTable
from vitrail.errors import DataError
from vitrail.files import cache_folder, named_once, replacing_file

RawLabel = int | str | tuple[int | str, ...] | tuple[float | None, ...]
"""A label as stored in a shard: the number or name of a class, a tuple of class numbers or names, or a tuple of numbers
to learn. An unknown number is None."""

FORMAT = 5
WINDOW = 16 * 1024
"""Number of bytes that are requested from a server to read a header. If samples are small, one request contains several
headers."""

LABELS = ("label", "cls", "class")
"""Fields of a sample's JSON that can hold the label. The first one that is present is used."""

KEY = "__key__"
"""Field of a sample's JSON that holds the key if the key cannot be the name of a member."""

USED = frozenset({*LABELS, *TEXTS, KEY, NUMBERS})
"""Fields of a sample's JSON that are read."""

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
    text_counts: np.ndarray
    """Number of texts of each image (int32)."""
    texts: TextTable
    """The texts of all images, one image after another."""
    unread: tuple[int, int]
    """Numbers of texts that are empty and that are broken."""
    ignored: int
    """Number of tar members that are neither images nor labels or texts of images."""
    doubtful: int
    """Number of images whose .json file has another label than the .cls file or another text than the .txt file, which
    are used, or several labels, of which the first one of `LABELS` is used."""

    def __len__(self) -> int:
        return len(self.codes)


COLUMNS = {
    "key_ends": np.int64, "hashes": np.uint64, "offsets": np.int64, "sizes": np.int64, "codes": np.int32,
    "text_counts": np.int32,
}  # fmt: skip
"""Names of the columns that are saved together as one int64 array. A file with fewer arrays loads faster."""


class Version(NamedTuple):
    """The version of a shard for which an index is valid."""

    size: int
    tag: str
    """Modification time of a local file, or the version that the server states for a remote file ("" if none)."""
    changed: int = 0
    """Inode change time of a local file, which programs that copy or unpack files cannot set."""


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

    If a server states no version, no index is saved, because it would also be used for a new file of the same size.

    Raises `DataError` if the file does not exist, is not a usable tar (see `members`), or has unreadable labels.
    """
    try:
        version = version_of(path)
        index = _load(path, version) if version.tag else None
        if index is None:
            with _reader(path, version.size) as read:
                index = _scan(path, read, version.size)
            if version.tag:
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
    return Version(status.st_size, f"changed at {status.st_mtime_ns}", status.st_ctime_ns)


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
    stated: dict[str, dict[int, RawLabel]] = {"json": {}, "cls": {}}
    labels: dict[RawLabel, int] = {}
    texts: dict[str, dict[int, tuple[str, ...]]] = {"json": {}, "txt": {}}
    reader = TextReader()
    seen: set[tuple[int, str]] = set()
    doubtful: set[int] = set()
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
        data = read(member.offset, member.size)
        if suffix == "txt":
            texts["txt"][row] = reader(data.decode("utf-8-sig", "replace"))
            continue
        label, name, cell, has_others = _label(shard, member.name, data)
        doubtful |= {row} if has_others else set()
        if cell is not None:
            texts["json"][row] = reader(cell)
        if name is not None:
            names[row] = name
        if label is not None:
            stated[suffix][row] = label
    ignored += sum(row not in images for row, _ in seen)
    kept = {row: names.get(row, key) for key, row in rows.items() if row in images}
    used = stated["json"] | stated["cls"]
    codes = {row: labels.setdefault(used[row], len(labels)) for row in kept if row in used}
    encoded = [os.fsencode(key) for key in kept.values()]
    if len(set(encoded)) < len(encoded):
        repeated = next(key for key, count in Counter(kept.values()).items() if count > 1)
        raise DataError(f"{shard} has two samples with the key {repeated!r}; keys must be unique")
    digests = b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in encoded)
    of_images = [texts["txt"].get(row, texts["json"].get(row, ())) for row in kept]
    doubtful |= {row for row, label in stated["cls"].items() if str(stated["json"].get(row, label)) != str(label)}
    doubtful |= {row for row, some in texts["txt"].items() if texts["json"].get(row, some) != some}
    return ShardIndex(
        keys=np.frombuffer(b"".join(encoded), np.uint8),
        key_ends=np.cumsum([len(key) for key in encoded], dtype=np.int64),
        hashes=np.frombuffer(digests, np.uint64),
        offsets=np.array([images[row].offset for row in kept], np.int64),
        sizes=np.array([images[row].size for row in kept], np.int64),
        codes=np.array([codes.get(row, -1) for row in kept], np.int32),
        labels=tuple(labels),
        text_counts=np.array(list(map(len, of_images)), np.int32),
        texts=TextTable.of(text for some in of_images for text in some),
        unread=(reader.empty, reader.broken),
        ignored=ignored,
        doubtful=len(doubtful & kept.keys()),
    )


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
    return f".{suffix}" in SUFFIXES or suffix in ("cls", "json", "txt")


def _label(shard: str, name: str, data: bytes) -> tuple[RawLabel | None, str | None, Any, bool]:
    """Return the label in the .cls or .json file of a sample, the key and the texts in the .json file, and True if
    this file also has other labels. Raises `DataError`."""
    try:
        if not name.lower().endswith(".json"):
            text = data.decode("utf-8-sig").strip()
            if not text or "\n" in text:
                raise ValueError(f"it holds {text[:40]!r}")
            return (int(text) if re.fullmatch("[+-]?[0-9]+", text) else text), None, None, False
        values = json.loads(data, object_pairs_hook=partial(named_once, names=USED))
        if not isinstance(values, dict):
            return None, None, None, False
        stated = [values[field] for field in LABELS if values.get(field) is not None]
        found, has_others = next(iter(stated), None), len(set(map(str, stated))) > 1
        label: RawLabel | None
        if isinstance(values.get(NUMBERS), list) and values[NUMBERS]:
            numbers = tuple(map(_number, values[NUMBERS]))
            label = None if set(numbers) == {None} else numbers
        else:
            label = tuple(map(_one, found)) if isinstance(found, list) else None if found is None else _one(found)
        cell = next((values[field] for field in TEXTS if values.get(field) is not None), None)
        key = values.get(KEY)
        if not isinstance(key, str) or not key:
            return label, None, cell, has_others
        os.fsencode(key)  # not every JSON string can be encoded
        return label, key, cell, has_others
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
    about |= {"unread": index.unread, "doubtful": index.doubtful}
    columns = np.stack([getattr(index, name).astype(np.int64) for name in COLUMNS])
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    for place in filter(_is_free, _places(shard)):
        with contextlib.suppress(OSError), replacing_file(place) as partial:
            with partial.open("wb") as file:  # np.savez would append a suffix to a name
                np.savez(
                    file, about=text, keys=index.keys, columns=columns, texts=index.texts.data,
                    text_ends=index.texts.ends,
                )  # fmt: skip
            return


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
                stored = Version(*about["version"])
                # An index that was copied with its shard, or is of an earlier version, is not older than the shard.
                is_newer = os.fstat(opened.fileno()).st_ctime_ns > version.changed
                if about["format"] != FORMAT or stored[:2] != version[:2] or not (stored == version or is_newer):
                    continue
                labels = tuple(tuple(label) if isinstance(label, list) else label for label in about["labels"])
                rows = zip(COLUMNS.items(), file["columns"], strict=True)
                columns = {name: row.astype(kind) for (name, kind), row in rows}
                texts, unread = TextTable(file["texts"], file["text_ends"]), about["unread"]
                index = ShardIndex(
                    keys=file["keys"], **columns, labels=labels, texts=texts, unread=(unread[0], unread[1]),
                    ignored=about["ignored"], doubtful=about["doubtful"],
                )  # fmt: skip
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
        and bool((index.text_counts >= 0).all())
        and int(index.text_counts.sum()) == len(index.texts)
        and bool((np.diff(index.texts.ends, prepend=0) > 0).all())
        and len(index.texts.data) == int(index.texts.ends[-1] if len(index.texts) else 0)
        and bool(((index.codes >= -1) & (index.codes < len(index.labels))).all())
    )


Read = Callable[[int, int], bytes]
"""A function of an offset and a number of bytes that returns those bytes of a file. It returns fewer bytes at the end
of the file."""

BLOCK = 512
LONGEST_NAME = 2**20
FILES = (b"0", b"\0", b"7")
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A file in a tar."""

    name: str
    offset: int
    """Position of the first byte in the tar."""
    size: int


def members(shard: str, read: Read, size: int) -> Iterator[Member]:
    """Yield the files in a tar of `size` bytes, in order, without its folders.

    Only headers and long names are read, never the content of a file. Raises `DataError` if the file is truncated or is
    not an uncompressed tar, if a member is a link, a device or a sparse file, or if the path of a member leads out of
    the folder.
    """
    position, name, length = 0, None, None
    last = "its beginning"
    while True:
        header = read(position, BLOCK) if position < size else b""  # a header may state any size
        if position == 0:
            _refuse_other(shard, header)
        if len(header) < BLOCK:
            raise DataError(
                f"{shard} is truncated: it ends at byte {size:,}, after {last}, without the zeros that end a tar; "
                "copy or create the shard again"
            )
        if header.count(0) == BLOCK:
            return
        kind = header[156:157]
        stated = _size(shard, header, position)
        data = position + BLOCK
        if kind in (b"L", b"x", b"X"):
            if stated > min(LONGEST_NAME, size - data):
                raise DataError(
                    f"{shard} is damaged at byte {position:,}: the stated length of a name is {stated:,} bytes, which "
                    "is too long; copy or create the shard again"
                )
            extra = read(data, stated)
            if kind == b"L":
                name = _text(extra.rstrip(b"\0"))
            else:
                name, length = _pax(shard, extra, position, name)
        elif kind not in (b"g", b"K"):
            path, count = name or _name(header), stated if length is None else length
            _refuse_hostile(shard, path, kind)
            if kind == b"5" or path.endswith("/"):
                count = 0
            elif data + count > size:
                raise DataError(
                    f"{shard} is truncated: it ends at byte {size:,}, inside {path!r}, which extends to "
                    f"{data + count:,}; copy or create the shard again"
                )
            else:
                yield Member(path.removeprefix("./"), data, count)
            stated, last = count, repr(path)
            name = length = None
        position = data + -(-stated // BLOCK) * BLOCK


def _refuse_other(shard: str, start: bytes) -> None:
    """Raise `DataError` if a file does not begin like a tar. The message names the actual format if it is known."""
    if not start:
        raise DataError(f"{shard} is empty (0 bytes); copy or create the shard again")
    if len(start) == BLOCK and (start.count(0) == BLOCK or _checks(start)):
        return
    for mark, method in COMPRESSED.items():
        if start.startswith(mark):
            raise DataError(
                f"{shard} is compressed ({method}); samples are read in random order, which needs a plain tar, so "
                "decompress it"
            )
    raise DataError(f"{shard} is not a tar file")


def _checks(header: bytes) -> bool:
    """Return True if a header's checksum is correct. The checksum is the sum of the header's bytes, with spaces in
    place of the checksum."""
    try:
        return _stated_number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * 32
    except ValueError:
        return False


def _size(shard: str, header: bytes, position: int) -> int:
    try:
        size = _stated_number(header[124:136])
    except ValueError:
        size = -1
    if size < 0 or not _checks(header):
        raise DataError(
            f"{shard} is damaged at byte {position:,}, where the header of a file is expected; copy or create the "
            "shard again"
        )
    return size


def _stated_number(digits: bytes) -> int:
    """Return a number from a header field. Numbers are written in octal digits. A number that is too large for the
    field is written in base 256 after a first byte of 128 (GNU)."""
    if digits[0] & 0x80:
        return int.from_bytes(digits[1:], "big") if digits[0] == 0x80 else -1
    return int(digits.split(b"\0")[0].strip() or b"0", 8)


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0")[0]
    if header[257:263] == b"ustar\0" and (prefix := header[345:500].split(b"\0")[0]):
        name = prefix + b"/" + name
    return _text(name)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _pax(shard: str, data: bytes, position: int, name: str | None) -> tuple[str | None, int | None]:
    """Return the path and the size that a pax header states for the next member, in records "LENGTH KEY=VALUE\\n"."""
    length = None
    while data.strip(b"\0"):
        digits = data.split(b" ", 1)[0]
        count = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        key, equals, value = data[len(digits) + 1 : count - 1].partition(b"=")
        if not equals or count > len(data):
            raise DataError(
                f"{shard} is damaged at byte {position:,}: its pax header cannot be read; copy or create the shard "
                "again"
            )
        if key.startswith(b"GNU.sparse"):
            raise DataError(f"{shard} has a sparse file, which cannot be read; pack it again without tar's --sparse")
        if key == b"path":
            name = _text(value)
        elif key == b"size" and value.isdigit() and len(value) < 20:
            length = int(value)
        data = data[count:]
    return name, length


def _refuse_hostile(shard: str, path: str, kind: bytes) -> None:
    if path.startswith("/") or ".." in path.split("/") or "\0" in path or not path:
        raise DataError(
            f"{shard} has a file called {path!r}, which leads out of the folder into which a tar is unpacked; pack it "
            "again with paths inside the folder"
        )
    if kind in (b"1", b"2"):
        raise DataError(f"{shard} has the link {path!r}; pack the file itself instead (tar --dereference)")
    if kind not in (*FILES, b"5"):
        raise DataError(f"{shard} has {path!r}, which is not an ordinary file (type {kind!r}); pack the tar without it")
