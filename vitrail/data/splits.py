"""The three splits of a data set, their names on disk, and the cut that makes a missing validation split."""

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
"""Names of each split, in any case, for a folder or at the beginning of a file's name."""

NAME = re.compile(rf"({'|'.join(name for names in SPLITS.values() for name in names)})(?:[^a-z].*)?", re.I | re.S)


@runtime_checkable
class Unlimited(Protocol):
    """A source that draws its samples and can draw further ones of the same classes."""

    def held_out(self, fraction: float) -> Source:
        """Return further samples, which make up about `fraction` of both sources together."""


@dataclass(frozen=True)
class Splits:
    """The splits of a data set. The classes of the training split index the samples of all splits."""

    train: Source
    validation: Source | None
    """Chooses the best weights. Its images are never trained on."""
    test: Source | None
    """Measured once, at the end. Nothing is ever trained on it or chosen by it."""
    notes: tuple[str, ...] = field(default=())
    """Remarks for the user, one sentence each, such as how many images were held out or which files were skipped."""
    title: str = "the data"
    """Names the data in messages."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @property
    def target_kind(self) -> TargetKind:
        return target_kind(self.train)

    @property
    def held_out(self) -> tuple[str, Source] | None:
        """Name and source of the split that measures a finished model: the test split, or else the validation split."""
        if self.test is not None:
            return "test", self.test
        return None if self.validation is None else ("validation", self.validation)


def split_of(path: str) -> Split | None:
    """Return the split that a relative path belongs to, by its name or the nearest folder named after a split.

    "train-00000.tar", "val/0.tar" and "Test.csv" belong to one; "training.csv" and "images/0.tar" to none.
    """
    for part in reversed(path.split("/")):
        if match := NAME.fullmatch(part):
            word = match[1].lower()
            return next(split for split, names in SPLITS.items() if word in names)
    return None


def by_split(where: str, paths: Iterable[str]) -> dict[Split, list[str]]:
    """Return relative paths of files, sorted, by split. If no path names a split, all are training data.

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
    """Raise `DataError` unless the data can be classified: its targets are classes, and there are two or more."""
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
    """Return the splits with a validation split of about this fraction of the training images, if there is none yet.

    A source that draws its samples draws further ones for it. From other sources samples are cut off. A fraction of 0
    leaves the splits as they are.
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
