"""The rows of a table of image files: CSV, TSV or JSON lines, as text, and what each of its columns means."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.choice import Choice
from vitrail.data.labels import LabelReader, class_name
from vitrail.data.sources.tables.number_column import holds_numbers, number_of, places_of
from vitrail.data.sources.tables.split_column import FALSE, NAMES, TRUE, divide, find_split
from vitrail.data.splits import CHOICE, Split, SplitNames, named_splits
from vitrail.errors import DataError, listed, nearest, plural

SUFFIXES = (".csv", ".tsv", ".jsonl")
PATHS = ("path", "file", "file_name", "filename", "filepath", "image", "image_path", "image_id")
LABELS = ("label", "labels", "class", "class_name", "category", "target")
DELIMITERS = ",;\t|"
INDEX = re.compile(r"|unnamed: \d+|index", re.I)
"""Names of the column of row numbers that pandas writes."""


class Row(NamedTuple):
    path: str
    label: str | tuple[str, ...] | None
    """The name of the image's class, or the names of all classes of the image. None if it has no label."""
    line: int
    numbers: tuple[float, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.label if isinstance(self.label, tuple) else () if self.label is None else (self.label,)


class Table(NamedTuple):
    path: Path
    rows: list[Row]
    classes: tuple[str, ...] | None
    """The names of the columns of 0 and 1, or None if there are no such columns."""
    split_column: str
    """Name of the column that divides the table, or "" if there is none."""
    splits: list[str]
    """The value of each row in this column."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Cells:
    """A table as text, or as the values of JSON."""

    path: Path
    header: list[str]
    lines: list[tuple[int, list[Any]]]
    """The line number and the cells of each row. A cell that the row does not have is None."""

    def column(self, place: int) -> list[Any]:
        return [cells[place] for _, cells in self.lines]

    def find(self, names: Iterable[str]) -> int | None:
        """Return the position of the first of these columns that exists, ignoring case."""
        lower = [name.lower() for name in self.header]
        return next((lower.index(name) for name in names if name in lower), None)

    def named(self, name: str) -> int:
        """Return the position of a column that the user chose."""
        (place,) = (self.header.index(name),) if name in self.header else (self.find([name.lower()]),)
        if place is None:
            raise DataError(f"{self.path} has no column {name!r}; {nearest(name, self.header)}")
        return place


def has_paths(table: Path) -> bool:
    """Return True for a table with a column that is called like one of paths."""
    try:
        with table.open(encoding="utf-8-sig") as file:
            first = file.readline(2**20)
        if table.suffix.lower() == ".jsonl":
            fields = json.loads(first)
            names = list(fields) if isinstance(fields, dict) else []
        else:
            names = next(csv.reader([first], delimiter=_delimiter(table, first)), [])
    except (OSError, ValueError, RecursionError, csv.Error):
        return False
    return any(name.strip().lower() in PATHS for name in names)


def read(path: Path, choice: Choice, numbers: Sequence[str] = (), *, unlabelled: bool = False) -> Table:
    """Return the rows of a table. Paths are not checked.

    If `numbers` names columns, these are the targets, and labels are not read. If `unlabelled` is true, a table without
    labels is accepted. Raises `DataError` if the table cannot be read, or has no column of paths or of targets.
    """
    cells_of = _json_cells if path.suffix.lower() == ".jsonl" else _csv_cells
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            cells = cells_of(path, file)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path} as a table in UTF-8: {error}") from error
    image = cells.find(PATHS) if choice.image is None else cells.named(choice.image)
    if image is None:
        raise DataError(
            f"{path} has no column of paths: its columns are {', '.join(cells.header) or 'none'}; the column of paths "
            f"must be called {' or '.join(PATHS[:3])}, or chosen by adding ?image=COLUMN to the data's name"
        )
    label = cells.find(LABELS) if choice.label is None else cells.named(choice.label)
    free = [name for place, name in enumerate(cells.header) if name and place not in (image, label)]
    column, splits, split_notes = find_split(
        str(path), free, lambda name: cells.column(cells.header.index(name)), choice.splits
    )
    split = None if column is None else cells.header.index(column)
    others = [
        place for place in range(len(cells.header)) if place not in (image, split) and not _is_index(cells, place)
    ]
    columns = [(name, place) for name, place in zip(numbers, places_of(str(path), numbers, cells.header), strict=True)]
    if numbers:
        used, classes = [place for _, place in columns], None
        targets: Iterable[Any] = ()
    elif label is None and _are_flags(cells, others):
        used, classes = others, tuple(class_name(cells.header[place]) for place in others)
        targets = (
            tuple(name for name, place in zip(classes, others, strict=True) if _is_true(line[place]))
            for _, line in cells.lines
        )
    else:
        candidates = [place for place in others if cells.header[place].lower() not in NAMES]
        if label is None and len(candidates) == 1 and not _are_measured(cells.column(candidates[0])):
            (label,) = candidates
        if label is None and not unlabelled:
            raise DataError(_without_labels(cells, others))
        used, classes = [] if label is None else [label], None
        targets = (None for _ in cells.lines) if label is None else cells.column(label)
    reader = LabelReader(choice)
    rows = [
        Row(
            str(line[image] or ""), target if classes else reader(target), number, _numbers(path, number, columns, line)
        )
        for (number, line), target in zip(cells.lines, targets or [None] * len(cells.lines), strict=True)
    ]
    if len({isinstance(row.label, tuple) for row in rows}) > 1:
        raise DataError(f"{path}: some rows have one label and others a list of labels; use one form in all rows")
    rest = [name or "(without a name)" for place, name in enumerate(cells.header) if place not in (image, split, *used)]
    notes = (*split_notes, *reader.notes(str(path)))
    if rest:
        notes = (*notes, f"{path}: {plural(len(rest), 'column')} not used: {listed(rest)}")
    return Table(path, rows, classes, column or "", splits, notes)


# --- cells


def _delimiter(table: Path, first: str) -> str:
    """Return the character between cells. Spreadsheets of some countries write semicolons into .csv."""
    if table.suffix.lower() == ".tsv":
        return "\t"
    named = (one for one in DELIMITERS if {name.strip(' "').lower() for name in first.split(one)} & {*PATHS, *LABELS})
    return "," if "," in first else next((one for one in named if one in first), ",")


def _csv_cells(table: Path, file: Iterable[str]) -> _Cells:
    """Return the cells of a CSV file. Spaces at the ends of cells are removed, and so are empty rows, and empty columns
    at the end of the table."""
    lines = iter(file)
    first = next(lines, "")
    reader = csv.reader(chain([first], lines), delimiter=_delimiter(table, first), strict=True)
    rows = [(reader.line_num, [cell.strip() for cell in line]) for line in reader]
    header, rows = (rows[0][1], [row for row in rows[1:] if any(row[1])]) if rows else ([], [])
    while header and not header[-1] and not any(line[len(header) - 1 :][:1] not in ([], [""]) for _, line in rows):
        header.pop()
    for number, line in rows:
        if len(line) < len(header) or any(line[len(header) :]):
            raise DataError(
                f"{table}, line {number}: the line has {plural(len(line), 'cell')}, but the first line names "
                f"{plural(len(header), 'column')}"
            )
    _refuse_repeated(table, header)
    return _Cells(table, header, rows)


def _json_cells(table: Path, file: Iterable[str]) -> _Cells:
    rows: list[tuple[int, dict[str, Any]]] = []
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
        rows.append((number, fields))
    spelled: dict[str, str] = {}
    for _, fields in rows:
        _refuse_repeated(table, list(fields))
        for name in fields:
            spelled.setdefault(name.lower(), name)
    header = list(spelled.values())
    for names in (PATHS, LABELS):
        known = next((name for name in names if name in map(str.lower, header)), None)
        for number, fields in rows if known is not None else ():
            if known not in [field.lower() for field in fields]:
                raise DataError(
                    f"{table}, line {number}: there is no field {known!r} among {', '.join(fields)}, but other lines "
                    "have it; give it to every line, with null for an unknown value"
                )
    lower = [(number, {name.lower(): value for name, value in fields.items()}) for number, fields in rows]
    return _Cells(table, header, [(number, [fields.get(name.lower()) for name in header]) for number, fields in lower])


def _refuse_repeated(table: Path, header: list[str]) -> None:
    """Raise `DataError` if two columns have the same name, ignoring case."""
    named = [name.lower() for name in header if name]
    if len(set(named)) != len(named):
        raise DataError(f"{table} names a column twice: {', '.join(header)}; give each column a name of its own")


# --- columns


def _is_index(cells: _Cells, place: int) -> bool:
    """Return True for a column of row numbers, which has no name or one that pandas gives it."""
    if INDEX.fullmatch(cells.header[place]) is None:
        return False
    values = [str(value) for value in cells.column(place)]
    return all(value.isdecimal() for value in values) and len(set(values)) == len(values)


def _are_flags(cells: _Cells, places: Sequence[int]) -> bool:
    """Return True if there are at least two columns, with 0 and 1 (or False and True) in all cells."""
    return len(places) > 1 and all(
        str(line[place]).lower() in TRUE | FALSE for _, line in cells.lines for place in places
    )


def _are_measured(values: Sequence[Any]) -> bool:
    """Return True if all values are numbers, and not all of them are whole: they are no classes."""
    return holds_numbers(values) and any(number_of("", "", value) % 1 > 0 for value in values)


def _is_true(value: object) -> bool:
    return str(value).lower() in TRUE


def _without_labels(cells: _Cells, others: Sequence[int]) -> str:
    text = (
        f"{cells.path} has no column of labels: its columns are {', '.join(cells.header)}; the column of labels must "
        f"be called {' or '.join(LABELS[:3])}, or chosen by adding ?label=COLUMN to the data's name, unless there is "
        "one column of 0 and 1 per class"
    )
    numbers = [cells.header[place] for place in others if holds_numbers(cells.column(place))]
    if numbers:
        return f"{text}; to predict numbers, name their columns: --numbers {' '.join(map(shlex.quote, numbers))}"
    for number, line in cells.lines:
        for place in others:
            if len(others) > 1 and str(line[place]).lower() not in TRUE | FALSE:
                return f"{text}; line {number} has {line[place]!r} in column {cells.header[place]!r}"
    return text


def _numbers(table: Path, number: int, columns: Sequence[tuple[str, int]], line: Sequence[Any]) -> tuple[float, ...]:
    """Return the numbers in some columns of a row. The columns are given by name and position."""
    return tuple(number_of(f"{table}, line {number}", column, line[place]) for column, place in columns)


# --- splits


def divided(table: Table, chosen: SplitNames | None) -> tuple[dict[Split, Table], tuple[str, ...]]:
    """Return the rows of each split, and notes. A column of splits divides the table, or else the folders of splits
    with which all paths begin. Otherwise all rows are of the training split. Raise `DataError` for an unknown split."""
    notes: tuple[str, ...] = ()
    where, values = f"{table.path}, column {table.split_column!r}", table.splits
    if not table.split_column:
        where = f"{table.path}, folders of the paths"
        values = [row.path.rpartition("/")[0] for row in table.rows]
        if chosen is None:
            values, notes = _split_folders(table, values)
    if not values or chosen == {}:
        return {"train": table}, notes
    parts, skipped = divide(where, values, chosen, lambda row: f"line {table.rows[row].line}")
    tables = {split: table._replace(rows=[table.rows[row] for row in rows]) for split, rows in parts.items()}
    return tables, (*notes, *skipped)


def _split_folders(table: Table, folders: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the folder of a split with which the path of each row begins, and a note. Return no folders unless all
    rows have one, and unless there are several splits. Folders that all paths share do not matter."""
    parts = [folder.split("/") for folder in folders]
    shared = len(list(takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))))
    first = ["".join(some[shared : shared + 1]) for some in parts]
    named = named_splits(set(first))
    if (
        not named
        or len(set(first)) < 2
        or all(row.label in ("", one) for row, one in zip(table.rows, first, strict=True))
    ):
        return [], ()
    shown = listed(sorted(named))
    if len(set(named.values())) > 1 and len(named) == len(set(first)):
        note = f"{table.path}: the folders {shown} of its paths divide the table into splits; to read all rows as "
        return [named[one] for one in first], (f"{note}training data, add --splits none",)
    count = sum(one in named for one in first)
    note = f"{table.path}: the paths of {plural(count, 'row')} begin with {shown}, and all rows are training data; to "
    return [], (f"{note}choose splits, add {CHOICE}",)
