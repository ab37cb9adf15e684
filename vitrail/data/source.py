"""What every kind of data looks like from above: samples by number, and nothing of order, batches or devices."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import UInt8

__all__ = [
    "Mixture",
    "Sample",
    "Source",
    "Subset",
    "Target",
    "TargetKind",
    "Widened",
    "class_indices",
    "cut",
    "fingerprint",
    "stamp_of",
    "take",
    "take_per_class",
    "target_kind",
]

Target = int | tuple[int, ...] | tuple[float, ...] | None
"""What a network learns to say of an image. The index of its class; or the indices of all classes that hold, in rising
order, if an image can have several; or numbers, NaN for one that is unknown; or None if nothing is known."""

TargetKind = Literal["class", "classes", "numbers", "none"]
"""What the targets of a source are: one class each, several classes each, numbers, or none."""


@dataclass(frozen=True)
class Sample:
    """One image as its source holds it."""

    key: str
    """Names the sample within its source, the same on every machine: a relative path, or a number."""
    image: bytes | UInt8[np.ndarray, "h w c"]
    """An encoded file, or pixels with 1 (grey) or 3 (RGB) channels."""
    target: Target


@runtime_checkable
class Source(Protocol):
    """Random access to samples. `key` and `target` read no image, so that splitting and counting are cheap."""

    @property
    def classes(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...
    def key(self, index: int) -> str: ...
    def target(self, index: int) -> Target: ...


class Subset:
    """Some samples of another source, in the order given."""

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


class Widened:
    """Another source under more classes than it has; its own come first."""

    def __init__(self, source: Source, classes: tuple[str, ...]) -> None:
        assert classes[: len(source.classes)] == tuple(source.classes), "labels would change their meaning"
        self.source = source
        self.classes = classes

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return self.source[index]

    def key(self, index: int) -> str:
        return self.source.key(index)

    def target(self, index: int) -> Target:
        return self.source.target(index)

    def stamp(self, index: int) -> str | None:
        return stamp_of(self.source, index)


class Mixture:
    """Several sources, one after the other, of which training draws in given shares.

    Classes of the first keep their numbers; further names of the others follow. Keys say which source they are of.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        self.sources = tuple(sources)
        self.weights = tuple(weights)
        names = [name for source in self.sources for name in source.classes]
        self.classes = tuple(dict.fromkeys(names))
        numbers = {name: number for number, name in enumerate(self.classes)}
        self._renumbered = [[numbers[name] for name in source.classes] for source in self.sources]
        self._firsts = np.cumsum([0, *(len(source) for source in self.sources)])

    @property
    def parts(self) -> tuple[tuple[int, int, float], ...]:
        """Each source's first index, length and share of the samples that are drawn."""
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

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return number, index - int(self._firsts[number])

    def _named(self, number: int, key: str) -> str:
        return f"{number + 1}:{key}"

    def _target(self, number: int, target: Target) -> Target:
        new = self._renumbered[number]
        if isinstance(target, tuple):
            return tuple(sorted(new[one] for one in class_indices(target)))
        return None if target is None else new[target]


def cut(source: Source, share: float) -> tuple[Subset, Subset]:
    """Splits `source` into the rest and a held-out part of about `share`, decided by a hash of each sample's key.

    A sample's side depends on its key alone, so adding or renaming other files moves nothing. A class of two or
    more has at least one sample on either side; one of one is never held out.
    """
    held_out: list[int] = []
    for members in _by_class(source, b""):
        wanted = sum(place < share for place, _ in members)
        count = min(max(wanted, 1), len(members) - 1)  # so the only image of a class is one to learn from
        held_out += [index for _, index in members[:count]]
    chosen = set(held_out)
    rest = [index for index in range(len(source)) if index not in chosen]
    return Subset(source, rest), Subset(source, sorted(held_out))


def take(source: Source, count: int, *, seed: int = 0) -> Subset:
    """`count` samples, every class with its share of them, chosen by a hash of seed and key.

    What a smaller count takes, a larger one takes as well. A class whose share is less than half a sample has none.
    """
    ranked = []
    for members in _by_class(source, _salt(seed)):
        ranked += [((rank + 0.5) / len(members), place, index) for rank, (place, index) in enumerate(members)]
    return Subset(source, sorted(index for _, _, index in sorted(ranked)[:count]))


def take_per_class(source: Source, count: int, *, seed: int = 0) -> Subset:
    """The first `count` samples of every class in an order by a hash of seed and key; all where it has fewer."""
    groups = _by_class(source, _salt(seed))
    return Subset(source, sorted(index for members in groups for _, index in members[:count]))


def target_kind(source: Source) -> TargetKind:
    """Return what the targets of a source are. All targets of one source are of one kind.

    The source's own attribute `target_kind` decides. Without one, the first target that is not None decides.
    """
    own = getattr(source, "target_kind", None)
    if own is not None:
        return cast(TargetKind, own)
    first = next((target for target in map(source.target, range(len(source))) if target is not None), None)
    if isinstance(first, tuple):
        return "numbers" if any(isinstance(number, float) for number in first) else "classes"
    return "none" if first is None else "class"


def class_indices(target: Target) -> tuple[int, ...]:
    """Return the indices of the classes that hold: none, one or several. Only for targets that are classes."""
    if isinstance(target, tuple):
        return cast(tuple[int, ...], target)
    return () if target is None else (target,)


def stamp_of(source: Source, index: int) -> str | None:
    """Text that changes when the image of a sample does, found without decoding it: a file's size and times, say.

    A source whose samples can change has a method `stamp(index)` for it; None where a source cannot say.
    """
    identity = getattr(source, "identity", None)
    if isinstance(identity, str):
        return identity
    own = getattr(source, "stamp", None)
    return None if own is None else own(index)


def _salt(seed: int) -> bytes:
    return f"subset {seed} ".encode()


def _by_class(source: Source, salt: bytes) -> list[list[tuple[float, int]]]:
    """The samples of each label: a place in [0, 1) by a hash of the key, and the index, in rising order."""
    groups: dict[Target, list[tuple[float, int]]] = {}
    for index in range(len(source)):
        digest = hashlib.blake2b(salt + os.fsencode(source.key(index)), digest_size=8).digest()
        groups.setdefault(source.target(index), []).append((int.from_bytes(digest, "big") / 2**64, index))
    return [sorted(members) for members in groups.values()]


def fingerprint(*sources: Source | None) -> str:
    """A hash of all keys and labels in order: sources that share it serve the same samples by the same numbers.

    It does not read the images, so it cannot tell a file from another of the same name. Where all samples follow from
    a few numbers, the source's `identity` says which, and is hashed instead.
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
    return digest.hexdigest()
