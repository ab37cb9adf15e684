"""Tables of image files, as CSV, TSV or JSON lines. A table has a column of paths, and a column of labels, a 0/1 column
per class, or a column of texts.

Paths are relative to the table. The first row names the columns, and the columns are recognised by their names:

    path,label          file,rose,daisy        {"file_name": "1.jpg", "label": "rose"}
    a/1.jpg,rose        1.jpg,1,0
    a/2.jpg,daisy       2.jpg,1,1

A column of splits divides the table. Alternatively, a folder can hold one table per split, and each table is named
after its split. For regression, the caller names the columns of numbers, and labels are not read. Rows of texts that
name the same image are texts of this image.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vitrail.data.faults import TABLES, Fault, column_names, has_predictions, shown
from vitrail.data.formats.folder import class_folders
from vitrail.data.source import Samples, file_samples, inodes_in
from vitrail.data.splits import (
    CHOICE,
    FALSE,
    NAMES,
    TRUE,
    Choice,
    Request,
    Split,
    SplitNames,
    Splits,
    by_split,
    divide,
    find_split,
    named_splits,
    split_of,
    splits_from,
)
from vitrail.data.targets import (
    LabelReader,
    MissingColumn,
    TargetKind,
    Targets,
    check_names,
    class_name,
    holds_numbers,
    number_of,
    places_of,
    refuse_flags,
    refuse_joined,
    whole_numbers,
)
from vitrail.data.texts import TEXTS, TextReader, without_texts
from vitrail.errors import DataError, listed, nearest, plural
from vitrail.files import named_once


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
    if has_paths(found[0]):
        raise DataError(
            f"{folder} has several tables: {listed([table.name for table in found])}; name one of them, such as "
            f"{found[0]}, or choose one for each split: {CHOICE}"
        )
    return []


def _tables(folder: Path) -> list[Path]:
    """Return the tables in a folder, without those in its subfolders. If at least one table has a column of paths,
    tables without such a column are left out."""
    found = sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in TABLES and entry.is_file())
    found = [table for table in found if not has_predictions(table)]
    useful = [table for table in found if has_paths(table)]
    empty = [table for table in found if split_of(table.name) and not table.stat().st_size]
    return sorted(useful + empty) if useful else found


def open_table(request: Request, tables: Sequence[Path]) -> Splits:
    """Return the splits of one table, which a column or the folders of its paths can divide, or of one table per split.

    If the request names a folder, the name of a single table also states its split. If it names columns of numbers, the
    numbers in these columns are the targets. Otherwise the labels are the targets. Held-out splits without labels or
    without rows are skipped with a note. Rows whose file cannot be used are left out, and are a fault. If the request
    has no classes, so are rows of held-out splits with a label that no training row has. Raises `DataError`.
    """
    classes, numbers, unlabelled = request.classes, request.numbers, request.unlabelled
    root = Path(os.path.commonpath([table.parent for table in tables]))
    where = str(root if len(tables) > 1 else tables[0])
    parts, notes = _parts(request, root, where, tables)
    has_texts = next(iter(parts.values())).has_texts
    for split, part in list(parts.items()):
        parts[split] = part._replace(has_texts=has_texts)
        are_known = (bool(row.texts) if has_texts else row.label is not None for row in part.rows)
        if split != "train" and len(parts) > 1 and not (part.rows and (numbers or unlabelled or any(are_known))):
            reason = f"none of its images has a {'text' if has_texts else 'label'}" if part.rows else "it has no rows"
            notes += (f"{part.path}: the {split} split is skipped, because {reason}",)
            del parts[split]
    for part in parts.values():
        if not part.rows:
            raise DataError(f"{part.path} has no rows; each image needs a row")
    parts = _renamed(parts)
    labels = [row.label for part in parts.values() for row in part.rows if row.label is not None]
    if len({*map(type, labels)}) > 1:
        raise DataError(
            f"{where}: one split has one label per image, and another has several; use the same form in all splits"
        )
    if not unlabelled:
        refuse_joined(where, Counter(one for one in labels if isinstance(one, str)), request.choice.separator)
        refuse_flags(where, (one for one in labels if isinstance(one, tuple)))
    faults: list[Fault] = []
    for split, part in parts.items():
        parts[split], found = _with_files(part)
        faults += found
        if not parts[split].rows:
            raise DataError("\n".join(fault.text for fault in found))
    if numbers or has_texts:
        if not (numbers or unlabelled or any(row.texts for part in parts.values() for row in part.rows)):
            raise DataError(f"{where}: no image has a text that can be used")
        classes = numbers
    else:
        first = "train" if "train" in parts else next(iter(parts))
        known = classes is not None
        classes = _classes(parts[first], unlabelled) if classes is None else classes
        for part in parts.values():
            lacking = [name for name in parts[first].classes or () if name not in (part.classes or (name,))]
            if lacking:
                raise DataError(
                    f"{part.path} has no column {lacking[0]!r}, which {parts[first].path} has, so the images of this "
                    "class are not known; add the column"
                )
        for split in [split for split in parts if known or split != first]:
            strange = [row for row in parts[split].rows if not set(classes).issuperset(row.names)]
            if strange:
                fault = _unknown_class(parts[split].path, split, strange, classes)
                if known:
                    raise DataError(fault.text)
                faults.append(fault)
                left = set(strange)
                parts[split] = parts[split]._replace(rows=[row for row in parts[split].rows if row not in left])
    sources = {split: _source(part, classes) for split, part in parts.items() if part.rows}
    return splits_from(sources, notes, faults)


def _parts(
    request: Request, root: Path, where: str, tables: Sequence[Path]
) -> tuple[dict[Split, Table], tuple[str, ...]]:
    """Read the tables. Return the rows of each split, and notes."""
    choice, numbers, unlabelled = request.choice, request.numbers, request.unlabelled
    names = [table.relative_to(root).as_posix() for table in tables]
    if len(tables) == 1 and not (request.is_folder and (split_of(names[0], choice.splits) or split_of(root.name))):
        table = read(tables[0], choice, numbers, unlabelled=unlabelled)
        parts, notes = divided(table, choice.splits)
        return parts, (*table.notes, *notes)
    by_name, notes = by_split(where, names, choice.splits)
    choice = replace(choice, splits={})  # each table is one split
    parts = {}
    for split, some in by_name.items():
        if len(some) > 1:
            raise DataError(
                f"{where} has {' and '.join(some)}, but only one of them can be the {split} split; remove or rename "
                f"the others, or choose one: {CHOICE}"
            )
        path = root / some[0]
        if split != "train" and not path.stat().st_size:
            notes += (f"{path}: the {split} split is skipped, because the file is empty",)
            continue
        try:
            parts[split] = read(
                path, choice, numbers, unlabelled=unlabelled or split != "train",
                named=parts["train"].labels if "train" in parts else None,
            )  # fmt: skip
        except MissingColumn:
            if split == "train":
                raise
            notes += (f"{path}: the {split} split is skipped, because it has no column of numbers",)
            continue
        notes += parts[split].notes
    return parts, notes


def _renamed(parts: dict[Split, Table]) -> dict[Split, Table]:
    """Return the tables with whole numbers as labels if all labels are such numbers, like 1.0."""
    names = {name for part in parts.values() for row in part.rows for name in row.names}
    whole = whole_numbers(names)

    def one(row: TableRow) -> TableRow:
        if isinstance(row.label, tuple):
            return row._replace(label=tuple(whole[name] for name in row.label))
        return row if row.label is None else row._replace(label=whole[row.label])

    return {split: part._replace(rows=list(map(one, part.rows))) for split, part in parts.items()} if whole else parts


def _source(table: Table, classes: tuple[str, ...]) -> Samples:
    """Return the image files of the rows, in their order. `classes` holds the names of classes or numbers."""
    root, rows = table.path.parent, table.rows
    if table.has_texts:
        targets = Targets.of((row.texts for row in rows), "texts", ())
    elif rows[0].numbers:
        targets = Targets.of((row.numbers for row in rows), "numbers", classes)
    else:
        kind: TargetKind = "none" if not classes else "classes" if isinstance(rows[0].label, tuple) else "class"
        places = {name: place for place, name in enumerate(classes)}
        found = [tuple(sorted({places[name] for name in row.names})) for row in rows]
        labels = found if kind == "classes" else [one[0] if one else None for one in found]
        targets = Targets.of(labels, kind, classes)
    return file_samples(root, [row.path for row in rows], [row.inode for row in rows], targets)


def _classes(table: Table, unlabelled: bool) -> tuple[str, ...]:
    """Return the class names: the names of the 0/1 columns, or else the sorted labels. Numeric labels are sorted by
    value, and labels of the same value, such as 1 and 01, as text."""
    if table.classes is not None:
        return table.classes
    names = {name for row in table.rows for name in row.names}
    if not names and not unlabelled:
        raise DataError(f"{table.path} has no labels: the cells of the label column are all empty")
    check_names(str(table.path), names)
    by_value = all(name.isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if by_value else 0, name)))


def _unknown_class(table: Path, split: Split, rows: list[TableRow], classes: tuple[str, ...]) -> Fault:
    """Return the fault of rows of a held-out split with labels that no training row has."""
    unknown = next(name for name in rows[0].names if name not in classes)
    return Fault(
        "unknown-class", "error", len(rows),
        f"{table}, line {rows[0].line}: the label {unknown!r} is not among the classes; {nearest(unknown, classes)}",
        "Training refuses the data, because a network cannot learn a class without training images. This check leaves "
        f"out {plural(len(rows), 'row')} of the {split} split.",
        "Add training images of the class, or correct or remove these rows.",
    )  # fmt: skip


def _with_files(table: Table) -> tuple[Table, list[Fault]]:
    """Return the table with a row for each file that can be used, and the faults of the other rows. Paths are then
    relative to the table, and rows have the inodes of their files.

    Every folder is listed once, because a million calls of stat would take longer.
    """
    folder = table.path.parent
    listings: dict[str, dict[str, int]] = {}
    found: dict[str, TableRow] = {}
    outside, missing, repeated = [], [], []
    first_missing = ""
    for row in table.rows:
        key = _inside(folder, row.path)
        if key is None:
            outside.append(f"line {row.line}: {row.path!r}")
            continue
        parent, _, name = key.rpartition("/")
        if parent not in listings:
            listings[parent] = inodes_in(folder / parent)
        inode = listings[parent].get(name)
        if inode is None:
            missing.append(f"line {row.line}: {row.path}")
            first_missing = first_missing or key
        elif key in found and table.has_texts:
            found[key] = found[key]._replace(texts=tuple(dict.fromkeys(found[key].texts + row.texts)))
        elif key in found:
            repeated.append(f"line {row.line}: {row.path}, which is also in line {found[key].line}")
        else:
            found[key] = row._replace(path=key, inode=inode)
    hint = _alike(folder, first_missing) if first_missing else ""
    return table._replace(rows=list(found.values())), list(_faults(table, outside, missing, repeated, hint))


def _inside(folder: Path, text: str) -> str | None:
    """Return a path relative to the folder of its table, or None if the path is not in this folder."""
    if "\\" in text and not (folder / text).exists():
        text = text.replace("\\", "/")  # from Windows
    path = PurePosixPath(text)
    if path.is_absolute():
        base = next(
            (base for base in (folder.absolute(), folder.resolve()) if path.is_relative_to(base.as_posix())), None
        )
        if base is None:
            return None
        path = path.relative_to(base.as_posix())
    return None if ".." in path.parts or not text.strip() else path.as_posix()


def _alike(folder: Path, key: str) -> str:
    """Return a hint if a folder in that of the table has the missing file, perhaps with another suffix."""
    for place in (folder, *class_folders(folder)):
        path = (place / key).parent
        for name in inodes_in(path):
            if place != folder and name == Path(key).name:
                return f"; there is such a file in {place.name}/, so paths must begin with {place.name}/"
            if Path(name).stem == Path(key).name:
                found = (path / name).relative_to(folder).as_posix()
                return f"; there is a file {found}, so paths must be written like it"
    return ""


def _faults(table: Table, outside: list[str], missing: list[str], repeated: list[str], hint: str) -> Iterator[Fault]:
    count = len(table.rows)
    for kind, rows, text, advice in (
        ("path-outside", outside, "a path that is not inside the table's folder", "Give paths in the table's folder."),
        ("missing-file", missing, "a file that does not exist", "Correct the paths, or remove the rows."),
        ("repeated-row", repeated, "an image of another row; each image may have only one row", "Remove these rows."),
    ):
        if rows:
            more = hint if rows is missing else ""
            yield Fault(
                kind, "error", len(rows),
                f"{table.path}: {len(rows):,} of {plural(count, 'row')} name {text} ({shown(rows)}){more}",
                "Training refuses the data. This check leaves these rows out.",
                advice,
            )  # fmt: skip


PATHS = ("path", "file", "file_name", "filename", "filepath", "image", "image_path", "image_id")
LABELS = ("label", "labels", "class", "class_name", "category", "target")
BOXES = frozenset({"xmin", "ymin", "xmax", "ymax", "x_min", "y_min", "x_max", "y_max", "x1", "y1", "x2", "y2", "bbox"})
DELIMITERS = ",;\t|"
INDEX = re.compile(r"|unnamed: \d+|index", re.I)
"""Names of the column of row numbers that pandas writes."""


class TableRow(NamedTuple):
    path: str
    label: str | tuple[str, ...] | None
    """The name of the image's class, or the names of all classes of the image. None if it has no label."""
    line: int
    numbers: tuple[float, ...] = ()
    texts: tuple[str, ...] = ()
    inode: int = 0
    """The inode of the image file, once it is known."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.label if isinstance(self.label, tuple) else () if self.label is None else (self.label,)


class Table(NamedTuple):
    path: Path
    rows: list[TableRow]
    classes: tuple[str, ...] | None
    """The names of the columns of 0 and 1, or None if there are no such columns."""
    split_column: str
    """Name of the column that divides the table, or "" if there is none."""
    splits: list[str]
    """The value of each row in this column."""
    notes: tuple[str, ...]
    has_texts: bool
    """True if the targets are texts."""
    labels: tuple[str, ...]
    """Name of the column of labels, if there is one."""


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
    names = column_names(table, lambda first: _delimiter(table, first))
    return any(name.strip().lower() in PATHS for name in names)


def read(
    path: Path,
    choice: Choice,
    numbers: Sequence[str] = (),
    *,
    unlabelled: bool = False,
    named: tuple[str, ...] | None = None,
) -> Table:
    """Return the rows of a table. Paths are not checked.

    If `numbers` names columns, these are the targets, and labels are not read. If `unlabelled` is true, a table without
    labels is accepted. The labels of a held-out table are in the column that is `named` as that of the training table,
    or in one with a usual name. Any other table can also have them in its only other column. Raises `DataError` if the
    table cannot be read, or has no column of paths or of targets.
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
    label = cells.find((*map(str.lower, named or ()), *LABELS)) if choice.label is None else cells.named(choice.label)
    text = None if numbers else cells.named(choice.text) if choice.text else cells.find(TEXTS)
    if choice.text is not None and text is None and not numbers:
        raise without_texts(str(path), cells.header)
    free = [name for place, name in enumerate(cells.header) if name and place not in (image, label)]
    column, splits, split_notes = find_split(
        str(path), free, lambda name: cells.column(cells.header.index(name)), choice.splits
    )
    split = None if column is None else cells.header.index(column)
    others = [
        place for place in range(len(cells.header)) if place not in (image, split) and not _is_index(cells, place)
    ]
    candidates = [place for place in others if cells.header[place].lower() not in NAMES]  # splits are no classes
    if text is not None and choice.text is None:
        candidates = [place for place in candidates if place != text]
        if label is not None or _are_flags(cells, candidates):
            text = None
    columns = [(name, place) for name, place in zip(numbers, places_of(str(path), numbers, cells.header), strict=True)]
    captions = TextReader()
    if numbers:
        used, classes = [place for _, place in columns], None
        targets: Iterable[Any] = ()
    elif text is not None:
        used, classes, targets = [text], None, ()
    elif label is None and _are_flags(cells, candidates):
        used, classes = candidates, tuple(class_name(cells.header[place]) for place in candidates)
        targets = (
            tuple(name for name, place in zip(classes, candidates, strict=True) if str(line[place]).lower() in TRUE)
            for _, line in cells.lines
        )
    else:
        if label is None and named is None and len(candidates) == 1 and not _are_measured(cells.column(candidates[0])):
            (label,) = candidates
        if label is None and not unlabelled:
            raise DataError(_without_labels(cells, candidates))
        if label is not None and not unlabelled:
            _refuse_boxes(cells, image, label, is_chosen=choice.label is not None)
        used, classes = [] if label is None else [label], None
        targets = (None for _ in cells.lines) if label is None else cells.column(label)
    reader = LabelReader(choice.separator if targets else None, keep_missing=choice.keep_missing)
    rows = [
        TableRow(
            str(line[image] or ""),
            target if classes else reader(target),
            number,
            tuple(number_of(f"{path}, line {number}", name, line[place]) for name, place in columns),
            () if text is None else captions(line[text]),
        )
        for (number, line), target in zip(cells.lines, targets or [None] * len(cells.lines), strict=True)
    ]
    forms = {isinstance(row.label, tuple) for row in rows if row.label is not None}
    if len(forms) > 1:
        raise DataError(f"{path}: some rows have one label and others a list of labels; use one form in all rows")
    if forms == {True}:
        reader.blank += sum(row.label is None for row in rows)
        rows = [row._replace(label=row.label or ()) for row in rows]
    rest = [name or "(without a name)" for place, name in enumerate(cells.header) if place not in (image, split, *used)]
    notes = (*split_notes, *reader.notes(str(path)), *captions.notes(str(path)))
    if rest:
        notes = (*notes, f"{path}: {plural(len(rest), 'column')} not used: {listed(rest)}")
    return Table(
        path, rows, classes, column or "", splits, notes, text is not None,
        () if label is None else (cells.header[label],),
    )  # fmt: skip


def _refuse_boxes(cells: _Cells, image: int, label: int, *, is_chosen: bool) -> None:
    """Raise `DataError` if the rows describe objects and not images. This is so if a label is a JSON object or holds
    objects or lists, if the labels are in a column of boxes that the user did not choose, or if there are columns of
    boxes and several rows name the same image."""
    name = cells.header[label]
    parts = (part for cell in cells.column(label) for part in (cell if isinstance(cell, list) else [cell]))
    inner = next((part for part in parts if isinstance(part, dict | list)), None)
    boxes = [column for column in cells.header if column.lower() in BOXES]
    is_of_boxes = name in boxes and not is_chosen
    if inner is None and not is_of_boxes and not (boxes and len(set(cells.column(image))) < len(cells.lines)):
        return
    what = f"the columns {listed(boxes)} are boxes" if inner is None else f"{name!r} holds JSON objects or lists"
    raise DataError(f"{cells.path}: {what}, and boxes are not read from tables; write them as COCO, YOLO or Pascal VOC")


# --- cells


def _delimiter(table: Path, first: str) -> str:
    """Return the character between cells. Spreadsheets of some countries write semicolons into .csv."""
    if table.suffix.lower() == ".tsv":
        return "\t"
    named = (
        one for one in DELIMITERS if {name.strip(' "').lower() for name in first.split(one)} & {*PATHS, *LABELS, *TEXTS}
    )
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
            fields = json.loads(line, object_pairs_hook=named_once)
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


def _without_labels(cells: _Cells, others: Sequence[int]) -> str:
    text = (
        f"{cells.path} has no column of labels: its columns are {', '.join(cells.header)}; the column of labels must "
        f"be called {' or '.join(LABELS[:3])}, or chosen by adding ?label=COLUMN to the data's name, unless there is "
        "one column of 0 and 1 per class"
    )
    numbers = [cells.header[place] for place in others if holds_numbers(cells.column(place))]
    strange = {
        place: {"" if value is None else str(value).lower() for value in cells.column(place)} - TRUE - FALSE
        for place in others
    }
    gaps = [place for place in others if strange[place]] if all(one <= {""} for one in strange.values()) else []
    if numbers and not gaps:
        return f"{text}; to predict numbers, name their columns: --numbers {' '.join(map(shlex.quote, numbers))}"
    for number, line in cells.lines:
        for place in gaps or others:
            if len(others) > 1 and str(line[place]).lower() not in TRUE | FALSE:
                return f"{text}; line {number} has {line[place]!r} in column {cells.header[place]!r}"
    return text


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
    words = listed(sorted(named))
    if len(set(named.values())) > 1 and len(named) == len(set(first)):
        note = f"{table.path}: the folders {words} of its paths divide the table into splits; to read all rows as "
        return [named[one] for one in first], (f"{note}training data, add --splits none",)
    count = sum(one in named for one in first)
    note = f"{table.path}: the paths of {plural(count, 'row')} begin with {words}, and all rows are training data; to "
    return [], (f"{note}choose splits, add {CHOICE}",)
