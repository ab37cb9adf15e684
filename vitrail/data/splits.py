"""The three splits of a data set, their names on disk, and the creation of a missing validation split."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

from vitrail.data.faults import Fault
from vitrail.data.selection import SLICE, CutMethod, cut, cut_slice, slice_bounds
from vitrail.data.source import Source, Subset, TargetKind, class_indices, target_kind
from vitrail.errors import DataError, plural

__all__ = [
    "SPLITS",
    "Split",
    "Splits",
    "Unlimited",
    "by_split",
    "check_classes",
    "check_numbers",
    "check_validation",
    "one_class",
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
        """Return a new source with other samples. Its size is about `fraction` of the total size of this source and the
        new one."""


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
    faults: tuple[Fault, ...] = field(default=())
    """Faults in the structure of the data that are tolerated, because the data is only checked."""

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
        raise DataError(one_class(splits).text)


def one_class(splits: Splits) -> Fault:
    """Return the fault of data with a single class."""
    return Fault(
        "one-class", "error", 1,
        f"{splits.title} has only one class, {splits.classes[0]!r}; classification needs at least two",
        "Training refuses the data.",
        "Add images of another class.",
    )  # fmt: skip


def check_numbers(splits: Splits) -> None:
    """Raise `DataError` unless the targets are numbers, as regression needs."""
    if splits.target_kind != "numbers":
        held = f"classes ({', '.join(splits.classes[:5])})" if splits.classes else "no targets"
        raise DataError(
            f"{splits.title} has {held} and no numbers; regression needs columns of numbers: name them with "
            "numbers=COLUMN"
        )


def with_validation(
    splits: Splits, spec: str, share: float, *, validation: str = "auto", method: CutMethod = "stratified"
) -> Splits:
    """Return the splits with a validation split.

    `validation` is "auto", "train" or a slice of the training images such as "train[99%:]". With "auto" the data's own
    validation split is used. If the data has none, and always with "train", the fraction `share` of the training images
    is held out by `method`; a fraction of 0 holds out none. A slice holds out the images at these positions. If the
    data has its own validation split and it is not used, it becomes the test split, unless the data has a test split.

    A source that generates its samples generates more samples instead of holding out some of them. Raise `DataError`
    if no image would be held out, or if a slice is out of range or leaves no image of a class to learn from.
    """
    if validation == "auto" and (splits.validation is not None or share == 0):
        return splits
    own, count = splits.validation, len(splits.train)
    if own is not None:
        splits = replace(splits, validation=None, test=splits.test or own)
    duty = "the test split" if splits.test is own else "not used, because the data also has a test split"
    duty = f"; its own validation split is {duty}" if own is not None else ""
    source = splits.train
    train: Source = source
    held_out: Source | None = None
    how = ""
    if SLICE.fullmatch(validation):
        train, held_out = _slice(splits, validation)
        how = validation
    elif share > 0 and isinstance(source, Unlimited):
        held_out = source.held_out(share)
    elif share > 0:
        train, held_out = cut(source, share, method=method)
        if not len(held_out) and method == "stratified":
            raise DataError(_nothing_held_out(splits, share))
        how = f"by a hash of their names, {100 * share:g}%"
    notes = splits.notes
    if how and held_out is not None:
        note = f"{len(held_out):,} of its {count:,} training images are held out for validation ({how})"
        start = "" if own is not None else " has no validation split"
        notes = (*notes, f"data {spec!r}{start}: {note}{duty}")
    elif duty:
        notes = (*notes, f"data {spec!r}: no training image is held out{duty}")
    return replace(splits, train=train, validation=held_out, notes=notes)


def check_validation(text: str) -> Iterator[str]:
    """Yield a message unless `text` is "auto", "train" or a slice."""
    if text not in ("auto", "train") and SLICE.fullmatch(text) is None:
        yield (
            f"validation={text!r} is not auto, train or a slice of the training images; write a slice such as "
            "train[-10000:] for the last 10,000, or train[99%:] for the last hundredth"
        )


def _slice(splits: Splits, text: str) -> tuple[Subset, Subset]:
    """Return the training images outside and inside a slice. Raise `DataError` if one of the two has none."""
    count = len(splits.train)
    try:
        start, stop = slice_bounds(text, count)
    except ValueError as error:
        raise DataError(
            f"validation={text!r} {error}: {splits.title} has {plural(count, 'training image')}; choose positions "
            f"within these, such as train[{count - count // 10}:]"
        ) from None
    if stop - start == count:
        raise DataError(
            f"validation={text!r} holds out all {plural(count, 'training image')} of {splits.title}; leave some to "
            f"learn from, such as with train[{count - count // 10}:]"
        )
    train, held_out = cut_slice(splits.train, start, stop)
    if lost := _lost_classes(train, held_out):
        fraction = (stop - start) / count
        raise DataError(
            f"validation={text!r} holds out all images of {plural(len(lost), 'class')} of {splits.title}, such as "
            f"{lost[0]}: the images are in the order of their classes; hold out a fraction of each class instead, with "
            f"validation='train' and validation_share={fraction:.2g}"
        )
    return train, held_out


def _lost_classes(train: Source, held_out: Source) -> list[str]:
    """Return the names of the classes that have at least two held-out images and no training image."""
    if target_kind(train) in ("numbers", "none"):
        return []
    left, held = Counter(_labels_of(train)), Counter(_labels_of(held_out))
    return [train.classes[label] for label in sorted(held) if held[label] > 1 and not left[label]]


def _labels_of(source: Source) -> Iterator[int]:
    return (label for index in range(len(source)) for label in class_indices(source.target(index)))


def _nothing_held_out(splits: Splits, share: float) -> str:
    count = len(splits.train)
    if round(share * count):
        reason = "each of its classes has only one training image, which is learned from; add images"
    else:
        reason = f"that is less than half an image; choose at least {0.5 / count:.2g}"
    return (
        f"validation_share={share:g} of {plural(count, 'training image')} leaves the validation split of "
        f"{splits.title} empty: {reason}, or choose 0 to hold out none"
    )
