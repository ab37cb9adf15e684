"""The targets of samples: classes, numbers or none, from the text of labels to arrays of numbers."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar, cast

import numpy as np
from jaxtyping import Bool, Float32, Int64, Shaped

from vitrail.data.faults import Fault, unknown_class
from vitrail.data.objects import Mask, ObjectRows, Objects
from vitrail.data.texts import TextTable
from vitrail.errors import DataError, listed, nearest, plural
from vitrail.report.page import printable

Target = int | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | Objects | Mask | None
"""The training target of an image. An int is the index of the image's class. A tuple of ints holds the indices of all
classes of the image, in rising order. A tuple of floats holds the numbers of a regression target, where NaN is an
unknown number. A tuple of strings holds texts. `Objects` are boxes with classes, and a `Mask` has a class for every
pixel. None means that the image has no target."""

SoftTarget = Float32[np.ndarray, " classes"]
"""The amount of each class of an image, such as the probabilities that a model predicted."""

TargetKind = Literal["class", "classes", "numbers", "boxes", "mask", "texts", "none"]
"""The kind of a source's targets: one class per image, several classes, numbers, boxes of objects, a mask of classes,
texts, or no targets at all."""

PLACED: tuple[TargetKind, ...] = ("boxes", "mask")
"""Targets that belong to places in the image."""


@dataclass(frozen=True, eq=False)
class SoftRows:
    """The amounts of classes of some of n samples. They are stored once, in blocks of rows, however they are selected
    and renumbered."""

    blocks: tuple[tuple[Float32[np.ndarray, "m k"], Int64[np.ndarray, " k"]], ...]
    """Rows of amounts, and the index of the class of each column."""
    places: Int64[np.ndarray, "n 2"]
    """The block and the row in it of each sample, or -1 for a sample without amounts."""

    def row(self, sample: int, classes: int) -> SoftTarget | None:
        """Return the amounts of all classes of a sample, or None if it has none."""
        block, row = self.places[sample].tolist()
        if block < 0:
            return None
        amounts, columns = self.blocks[block]
        found = np.zeros(classes, np.float32)
        found[columns] = amounts[row]
        return found


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of n samples, in the order of the samples. Raise `DataError` for a label that is not the index of a
    class."""

    kind: TargetKind
    names: tuple[str, ...]
    """Names of the classes, or of the numbers."""
    values: Shaped[np.ndarray, ...]
    """The index of the class of each sample, or -1 for no label; the indices of the classes of all samples, one sample
    after another; or the numbers of each sample (n k), with NaN for an unknown number. Without targets, (n 0). With
    boxes, the index of the class of each object, one sample after another. With masks, an array of `Mask`. With texts,
    the index in `texts` of each text, one sample after another."""
    starts: Int64[np.ndarray, " starts"] | None = None
    """Position in `values` at which the classes, objects or texts of each sample begin, if samples can have several."""
    soft: SoftRows | None = None
    """Amounts of classes that training learns instead of the class."""
    objects: ObjectRows | None = None
    """The boxes of objects, and what belongs to them."""
    texts: TextTable | None = None
    """Different texts. They are stored once, however samples are selected."""
    ids: tuple[int, ...] = ()
    """The numbers that the data gives its classes, if it gives some: those of COCO's categories, or values in masks."""

    def __post_init__(self) -> None:
        if self.kind in ("class", "classes", "boxes"):
            least = -1 if self.kind == "class" else 0
            wrong = np.flatnonzero((self.values < least) | (self.values >= len(self.names)))
            if len(wrong):
                raise DataError(
                    f"label {self.values[wrong[0]]} of row {wrong[0]} is not one of {len(self.names)} classes, "
                    "numbered from 0"
                )

    @staticmethod
    def of(
        targets: Iterable[Target],
        kind: TargetKind,
        names: tuple[str, ...],
        soft: Sequence[SoftTarget | None] | None = None,
    ) -> Targets:
        """Return targets of one kind as arrays. If the kind is "numbers", `names` are the names of the numbers."""
        found = list(targets)
        rows = None
        if soft is not None:
            places = np.full((len(found), 2), -1, np.int64)
            present = [place for place, amounts in enumerate(soft) if amounts is not None]
            places[present] = np.stack([np.zeros(len(present), np.int64), np.arange(len(present))], axis=1)
            amounts = np.array([soft[place] for place in present], np.float32).reshape(len(present), len(names))
            rows = SoftRows(((amounts, np.arange(len(names))),), places)
        if kind == "class":
            labels = np.array([-1 if one is None else one for one in found], np.float64)
            if len(wrong := labels[labels % 1 != 0]):
                raise DataError(
                    f"label {wrong[0]} is not the index of a class; numbers are targets of the kind numbers"
                )
            return Targets(kind, names, labels.astype(np.int64), soft=rows)
        if kind == "classes":
            several = [class_indices(one) for one in found]
            values = np.fromiter(itertools.chain.from_iterable(several), np.int64)
            return Targets(kind, names, values, np.cumsum([0, *map(len, several)], dtype=np.int64))
        if kind == "boxes":
            pictures = [one if isinstance(one, Objects) else Objects.of((), ()) for one in found]
            values = np.concatenate([np.zeros(0, np.int64), *(one.labels for one in pictures)])
            starts = np.cumsum([0, *map(len, pictures)], dtype=np.int64)
            return Targets(kind, names, values, starts, objects=ObjectRows.of(pictures))
        if kind == "texts":
            owned = [tuple(map(str, one)) if isinstance(one, tuple) else () for one in found]
            rows_of = {text: row for row, text in enumerate(dict.fromkeys(itertools.chain.from_iterable(owned)))}
            values = np.fromiter((rows_of[text] for one in owned for text in one), np.int64)
            starts = np.cumsum([0, *map(len, owned)], dtype=np.int64)
            return Targets(kind, (), values, starts, texts=TextTable.of(rows_of))
        if kind == "mask":
            masks = np.empty(len(found), object)
            masks[:] = found
            return Targets(kind, names, masks)
        width = len(names) if kind == "numbers" else 0
        numbers: list[Any] = [(math.nan,) * width if one is None or not width else one for one in found]
        for row, one in enumerate(numbers):
            if len(one) != width or any(map(math.isinf, one)):
                raise DataError(
                    f"target of row {row} is {one!r:.60}, but it must be None or {width} finite numbers, one for each "
                    "of the names; NaN stands for an unknown number"
                )
        return Targets(kind, names, np.array(numbers, np.float64).reshape(len(found), width))

    @staticmethod
    def unknown(kind: TargetKind, names: tuple[str, ...], count: int) -> Targets:
        """Return the targets of samples of which none is known."""
        return Targets.of([None] * count, kind, names)

    @staticmethod
    def joined(parts: Sequence[Targets]) -> Targets:
        """Return the targets of several data sets, one after another. They have the kind of the first. Names of the
        first keep their indices, and new names of the others follow."""
        kind = parts[0].kind
        if kind == "none":
            return Targets.unknown(kind, (), sum(map(len, parts)))
        if kind == "texts":
            return Targets.of([part[row] for part in parts for row in range(len(part))], kind, ())
        alike = all(part.names == parts[0].names for part in parts)
        names = parts[0].names if alike else tuple(dict.fromkeys(name for part in parts for name in part.names))
        places = {name: place for place, name in enumerate(names)}
        moved = [Targets.unknown(kind, part.names, len(part)) if part.kind == "none" else part for part in parts]
        if not alike:
            moved = [part.renumbered([places[name] for name in part.names], names) for part in moved]
        values, ids = np.concatenate([part.values for part in moved]), _joined_ids(parts, names)
        if kind in ("classes", "boxes"):
            sizes = np.concatenate([np.diff(part.starts) for part in moved if part.starts is not None])
            objects = [part.objects for part in moved if part.objects is not None]
            starts = np.cumsum([0, *sizes.tolist()], dtype=np.int64)
            columns = ObjectRows.joined(objects) if objects else None
            return Targets(kind, names, values, starts, objects=columns, ids=ids)
        if not any(part.soft for part in moved):
            return Targets(kind, names, values, ids=ids)
        blocks: list[tuple[np.ndarray, np.ndarray]] = []
        found = []
        for part in moved:
            rows = np.full((len(part), 2), -1, np.int64) if part.soft is None else part.soft.places.copy()
            rows[rows[:, 0] >= 0, 0] += len(blocks)
            blocks += () if part.soft is None else part.soft.blocks
            found.append(rows)
        return Targets(kind, names, values, soft=SoftRows(tuple(blocks), np.concatenate(found)))

    def __len__(self) -> int:
        return len(self.values) if self.starts is None else len(self.starts) - 1

    def __getitem__(self, row: int) -> Target:
        if self.starts is not None:
            start, stop = int(self.starts[:-1][row]), int(self.starts[1:][row])
            if self.objects is not None:
                return self.objects.objects(row, self.values[start:stop], start, stop)
            if self.texts is not None:
                return tuple(map(self.texts.__getitem__, self.values[start:stop].tolist())) or None
            return tuple(self.values[start:stop].tolist())
        if self.kind == "mask":
            return self.values[row]
        if self.kind == "class":
            label = int(self.values[row])
            return None if label < 0 else label
        numbers = self.values[row]
        return None if np.isnan(numbers).all() else tuple(numbers.tolist())

    @property
    def columns(self) -> int:
        """The number of classes or of numbers. A model for these targets has the same number of outputs."""
        return len(self.names)

    @property
    def known(self) -> Bool[np.ndarray, " n"]:
        """Mask of the samples with a known label, with a text or with at least one known number. If samples can have
        several labels, all are known."""
        if self.starts is not None and self.texts is not None:
            return np.diff(self.starts) > 0
        if self.starts is not None:
            return np.ones(len(self), np.bool_)
        if self.kind == "mask":
            return np.array([mask is not None for mask in self.values], np.bool_)
        return self.values >= 0 if self.kind == "class" else ~np.isnan(self.values).all(axis=1)

    @property
    def dense(self) -> Shaped[np.ndarray, "n ..."]:
        """`values`, but if samples can have several classes, 1 for each class of a sample and 0 for every other class
        (n classes)."""
        if self.starts is None:
            return self.values
        found = np.zeros((len(self), self.columns), np.uint8)
        found[np.repeat(np.arange(len(self)), np.diff(self.starts)), self.values] = 1
        return found

    def rows(self, chosen: Shaped[np.ndarray, " m"] | slice) -> Targets:
        """Return the targets of some samples, chosen by a mask, by indices or by a slice."""
        soft = None if self.soft is None else replace(self.soft, places=self.soft.places[chosen])
        if self.starts is None:
            return replace(self, values=self.values[chosen], soft=soft)
        firsts, sizes = self.starts[:-1][chosen], np.diff(self.starts)[chosen]
        starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        places = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], sizes)
        objects = None if self.objects is None else self.objects.taken(places, chosen)
        return replace(self, values=self.values[places], starts=starts, soft=soft, objects=objects)

    def renumbered(self, places: Sequence[int], names: tuple[str, ...]) -> Targets:
        """Return the targets with other names: class or number i gets the index `places[i]` among `names`, or is
        dropped if this is -1. `ids` stay if every new name has one."""
        owned = [(place, number) for place, number in zip(places, self.ids, strict=False) if place >= 0]
        ids = tuple(number for _, number in sorted(owned))
        ids = ids if len(dict(owned)) == len(owned) == len(names) else ()
        table = np.array([*places, -1], np.int64)  # the last element is for the label -1
        kept = table[:-1] >= 0
        if self.kind == "numbers":
            values = np.full((len(self), len(names)), math.nan)
            values[:, table[:-1][kept]] = self.values[:, kept]
            return replace(self, names=names, values=values)
        if self.kind in ("none", "texts"):
            return replace(self, names=names)
        if self.kind == "mask":
            masks = [None if one is None else one.renumbered(places) for one in self.values]
            return replace(Targets.of(masks, "mask", names), ids=ids)
        values, soft = table[self.values], self.soft
        if soft is not None:
            blocks = [(amounts, table[columns]) for amounts, columns in soft.blocks]
            kept_blocks = tuple((amounts[:, columns >= 0], columns[columns >= 0]) for amounts, columns in blocks)
            soft = replace(soft, blocks=kept_blocks)
        if self.starts is None:
            return replace(self, names=names, values=values, soft=soft)
        owners = np.repeat(np.arange(len(self)), np.diff(self.starts))
        order = np.lexsort((values, owners)) if self.objects is None else np.arange(len(values))
        order = order[values[order] >= 0]
        starts = np.concatenate([[0], np.cumsum(np.bincount(owners[order], minlength=len(self)), dtype=np.int64)])
        objects = None if self.objects is None else self.objects.taken(order)
        return replace(self, names=names, values=values[order], starts=starts, objects=objects, ids=ids)

    def restricted(self, columns: Sequence[int]) -> Targets:
        """Return the targets for a model that has only the outputs `columns`, in this order."""
        places = np.full(self.columns, -1, np.int64)
        places[list(columns)] = np.arange(len(columns))
        return self.renumbered(places.tolist(), tuple(self.names[column] for column in columns))

    def hits(self, likeliest: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Return True for each sample whose likeliest class is a true class. Raise `DataError` if targets are
        numbers."""
        if self.kind == "numbers":
            raise DataError("accuracy needs classes, but these samples have numbers; measure the errors instead")
        if self.starts is None:
            return self.values == likeliest
        return self.dense[np.arange(len(self)), likeliest] > 0

    def groups(self) -> Int64[np.ndarray, " n"]:
        """Return the stratum of each sample for stratified draws. Samples with several labels or numbers form one
        stratum."""
        return self.values if self.kind == "class" else np.zeros(len(self), np.int64)

    def plain(self, row: int) -> int | list[int] | list[float | None] | list[str] | None:
        """Return the target of one sample as a JSON value. An unknown class or number is None."""
        if self.kind == "numbers":
            return [None if math.isnan(number) else number for number in self.values[row].tolist()]
        target = self[row]
        if self.kind == "texts":
            return list(map(str, cast(tuple[str, ...], target or ())))
        return list(class_indices(target)) if self.kind == "classes" else cast(int | None, target)


def _joined_ids(parts: Sequence[Targets], names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the numbers that data sets give their classes, or () if a class has none. Raise `DataError` if they
    contradict each other."""
    found: dict[str, int] = {}
    for part in parts:
        for name, number in zip(part.names, part.ids, strict=False):
            if found.setdefault(name, number) != number:
                raise DataError(
                    f"the data sets give the class {name!r} the numbers {found[name]} and {number}; give it one number"
                )
    if len(set(found.values())) < len(found):
        raise DataError(f"the data sets give two classes one number: {found}; give each class a number of its own")
    return tuple(found[name] for name in names) if len(found) == len(names) else ()


def class_indices(target: Target) -> tuple[int, ...]:
    """Return the indices of a target's classes: none, one or several. The target must not hold numbers. Those in a mask
    are not known, because no mask is read. Texts have no classes."""
    if isinstance(target, Objects):
        return tuple(np.unique(target.labels).tolist())
    if isinstance(target, Mask) or is_texts(target):
        return ()
    if isinstance(target, tuple):
        return cast(tuple[int, ...], target)
    return () if target is None else (target,)


def is_texts(target: Target) -> TypeGuard[tuple[str, ...]]:
    """Return True for a tuple of texts."""
    return isinstance(target, tuple) and bool(target) and isinstance(target[0], str)


MISSING = frozenset({"nan", "none", "null", "n/a", "na", "#n/a", "<na>", "nat"})
"""Words for a missing value, in lower case, as pandas and spreadsheets write them."""

INVISIBLE = dict.fromkeys(map(ord, "\u200b\u2060\ufeff"))
"""Characters without width or meaning, which copied text can contain: two names must not differ in them alone."""

SEPARATORS = ("|", ";", ",", "/", "+", "&", " ")
NEVER_IN_NAMES = ("|", ";")
"""Separators that names of classes do not contain: a part of several names need not be a class of its own."""

WHOLE = re.compile(r"(\d+)(\.0*)?")


def class_name(text: str) -> str:
    """Return the name of a class in Unicode's normal form C, without spaces at its ends and without characters that
    cannot be seen. A space of another kind is a space."""
    name = unicodedata.normalize("NFC", text).translate(INVISIBLE)
    return "".join(" " if unicodedata.category(one) == "Zs" else one for one in name).strip()


def check_names(title: str, names: Iterable[str]) -> None:
    """Raise `DataError` for a class name that is empty or contains control characters. All scripts are accepted."""
    wrong = [name for name in names if not name or printable(name) != name]
    if wrong:
        raise DataError(f"{title} has classes with unprintable names: {sorted(wrong)}; rename them")


class LabelReader:
    """Reads the cells of a column of labels, and counts what it does not take as the name of a class.

    `separator` is the text between several labels in a cell; with "none" and None, a cell is one label. With
    `keep_missing`, words for a missing value are names of classes.
    """

    def __init__(self, separator: str | None = None, *, keep_missing: bool = False) -> None:
        self._separator = None if separator == "none" else separator
        self._keep = keep_missing
        self.missing: Counter[str] = Counter()
        """The number of cells with each word for a missing value."""
        self.blank = 0
        """The number of cells without a label, where cells can have several labels."""

    def __call__(self, cell: object, times: int = 1) -> str | tuple[str, ...] | None:
        """Return the name of a cell's class, or the names of all its classes. Return None if the cell has no label.

        A list holds several names. If a separator was chosen, a text holds several names, and an empty text none.
        `times` is the number of such cells, for the count of missing values.
        """
        parts: Iterable[object]
        if isinstance(cell, list | tuple):
            parts = cell
        elif self._separator is not None:
            parts = str("" if cell is None else cell).split(self._separator if self._separator.strip() else None)
        else:
            return self._one(cell, times)
        names = tuple(name for one in parts if (name := self._one(one, times)) is not None)
        if not names and cell not in ([], ()):  # an empty list says that there are none
            self.blank += times
        return names

    def _one(self, cell: object, times: int) -> str | None:
        name = "" if cell is None else class_name(str(cell))
        if name and name.lower() in MISSING and not self._keep:
            self.missing[name] += times
            return None
        return name or None

    def notes(self, title: str) -> Iterator[str]:
        """Yield a note on words that were read as a missing value."""
        if self.missing:
            yield (
                f"{title}: {plural(self.missing.total(), 'label')} ({listed(sorted(self.missing))}) stand for a "
                "missing value, so these images have no label; if they are names of classes, add --keep-missing-words"
            )
        if self.blank:
            yield (
                f"{title}: {plural(self.blank, 'image')} without a label in a column of several labels are learned as "
                "images of none of the classes; if their classes are unknown, leave these rows out"
            )


def whole_numbers(names: Iterable[str]) -> dict[str, str]:
    """Return the whole number of each name such as "1.0", which is how pandas writes class numbers in a column with a
    missing value. Return nothing unless all names are whole numbers and some have a decimal point."""
    matches = {name: WHOLE.fullmatch(name) for name in names}
    if not all(matches.values()) or not any("." in name for name in matches):
        return {}
    return {name: match[1] for name, match in matches.items() if match is not None}


def refuse_joined(title: str, counts: Mapping[str, int], chosen: str | None = None) -> None:
    """Raise `DataError` if labels of several images join names of other classes, as "cat|fox" does, because an image
    can then have several labels, or if labels are lists as text, such as "['cat', 'fox']". `counts` holds the number of
    images of each class, and `chosen` the separator that the user chose."""
    if chosen is not None:
        return
    if lists := [name for name in counts if re.fullmatch(r"""\[\s*(["']).*\1[\s,]+(["']).*\2\s*\]""", name)]:
        raise DataError(
            f"{title}: labels such as {lists[0]} are lists that were written as texts; write them as lists in JSON "
            "lines, or as cat|fox with --label-separator '|'. If each of them is one class, add --label-separator none"
        )
    for separator in SEPARATORS:
        joined = {name: parts for name in counts if len(parts := _parts(name, separator)) > 1}
        used = Counter(part for parts in joined.values() for part in set(parts))
        known = {part for part in used if part in counts or (separator in NEVER_IN_NAMES and used[part] > 1)}
        found = [name for name, parts in joined.items() if known.issuperset(parts)]
        rows = sum(counts[name] for name in found)
        if rows > 1:
            raise DataError(
                f"{title}: {plural(rows, 'label')} such as {found[0]!r} join the names of other classes; if they are "
                f"several labels of one image, add --label-separator {separator!r}; if each of them is one class, add "
                "--label-separator none"
            )


def refuse_flags(title: str, lists: Iterable[Iterable[object]]) -> None:
    """Raise `DataError` if lists such as [0, 1, 0] have a 0 or a 1 for each class, instead of the labels of an image.
    They have the same length, and some of them repeat a value."""
    found = {tuple(str(one).lower() for one in labels) for labels in lists}
    repeated = next((labels for labels in found if len({*labels}) < len(labels)), None)
    if (
        repeated is not None
        and len({*map(len, found)}) == 1
        and {*itertools.chain(*found)} <= {"0", "1", "false", "true"}
    ):
        raise DataError(
            f"{title}: lists of labels such as [{', '.join(repeated)}] seem to have a 0 or a 1 for each class; a list "
            "holds the labels of the image, so write [0, 2] for [1, 0, 1]. If the numbers are labels, write each of "
            "them once"
        )


def _parts(name: str, separator: str) -> list[str]:
    return [part.strip() for part in name.split(separator) if part.strip()]


def similar_names(title: str, classes: Sequence[str]) -> Iterator[Fault]:
    """Yield a fault if names of classes differ only in case, or in the number of spaces."""
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault(" ".join(name.casefold().split()), []).append(name)
    if groups := [names for names in alike.values() if len(names) > 1]:
        shown = listed([" and ".join(map(repr, names)) for names in groups])
        yield Fault(
            "similar-names", "warning", sum(map(len, groups)),
            f"{title} has classes whose names differ only in case or spaces: {shown}",
            "Each spelling is a class of its own.",
            "If they are one class, give its images the same label.",
        )  # fmt: skip


K = TypeVar("K", bound=str)
"""The name of a split."""

HIGHEST = 100_000
"""Limit for labels without class names. A column with a label of this number or more does not hold class numbers."""


class LabelColumn(NamedTuple):
    """The labels of some rows, and the form in which a file stores them."""

    targets: Targets
    """The names are those that the file states, or else those in use: text in its order, or numbers."""
    form: Literal["numbers", "numbers with names", "text"]

    @property
    def described(self) -> str:
        return f"{'lists of ' if self.targets.kind == 'classes' else ''}{self.form}"

    def rows(self, chosen: Int64[np.ndarray, " m"]) -> LabelColumn:
        """Return the labels of some rows."""
        return LabelColumn(self.targets.rows(chosen), self.form).in_order()

    def in_order(self) -> LabelColumn:
        """Return the labels with names in their order, without unused ones, unless the file states the names."""
        if self.form == "numbers with names":
            return self
        own = self.targets.names
        used = [own[place] for place in np.unique(self.targets.values[self.targets.values >= 0]).tolist()]
        names = tuple(sorted(used, key=int) if self.form == "numbers" else sorted(used))
        places = {name: place for place, name in enumerate(names)}
        return self._replace(targets=self.targets.renumbered([places.get(name, -1) for name in own], names))

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each class that is named by text, if every row has at most one."""
        if self.form != "text" or self.targets.kind == "classes":
            return {}
        names, values = self.targets.names, self.targets.values
        return dict(zip(names, np.bincount(values[values >= 0], minlength=len(names)).tolist(), strict=True))


def number_column(numbers: Int64[np.ndarray, " n"], starts: Int64[np.ndarray, " starts"] | None) -> LabelColumn:
    """Return labels that are numbers without names, or -1 for no label. `starts` has the position at which each row
    begins, if rows have several labels."""
    used = np.unique(numbers[numbers >= 0])
    values = np.where(numbers < 0, -1, np.searchsorted(used, numbers))
    return LabelColumn(label_targets(values, starts, tuple(map(str, used.tolist()))), "numbers")


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
        reader.blank += int((numbers < 0).sum())
        found = [[places[name] for name in some] for some in several]
        parts = [found[number] if number >= 0 else [] for number in numbers.tolist()]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        values = np.fromiter(itertools.chain.from_iterable(parts), np.int64)
    else:
        first = [*(places[some[0]] if some else -1 for some in several), -1]  # the last element is for null
        values = np.array(first, np.int64)[numbers]
    return LabelColumn(label_targets(values, starts, names), "text").in_order()


def label_targets(
    values: Int64[np.ndarray, " n"], starts: Int64[np.ndarray, " starts"] | None, names: tuple[str, ...]
) -> Targets:
    """Return labels as targets. In lists of labels, those that repeat another and those that are -1 are dropped."""
    if starts is None:
        return Targets("class", names, values)
    owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    pairs = np.unique(np.stack([owners, values], axis=1)[values >= 0], axis=0)
    sizes = np.bincount(pairs[:, 0], minlength=len(starts) - 1)
    return Targets("classes", names, pairs[:, 1], np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))


def join(files: Sequence[str], parts: Sequence[LabelColumn]) -> LabelColumn:
    """Return the labels of several files as one column. Raises `DataError` if the files disagree about their classes.

    `files` are the names of the files, for messages.
    """
    for file, part in zip(files, parts, strict=True):
        _must_fit(file, part, files[0], parts[0])
    return LabelColumn(Targets.joined([part.targets for part in parts]), parts[0].form).in_order()


def number(
    title: str, labels: Mapping[K, LabelColumn], known: tuple[str, ...] | None
) -> tuple[dict[K, Targets], tuple[Fault, ...]]:
    """Return the labels of every split as class indices, and the faults.

    If `known` is None, the training split determines the classes. A label that only held-out splits have is then a
    fault, and its rows become unlabelled. Otherwise a label that is a number without a name is the class that is called
    by this number. If two classes have the same name, the class index is appended to the second
    name. For example, the second "crane" of ImageNet becomes "crane (517)". Raises `DataError` if the splits have
    different classes, or if a label is not in `known`.
    """
    first, train = next(iter(labels.items()))
    for split, other in labels.items():
        _must_fit(f"the {split} split of {title}", other, f"the {first} split", train)
    own = train.targets.names
    if train.form == "numbers with names":
        own = distinct_names(map(class_name, own))
        check_names(title, own)
        labels = {split: one._replace(targets=replace(one.targets, names=own)) for split, one in labels.items()}
    by_number = train.form == "numbers" and known is None
    classes = known or (_numbered_classes(title, own) if by_number else own)
    places = {name: place for place, name in enumerate(classes)}
    found: dict[K, Targets] = {}
    faults = []
    for split, column in labels.items():
        targets = column.targets
        if unknown := [name for name in targets.names if name not in places]:
            message = (
                f"{title} has the label {unknown[-1]}, but the labels of {len(classes)} classes go from 0 to "
                f"{len(classes) - 1}"
                if by_number
                else f"{title}: the {split} split has unknown classes: {listed(unknown)}; the known classes are: "
                f"{listed(classes, 20)}"
            )
            if known is not None:
                raise DataError(message)
            only = targets.renumbered([0 if name in unknown else -1 for name in targets.names], ("one of them",))
            rows = only.known if only.starts is None else np.diff(only.starts) > 0
            faults.append(unknown_class(split, int(rows.sum()), message))
        found[split] = targets.renumbered([places.get(name, -1) for name in targets.names], classes)
    return found, tuple(faults)


def _numbered_classes(title: str, numbers: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of labels that are numbers without names: the numbers up to the highest one."""
    most = int(numbers[-1]) if numbers else -1
    if most >= HIGHEST:
        raise DataError(
            f"{title}: the labels have no names and go up to {most:,}, so they are not class numbers; choose "
            "another column by adding ?label=COLUMN to the data's name"
        )
    return tuple(map(str, range(most + 1)))


def _must_fit(title: str, one: LabelColumn, other_title: str, other: LabelColumn) -> None:
    if one.described != other.described:
        raise DataError(
            f"{title} and {other_title} have labels of different kinds: {one.described} and {other.described}; all "
            "files need the same kind"
        )
    mine, theirs = one.targets.names, other.targets.names
    if one.form == "numbers with names" and mine != theirs:
        pairs = enumerate(zip(mine, theirs, strict=False))
        place = next((place for place, (here, there) in pairs if here != there), None)
        difference = (
            f"{len(mine)} names and {len(theirs)} names"
            if place is None
            else f"class {place} is {mine[place]!r} and {theirs[place]!r}"
        )
        raise DataError(f"{title} and {other_title} state different classes: {difference}")


def distinct_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of classes without a repetition. A name that an earlier class has gets its class index appended
    until it is a new name."""
    found: dict[str, None] = {}
    for place, name in enumerate(names):
        while name in found:
            name = f"{name} ({place})"
        found[name] = None
    return tuple(found)


class MissingColumn(DataError):
    """Raised if a table or a file has no column of a given name."""


def number_of(where: str, column: str, value: Any) -> float:
    """Return the number in a cell, or NaN if the cell is empty or has a word for a missing value. `where` names the
    file and the row in messages.

    Raise `DataError` if the cell holds text or an infinite number.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in {"", *MISSING}):
        return math.nan
    try:
        number = math.inf if isinstance(value, bool | list | dict) or "_" in str(value) else float(value)
    except ValueError:
        number = math.inf
    if math.isinf(number):
        raise DataError(
            f"{where}: column {column!r} holds {value!r}, which is not a finite number; regression needs "
            "numbers, so leave the cell empty if the number is unknown"
        )
    return number


def holds_numbers(values: Iterable[Any]) -> bool:
    """Return True if some values are numbers, and all others are empty."""
    try:
        found = [number_of("", "", value) for value in values]
    except DataError:
        return False
    return not all(map(math.isnan, found))


def places_of(title: str, wanted: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Return the index in `columns` of each wanted column, ignoring case. Raise `MissingColumn` if a column is
    missing."""
    lower = [column.lower() for column in columns]
    for name in wanted:
        if name not in columns and name.lower() not in lower:
            raise MissingColumn(f"{title} has no column {name!r} of numbers; {nearest(name, columns)}")
    return [list(columns).index(name) if name in columns else lower.index(name.lower()) for name in wanted]
