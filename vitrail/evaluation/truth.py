"""The true targets of samples: one class each, several classes each, or numbers.

Code that depends on the kind of target is in methods of `Truth`, so most code of evaluators, reports and files is the
same for all kinds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from jaxtyping import Bool, Float64, Int64, Shaped, UInt8

from vitrail.data.source import Source, Target, TargetKind, class_indices, target_kind
from vitrail.errors import DataError

T = TypeVar("T", bound="Truth")


class Truth(ABC):
    """The true targets of n samples, in the order of the samples.

    `columns` is the number of classes or of numbers. A model for these targets has the same number of outputs.
    """

    kind: ClassVar[TargetKind]
    values: Shaped[np.ndarray, "n ..."]

    def __len__(self) -> int:
        return len(self.values)

    @property
    @abstractmethod
    def columns(self) -> int: ...

    @property
    @abstractmethod
    def known(self) -> Bool[np.ndarray, " n"]:
        """Mask of the samples with a known label or with at least one known number."""

    def rows(self: T, chosen: Shaped[np.ndarray, " m"] | slice) -> T:
        """Return the targets of some samples, chosen by a mask, by indices or by a slice."""
        return replace(cast(Any, self), values=self.values[chosen])

    @abstractmethod
    def restricted(self: T, columns: Sequence[int]) -> T:
        """Return the targets for a model that has only the outputs `columns`, in this order."""

    @abstractmethod
    def hits(self, likeliest: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Return True for each sample whose likeliest class is a true class. Raise `DataError` if targets are
        numbers."""

    @abstractmethod
    def add_to(
        self, sums: Float64[np.ndarray, "b columns"], rows: Int64[np.ndarray, " b"], weights: Float64[np.ndarray, " b"]
    ) -> None:
        """Add weight times target to each row of `sums`, for the samples `rows`. Unknown targets add nothing."""

    @abstractmethod
    def groups(self) -> Int64[np.ndarray, " n"]:
        """Return the stratum of each sample for stratified draws. Samples with several labels or numbers form one
        stratum.
        """

    @abstractmethod
    def plain(self, row: int) -> int | list[int] | list[float | None] | None:
        """Return the target of one sample as a JSON value. An unknown class or number is None."""


@dataclass(frozen=True, eq=False)
class SingleLabels(Truth):
    """One class for each sample. Raise `DataError` for a label that is not the index of a class."""

    kind = "class"
    values: Int64[np.ndarray, " n"]
    """Indices of classes. -1 marks a sample without a label."""
    num_classes: int

    def __post_init__(self) -> None:
        wrong = np.flatnonzero((self.values < -1) | (self.values >= self.num_classes))
        if len(wrong):
            raise DataError(
                f"label {self.values[wrong[0]]} of row {wrong[0]} is not one of {self.num_classes} classes, numbered "
                "from 0"
            )

    @property
    def columns(self) -> int:
        return self.num_classes

    @property
    def known(self) -> Bool[np.ndarray, " n"]:
        return self.values >= 0

    def restricted(self, columns: Sequence[int]) -> SingleLabels:
        places = np.full(self.num_classes + 1, -1, np.int64)  # the last element is for the label -1
        places[list(columns)] = np.arange(len(columns))
        return replace(self, values=places[self.values], num_classes=len(columns))

    def hits(self, likeliest: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        return self.values == likeliest

    def add_to(
        self, sums: Float64[np.ndarray, "b columns"], rows: Int64[np.ndarray, " b"], weights: Float64[np.ndarray, " b"]
    ) -> None:
        known = np.flatnonzero(self.known[rows])
        sums[known, self.values[rows[known]]] += weights[known]

    def groups(self) -> Int64[np.ndarray, " n"]:
        return self.values

    def plain(self, row: int) -> int | None:
        label = int(self.values[row])
        return None if label < 0 else label


@dataclass(frozen=True, eq=False)
class MultiLabels(Truth):
    """Any number of classes for each sample."""

    kind = "classes"
    values: UInt8[np.ndarray, "n classes"]
    """1 for each true class of a sample, and 0 for every other class."""

    @property
    def columns(self) -> int:
        return self.values.shape[1]

    @property
    def known(self) -> Bool[np.ndarray, " n"]:
        return np.ones(len(self), np.bool_)

    def restricted(self, columns: Sequence[int]) -> MultiLabels:
        return replace(self, values=self.values[:, list(columns)])

    def hits(self, likeliest: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        return np.take_along_axis(self.values, likeliest[:, None], axis=1)[:, 0] > 0

    def add_to(
        self, sums: Float64[np.ndarray, "b columns"], rows: Int64[np.ndarray, " b"], weights: Float64[np.ndarray, " b"]
    ) -> None:
        sums += weights[:, None] * self.values[rows]

    def groups(self) -> Int64[np.ndarray, " n"]:
        return np.zeros(len(self), np.int64)

    def plain(self, row: int) -> list[int]:
        return np.flatnonzero(self.values[row]).tolist()


@dataclass(frozen=True, eq=False)
class Numbers(Truth):
    """One or several numbers for each sample."""

    kind = "numbers"
    values: Float64[np.ndarray, "n outputs"]
    """The numbers. NaN marks an unknown number."""
    names: tuple[str, ...] = ()
    """Names of the outputs, or () if they have none."""

    @property
    def columns(self) -> int:
        return self.values.shape[1]

    @property
    def known(self) -> Bool[np.ndarray, " n"]:
        return ~np.isnan(self.values).all(axis=1)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs. Outputs without names are numbered from 1."""
        return self.names or tuple(str(output + 1) for output in range(self.columns))

    def restricted(self, columns: Sequence[int]) -> Numbers:
        names = tuple(self.names[column] for column in columns) if self.names else ()
        return replace(self, values=self.values[:, list(columns)], names=names)

    def hits(self, likeliest: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        raise DataError("accuracy needs classes, but these samples have numbers; measure the errors instead")

    def add_to(
        self, sums: Float64[np.ndarray, "b columns"], rows: Int64[np.ndarray, " b"], weights: Float64[np.ndarray, " b"]
    ) -> None:
        sums += weights[:, None] * np.nan_to_num(self.values[rows])

    def groups(self) -> Int64[np.ndarray, " n"]:
        return np.zeros(len(self), np.int64)

    def plain(self, row: int) -> list[float | None]:
        return [None if math.isnan(number) else number for number in self.values[row].tolist()]


def truth_of(source: Source, rows: Iterable[int] | None = None) -> Truth:
    """Return the targets of all samples of a source, or of the samples `rows` in this order. No image is read."""
    chosen = range(len(source)) if rows is None else rows
    truth = truth_of_targets(map(source.target, chosen), target_kind(source), len(source.classes))
    return replace(truth, names=tuple(source.classes)) if isinstance(truth, Numbers) else truth


def truth_of_targets(targets: Iterable[Target], kind: TargetKind, columns: int) -> Truth:
    """Return these targets as a `Truth` with `columns` classes or numbers.

    If the kind is "none", every sample gets the label -1.
    """
    found = list(targets)
    if kind == "numbers":
        unknown = (math.nan,) * columns
        numbers = [unknown if target is None else target for target in found]
        return Numbers(np.array(numbers, np.float64).reshape(len(found), columns))
    if kind == "classes":
        values = np.zeros((len(found), columns), np.uint8)
        for row, target in zip(values, found, strict=True):
            row[list(class_indices(target))] = 1
        return MultiLabels(values)
    return SingleLabels(np.array([-1 if target is None else target for target in found], np.int64), columns)


def target_from_plain(value: Any, kind: TargetKind, columns: int) -> Target:
    """Return the target that `Truth.plain` wrote as a JSON value. Raise `ValueError` if the value does not fit."""
    if kind == "numbers":
        fits = isinstance(value, list) and len(value) == columns and all(map(_is_number, value))
        target: Target = tuple(math.nan if one is None else float(one) for one in value) if fits else None
    else:
        several = value if isinstance(value, list) else [] if value is None else [value]
        fits = all(type(one) is int and 0 <= one < columns for one in several)
        fits = fits and isinstance(value, list) == (kind == "classes")
        target = tuple(several) if kind == "classes" else value
    if not fits:
        raise ValueError(f"{value} is not a valid target for {columns} {'numbers' if kind == 'numbers' else 'classes'}")
    return target


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def check_known(source: Source, name: str) -> Truth:
    """Return the targets of a source. Raise `DataError` if no sample has a label or a number. No image is read.

    `name` is the name of the evaluator, for the message.
    """
    truth = truth_of(source)
    if not truth.known.any():
        what, needed = ("known number", "numbers") if truth.kind == "numbers" else ("label", "classes")
        raise DataError(f"none of {len(source):,} images has a {what}, but {name} needs to know their {needed}")
    return truth
