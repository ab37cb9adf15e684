"""The three splits of a data set, their names on disk, and the cut that makes a validation split where none is."""

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
"""What each split is called, as a folder or at the beginning of a file's name, in any case."""

NAME = re.compile(rf"({'|'.join(name for names in SPLITS.values() for name in names)})(?:[^a-z].*)?", re.I | re.S)


@runtime_checkable
class Unlimited(Protocol):
    """A source that draws its samples and can draw further ones of the same classes."""

    def held_out(self, fraction: float) -> Source:
        """Return further samples, which make up about `fraction` of both sources together."""


@dataclass(frozen=True)
class Splits:
    """What a data SPEC holds. All splits are indexed by the classes of the training split."""

    train: Source
    validation: Source | None
    """Chooses the best weights. Its images are never trained on."""
    test: Source | None
    """Measured once, at the end. Nothing is ever trained or chosen on it."""
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
        """The split that measures a finished model, with its name: the test split, or else the validation split."""
        if self.test is not None:
            return "test", self.test
        return None if self.validation is None else ("validation", self.validation)


def split_of(path: str) -> Split | None:
    """The split that a relative path is of: by its file's name, or by the nearest folder that is named after a split.

    "train-00000.tar", "val/0.tar" and "Test.csv" are; "training.csv" and "images/0.tar" are not.
    """
    for part in reversed(path.split("/")):
        if match := NAME.fullmatch(part):
            word = match[1].lower()
            return next(split for split, names in SPLITS.items() if word in names)
    return None


def by_split(where: str, paths: Iterable[str]) -> dict[Split, list[str]]:
    """Relative paths of files, sorted, by the splits that they are of; where none has a split's name, all are to train
    on.

    Raises `DataError` where some have one and others do not, or where there is nothing to train on.
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
            f"{where} has files of splits, like {next(iter(named.values()))[0]}, and {unnamed[0]}, which names none; "
            "begin the names of all of them with train, val or test"
        )
    if "train" not in named:
        raise DataError(f"{where} has {', '.join(named)} but no train to learn from")
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
