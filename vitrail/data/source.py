"""What every kind of data looks like from above: samples by number, and nothing of order, batches or devices."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

__all__ = ["Sample", "Source", "Subset", "cut", "fingerprint"]


@dataclass(frozen=True)
class Sample:
    """One image as its source holds it."""

    key: str
    """Names the sample within its source, the same on every machine: a relative path, or a number."""
    image: bytes | UInt8[np.ndarray, "h w c"]
    """An encoded file, or pixels with 1 (grey) or 3 (RGB) channels."""
    label: int | None
    """Index into the source's classes; None where the sample has none."""


@runtime_checkable
class Source(Protocol):
    """Random access to samples. `key` and `label` read no image, so that splitting and counting are cheap."""

    classes: tuple[str, ...]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...
    def key(self, index: int) -> str: ...
    def label(self, index: int) -> int | None: ...


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

    def label(self, index: int) -> int | None:
        return self.source.label(int(self.indices[index]))


def cut(source: Source, share: float) -> tuple[Subset, Subset]:
    """Splits `source` into the rest and a held-out part of about `share`, decided by a hash of each sample's key.

    A sample's side depends on its key alone, so adding or renaming other files moves nothing. A class of two or
    more has at least one sample on either side; one of one is never held out.
    """
    by_class: dict[int | None, list[tuple[float, int]]] = {}
    for index in range(len(source)):
        digest = hashlib.blake2b(os.fsencode(source.key(index)), digest_size=8).digest()
        place = int.from_bytes(digest, "big") / 2**64  # uniform in [0, 1)
        by_class.setdefault(source.label(index), []).append((place, index))
    held_out: list[int] = []
    for members in by_class.values():
        members.sort()
        wanted = sum(place < share for place, _ in members)
        count = min(max(wanted, 1), len(members) - 1)  # so the only image of a class is one to learn from
        held_out += [index for _, index in members[:count]]
    chosen = set(held_out)
    rest = [index for index in range(len(source)) if index not in chosen]
    return Subset(source, rest), Subset(source, sorted(held_out))


def fingerprint(*sources: Source | None) -> str:
    """A hash of all keys and labels in order: sources that share it serve the same samples by the same numbers.

    It does not read the images, so it cannot tell a file from another of the same name.
    """
    digest = hashlib.sha256()
    for source in filter(None, sources):
        for index in range(len(source)):
            digest.update(os.fsencode(f"{source.key(index)}\0{source.label(index)}\n"))
    return digest.hexdigest()
