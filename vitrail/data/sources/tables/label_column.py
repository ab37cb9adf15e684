"""Labels of many rows as arrays of numbers. The labels of several files are joined, and all splits use the same class
indices."""

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
"""Limit for labels without class names. A column with a label of this number or more does not hold class numbers."""


@dataclass(frozen=True, eq=False)
class LabelColumn:
    """The labels of some rows, as numbers."""

    numbers: Int32[np.ndarray, " n"]
    """The label of each row, or -1 for no label. If rows have several labels, these are the labels of all rows one
    after another."""
    starts: Int64[np.ndarray, " starts"] | None = None
    """Position in `numbers` at which each row begins. None if every row has at most one label."""
    names: tuple[str, ...] | None = None
    """The name of each label number, or None if the file has no names."""
    stated: bool = False
    """True if the file lists its classes in order, as `names`. False if `names` was collected from the labels."""

    def __getitem__(self, row: int) -> Target:
        if self.starts is not None:
            several = self.numbers[self.starts[row] : self.starts[row + 1]].tolist()
            return tuple(sorted({number for number in several if number >= 0}))
        label = int(self.numbers[row])
        return None if label < 0 else label

    def row_of(self, place: int) -> int:
        """Return the row of a position in `numbers`."""
        return place if self.starts is None else int(np.searchsorted(self.starts, place, side="right")) - 1

    @property
    def is_empty(self) -> bool:
        """True if no row has a label."""
        return not (self.numbers >= 0).any()

    def renamed(self, names: tuple[str, ...]) -> LabelColumn:
        """Return the same labels as indices into new `names`. All current names must be among the new ones."""
        if self.names is None or self.names == names:
            return replace(self, names=names)
        places = {name: place for place, name in enumerate(names)}
        new = np.asarray([*(places[name] for name in self.names), -1], np.int32)  # the last entry maps -1 to itself
        return replace(self, numbers=new[self.numbers], names=names)


def join(files: Sequence[str], parts: Sequence[LabelColumn]) -> LabelColumn:
    """Return the labels of several files as one column. Raises `DataError` if the files disagree about their classes.

    `files` are the names of the files, for messages.
    """
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        _must_fit(file, part, files[0], first)
    if first.names is not None and not first.stated:
        names = tuple(sorted({name for part in parts for name in part.names or ()}))
        parts = [part.renamed(names) for part in parts]
    starts = None
    if first.starts is not None:
        lengths = np.concatenate([np.diff(part.starts) for part in parts if part.starts is not None])
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return replace(parts[0], numbers=np.concatenate([part.numbers for part in parts]), starts=starts)


def number(
    title: str, labels: Mapping[Split, LabelColumn], known: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[Split, LabelColumn]]:
    """Return the classes, and the labels of every split as class indices.

    If `known` is None, the training split determines the classes. If two classes have the same name, the class index is
    appended to the second name. For example, the second "crane" of ImageNet becomes "crane (517)". Raises `DataError`
    if a label is not among the classes or the splits have different classes.
    """
    train = labels["train"]
    for split, other in labels.items():
        _must_fit(f"the {split} split of {title}", other, "the train split", train)
    if train.names is None:
        highest = max(int(column.numbers.max(initial=-1)) for column in labels.values())
        most = int(train.numbers.max(initial=-1)) if known is None else len(known) - 1
        if most >= HIGHEST:
            raise DataError(
                f"{title}: the labels have no names and go up to {most:,}, so they are not class numbers; choose "
                "another column by adding ?label=COLUMN to the data's name"
            )
        if highest > most:
            raise DataError(
                f"{title} has the label {highest}, but the labels of {most + 1} classes go from 0 to {most}"
            )
        return known or tuple(str(label) for label in range(most + 1)), dict(labels)
    if train.stated:
        distinct = _distinct(title, train.names)
        labels = {split: replace(column, names=distinct) for split, column in labels.items()}
    classes = known or labels["train"].names or ()
    for split, column in labels.items():
        if unknown := [name for name in column.names or () if name not in set(classes)]:
            raise DataError(
                f"{title}: the {split} split has unknown classes: {', '.join(unknown[:5])}; the known classes are: "
                f"{', '.join(classes)}"
            )
    return classes, {split: column.renamed(classes) for split, column in labels.items()}


def _must_fit(title: str, one: LabelColumn, other_title: str, other: LabelColumn) -> None:
    if _kind(one) != _kind(other):
        raise DataError(
            f"{title} and {other_title} have labels of different kinds: {_kind(one)} and {_kind(other)}; all files "
            "need the same kind"
        )
    if one.names != other.names and one.stated:
        pairs = zip(one.names or (), other.names or (), strict=False)
        place = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        difference = (
            f"{len(one.names or ())} names and {len(other.names or ())} names"
            if place is None
            else f"class {place} is {(one.names or ())[place]!r} and {(other.names or ())[place]!r}"
        )
        raise DataError(f"{title} and {other_title} state different classes: {difference}")


def _kind(column: LabelColumn) -> str:
    kind = "numbers" if column.names is None else "numbers with names" if column.stated else "text"
    return f"{'lists of ' if column.starts is not None else ''}{kind}"


def _distinct(title: str, names: tuple[str, ...]) -> tuple[str, ...]:
    seen: set[str] = set()
    result = []
    for place, name in enumerate(names):
        result.append(f"{name} ({place})" if name in seen else name)
        seen.add(name)
    if unprintable := [name for name in result if not name.isprintable() or not name]:
        raise DataError(f"{title} has classes with unprintable names: {unprintable}; rename them")
    return tuple(result)
