"""Tables of image files: a CSV or TSV with a column of paths and one of labels (or several of 0 and 1), or JSON lines.

Paths are relative to the table. The first row names the columns; which is which is found by name:

    path,label          file,rose,daisy        {"file_name": "1.jpg", "label": "rose"}
    a/1.jpg,rose        1.jpg,1,0
    a/2.jpg,daisy       2.jpg,1,1

A column called split, of train, val and test, divides the table; so do tables of these names in one folder.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vitrail.data.source import Target
from vitrail.data.sources.files import FileSource, inode_of
from vitrail.data.splits import Split, Splits, by_split, split_of
from vitrail.errors import DataError, nearest

__all__ = ["SUFFIXES", "TableSource", "open_table", "tables_in"]

SUFFIXES = (".csv", ".tsv", ".jsonl")
PATHS = ("path", "file", "file_name", "filename", "filepath", "image", "image_path", "image_id")
LABELS = ("label", "labels", "class", "class_name", "category", "target")
SPLIT_COLUMN = "split"


class _Row(NamedTuple):
    path: str
    label: str | tuple[str, ...] | None
    """The name of a class, or of all that hold; none where the cell is empty."""
    split: str
    line: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.label if isinstance(self.label, tuple) else () if self.label is None else (self.label,)


class _Table(NamedTuple):
    path: Path
    rows: list[_Row]
    classes: tuple[str, ...] | None
    """Names of the columns of 0 and 1, where there are such."""


class TableSource(FileSource):
    """The image files that rows of a table name, in their order.

    Raises `DataError` for a path that is absolute, leads out of the folder, is not there or comes twice, and for labels
    that are not among `classes`.
    """

    def __init__(self, table: Path, rows: list[_Row], classes: tuple[str, ...]) -> None:
        numbers = {name: number for number, name in enumerate(classes)}
        keys: list[str] = []
        labels: list[Target] = []
        for row in rows:
            keys.append(_inside(table, row))
            if unknown := [name for name in row.names if name not in numbers]:
                raise DataError(
                    f"{table}, line {row.line}: the label {unknown[0]!r} is not among the classes; "
                    f"{nearest(unknown[0], classes)}"
                )
            found = tuple(sorted({numbers[name] for name in row.names}))
            labels.append(found if isinstance(row.label, tuple) else found[0] if found else None)
        super().__init__(table.parent, keys, labels, _inodes(table, rows, keys), classes)


def tables_in(folder: Path) -> list[Path]:
    """The tables that make a folder a data set: those named after splits, or else `metadata`, or else the only one."""
    found = sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in SUFFIXES and entry.is_file())
    named = [table for table in found if split_of(table.name) is not None]
    return named or [table for table in found if table.stem.lower() == "metadata"] or (found if len(found) == 1 else [])


def open_table(tables: list[Path], classes: tuple[str, ...] | None) -> Splits:
    """The splits of one table, or of one for each split. Raises `DataError`."""
    where = str(tables[0].parent if len(tables) > 1 else tables[0])
    if len(tables) == 1:
        parts = _divided(_read(tables[0]))
    else:
        named = by_split(where, (table.name for table in tables))
        for split, names in named.items():
            if len(names) > 1:
                raise DataError(f"{where} has {' and '.join(names)}: which is the {split} split?")
        parts = {split: _read(tables[0].parent / names[0]) for split, names in named.items()}
    if len({isinstance(part.rows[0].label, tuple) for part in parts.values()}) > 1:
        raise DataError(f"{where}: one split has a label for each image, another has several")
    if classes is None:
        classes = _classes(parts["train"])
    sources = {split: TableSource(part.path, part.rows, classes) for split, part in parts.items()}
    return Splits(sources["train"], sources.get("validation"), sources.get("test"))


def _read(path: Path) -> _Table:
    """The rows of a table, none of them checked against files or classes."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = _read_json(path, file) if path.suffix.lower() == ".jsonl" else _read_csv(path, file)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path} as a table in UTF-8: {error}") from error
    if not table.rows:
        raise DataError(f"{path} has no rows of images")
    return table


def _read_csv(table: Path, file: Iterable[str]) -> _Table:
    lines = csv.reader(file, delimiter="\t" if table.suffix.lower() == ".tsv" else ",", strict=True)
    header = [name.strip() for name in next(lines, [])]
    cells = [(lines.line_num, line) for line in lines if line]
    for number, line in cells:
        if len(line) != len(header):
            raise DataError(
                f"{table}, line {number}: {len(line)} cells where the first line names {len(header)} columns"
            )
    path, label, split = _columns(table, header)
    others = [column for column in range(len(header)) if column not in (path, split)]
    if label is None and len(others) >= 2 and all(line[column] in ("0", "1") for _, line in cells for column in others):
        rows = [
            _Row(line[path], tuple(header[c] for c in others if line[c] == "1"), _cell(line, split), number)
            for number, line in cells
        ]
        return _Table(table, rows, tuple(header[column] for column in others))
    if label is None and len(others) == 1:
        (label,) = others
    if label is None:
        raise DataError(
            f"{table} has no column of labels: its columns are {', '.join(header)}; name one of them "
            f"{' or '.join(LABELS[:3])}, or let all but the path be 0 or 1"
        )
    return _Table(table, [_Row(line[path], line[label] or None, _cell(line, split), n) for n, line in cells], None)


def _read_json(table: Path, file: Iterable[str]) -> _Table:
    rows = []
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise DataError(f"{table}, line {number}: not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise DataError(f"{table}, line {number}: not an object of named fields but {type(fields).__name__}")
        names, values = list(fields), list(fields.values())
        path, label, split = _columns(table, names)
        if label is None:
            raise DataError(
                f"{table}, line {number} has no label: its fields are {', '.join(names)}; name one of them "
                f"{' or '.join(LABELS[:3])}"
            )
        rows.append(_Row(str(values[path]), _json_label(values[label]), _cell(values, split), number))
    if len({isinstance(row.label, tuple) for row in rows}) > 1:
        raise DataError(f"{table}: some lines have one label and others a list of them")
    return _Table(table, rows, None)


def _json_label(value: Any) -> str | tuple[str, ...] | None:
    if isinstance(value, list):
        return tuple(map(str, value))
    return None if value is None else str(value)


def _columns(table: Path, header: list[str]) -> tuple[int, int | None, int | None]:
    """Where path, label and split are; of several that could be the path or the label, the first in our order."""
    lower = [name.lower() for name in header]
    if len(set(lower)) != len(lower):
        raise DataError(f"{table} names a column twice: {', '.join(header)}")

    def find(names: tuple[str, ...]) -> int | None:
        return next((lower.index(name) for name in names if name in lower), None)

    path = find(PATHS)
    if path is None:
        raise DataError(
            f"{table} has no column of paths: its columns are {', '.join(header) or 'none'}; name one of them "
            f"{' or '.join(PATHS[:3])}"
        )
    return path, find(LABELS), find((SPLIT_COLUMN,))


def _cell(line: list[Any], column: int | None) -> str:
    return "" if column is None else str(line[column])


def _divided(table: _Table) -> dict[Split, _Table]:
    if not any(row.split for row in table.rows):
        return {"train": table}
    parts: dict[Split, list[_Row]] = {}
    for row in table.rows:
        split = split_of(row.split)
        if split is None:
            raise DataError(f"{table.path}, line {row.line}: the split {row.split!r} is not one of train, val, test")
        parts.setdefault(split, []).append(row)
    if "train" not in parts:
        raise DataError(
            f"{table.path} has {', '.join(parts)} in its column {SPLIT_COLUMN!r} but no train to learn from"
        )
    return {split: table._replace(rows=rows) for split, rows in parts.items()}


def _classes(table: _Table) -> tuple[str, ...]:
    """The names of columns of 0 and 1; else all labels, sorted, numbers by their values."""
    if table.classes is not None:
        return table.classes
    names = {name for row in table.rows for name in row.names}
    if not names:
        raise DataError(f"{table.path} has no labels to learn from: all of them are empty")
    return tuple(sorted(names, key=int if all(name.isdecimal() for name in names) else None))


def _inside(table: Path, row: _Row) -> str:
    path = PurePosixPath(row.path.replace(os.sep, "/"))
    if path.is_absolute() or ".." in path.parts or not row.path.strip():
        raise DataError(
            f"{table}, line {row.line}: the path {row.path!r} is not inside the table's folder; give relative paths"
        )
    return path.as_posix()


def _inodes(table: Path, rows: list[_Row], keys: list[str]) -> list[int]:
    """Which file each key leads to, from one listing of every folder: a million calls of stat would take longer."""
    listings: dict[str, dict[str, int]] = {}
    inodes = []
    seen: dict[str, int] = {}
    for row, key in zip(rows, keys, strict=True):
        folder, _, name = key.rpartition("/")
        if folder not in listings:
            try:
                with os.scandir(table.parent / folder) as entries:
                    listings[folder] = {entry.name: inode_of(entry) for entry in entries}
            except OSError:
                listings[folder] = {}
        inode = listings[folder].get(name)
        if inode is None:
            raise DataError(f"{table}, line {row.line}: there is no file {table.parent / key}")
        if key in seen:
            raise DataError(f"{table}, line {row.line}: {key} is in line {seen[key]} already")
        seen[key] = row.line
        inodes.append(inode)
    return inodes
