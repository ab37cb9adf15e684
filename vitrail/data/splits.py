"""The three splits of a data set, their names on disk, and the creation of a missing validation split."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

from vitrail.data.source import Source, TargetKind, cut, target_kind
from vitrail.errors import DataError

__all__ = [
    "SPLITS",
    "Split",
    "Splits",
    "Unlimited",
    "by_split",
    "check_classes",
    "check_numbers",
    "split_of",
    "with_validation",
]

Split = Literal["train", "validation", "test"]

SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("val", "validation", "valid"),
    "test": ("test",),
}
"""Names of each split for folders and for the beginnings of file names. Case is ignored."""

NAME = re.compile(rf"({'|'.join(name for names in SPLITS.values() for name in names)})(?:[^a-z].*)?", re.I | re.S)


@runtime_checkable
class Unlimited(Protocol):
    """A source that generates its samples and can generate more samples of the same classes."""

    def held_out(self, fraction: float) -> Source:
        """Return a source with more samples. It holds about `fraction` of the samples of both sources."""


@dataclass(frozen=True)
class Splits:
    """The splits of a data set. The classes of the training split index the samples of all splits."""

    train: Source
    validation: Source | None
    """Validation split, which selects the best weights. It is never used for training."""
    test: Source | None
    """Test split, which is evaluated once, at the end. It is never used for training or for selecting weights."""
    notes: tuple[str, ...] = field(default=())
    """Remarks for the user, one sentence each, for example about skipped files."""
    title: str = "the data"
    """Name of the data in messages."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @property
    def target_kind(self) -> TargetKind:
        return target_kind(self.train)

    @property
    def held_out(self) -> tuple[str, Source] | None:
        """Name and source of the split that evaluates a finished model: the test split if there is one, else the
        validation split."""
        if self.test is not None:
            return "test", self.test
        return None if self.validation is None else ("validation", self.validation)


def split_of(path: str) -> Split | None:
    """Return the split of a relative path. The file name decides, or else the nearest folder that is named after a
    split.

    For example, "train-00000.tar", "val/0.tar" and "Test.csv" have a split. "training.csv" and "images/0.tar" have
    none.
    """
    for part in reversed(path.split("/")):
        if match := NAME.fullmatch(part):
            word = match[1].lower()
            return next(split for split, names in SPLITS.items() if word in names)
    return None


def by_split(where: str, paths: Iterable[str]) -> dict[Split, list[str]]:
    """Return the sorted relative paths of each split. If no path names a split, all paths are training data.

    Raise `DataError` if some paths name a split and others do not, or if no path is training data.
    """
    paths = sorted(paths)
    found: dict[Split | None, list[str]] = {}
    for path in paths:
        found.setdefault(split_of(path), []).append(path)
    unnamed = found.pop(None, [])
    named: dict[Split, list[str]] = {split: found[split] for split in SPLITS if split in found}
    if not named:
        return {"train": unnamed}
    if unnamed:
        raise DataError(
            f"{where} has files that name their split, like {next(iter(named.values()))[0]}, and {unnamed[0]}, which "
            "names none; begin the names of all files with train, val or test"
        )
    if "train" not in named:
        raise DataError(f"{where} has {', '.join(named)} but no training data; name it train")
    return named


def check_classes(splits: Splits) -> None:
    """Raise `DataError` unless the targets are classes and there are at least two classes."""
    if splits.target_kind == "numbers":
        raise DataError(
            f"{splits.title} has numbers ({', '.join(splits.classes)}) and no classes; classification needs classes: "
            "open it without columns of numbers, or train a regression"
        )
    if not splits.classes:
        raise DataError(
            f"{splits.title} has no labels; classification needs a label for each image: label them, or choose a task "
            "that needs no labels"
        )
    if len(splits.classes) < 2:
        raise DataError(f"{splits.title} has only one class, {splits.classes[0]!r}; classification needs at least two")


def check_numbers(splits: Splits) -> None:
    """Raise `DataError` unless the targets are numbers, as regression needs."""
    if splits.target_kind != "numbers":
        held = f"classes ({', '.join(splits.classes[:5])})" if splits.classes else "no targets"
        raise DataError(
            f"{splits.title} has {held} and no numbers; regression needs columns of numbers: name them with "
            "numbers=COLUMN"
        )


def with_validation(splits: Splits, spec: str, share: float) -> Splits:
    """Return the splits with a validation split. A missing one is made from about `fraction` of the training images.

    A source that generates its samples generates more samples for the validation split. Other sources lose the samples
    that are held out. A fraction of 0 leaves the splits unchanged.
    """
    if splits.validation is not None or share == 0:
        return splits
    if isinstance(splits.train, Unlimited):
        return replace(splits, validation=splits.train.held_out(share))
    train, validation = cut(splits.train, share)
    note = (
        f"data {spec!r} has no validation split: {len(validation):,} of its {len(splits.train):,} training images were "
        f"cut for it (by a hash of their names, {share:.0%})"
    )
    return replace(splits, train=train, validation=validation, notes=(*splits.notes, note))
