"""The protocol of a data source, and sources that combine or select samples of other sources.

A source returns samples by index. It does not depend on the order of training, batches or devices.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Float32, UInt8

Target = int | tuple[int, ...] | tuple[float, ...] | None
"""The training target of an image. An int is the index of the image's class. A tuple of ints holds the indices of all
classes of the image, in rising order. A tuple of floats holds the numbers of a regression target, where NaN is an
unknown number. None means that the image has no target."""

SoftTarget = Float32[np.ndarray, " classes"]
"""The amount of each class of an image, such as the probabilities that a model predicted."""

TargetKind = Literal["class", "classes", "numbers", "none"]
"""The kind of a source's targets: one class per image, several classes, numbers, or no targets at all."""


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
    not read the targets.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes or, if the targets are numbers, names of the numbers. Empty if there are no targets."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...
    def key(self, index: int) -> str: ...
    def target(self, index: int) -> Target: ...


class Subset:
    """Some samples of another source, in the order of `indices`."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self.source = source
        self.indices = np.asarray(indices, dtype=np.int64)
        self.classes = source.classes

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.source[int(self.indices[index])]

    def key(self, index: int) -> str:
        return self.source.key(int(self.indices[index]))

    def target(self, index: int) -> Target:
        return self.source.target(int(self.indices[index]))

    def stamp(self, index: int) -> str | None:
        return stamp_of(self.source, int(self.indices[index]))

    def origin(self, index: int) -> str | None:
        return origin_of(self.source, int(self.indices[index]))

    def soft_target(self, index: int) -> SoftTarget | None:
        return soft_target_of(self.source, int(self.indices[index]))

    @property
    def has_soft_targets(self) -> bool:
        return has_soft_targets(self.source)

    @property
    def target_kind(self) -> TargetKind:
        return target_kind(self.source)


class Widened:
    """A source with additional classes or numbers. The classes or numbers of the original source come first."""

    def __init__(self, source: Source, classes: tuple[str, ...]) -> None:
        assert classes[: len(source.classes)] == tuple(source.classes), "labels would change their meaning"
        self.source = source
        self.classes = classes
        self.target_kind: TargetKind = target_kind(source)
        self._places = list(range(len(source.classes)))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        sample = self.source[index]
        return Sample(sample.key, sample.image, self._target(sample.target))

    def key(self, index: int) -> str:
        return self.source.key(index)

    def target(self, index: int) -> Target:
        return self._target(self.source.target(index))

    def stamp(self, index: int) -> str | None:
        return stamp_of(self.source, index)

    def origin(self, index: int) -> str | None:
        return origin_of(self.source, index)

    def soft_target(self, index: int) -> SoftTarget | None:
        return _moved_amounts(soft_target_of(self.source, index), self._places, len(self.classes))

    @property
    def has_soft_targets(self) -> bool:
        return has_soft_targets(self.source)

    def _target(self, target: Target) -> Target:
        return _moved(target, self._places, len(self.classes), self.target_kind)


class Mixture:
    """Several sources, one after the other, from which training draws with the given weights.

    The classes of the first source keep their indices, and new class names of the other sources follow. Numbers are
    matched by name in the same way. The key of a sample begins with the index of its source. All sources need the same
    kind of targets as the first source. If the first source has no targets, the targets of the other sources are
    dropped.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        self.sources = tuple(sources)
        self.weights = tuple(weights)
        self.target_kind: TargetKind = target_kind(self.sources[0])
        labelled = self.sources if self.target_kind != "none" else ()
        names = [name for source in labelled for name in source.classes]
        self.classes = tuple(dict.fromkeys(names))
        numbers = {name: number for number, name in enumerate(self.classes)}
        self._renumbered = [[numbers[name] for name in source.classes] for source in labelled]
        self._firsts = np.cumsum([0, *(len(source) for source in self.sources)])

    @property
    def parts(self) -> tuple[tuple[int, int, float], ...]:
        """One tuple per source: the index of its first sample, its number of samples, and its fraction of the samples
        that training draws."""
        return tuple(
            (int(first), len(source), weight)
            for first, source, weight in zip(self._firsts, self.sources, self.weights, strict=False)
        )

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Sample:
        number, inner = self._place(index)
        sample = self.sources[number][inner]
        return Sample(self._named(number, sample.key), sample.image, self._target(number, sample.target))

    def key(self, index: int) -> str:
        number, inner = self._place(index)
        return self._named(number, self.sources[number].key(inner))

    def target(self, index: int) -> Target:
        number, inner = self._place(index)
        return self._target(number, self.sources[number].target(inner))

    def stamp(self, index: int) -> str | None:
        number, inner = self._place(index)
        return stamp_of(self.sources[number], inner)

    def soft_target(self, index: int) -> SoftTarget | None:
        number, inner = self._place(index)
        if self.target_kind == "none":
            return None
        return _moved_amounts(soft_target_of(self.sources[number], inner), self._renumbered[number], len(self.classes))

    @property
    def has_soft_targets(self) -> bool:
        return self.target_kind != "none" and any(map(has_soft_targets, self.sources))

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return number, index - int(self._firsts[number])

    def _named(self, number: int, key: str) -> str:
        return f"{number + 1}:{key}"

    def _target(self, number: int, target: Target) -> Target:
        if self.target_kind == "none":
            return None
        return _moved(target, self._renumbered[number], len(self.classes), self.target_kind)


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
    """Return True if some samples of a source have soft targets.

    A source whose targets are classes can have an attribute `has_soft_targets`, which is True, and a method
    `soft_target(index)`. The method returns the amount of each class, or None for a sample that has only the class
    `target(index)`. Training learns the soft targets. All other code uses `target`, which is the most likely class.
    """
    return bool(getattr(source, "has_soft_targets", False))


def soft_target_of(source: Source, index: int) -> SoftTarget | None:
    """Return the soft target of a sample, or None if it has none."""
    own = getattr(source, "soft_target", None) if has_soft_targets(source) else None
    return None if own is None else own(index)


def class_indices(target: Target) -> tuple[int, ...]:
    """Return the indices of a target's classes: none, one or several. The target must not hold numbers."""
    if isinstance(target, tuple):
        return cast(tuple[int, ...], target)
    return () if target is None else (target,)


def stamp_of(source: Source, index: int) -> str | None:
    """Return a text that changes when the image of a sample changes, or None if there is no such text.

    The image is not decoded. A source whose images can change has a method `stamp(index)`, which returns, for example,
    a file's size and times. If a source has neither this method nor an `identity`, the result is None.
    """
    identity = getattr(source, "identity", None)
    if isinstance(identity, str):
        return identity
    own = getattr(source, "stamp", None)
    return None if own is None else own(index)


def origin_of(source: Source, index: int) -> str | None:
    """Return a text that identifies the place that the image of a sample is read from, if the source knows it.

    The text begins with a word for the kind of place and a blank. Two samples with the same text have the same image.
    Image files are an exception: their text is the inode, and files on two disks can have the same inode. The image is
    not decoded. By default the text is made from the stamp. If the stamps of a source do not identify its samples, the
    source has a method `origin(index)`.
    """
    own = getattr(source, "origin", None)
    if own is not None:
        return own(index)
    stamp = stamp_of(source, index) if getattr(source, "identity", None) is None else None
    return None if stamp is None else f"stamp {stamp}"


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
        identity = getattr(source, "identity", None)
        if isinstance(identity, str):
            digest.update(identity.encode())
            continue
        for index in range(len(source)):
            digest.update(os.fsencode(f"{source.key(index)}\0{source.target(index)}\n"))
            if (amounts := soft_target_of(source, index)) is not None:
                digest.update(amounts.tobytes())
    return digest.hexdigest()


def _moved(target: Target, places: Sequence[int], width: int, kind: TargetKind) -> Target:
    """Return a target with new indices: class or number i gets the index `places[i]`. `width` is the new length of a
    target of numbers."""
    if target is None:
        return None
    if kind == "numbers":
        moved = [math.nan] * width
        for place, number in zip(places, cast(tuple[float, ...], target), strict=True):
            moved[place] = number
        return tuple(moved)
    if isinstance(target, tuple):
        return tuple(sorted(places[one] for one in class_indices(target)))
    return places[target]


def _moved_amounts(amounts: Float32[np.ndarray, " own"] | None, places: Sequence[int], width: int) -> SoftTarget | None:
    """Return a soft target for `width` classes, in which class i has the index `places[i]`."""
    if amounts is None:
        return None
    moved = np.zeros(width, np.float32)
    moved[list(places)] = amounts
    return moved
