"""Tables of image files, as CSV, TSV or JSON lines. A table has a column of paths, and a column of labels or a 0/1
column per class.

Paths are relative to the table. The first row names the columns, and the columns are recognised by their names:

    path,label          file,rose,daisy        {"file_name": "1.jpg", "label": "rose"}
    a/1.jpg,rose        1.jpg,1,0
    a/2.jpg,daisy       2.jpg,1,1

A column called split, with the values train, val and test, divides the table into splits. Alternatively, a folder can
hold one table per split, and each table is named after its split. For regression, the caller names the columns of
numbers, and labels are not read.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.faults import Fault, has_predictions
from vitrail.data.source import Target
from vitrail.data.sources.files import FileSource, inodes_in
from vitrail.data.sources.folder import class_folders
from vitrail.data.sources.tables.number_column import MissingColumn, NumberColumns, holds_numbers, number_of, places_of
from vitrail.data.splits import (
    CHOICE,
    SPLITS,
    Split,
    SplitNames,
    Splits,
    by_split,
    check_chosen,
    left_out,
    split_of,
    splits_from,
)
from vitrail.errors import DataError, listed, nearest, plural

__all__ = ["SUFFIXES", "TableSource", "open_table", "tables_in"]

SUFFIXES = (".csv", ".tsv", ".jsonl")
PATHS = ("path", "file", "file_name", "filename", "filepath", "image", "image_path", "image_id")
LABELS = ("label", "labels", "class", "class_name", "category", "target")
SPLIT_COLUMN = "split"


class _Row(NamedTuple):
    path: str
    label: str | tuple[str, ...] | None
    """The name of the image's class, or the names of all classes of the image. None if the cell is empty."""
    split: str
    line: int
    numbers: tuple[float, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.label if isinstance(self.label, tuple) else () if self.label is None else (self.label,)


class _Table(NamedTuple):
    path: Path
    rows: list[_Row]
    classes: tuple[str, ...] | None
    """The names of the 0/1 columns, or None if there are no such columns."""


class TableSource(FileSource):
    """The image files that the rows of a table name, in the order of the rows.

    `classes` holds the class names, or the names of the numbers if the targets are numbers. Raises `DataError` if a
    path is absolute, leads out of the folder, does not exist or is repeated, or if a label is not among `classes`.
    """

    def __init__(self, table: Path, rows: list[_Row], classes: tuple[str, ...]) -> None:
        if rows[0].numbers:
            keys = [_inside(table, row) for row in rows]
            values = NumberColumns(np.array([row.numbers for row in rows], np.float64))
            super().__init__(table.parent, keys, values, _inodes(table, rows, keys), classes)
            return
        numbers = {name: number for number, name in enumerate(classes)}
        keys = []
        labels: list[Target] = []
        for row in rows:
            keys.append(_inside(table, row))
            if unknown := [name for name in row.names if name not in numbers]:
                raise DataError(_unknown_label(table, row.line, unknown[0], classes))
            found = tuple(sorted({numbers[name] for name in row.names}))
            labels.append(found if isinstance(row.label, tuple) else found[0] if found else None)
        super().__init__(table.parent, keys, labels if classes else None, _inodes(table, rows, keys), classes)


def tables_in(folder: Path, chosen: SplitNames | None = None) -> list[Path]:
    """Return the tables of a folder: those that are named after splits, else `metadata`, else the tables in its folders
    of splits, else the only table with a column of paths. Predictions are not among them. Raise `DataError` if several
    tables have such a column."""
    found = _tables(folder)
    named = [table for table in found if split_of(table.name, chosen) is not None]
    if tables := named or [table for table in found if table.stem.lower() == "metadata"]:
        return tables
    inner = [_tables(place) for place in class_folders(folder) if split_of(place.name, chosen) is not None]
    several = [one for some in inner for one in [table for table in some if table.stem.lower() == "metadata"] or some]
    if several or len(found) < 2:
        return several or found
    if _has_paths(found[0]):
        raise DataError(
            f"{folder} has several tables: {listed([table.name for table in found])}; name one of them, such as "
            f"{found[0]}, or choose one for each split: {CHOICE}"
        )
    return []


def _tables(folder: Path) -> list[Path]:
    """Return the tables directly in a folder. If some of them have a column of paths, the others are left out."""
    found = sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in SUFFIXES and entry.is_file())
    found = [table for table in found if not has_predictions(table)]
    useful = [table for table in found if _has_paths(table)]
    empty = [table for table in found if split_of(table.name) and not table.stat().st_size]
    return sorted(useful + empty) if useful else found


def _has_paths(table: Path) -> bool:
    try:
        with table.open(encoding="utf-8-sig") as file:
            first = file.readline(2**20)
        if table.suffix.lower() == ".jsonl":
            fields = json.loads(first)
            names = list(fields) if isinstance(fields, dict) else []
        else:
            names = next(csv.reader([first], delimiter=_delimiter(table)), [])
    except (OSError, ValueError, RecursionError, csv.Error):
        return False
    return any(name.strip().lower() in PATHS for name in names)


def open_table(
    tables: list[Path],
    classes: tuple[str, ...] | None,
    *,
    numbers: tuple[str, ...] = (),
    unlabelled: bool = False,
    chosen: SplitNames | None = None,
    is_folder: bool = False,
) -> Splits:
    """Return the splits of one table, which a column can divide, or of one table per split.

    If `is_folder` is true, the name of a single table also states its split. If `numbers` names columns, the numbers in
    these columns are the targets. Otherwise the labels are the targets. If `unlabelled` is true, a table without labels
    is accepted. Held-out splits without labels or without rows are skipped with a note. If `classes` is None, rows of
    held-out splits with a label that no training row has are left out, and are a fault. Raises `DataError`.
    """
    root = Path(os.path.commonpath([table.parent for table in tables]))
    where = str(root if len(tables) > 1 else tables[0])
    faults: list[Fault] = []
    notes: tuple[str, ...] = ()
    names = [table.relative_to(root).as_posix() for table in tables]
    if len(tables) == 1 and not (is_folder and (split_of(names[0], chosen) or split_of(root.name))):
        parts, notes = _divided(_read(tables[0], numbers, unlabelled), chosen)
    else:
        by_name, notes = by_split(where, names, chosen)
        for split, some in by_name.items():
            if len(some) > 1:
                raise DataError(
                    f"{where} has {' and '.join(some)}, but only one of them can be the {split} split; remove or "
                    f"rename the others, or choose one: {CHOICE}"
                )
        parts = {}
        for split, (name,) in by_name.items():
            if split != "train" and not (root / name).stat().st_size:
                notes += (f"{root / name}: the {split} split is skipped, because the file is empty",)
                continue
            try:
                parts[split] = _read(root / name, numbers, unlabelled or split != "train")
            except MissingColumn:
                if split == "train":
                    raise
                notes += (f"{root / name}: the {split} split is skipped, because it has no column of numbers",)
    for split, part in list(parts.items()):
        has_labels = numbers or unlabelled or any(row.label is not None for row in part.rows)
        if split != "train" and len(parts) > 1 and not (part.rows and has_labels):
            reason = "none of its images has a label" if part.rows else "it has no rows"
            notes += (f"{part.path}: the {split} split is skipped, because {reason}",)
            del parts[split]
    for part in parts.values():
        if not part.rows:
            raise DataError(f"{part.path} has no rows; each image needs a row")
    if len({isinstance(part.rows[0].label, tuple) for part in parts.values()}) > 1:
        raise DataError(
            f"{where}: one split has one label per image, and another has several; use the same form in all splits"
        )
    if numbers:
        classes = numbers
    elif classes is None:
        first = "train" if "train" in parts else next(iter(parts))
        classes = _classes(parts[first], unlabelled)
        for split in [split for split in parts if split != first]:
            part, known = parts[split], set(classes)
            strange = [row for row in part.rows if not known.issuperset(row.names)]
            if strange:
                faults.append(_unknown_class(part.path, split, strange, classes))
                parts[split] = part._replace(rows=[row for row in part.rows if known.issuperset(row.names)])
        parts = {split: part for split, part in parts.items() if part.rows}
    sources = {split: TableSource(part.path, part.rows, classes) for split, part in parts.items()}
    return splits_from(sources, notes, faults)


def _read(path: Path, numbers: Sequence[str], unlabelled: bool) -> _Table:
    """Return the rows of a table. Paths and labels are not checked."""
    read = _read_json if path.suffix.lower() == ".jsonl" else _read_csv
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = read(path, file, numbers, unlabelled)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path} as a table in UTF-8: {error}") from error
    return table


def _delimiter(table: Path) -> str:
    return "\t" if table.suffix.lower() == ".tsv" else ","


def _read_csv(table: Path, file: Iterable[str], numbers: Sequence[str], unlabelled: bool) -> _Table:
    lines = csv.reader(file, delimiter=_delimiter(table), strict=True)
    header = [name.strip() for name in next(lines, [])]
    cells = [(lines.line_num, line) for line in lines if line]
    for number, line in cells:
        if len(line) != len(header):
            raise DataError(
                f"{table}, line {number}: the line has {plural(len(line), 'cell')}, but the first line names "
                f"{plural(len(header), 'column')}"
            )
    path, label, split = _columns(table, header)
    if numbers:
        pairs = list(zip(numbers, places_of(str(table), numbers, header), strict=True))
        return _Table(
            table,
            [
                _Row(line[path], None, _cell(line, split), n, _numbers(f"{table}, line {n}", pairs, line))
                for n, line in cells
            ],
            None,
        )
    others = [column for column in range(len(header)) if column not in (path, split)]
    if label is None and len(others) >= 2 and all(line[column] in ("0", "1") for _, line in cells for column in others):
        rows = [
            _Row(line[path], tuple(header[c] for c in others if line[c] == "1"), _cell(line, split), number)
            for number, line in cells
        ]
        return _Table(table, rows, tuple(header[column] for column in others))
    if label is None and len(others) == 1:
        (label,) = others
    if label is None and unlabelled:
        return _Table(table, [_Row(line[path], None, _cell(line, split), number) for number, line in cells], None)
    if label is None:
        raise DataError(
            f"{table} has no column of labels: its columns are {', '.join(header)}; the column of labels "
            f"must be called {' or '.join(LABELS[:3])}, unless there is one column of 0 and 1 per class"
            f"{_regression_hint([(header[c], [line[c] for _, line in cells]) for c in others])}"
        )
    return _Table(table, [_Row(line[path], line[label] or None, _cell(line, split), n) for n, line in cells], None)


def _read_json(table: Path, file: Iterable[str], numbers: Sequence[str], unlabelled: bool) -> _Table:
    rows = []
    seen: dict[str, None] = {}
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{table}, line {number}: the line is not valid JSON ({error})") from None
        if not isinstance(fields, dict):
            raise DataError(
                f"{table}, line {number}: the line is a JSON {type(fields).__name__}; it must be an object with named "
                "fields"
            )
        names, values = list(fields), list(fields.values())
        path, label, split = _columns(table, names)
        if numbers:
            seen |= dict.fromkeys(names)
            lower = {name.lower(): value for name, value in fields.items()}
            values_of = [fields.get(column, lower.get(column.lower())) for column in numbers]
            pairs = [(column, place) for place, column in enumerate(numbers)]
            targets = _numbers(f"{table}, line {number}", pairs, values_of)
            rows.append(_Row(str(values[path]), None, _cell(values, split), number, targets))
            continue
        if label is None and unlabelled:
            rows.append(_Row(str(values[path]), None, _cell(values, split), number))
            continue
        if label is None:
            raise DataError(
                f"{table}, line {number}: there is no label among the fields {', '.join(names)}; the field of the "
                f"label must be called {' or '.join(LABELS[:3])}"
                f"{_regression_hint([(name, [value]) for name, value in fields.items()])}"
            )
        rows.append(_Row(str(values[path]), _json_label(values[label]), _cell(values, split), number))
    places_of(str(table), numbers if rows else (), list(seen))
    if len({isinstance(row.label, tuple) for row in rows}) > 1:
        raise DataError(f"{table}: some lines have one label and others a list of labels; use one form in all lines")
    return _Table(table, rows, None)


def _json_label(value: Any) -> str | tuple[str, ...] | None:
    if isinstance(value, list):
        return tuple(str(one) for one in value if not _is_unknown(one))
    return None if _is_unknown(value) else str(value)


def _is_unknown(label: Any) -> bool:
    """Return True for null, for an empty text, and for NaN, which Python writes for a missing value."""
    return label is None or label == "" or label != label


def _numbers(where: str, columns: Sequence[tuple[str, int]], line: Sequence[Any]) -> tuple[float, ...]:
    """Return the numbers in some columns of a row. The columns are given by name and position."""
    return tuple(number_of(where, column, line[place]) for column, place in columns)


def _columns(table: Path, header: list[str]) -> tuple[int, int | None, int | None]:
    """Return the positions of the path, label and split columns. The position of a missing label or split column is
    None.

    If several columns could be the path or the label, the order of `PATHS` or `LABELS` decides.
    """
    lower = [name.lower() for name in header]
    if len(set(lower)) != len(lower):
        raise DataError(f"{table} names a column twice: {', '.join(header)}; give each column a name of its own")

    def find(names: tuple[str, ...]) -> int | None:
        return next((lower.index(name) for name in names if name in lower), None)

    path = find(PATHS)
    if path is None:
        raise DataError(
            f"{table} has no column of paths: its columns are {', '.join(header) or 'none'}; the column of paths "
            f"must be called {' or '.join(PATHS[:3])}"
        )
    return path, find(LABELS), find((SPLIT_COLUMN,))


def _regression_hint(columns: Iterable[tuple[str, Sequence[Any]]]) -> str:
    """Return the end of a message that names the option for the columns that hold numbers only, or ""."""
    found = [name for name, values in columns if holds_numbers(values)]
    return f"; to predict numbers, name their columns: --numbers {' '.join(map(shlex.quote, found))}" if found else ""


def _cell(line: list[Any], column: int | None) -> str:
    return "" if column is None or line[column] is None else str(line[column])


def _divided(table: _Table, chosen: SplitNames | None) -> tuple[dict[Split, _Table], tuple[str, ...]]:
    """Return the rows of each split, and notes. Without a column of splits, all rows are of the training split."""
    if not any(row.split for row in table.rows):
        if chosen:
            raise DataError(f"{table.path} has no column {SPLIT_COLUMN!r} with the values that --splits chooses")
        return {"train": table}, ()
    parts: dict[Split, list[_Row]] = {}
    others: dict[str, None] = {}
    for row in table.rows:
        split = split_of(row.split, chosen)
        if split is not None:
            parts.setdefault(split, []).append(row)
        elif chosen is not None:
            others[row.split] = None
        else:
            raise DataError(
                f"{table.path}, line {row.line}: the split {row.split!r} is not one of train, val, test; choose the "
                f"values of the splits: {CHOICE}"
            )
    where = f"{table.path}, column {SPLIT_COLUMN!r}"
    if chosen is not None:
        check_chosen(where, chosen, parts, list(dict.fromkeys(row.split for row in table.rows)))
    ordered = {split: table._replace(rows=parts[split]) for split in SPLITS if split in parts}
    return ordered or {"train": table}, left_out(where, list(others)) if chosen else ()


def _classes(table: _Table, unlabelled: bool) -> tuple[str, ...]:
    """Return the class names: the names of the 0/1 columns, or else the sorted labels. Numeric labels are sorted by
    value, and labels of the same value, such as 1 and 01, as text."""
    if table.classes is not None:
        return table.classes
    names = {name for row in table.rows for name in row.names}
    if not names and not unlabelled:
        raise DataError(f"{table.path} has no labels: the cells of the label column are all empty")
    by_value = all(name.isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if by_value else 0, name)))


def _unknown_class(table: Path, split: Split, rows: list[_Row], classes: tuple[str, ...]) -> Fault:
    """Return the fault of rows of a held-out split with labels that no training row has."""
    unknown = next(name for name in rows[0].names if name not in classes)
    return Fault(
        "unknown-class", "error", len(rows), _unknown_label(table, rows[0].line, unknown, classes),
        "Training refuses the data, because a network cannot learn a class without training images. This check leaves "
        f"out {plural(len(rows), 'row')} of the {split} split.",
        "Add training images of the class, or correct or remove these rows.",
    )  # fmt: skip


def _unknown_label(table: Path, line: int, name: str, classes: tuple[str, ...]) -> str:
    return f"{table}, line {line}: the label {name!r} is not among the classes; {nearest(name, classes)}"


def _inside(table: Path, row: _Row) -> str:
    path = PurePosixPath(row.path.replace(os.sep, "/"))
    if path.is_absolute() or ".." in path.parts or not row.path.strip():
        raise DataError(
            f"{table}, line {row.line}: the path {row.path!r} is not inside the table's folder; give relative paths"
        )
    return path.as_posix()


def _inodes(table: Path, rows: list[_Row], keys: list[str]) -> list[int]:
    """Return the inode of the file of each key. Raises `DataError` for missing and repeated files.

    Every folder is listed once, because a million calls of stat would take longer.
    """
    listings: dict[str, dict[str, int]] = {}
    inodes = []
    seen: dict[str, int] = {}
    for row, key in zip(rows, keys, strict=True):
        folder, _, name = key.rpartition("/")
        if folder not in listings:
            listings[folder] = inodes_in(table.parent / folder)
        inode = listings[folder].get(name)
        if inode is None:
            raise DataError(f"{table}, line {row.line}: the file {table.parent / key} does not exist")
        if key in seen:
            raise DataError(
                f"{table}, line {row.line}: {key} is also in line {seen[key]}; each image may have only one row"
            )
        seen[key] = row.line
        inodes.append(inode)
    return inodes
