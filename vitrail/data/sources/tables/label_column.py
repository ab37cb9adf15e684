"""Labels of many rows as arrays of numbers. The labels of several files are joined, and all splits use the same class
indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int32, Int64

from vitrail.data.faults import Fault, unknown_class
from vitrail.data.labels import LabelReader, check_names, class_name
from vitrail.data.source import Target
from vitrail.data.splits import Split
from vitrail.errors import DataError, listed

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

    def rows_with(self, chosen: Bool[np.ndarray, " n"]) -> int:
        """Return the number of rows to which chosen positions of `numbers` belong."""
        if self.starts is None:
            return int(chosen.sum())
        return len(np.unique(np.searchsorted(self.starts, np.flatnonzero(chosen), side="right")))

    @property
    def is_empty(self) -> bool:
        """True if no row has a label."""
        return not (self.numbers >= 0).any()

    def taken(self, rows: Int64[np.ndarray, " m"]) -> LabelColumn:
        """Return the labels of some rows. Names that were collected from the labels are those of these rows."""
        starts, numbers = None, self.numbers
        if self.starts is None:
            numbers = numbers[rows]
        else:
            parts = [numbers[self.starts[row] : self.starts[row + 1]] for row in rows.tolist()]
            starts = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])
            numbers = np.concatenate([np.zeros(0, np.int32), *parts])
        if self.names is None or self.stated:
            return replace(self, numbers=numbers, starts=starts)
        used = np.unique(numbers[numbers >= 0])
        places = np.where(numbers < 0, -1, np.searchsorted(used, numbers)).astype(np.int32)
        return LabelColumn(places, starts, tuple(self.names[name] for name in used.tolist()))

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each named class, if every row has at most one."""
        if self.names is None or self.stated or self.starts is not None:
            return {}
        found = np.bincount(self.numbers[self.numbers >= 0], minlength=len(self.names)).tolist()
        return dict(zip(self.names, found, strict=True))

    def named(self) -> LabelColumn:
        """Return labels that are numbers without names as labels whose names are these numbers."""
        used = np.unique(self.numbers[self.numbers >= 0])
        places = np.where(self.numbers < 0, -1, np.searchsorted(used, self.numbers)).astype(np.int32)
        return replace(self, numbers=places, names=tuple(map(str, used.tolist())))

    def renamed(self, names: tuple[str, ...]) -> LabelColumn:
        """Return the same labels as indices into new `names`. All current names must be among the new ones."""
        if self.names is None or self.names == names:
            return replace(self, names=names)
        places = {name: place for place, name in enumerate(names)}
        new = np.asarray([*(places[name] for name in self.names), -1], np.int32)  # the last entry maps -1 to itself
        return replace(self, numbers=new[self.numbers], names=names)


def text_column(
    numbers: Int64[np.ndarray, " n"],
    words: Sequence[str],
    starts: Int64[np.ndarray, " starts"] | None,
    reader: LabelReader,
) -> LabelColumn:
    """Return labels that are text, given as indices into the distinct `words`, or -1 for null. `reader` turns a word
    into the name of a class, into several names, or into no label."""
    counts = np.bincount(numbers[numbers >= 0], minlength=len(words)).tolist()
    read = [reader(word, times=times) for word, times in zip(words, counts, strict=True)]
    several = [one if isinstance(one, tuple) else () if one is None else (one,) for one in read]
    names = tuple(dict.fromkeys(name for some in several for name in some))
    places = {name: place for place, name in enumerate(names)}
    if starts is None and any(isinstance(one, tuple) for one in read):
        found = [np.array([places[name] for name in some], np.int32) for some in several]
        parts = [found[number] if number >= 0 else np.zeros(0, np.int32) for number in numbers.tolist()]
        starts = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])
        return LabelColumn(np.concatenate([np.zeros(0, np.int32), *parts]), starts, names, stated=False)
    single = np.array(
        [*(places[some[0]] if some else -1 for some in several), -1], np.int32
    )  # the last one is for null
    return LabelColumn(single[numbers], starts, names, stated=False)


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
) -> tuple[tuple[str, ...], dict[Split, LabelColumn], tuple[Fault, ...]]:
    """Return the classes, the labels of every split as class indices, and the faults.

    If `known` is None, the training split determines the classes. A label that only held-out splits have is then a
    fault, and its rows become unlabelled. Otherwise a label that is a number without a name is the class that is called
    by this number. If two classes have the same name, the class index is appended to the second
    name. For example, the second "crane" of ImageNet becomes "crane (517)". Raises `DataError` if the splits have
    different classes, or if a label is not in `known`.
    """
    first, train = next(iter(labels.items()))
    for split, other in labels.items():
        _must_fit(f"the {split} split of {title}", other, f"the {first} split", train)
    if train.names is None and known is None:
        classes, numbered, messages = _by_number(title, labels)
    else:
        named = labels if train.names is not None else {split: column.named() for split, column in labels.items()}
        classes, numbered, messages = _by_name(title, named, known)
    faults = []
    for split, column in numbered.items():
        strange = column.numbers >= len(classes)
        if strange.any():
            if known is not None:
                raise DataError(messages[split])
            faults.append(unknown_class(split, column.rows_with(strange), messages[split]))
            numbered[split] = replace(column, numbers=np.where(strange, np.int32(-1), column.numbers))
    return classes, numbered, tuple(faults)


Numbered = tuple[tuple[str, ...], dict[Split, LabelColumn], dict[Split, str]]
"""The classes, the labels of each split, and a message about unknown labels for each split. Unknown labels are numbers
beyond those of the classes."""


def _by_number(title: str, labels: Mapping[Split, LabelColumn]) -> Numbered:
    """Return labels that are numbers without names. The classes are called by the numbers up to the highest one."""
    highest = {split: int(column.numbers.max(initial=-1)) for split, column in labels.items()}
    most = next(iter(highest.values()))
    if most >= HIGHEST:
        raise DataError(
            f"{title}: the labels have no names and go up to {most:,}, so they are not class numbers; choose "
            "another column by adding ?label=COLUMN to the data's name"
        )
    messages = {
        split: f"{title} has the label {label}, but the labels of {most + 1} classes go from 0 to {most}"
        for split, label in highest.items()
    }
    return tuple(str(label) for label in range(most + 1)), dict(labels), messages


def _by_name(title: str, labels: Mapping[Split, LabelColumn], known: tuple[str, ...] | None) -> Numbered:
    """Return labels that have names."""
    train = next(iter(labels.values()))
    if train.stated and train.names is not None:
        distinct = _distinct(title, train.names)
        labels = {split: replace(column, names=distinct) for split, column in labels.items()}
    classes = known or next(iter(labels.values())).names or ()
    distinct_classes = set(classes)
    numbered, messages = {}, {}
    for split, column in labels.items():
        unknown = [name for name in column.names or () if name not in distinct_classes]
        messages[split] = (
            f"{title}: the {split} split has unknown classes: {listed(unknown)}; the known classes are: "
            f"{listed(classes, 20)}"
        )
        if unknown and known is not None:
            raise DataError(messages[split])
        numbered[split] = replace(column.renamed((*classes, *unknown)), names=classes)
    return classes, numbered, messages


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
    for place, name in enumerate(map(class_name, names)):
        result.append(f"{name} ({place})" if name in seen else name)
        seen.add(name)
    check_names(title, result)
    return tuple(result)
