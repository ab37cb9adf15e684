"""The protocol of a data source, and `Samples`, which all formats return: images by reader and place, with targets.

A source returns samples by index. It does not depend on the order of training, batches or devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int64, Shaped, UInt8

from vitrail.data.faults import Fault
from vitrail.data.objects import Mask, Objects
from vitrail.data.pixels.decode import image_size_of
from vitrail.data.targets import SoftTarget, Target, TargetKind, Targets, is_texts
from vitrail.errors import DataError, UndecodableImage, plural

R = TypeVar("R")


@dataclass(frozen=True)
class Sample:
    """One sample of a source: an image and its target."""

    key: str
    """Name of the sample within its source, the same on every machine: a relative path or a number."""
    image: bytes | UInt8[np.ndarray, "h w c"]
    """Bytes of an image file, or an array of pixels with 1 (grey) or 3 (RGB) channels."""
    target: Target


@runtime_checkable
class Source(Protocol):
    """Random access to samples. `key` and `target` read no image, so splitting and counting are cheap.

    A source may also have an attribute `target_kind`. The function `target_kind` then returns this attribute and does
    not read the targets. A source whose targets are classes can have an attribute `has_soft_targets`, which is True,
    and a method `soft_target(index)`. The method returns the amount of each class, or None for a sample that has only
    the class `target(index)`. Training learns the soft targets. All other code uses `target`, which is the most likely
    class. The methods `stamp` and `origin` and the attribute `identity` are described at `Reader`.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes or, if the targets are numbers, names of the numbers. Empty if there are no targets."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...
    def key(self, index: int) -> str: ...
    def target(self, index: int) -> Target: ...


@runtime_checkable
class Reader(Protocol):
    """Access to the images of a format by their place.

    A reader whose images can change has a method `stamp(place)`. It returns a text that changes with the image, such as
    a file's size and times, and does not decode the image. If a few numbers determine all samples, the reader has an
    attribute `identity`, a text of them.

    If the stamps do not identify the place that an image is read from, the reader has a method `origin(place)`. Its
    text begins with a word for the kind of place and a blank. Two samples with the same text have the same image. Image
    files are an exception: their text is the inode, and files on two disks can have the same inode.
    """

    def key(self, place: int) -> str: ...
    def image(self, place: int) -> bytes | UInt8[np.ndarray, "h w c"]: ...


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples in order. Each image is at a place of one of the readers. A sample has a target, but no image is read
    for it."""

    readers: tuple[Reader, ...]
    places: range | Int64[np.ndarray, " n"]
    """The place of each sample in its reader. A range if these are all samples of a reader."""
    targets: Targets
    parts: Int64[np.ndarray, " n"] | None = None
    """The index in `readers` and `prefixes` of each sample. By default all samples are of the first part."""
    prefixes: tuple[str, ...] = ("",)
    """The beginning of the keys of each part."""
    mixture: tuple[tuple[int, int, float], ...] = ()
    """If training draws from several sources with weights: for each the index of its first sample, its number of
    samples, and its fraction of the samples that training draws."""
    identity: str | None = None
    """A text of the numbers that determine all samples, if there are such numbers."""

    def __post_init__(self) -> None:
        """Raise `DataError` unless every sample has a place and a target."""
        if len(self.targets) != len(self.places):
            raise DataError(
                f"targets: {plural(len(self.targets), 'target')} for {plural(len(self.places), 'image')}; give every "
                "image one, which can be unknown"
            )

    @property
    def classes(self) -> tuple[str, ...]:
        return self.targets.names

    @property
    def target_kind(self) -> TargetKind:
        return self.targets.kind

    @property
    def has_soft_targets(self) -> bool:
        return self.targets.soft is not None

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), self.image(index), self.targets[index])

    def image(self, index: int) -> bytes | UInt8[np.ndarray, "h w c"]:
        part, place = self.place(index)
        return self.readers[part].image(place)

    def key(self, index: int) -> str:
        part, place = self.place(index)
        return self.prefixes[part] + self.readers[part].key(place)

    def target(self, index: int) -> Target:
        return self.targets[index]

    def soft_target(self, index: int) -> SoftTarget | None:
        soft = self.targets.soft
        return None if soft is None else soft.row(index, len(self.classes))

    def stamp(self, index: int) -> str | None:
        """Return a text that changes when the image of a sample changes, or None if there is no such text."""
        part, place = self.place(index)
        reader = self.readers[part]
        identity = getattr(reader, "identity", None)
        own = getattr(reader, "stamp", None)
        return identity if isinstance(identity, str) else None if own is None else own(place)

    def origin(self, index: int) -> str | None:
        """Return a text that identifies the place that the image of a sample is read from, if its reader knows it. By
        default the text is made from the stamp."""
        part, place = self.place(index)
        own = getattr(self.readers[part], "origin", None)
        if own is not None:
            return own(place)
        stamp = None if getattr(self.readers[part], "identity", None) is not None else self.stamp(index)
        return None if stamp is None else f"stamp {stamp}"

    def taken(self, indices: Sequence[int] | Int64[np.ndarray, " m"] | Bool[np.ndarray, " n"]) -> Samples:
        """Return some of the samples, in the order of `indices`, which can also be a mask of truth values."""
        rows = np.arange(len(self))[np.asarray(indices, None if len(indices) else np.int64)]
        parts = None if self.parts is None else self.parts[rows]
        places = np.asarray(self.places, np.int64)[rows]
        return Samples(self.readers, places, self.targets.rows(rows), parts, self.prefixes)

    def renumbered(self, places: Sequence[int], names: tuple[str, ...]) -> Samples:
        """Return the samples with other names of classes or numbers: number i gets the index `places[i]`."""
        return replace(self, targets=self.targets.renumbered(places, names), identity=None)

    def first_part(self) -> Samples:
        """Return the samples of the first source of a mixture, with the classes of all."""
        if not self.mixture:
            return self
        own = self.taken(range(self.mixture[0][1]))
        return replace(own, prefixes=tuple(prefix.removeprefix("1:") for prefix in self.prefixes))

    def place(self, index: int) -> tuple[int, int]:
        """Return the part of a sample, and its place in the reader of this part."""
        return (0 if self.parts is None else int(self.parts[index])), int(self.places[index])


class _OwnImages:
    """The images of a source of the user's own."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.key = source.key
        for name in ("stamp", "origin", "identity"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))

    def image(self, place: int) -> bytes | UInt8[np.ndarray, "h w c"]:
        return self.source[place].image


def samples_of(source: Source) -> Samples:
    """Return any source as `Samples`. All targets are read, but no image."""
    if isinstance(source, Samples):
        return source
    count, names = len(source), tuple(source.classes)
    soft = [soft_target_of(source, index) for index in range(count)] if has_soft_targets(source) else None
    targets = Targets.of(map(source.target, range(count)), target_kind(source), names, soft)
    return Samples((_OwnImages(source),), range(count), targets, identity=identity_of(source))


def image_of(source: Source, index: int) -> bytes | UInt8[np.ndarray, "h w c"]:
    """Return the image of a sample, without its key and its target if the source is `Samples`."""
    return source.image(index) if isinstance(source, Samples) else source[index].image


def subset(source: Source, indices: Sequence[int] | Int64[np.ndarray, " m"] | Bool[np.ndarray, " n"]) -> Samples:
    """Return some samples of a source, in the order of `indices`."""
    return samples_of(source).taken(indices)


def first_copies(source: Source) -> Int64[np.ndarray, " n"]:
    """Return for each sample the index of the first sample that shows the same image, which is usually its own index.
    Images are the same if they are at the same place of one reader, which occurs several times in `Samples.readers`."""
    own, parts = np.arange(len(source)), getattr(source, "parts", None)
    if not isinstance(source, Samples) or parts is None or len({*map(id, source.readers)}) == len(source.readers):
        return own
    number = {id(reader): part for part, reader in enumerate(source.readers)}
    readers = np.array([number[id(reader)] for reader in source.readers])[parts]
    images = np.stack([readers, np.asarray(source.places, np.int64)], axis=1)
    _, first, which = np.unique(images, axis=0, return_index=True, return_inverse=True)
    return own[first][which.reshape(-1)]


def mixed(sources: Sequence[Source], weights: Sequence[float]) -> Samples:
    """Return several sources, one after the other, from which training draws with the given weights.

    The classes of the first source keep their indices, and new class names of the other sources follow. Numbers are
    matched by name in the same way. The key of a sample begins with the number of its source. All sources need the same
    kind of targets as the first source. If the first source has no targets, the targets of the other sources are
    dropped.
    """
    found = [samples_of(source) for source in sources]
    firsts = np.cumsum([0, *map(len, found)]).tolist()
    counts = np.cumsum([0, *(len(one.readers) for one in found)]).tolist()
    parts = [np.zeros(len(one), np.int64) if one.parts is None else one.parts for one in found]
    return Samples(
        tuple(reader for one in found for reader in one.readers),
        np.concatenate([np.asarray(one.places, np.int64) for one in found]),
        Targets.joined([one.targets for one in found]),
        np.concatenate([part + count for part, count in zip(parts, counts, strict=False)]),
        tuple(f"{number}:{prefix}" for number, one in enumerate(found, start=1) for prefix in one.prefixes),
        tuple((first, len(one), weight) for first, one, weight in zip(firsts, found, weights, strict=False)),
    )


def parts_of(source: Source) -> tuple[tuple[int, int, float], ...]:
    """Return the parts from which training draws, as in `Samples.mixture`."""
    return getattr(source, "mixture", ()) or ((0, len(source), 1.0),)


def evenly(total: int, count: int) -> Int64[np.ndarray, " n"]:
    """Return at most `count` different numbers from 0 to `total` - 1, at equal distances."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))


def decodable(read: Callable[[Any], R], images: Iterable[Any]) -> Iterator[R]:
    """Yield what `read` returns for each of some images. Those for which it raises `DataError` are skipped, because
    training skips them, too, and names them."""
    for image in images:
        with contextlib.suppress(DataError):
            yield read(image)


LARGEST_SCALE = 2.0
"""Images are not made larger than this multiple of their pixels, because larger ones show nothing more."""


def typical_size(source: Source, most: int) -> tuple[float, float]:
    """Return the geometric means of the heights and of the widths of up to `most` images, of which only the headers are
    read. Raise `DataError` if none of them can be decoded."""
    sizes = list(decodable(lambda index: image_size_of(image_of(source, index)), evenly(len(source), most).tolist()))
    if not sizes:
        raise DataError("none of the first training images can be decoded")
    height, width = np.exp(np.log(np.array(sizes)).mean(axis=0)).tolist()
    return height, width


def target_kind(source: Source) -> TargetKind:
    """Return the kind of a source's targets. All targets of one source are of one kind.

    The source's own attribute `target_kind` decides. Without one, the first target that is not None decides.
    """
    own = getattr(source, "target_kind", None)
    if own is not None:
        return cast(TargetKind, own)
    first = next((target for target in map(source.target, range(len(source))) if target is not None), None)
    if is_texts(first):
        return "texts"
    if isinstance(first, Objects | Mask):
        return "boxes" if isinstance(first, Objects) else "mask"
    if isinstance(first, tuple):
        return "numbers" if any(isinstance(number, float) for number in first) else "classes"
    return "none" if first is None else "class"


def has_soft_targets(source: Source) -> bool:
    """Return True if some samples of a source have soft targets."""
    return bool(getattr(source, "has_soft_targets", False))


def soft_target_of(source: Source, index: int) -> SoftTarget | None:
    """Return the soft target of a sample, or None if it has none. Raise `DataError` unless a source of the user's own
    gives an amount between 0 and 1 for each class."""
    own = getattr(source, "soft_target", None) if has_soft_targets(source) else None
    amounts: SoftTarget | None = None if own is None else own(index)
    if amounts is None or isinstance(source, Samples):
        return amounts
    found, count = np.asarray(amounts, np.float32), len(source.classes)
    if found.shape != (count,) or not ((found >= 0) & (found <= 1.01)).all():  # a sum of parts is rounded
        raise DataError(
            f"soft_target({index}) of {type(source).__name__} is {amounts!r:.60}, but it must be None or {count} "
            "amounts between 0 and 1, one for each class"
        )
    return found


def identity_of(source: Source) -> str | None:
    """Return the text that determines all samples of a source, if it has one."""
    identity = getattr(source, "identity", None)
    return identity if isinstance(identity, str) else None


def fingerprint(*sources: Source | None) -> str:
    """Return a hash of all keys, targets and soft targets in order. Sources with the same hash have the same samples in
    the same order.

    Images are not read, so the hash does not change if a file is replaced by one with the same name. If a source has an
    `identity`, because a few numbers determine all samples, the hash of the `identity` is returned.
    """
    digest = hashlib.sha256()
    for source in [one for one in sources if one is not None]:
        if (identity := identity_of(source)) is not None:
            digest.update(identity.encode())
            continue
        for index in range(len(source)):
            digest.update(os.fsencode(f"{source.key(index)}\0{source.target(index)}\n"))
            if (amounts := soft_target_of(source, index)) is not None:
                digest.update(amounts.tobytes())
    return digest.hexdigest()


def key_hash(source: Source) -> str:
    """Return a hash of the keys of all samples, in any order."""
    digest = hashlib.sha256()
    for key in sorted(os.fsencode(source.key(index)) for index in range(len(source))):
        digest.update(key + b"\n")
    return digest.hexdigest()


class Files:
    """Image files below a folder, named by relative paths.

    `inodes` holds the inode of each file. If a file was removed or cannot be read, reading it raises
    `UndecodableImage`, so that training can skip it.
    """

    def __init__(
        self,
        root: Path,
        keys: list[str],
        inodes: Sequence[int] | Shaped[np.ndarray, " n"],
        ids: Sequence[int | str] = (),
    ) -> None:
        self.root = root
        self.keys = keys
        self.ids = ids
        """The number or the name that the data gives each image, or () if it gives none."""
        self.inodes = np.asarray(inodes, dtype=np.uint64)

    def key(self, place: int) -> str:
        return self.keys[place]

    def image(self, place: int) -> bytes:
        path = os.path.join(self.root, self.keys[place])  # noqa: PTH118 (making a Path takes longer than reading a small file)
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise UndecodableImage(f"cannot read {path}: {error.strerror}") from error

    def stamp(self, place: int) -> str:
        """Return the file's size, modification time and inode change time.

        Programs that copy or unpack files cannot set the inode change time.
        """
        try:
            status = os.stat(os.path.join(self.root, self.keys[place]))  # noqa: PTH116, PTH118 (as above)
        except OSError as error:
            return str(error.strerror)
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"

    def origin(self, place: int) -> str:
        """Return the file's inode, which is the same under all names of the file."""
        return f"file {self.inodes[place]}"


def file_samples(
    root: Path,
    keys: list[str],
    inodes: Sequence[int] | Shaped[np.ndarray, " n"],
    targets: Targets,
    ids: Sequence[int | str] = (),
) -> Samples:
    """Return the image files below a folder, with one target per file."""
    return Samples((Files(root, keys, inodes, ids),), range(len(keys)), targets)


def files_of(source: Source) -> Files | None:
    """Return the files of a source that consists of all files that were found in a folder or a table."""
    if not isinstance(source, Samples) or not isinstance(source.places, range):
        return None
    return source.readers[0] if isinstance(source.readers[0], Files) else None


def shared_files(train: Source, held_out: Source, split: str) -> Iterator[Fault]:
    """Yield a fault if the training split and another split contain the same file, even under different names."""
    own, other = files_of(train), files_of(held_out)
    if own is None or other is None:
        return
    common = np.intersect1d(own.inodes, other.inodes)
    mine, theirs = (_first_paths(source, common) for source in (own, other))
    if pairs := [(path, theirs[file]) for file, path in mine.items() if file in theirs]:
        yield Fault(
            "shared-files", "error", len(pairs),
            f"the training split and the {split} split share {plural(len(pairs), 'file')}, such as {pairs[0][0]} and "
            f"{pairs[0][1]}; training must not see held-out images, so remove one copy of each",
            "Training refuses the data.",
            "Remove one copy of each file.",
        )  # fmt: skip


def _first_paths(source: Files, inodes: Shaped[np.ndarray, " n"]) -> dict[tuple[int, int], Path]:
    """Return the first path of each file that has one of these inodes. Files on two disks can have the same inode, so
    the keys are pairs of device and inode. Files that cannot be read are skipped."""
    found: dict[tuple[int, int], Path] = {}
    for index in np.flatnonzero(np.isin(source.inodes, inodes)):
        path = source.root / source.key(int(index))
        with contextlib.suppress(OSError):
            status = path.stat()
            found.setdefault((status.st_dev, status.st_ino), path)
    return found


def inode_of(entry: os.DirEntry[str]) -> int:
    """Return the inode of the file that an entry refers to. For a broken link, return the inode of the link."""
    if not entry.is_symlink():
        return entry.inode()
    try:
        return entry.stat().st_ino
    except OSError:
        return entry.inode()


def inodes_in(folder: Path) -> dict[str, int]:
    """Return the inodes of the files in a folder, by name. A folder that cannot be read has none."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: inode_of(entry) for entry in entries}
    except (OSError, ValueError):  # a path with a null character
        return {}


MOST_READ = 1000
"""Largest number of pairs of images with the same file name that are read and compared."""

MOST_HASHED = 10_000
"""Largest number of images of two sources that are all read, so that copies under other names are found."""


def may_be_copies(source: Source) -> bool:
    """Return False for images that are computed from a few numbers, such as fractals, which are copies of no file."""
    return all(getattr(reader, "identity", None) is None for reader in samples_of(source).readers)


def shared_images(train: Source, held_out: Source, *, of_any_name: bool = True) -> list[int]:
    """Return the indices of held-out images that the training data also contains.

    Two samples are the same image if both come from the same place, such as a file or a part of a file, even under
    different names. Two images are also the same if they have the same bytes or pixels. If there are more than
    `MOST_HASHED` images, or if `of_any_name` is false, only 1,000 evenly spaced pairs with the same file name are
    compared in this way.
    """
    if not len(train) or not len(held_out):
        return []
    own, other_samples = samples_of(train), samples_of(held_out)
    origins = {origin: index for index in range(len(held_out)) if (origin := other_samples.origin(index)) is not None}
    kind = (own.origin(0) or "").partition(" ")[0]
    same = set()
    if any(origin.startswith(f"{kind} ") for origin in origins):
        for index in range(len(train)):
            other = origins.get(own.origin(index) or "")
            # files on two disks can have the same inode, but hardly the same times as well
            if other is not None and (kind != "file" or own.stamp(index) == other_samples.stamp(other)):
                same.add(other)
    if of_any_name and may_be_copies(train) and len(train) + len(held_out) <= MOST_HASHED:
        known = {_digest(train, index) for index in range(len(train))} - {""}
        same |= {index for index in range(len(held_out)) if _digest(held_out, index) in known}
    elif kind != "fractal":
        same |= {
            other
            for one, other in _with_same_name(train, held_out)
            if other not in same and (digest := _digest(train, one)) and digest == _digest(held_out, other)
        }
    return sorted(same)


def _with_same_name(train: Source, held_out: Source) -> Iterator[tuple[int, int]]:
    """Yield at most `MOST_READ` pairs of indices: a training image and a held-out image with the same file name in any
    folder.

    The pairs are counted and not listed, because classes whose images have the same numbers have millions of them.
    """
    names: dict[str, list[int]] = {}
    for index in range(len(held_out)):
        names.setdefault(held_out.key(index).rpartition("/")[2], []).append(index)
    counts = [len(names.get(train.key(index).rpartition("/")[2], ())) for index in range(len(train))]
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1])
    for place in np.unique(np.linspace(0, total - 1, min(MOST_READ, total)).astype(np.int64)).tolist():
        index = int(np.searchsorted(ends, place, side="right"))
        yield index, names[train.key(index).rpartition("/")[2]][place - int(ends[index]) + counts[index]]


def _digest(source: Source, index: int) -> str:
    """Return a hash of the bytes or the pixels of an image. It is empty for an empty or broken image, which is no
    copy."""
    try:
        image = source[index].image
    except DataError:  # training will skip the image and report it
        return ""
    data = image if isinstance(image, bytes) else f"{image.shape}".encode() + image.tobytes()
    return hashlib.sha256(data).hexdigest() if data else ""


# The true targets of samples: one class each, several classes each, or numbers.


def truth_of(source: Source, rows: Iterable[int] | None = None) -> Targets:
    """Return the targets of all samples of a source, or of the samples `rows` in this order. No image is read."""
    if isinstance(source, Samples) and source.target_kind != "none":
        return source.targets if rows is None else source.targets.rows(np.fromiter(rows, np.int64))
    chosen = range(len(source)) if rows is None else rows
    kind, names = target_kind(source), tuple(source.classes)
    return Targets.of(map(source.target, chosen), "class" if kind == "none" else kind, names)


def target_from_plain(value: Any, kind: TargetKind, columns: int) -> Target:
    """Return the target that `Targets.plain` wrote as a JSON value. Raise `ValueError` if the value does not fit."""
    if kind == "numbers":
        fits = isinstance(value, list) and len(value) == columns and all(map(_is_number, value))
        target: Target = tuple(math.nan if one is None else float(one) for one in value) if fits else None
    elif kind == "texts":
        fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
        target = tuple(value) or None if fits else None
    else:
        several = value if isinstance(value, list) else [] if value is None else [value]
        fits = all(type(one) is int and 0 <= one < columns for one in several)
        fits = fits and isinstance(value, list) == (kind == "classes")
        target = tuple(several) if kind == "classes" else value
    if not fits:
        noun = kind if kind in ("numbers", "texts") else "classes"
        raise ValueError(f"{value} is not a valid target for {columns} {noun}")
    return target


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def check_outlines(source: Source, needing: str, advice: str) -> None:
    """Raise `DataError` unless every object of a source has an outline. Crowds need none. No image is read.

    `needing` says what needs the outlines, and `advice` what to do without them.
    """
    total = lacking = 0
    for index in range(len(source)):
        if isinstance(target := source.target(index), Objects):
            outlines = target.outlines or (None,) * len(target)
            lacks = [one is None and not crowd for one, crowd in zip(outlines, target.crowd.tolist(), strict=True)]
            total, lacking = total + len(lacks), lacking + sum(lacks)
    if lacking:
        raise DataError(
            f"{needing} needs the outline of each object, and {lacking:,} of {plural(total, 'object')} have a box "
            f"only; add polygons or run lengths to the annotations, or {advice}"
        )


def check_known(source: Source, name: str) -> Targets:
    """Return the targets of a source. Raise `DataError` if no sample has a label or a number. No image is read.

    `name` is the name of the evaluator, for the message.
    """
    truth = truth_of(source)
    if truth.kind in ("boxes", "mask", "texts"):
        held = {"boxes": "boxes", "mask": "masks"}.get(truth.kind, "texts")
        raise DataError(f"{name} needs a class or numbers for each image, but this data has {held}")
    if not truth.known.any():
        what, needed = ("known number", "numbers") if truth.kind == "numbers" else ("label", "classes")
        raise DataError(f"none of {len(source):,} images has a {what}, but {name} needs to know their {needed}")
    return truth
