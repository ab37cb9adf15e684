"""A column of a table that divides its rows into splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vitrail.data.splits import CHOICE, SPLITS, Split, SplitNames, check_chosen, left_out, split_of
from vitrail.errors import DataError, listed

USUAL = "split"
"""The column that always divides a table. Others do so only if all their values are names of splits."""

FLAGS = {"is_valid": "validation", "is_val": "validation", "is_validation": "validation", "is_test": "test"}
"""Columns of yes and no, each with the split of yes. The others are training data."""

NAMES = (USUAL, "set", "subset", "dataset", "data_set", "partition", "phase", "fold", *FLAGS)

TRUE = frozenset({"1", "1.0", "true"})
FALSE = frozenset({"0", "0.0", "false"})


def find_split(
    title: str, columns: Sequence[str], values_of: Callable[[str], Sequence[Any]], chosen: SplitNames | None
) -> tuple[str | None, list[str], tuple[str, ...]]:
    """Return the column that divides a table, its value in each row, and notes. The notes are about a column of another
    name than split, and about columns that could divide the table and do not.

    The values of a column of yes and no are returned as the names of splits.
    """
    lower = {column.lower(): column for column in columns}
    notes: list[str] = []
    found: tuple[str | None, list[str]] = (None, [])
    for name in (name for name in NAMES if name in lower):
        column = lower[name]
        values = ["" if value is None else str(value).strip() for value in values_of(column)]
        if name in FLAGS and all(value.lower() in TRUE | FALSE for value in values):
            values = [FLAGS[name] if value.lower() in TRUE else "train" for value in values]
        if not any(values):
            continue
        parts = {split_of(value, chosen) for value in set(values)}
        divides = parts != {None} if chosen else None not in parts or name == USUAL
        if chosen == {}:
            continue
        if found[0] is None and divides:
            found = (column, values)
            if name != USUAL and not chosen:
                notes.append(
                    f"{title}: column {column!r} divides the rows into splits; to read all rows as training data, add "
                    "--splits none"
                )
        else:
            shown = listed(sorted(set(values)), 4)
            notes.append(
                f"{title}: column {column!r} ({shown}) does not divide the rows into splits; to choose splits by its "
                f"values, add {CHOICE}"
            )
    return (*found, tuple(notes))


def divide(
    where: str, values: Sequence[str], chosen: SplitNames | None, row_name: Callable[[int], str]
) -> tuple[dict[Split, list[int]], tuple[str, ...]]:
    """Return the rows of each split, of which `values` holds the name in each row, and notes. `row_name` names a row in
    messages. Raise `DataError` for a name that is not one of a split."""
    parts: dict[Split, list[int]] = {}
    others: dict[str, None] = {}
    for row, value in enumerate(values):
        split = split_of(value, chosen)
        if split is not None:
            parts.setdefault(split, []).append(row)
        elif chosen is not None:
            others[value] = None
        else:
            raise DataError(
                f"{where}, {row_name(row)}: the split {value!r} is not one of train, val, test; choose the values of "
                f"the splits: {CHOICE}"
            )
    if chosen:
        check_chosen(where, chosen, parts, list(dict.fromkeys(values)))
    return {split: parts[split] for split in SPLITS if split in parts}, left_out(where, list(others))
