"""The protocol of a data source, and `Samples`, which all formats return: images by reader and place, with targets.

A source returns samples by index. It does not depend on the order of training, batches or devices.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Int64, UInt8

from vitrail.data.targets import SoftTarget, Target, TargetKind, Targets


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
        part, place = self._place(index)
        reader = self.readers[part]
        return Sample(self.prefixes[part] + reader.key(place), reader.image(place), self.targets[index])

    def image(self, index: int) -> bytes | UInt8[np.ndarray, "h w c"]:
        part, place = self._place(index)
        return self.readers[part].image(place)

    def key(self, index: int) -> str:
        part, place = self._place(index)
        return self.prefixes[part] + self.readers[part].key(place)

    def target(self, index: int) -> Target:
        return self.targets[index]

    def soft_target(self, index: int) -> SoftTarget | None:
        soft = self.targets.soft
        return None if soft is None else soft.row(index, len(self.classes))

    def stamp(self, index: int) -> str | None:
        """Return a text that changes when the image of a sample changes, or None if there is no such text."""
        part, place = self._place(index)
        reader = self.readers[part]
        identity = getattr(reader, "identity", None)
        own = getattr(reader, "stamp", None)
        return identity if isinstance(identity, str) else None if own is None else own(place)

    def origin(self, index: int) -> str | None:
        """Return a text that identifies the place that the image of a sample is read from, if its reader knows it. By
        default the text is made from the stamp."""
        part, place = self._place(index)
        own = getattr(self.readers[part], "origin", None)
        if own is not None:
            return own(place)
        stamp = None if getattr(self.readers[part], "identity", None) is not None else self.stamp(index)
        return None if stamp is None else f"stamp {stamp}"

    def taken(self, indices: Sequence[int] | Int64[np.ndarray, " m"]) -> Samples:
        """Return some of the samples, in the order of `indices`."""
        rows = np.asarray(indices, np.int64)
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

    def _place(self, index: int) -> tuple[int, int]:
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
    reader = _OwnImages(source)
    return Samples((reader,), range(count), targets, identity=identity_of(source))


def image_of(source: Source, index: int) -> bytes | UInt8[np.ndarray, "h w c"]:
    """Return the image of a sample, without its key and its target if the source is `Samples`."""
    return source.image(index) if isinstance(source, Samples) else source[index].image


def subset(source: Source, indices: Sequence[int] | Int64[np.ndarray, " m"]) -> Samples:
    """Return some samples of a source, in the order of `indices`."""
    return samples_of(source).taken(indices)


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


def target_kind(source: Source) -> TargetKind:
    """Return the kind of a source's targets. All targets of one source are of one kind.

    The source's own attribute `target_kind` decides. Without one, the first target that is not None decides.
    """
    own = getattr(source, "target_kind", None)
    if own is not None:
        return cast(TargetKind, own)
    first = next((target for target in map(source.target, range(len(source))) if target is not None), None)
    if isinstance(first, tuple):
        return "numbers" if any(isinstance(number, float) for number in first) else "classes"
    return "none" if first is None else "class"


def has_soft_targets(source: Source) -> bool:
    """Return True if some samples of a source have soft targets."""
    return bool(getattr(source, "has_soft_targets", False))


def soft_target_of(source: Source, index: int) -> SoftTarget | None:
    """Return the soft target of a sample, or None if it has none."""
    own = getattr(source, "soft_target", None) if has_soft_targets(source) else None
    return None if own is None else own(index)


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
    for source in sources:
        if source is None:
            continue
        if (identity := identity_of(source)) is not None:
            digest.update(identity.encode())
            continue
        for index in range(len(source)):
            digest.update(os.fsencode(f"{source.key(index)}\0{source.target(index)}\n"))
            if (amounts := soft_target_of(source, index)) is not None:
                digest.update(amounts.tobytes())
    return digest.hexdigest()
