"""The three splits of a data set, their names on disk, and the cut that makes a validation split where none is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from vitrail.data.source import Source, cut
from vitrail.errors import DataError

__all__ = ["SPLITS", "Split", "Splits", "by_split", "split_of", "with_validation"]

Split = Literal["train", "validation", "test"]

SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("val", "validation", "valid"),
    "test": ("test",),
}
"""What each split is called, as a folder or at the beginning of a file's name, in any case."""

NAME = re.compile(rf"({'|'.join(name for names in SPLITS.values() for name in names)})(?:[^a-z].*)?", re.I | re.S)


@dataclass(frozen=True)
class Splits:
    """What a data SPEC holds. All splits are indexed by the classes of the training split."""

    train: Source
    validation: Source | None
    """Chooses the best weights. Its images are never trained on."""
    test: Source | None
    """Measured once, at the end. Nothing is ever trained or chosen on it."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know, a sentence each: what was cut, what was left out."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

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


def with_validation(splits: Splits, spec: str, share: float) -> Splits:
    """The same with a validation split, cut from the training images where there is none (share 0 leaves it so)."""
    if splits.validation is not None or share == 0:
        return splits
    train, validation = cut(splits.train, share)
    note = (
        f"data {spec!r} has no validation split: {len(validation):,} of its {len(splits.train):,} training images were "
        f"cut for it (by a hash of their names, {share:.0%})"
    )
    return replace(splits, train=train, validation=validation, notes=(*splits.notes, note))
