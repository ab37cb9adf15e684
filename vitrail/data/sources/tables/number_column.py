"""Numbers of many rows as one array. They are regression targets from the columns of a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from vitrail.data.labels import is_missing
from vitrail.errors import DataError, nearest


class MissingColumn(DataError):
    """Raised if a table or a file has no column of a given name."""


@dataclass(frozen=True, eq=False)
class NumberColumns:
    """The numbers of some rows."""

    values: Float64[np.ndarray, "n k"]
    """One row per sample and one column per number. An unknown number is NaN."""

    def __getitem__(self, row: int) -> tuple[float, ...] | None:
        """Return the numbers of a row, or None if all numbers of the row are unknown."""
        values = self.values[row]
        return None if np.isnan(values).all() else tuple(values.tolist())

    def __len__(self) -> int:
        return len(self.values)


def number_of(where: str, column: str, value: Any) -> float:
    """Return the number in a cell, or NaN if the cell is empty or has a word for a missing value. `where` names the
    file and the row in messages.

    Raise `DataError` if the cell holds text or an infinite number.
    """
    if value is None or (isinstance(value, str) and is_missing(value)):
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
