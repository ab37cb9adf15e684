"""Labels of many rows as arrays of numbers: joined over files, and numbered by one order of classes over splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int32, Int64

from vitrail.data.source import Target
from vitrail.data.splits import Split
from vitrail.errors import DataError

__all__ = ["LabelColumn", "join", "number"]

HIGHEST = 100_000
"""Numbers without names that go beyond are not classes but something else."""


@dataclass(frozen=True, eq=False)
class LabelColumn:
    """The labels of some rows, as numbers."""

    numbers: Int32[np.ndarray, " n"]
    """-1 for none; where rows have several labels, those of all rows one after the other."""
    starts: Int64[np.ndarray, " starts"] | None = None
    """Where rows have several labels, each row's first place in `numbers`; else None."""
    names: tuple[str, ...] | None = None
    """What the numbers stand for; None where the file does not say."""
    stated: bool = False
    """Whether `names` are all classes, in an order of their own, or just the words that were found."""

    def __getitem__(self, row: int) -> Target:
        if self.starts is not None:
            several = self.numbers[self.starts[row] : self.starts[row + 1]].tolist()
            return tuple(sorted({number for number in several if number >= 0}))
        label = int(self.numbers[row])
        return None if label < 0 else label

    def row_of(self, place: int) -> int:
        """The row that a place in `numbers` is of."""
        return place if self.starts is None else int(np.searchsorted(self.starts, place, side="right")) - 1

    @property
    def is_empty(self) -> bool:
        """Whether no row has a label."""
        return not (self.numbers >= 0).any()

    def renamed(self, names: tuple[str, ...]) -> LabelColumn:
        """The same labels as numbers of other names, among which all of these are."""
        if self.names is None or self.names == names:
            return replace(self, names=names)
        places = {name: place for place, name in enumerate(names)}
        new = np.asarray([*(places[name] for name in self.names), -1], np.int32)  # the last is for the number -1
        return replace(self, numbers=new[self.numbers], names=names)


def join(files: Sequence[str], parts: Sequence[LabelColumn]) -> LabelColumn:
    """The labels of several files, of these names, one after the other. Raises `DataError` where they disagree."""
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        _must_fit(file, part, files[0], first)
    if first.names is not None and not first.stated:
        words = tuple(sorted({name for part in parts for name in part.names or ()}))
        parts = [part.renamed(words) for part in parts]
    starts = None
    if first.starts is not None:
        lengths = np.concatenate([np.diff(part.starts) for part in parts if part.starts is not None])
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return replace(parts[0], numbers=np.concatenate([part.numbers for part in parts]), starts=starts)


def number(
    title: str, labels: Mapping[Split, LabelColumn], given: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[Split, LabelColumn]]:
    """The classes, by the training split where they are not `given`, and all labels as numbers of these.

    Where names of classes are stated twice with the same words (as ImageNet's two cranes are), the second gets its
    number: "crane (517)". Raises `DataError` where a label is of no class, or the splits disagree.
    """
    train = labels["train"]
    for split, other in labels.items():
        _must_fit(f"the {split} split of {title}", other, "the train split", train)
    if train.names is None:
        highest = max(int(column.numbers.max(initial=-1)) for column in labels.values())
        most = int(train.numbers.max(initial=-1)) if given is None else len(given) - 1
        if most >= HIGHEST:
            raise DataError(
                f"{title}: its labels go up to {most:,} and have no names, so they are not numbers of classes; choose "
                "another column by putting ?label=COLUMN behind the data's name"
            )
        if highest > most:
            raise DataError(f"{title} has the label {highest}; the {most + 1} classes are numbered from 0")
        return given or tuple(str(label) for label in range(most + 1)), dict(labels)
    if train.stated:
        distinct = _distinct(title, train.names)
        labels = {split: replace(column, names=distinct) for split, column in labels.items()}
    classes = given or labels["train"].names or ()
    for split, column in labels.items():
        if unknown := [name for name in column.names or () if name not in set(classes)]:
            raise DataError(
                f"{title}: its {split} split has classes that are not known: {', '.join(unknown[:5])}; known are: "
                f"{', '.join(classes)}"
            )
    return classes, {split: column.renamed(classes) for split, column in labels.items()}


def _must_fit(title: str, one: LabelColumn, other_title: str, other: LabelColumn) -> None:
    if _kind(one) != _kind(other):
        raise DataError(f"{title} and {other_title} have labels of different kinds: {_kind(one)} and {_kind(other)}")
    if one.names != other.names and one.stated:
        pairs = zip(one.names or (), other.names or (), strict=False)
        place = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        what = (
            f"{len(one.names or ())} and {len(other.names or ())} of them"
            if place is None
            else f"class {place} is {(one.names or ())[place]!r} and {(other.names or ())[place]!r}"
        )
        raise DataError(f"{title} and {other_title} name different classes: {what}")


def _kind(column: LabelColumn) -> str:
    what = "numbers" if column.names is None else "numbers with names" if column.stated else "words"
    return f"{'lists of ' if column.starts is not None else ''}{what}"


def _distinct(title: str, names: tuple[str, ...]) -> tuple[str, ...]:
    seen: set[str] = set()
    result = []
    for place, name in enumerate(names):
        result.append(f"{name} ({place})" if name in seen else name)
        seen.add(name)
    if unwritable := [name for name in result if not name.isprintable() or not name]:
        raise DataError(f"{title} has classes whose names cannot be written down: {unwritable}")
    return tuple(result)
