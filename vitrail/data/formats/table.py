"""Tables of image files, as CSV, TSV or JSON lines. A table has a column of paths, and a column of labels, a 0/1 column
per class, or a column of texts.

Paths are relative to the table, or to the only folder beside it that holds the files. The first row names the columns,
and the columns are recognised by their names:

    path,label          file,rose,daisy        {"file_name": "1.jpg", "label": "rose"}
    a/1.jpg,rose        1.jpg,1,0
    a/2.jpg,daisy       2.jpg,1,1

A column of splits divides the table. Alternatively, a folder can hold one table per split, and each table is named
after its split. For regression, the caller names the columns of numbers, and labels are not read. Rows of texts that
name the same image are texts of this image.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vitrail.data.faults import TABLES, Fault, column_names, has_predictions, shown, unknown_class
from vitrail.data.formats.folder import TARGETS, class_folders
from vitrail.data.pixels.decode import SUFFIXES
from vitrail.data.source import Samples, file_samples, inodes_in
from vitrail.data.splits import (
    CHOICE,
    FALSE,
    NAMES,
    SPLITS,
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
    words = named_splits(table.stem for table in found) if chosen is None else {}
    named = [table for table in found if len(words) == len(found) or split_of(table.name, chosen) is not None]
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
    tables without such a column are left out. Less usual names of this column count only if no table has a usual
    one."""
    found = sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in TABLES and entry.is_file())
    found = [table for table in found if not has_predictions(table)]
    useful = [table for table in found if has_paths(table, USUAL_PATHS)] or list(filter(has_paths, found))
    empty = [table for table in found if split_of(table.name) and not table.stat().st_size]
    return sorted(useful + empty) if useful else found


def open_table(request: Request, tables: Sequence[Path]) -> Splits:
    """Return the splits of one table, which a column or the folders of its paths can divide, or of one table per split.

    If the request names a folder, the name of a single table also states its split. If it names columns of numbers, the
    numbers in these columns are the targets. Otherwise the labels are the targets. Held-out splits without labels or
    without rows are skipped with a note. Rows whose file cannot be used are left out, and are a fault. If the request
    has no classes, so are rows of held-out splits with a label that no training row has. Raises `DataError`.
    """
    root = Path(os.path.commonpath([table.parent for table in tables]))
    where = str(root if len(tables) > 1 else tables[0])
    parts, notes = _parts(request, root, where, tables)
    has_texts = next(iter(parts.values())).has_texts
    parts, skipped = _with_targets(request, {one: part._replace(has_texts=has_texts) for one, part in parts.items()})
    parts = _renamed(parts)
    labels = [row.label for part in parts.values() for row in part.rows if row.label is not None]
    if len({*map(type, labels)}) > 1:
        raise DataError(
            f"{where}: one split has one label per image, and another has several; use the same form in all splits"
        )
    if not request.unlabelled:
        refuse_joined(where, Counter(one for one in labels if isinstance(one, str)), request.choice.separator)
        refuse_flags(where, (one for one in labels if isinstance(one, tuple)))
    faults: list[Fault] = []
    for split, part in parts.items():
        parts[split], found = _with_files(part)
        faults += found
        if not parts[split].rows:
            raise DataError("\n".join(fault.text for fault in found))
    classes = request.numbers
    if not (classes or has_texts):
        parts, classes, strange = _with_classes(request, parts)
        faults += strange
    elif not (classes or request.unlabelled or any(row.texts for part in parts.values() for row in part.rows)):
        raise DataError(f"{where}: no image has a text that can be used")
    sources = {split: _source(part, classes) for split, part in parts.items() if part.rows}
    return splits_from(sources, (*notes, *skipped), faults)


def _with_targets(request: Request, parts: Mapping[Split, Table]) -> tuple[dict[Split, Table], list[str]]:
    """Return the splits without held-out ones that have no targets, and a note on each of those. Raise `DataError` if
    one of the others has no rows."""
    found, notes = dict(parts), []
    for split, part in parts.items():
        are_known = (bool(row.texts) if part.has_texts else row.label is not None for row in part.rows)
        has_targets = part.rows and (request.numbers or request.unlabelled or any(are_known))
        if split != "train" and len(found) > 1 and not has_targets:
            noun = "text" if part.has_texts else "label"
            reason = f"none of its images has a {noun}" if part.rows else "it has no rows"
            notes.append(f"{part.path}: the {split} split is skipped, because {reason}")
            del found[split]
    if empty := [part.path for part in found.values() if not part.rows]:
        raise DataError(f"{empty[0]} has no rows; each image needs a row")
    return found, notes


def _with_classes(
    request: Request, parts: Mapping[Split, Table]
) -> tuple[dict[Split, Table], tuple[str, ...], list[Fault]]:
    """Return the splits without rows of unknown classes, the classes, and the faults of those rows. The classes are
    those of the request, or else those of the training split. Raise `DataError` for a column of a class that a split
    lacks, and for a class that is not among those of the request."""
    first = "train" if "train" in parts else next(iter(parts))
    classes = _classes(parts[first], request.unlabelled) if request.classes is None else request.classes
    for part in parts.values():
        if lacking := [name for name in parts[first].classes or () if name not in (part.classes or (name,))]:
            raise DataError(
                f"{part.path} has no column {lacking[0]!r}, which {parts[first].path} has, so the images of this "
                "class are not known; add the column"
            )
    found, faults, known = dict(parts), [], set(classes)
    for split, part in parts.items():
        strange = [row for row in part.rows if not known.issuperset(row.names)]
        if strange and (request.classes is not None or split != first):
            unknown = next(name for name in strange[0].names if name not in known)
            text = f"{part.path}, line {strange[0].line}: the label {unknown!r} is not among the classes"
            faults.append(unknown_class(
                split, len(strange), f"{text}; {nearest(unknown, classes)}",
                f"leaves out {plural(len(strange), 'row')} of the {split} split",
                "Add training images of the class, or correct or remove these rows.",
            ))  # fmt: skip
            found[split] = part._replace(rows=[row for row in part.rows if known.issuperset(row.names)])
    if faults and request.classes is not None:
        raise DataError(faults[0].text)
    return found, classes, faults


def _parts(
    request: Request, root: Path, where: str, tables: Sequence[Path]
) -> tuple[dict[Split, Table], tuple[str, ...]]:
    """Read the tables. Return the rows of each split, and notes."""
    choice, numbers, unlabelled = request.choice, request.numbers, request.unlabelled
    names = [table.relative_to(root).as_posix() for table in tables]
    if len(tables) == 1 and not (request.is_folder and (split_of(names[0], choice.splits) or split_of(root.name))):
        return _read(tables[0], choice, numbers, unlabelled=unlabelled)
    by_name, notes = by_split(where, names, choice.splits)
    choice = replace(choice, splits={})  # each table is one split
    parts: dict[Split, Table] = {}
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
            whole, more = _read(
                path, choice, numbers, unlabelled=unlabelled or split != "train",
                named=parts["train"].labels if "train" in parts else None,
            )  # fmt: skip
        except MissingColumn:
            if split == "train":
                raise
            notes += (f"{path}: the {split} split is skipped, because it has no column of numbers",)
            continue
        parts[split] = whole["train"]
        notes += more
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
    rows = table.rows
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
    return file_samples(table.root, [row.path for row in rows], [row.inode for row in rows], targets)


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


def _with_files(table: Table) -> tuple[Table, list[Fault]]:
    """Return the table with a row for each file that can be used, and the faults of the other rows. Paths are then
    relative to the folder that holds the table and all files, and rows have the inodes of their files."""
    folder = table.path.parent
    keys = [_from_folder(folder, row.path) for row in table.rows]
    if above := max(key.split("/").count("..") for key in keys):
        real = folder.resolve()
        keys = [os.path.normpath(f"{'/'.join(real.parts[-above:])}/{key}") for key in keys]
        folder = real.parents[above - 1]
    # Every folder is listed once, because a million calls of stat would take longer.
    listing = functools.cache(lambda place: inodes_in(folder / place))
    keys, hint = (keys, "") if above else _below(folder, keys, listing, split_of(table.path.name))
    found: dict[str, TableRow] = {}
    missing, repeated = [], []
    for row, key in zip(table.rows, keys, strict=True):
        file = _file(listing, key) if row.path.strip() else None
        if file is None:
            missing.append(f"line {row.line}: {row.path}")
            continue
        path, inode = file
        if path in found and table.has_texts:
            found[path] = found[path]._replace(texts=tuple(dict.fromkeys(found[path].texts + row.texts)))
        elif path in found:
            repeated.append(f"line {row.line}: {row.path}, which is also in line {found[path].line}")
        else:
            found[path] = row._replace(path=path, inode=inode)
    return table._replace(rows=list(found.values()), root=folder), list(_faults(table, missing, repeated, hint))


def _file(listing: Listing, key: str) -> tuple[str, int] | None:
    """Return the path and the inode of a file. A path without a suffix is that of the only image of this name."""
    folder, slash, name = key.rpartition("/")
    others = (name + one for suffix in SUFFIXES for one in (suffix, suffix.upper()))
    names = [name] if name in listing(folder) else [one for one in others if one in listing(folder)]
    return (f"{folder}{slash}{names[0]}", listing(folder)[names[0]]) if len(names) == 1 else None


def _from_folder(folder: Path, text: str) -> str:
    """Return a path relative to the folder of its table. If the file is elsewhere, the path begins with two dots."""
    if "\\" in text and not (folder / text).exists():
        text = text.replace("\\", "/")  # from Windows
    path = PurePosixPath(text)
    if not path.is_absolute() and ".." not in path.parts:
        return path.as_posix()
    base = folder.absolute() if path.is_relative_to(folder.absolute().as_posix()) else folder.resolve()
    return os.path.relpath(base / path, base)


def _below(folder: Path, keys: list[str], listing: Listing, split: Split | None) -> tuple[list[str], str]:
    """Return the paths of files relative to the folder of their table. If none of them is there, they are in a folder
    in it, or the paths begin with the name of the folder, as they do from a folder above. Folders of masks, and of a
    test set if the table is of another `split`, do not count. If this can be several folders, return the paths as they
    are, and a hint."""
    if any(_file(listing, key) for key in keys):
        return keys, ""
    known = (None, "train", split) if split else (None, *SPLITS)
    places = {
        f"{name}/": [f"{name}/{key}" for key in keys]
        for name in (place.name for place in class_folders(folder))
        if name.lower() not in TARGETS and split_of(name) in known
    }
    parts = folder.resolve().parts
    for start in ("/".join(parts[-depth:]) + "/" for depth in range(1, len(parts))):
        if keys[0].startswith(start):
            places[start] = [key.removeprefix(start) for key in keys]
    # A thousand paths are enough, because there can be as many folders as classes.
    found = [place for place, some in places.items() if any(_file(listing, key) for key in some[:1000])]
    if len(found) == 1:
        return places[found[0]], ""
    hint = f"; there are such files in {listed(found)}, so say in each path which one is meant" if found else ""
    return keys, hint


def _faults(table: Table, missing: list[str], repeated: list[str], hint: str) -> Iterator[Fault]:
    count = len(table.rows)
    for kind, rows, text, advice in (
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


USUAL_PATHS = ("path", "file", "file_name", "filename", "filepath", "image", "image_path", "image_id")
"""Names of columns that decide which table of a folder is read."""

PATHS = (
    *USUAL_PATHS[:-1], "file_path", "img_path", "img", "image_name", "image_file", "filenames", "filepaths",
    "image_id", "imageid",
)  # fmt: skip
Listing = Callable[[str], dict[str, int]]
"""A function that takes a folder, relative to a given one, and returns the inodes of its files by their names."""
LABELS = ("label", "labels", "class", "class_name", "category", "target")
BOXES = frozenset({
    "xmin", "ymin", "xmax", "ymax", "x_min", "y_min", "x_max", "y_max", "x1", "y1", "x2", "y2", "bbox",
    "rle", "rle_mask", "encodedpixels",
})  # fmt: skip
"""Names of columns of boxes and of run lengths of masks."""
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
    has_texts: bool
    """True if the targets are texts."""
    labels: tuple[str, ...]
    """Name of the column of labels, if there is one."""
    root: Path
    """The folder to which the paths in the rows are relative."""


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


def has_paths(table: Path, paths: Sequence[str] = PATHS) -> bool:
    """Return True for a table with a column that is called like one of paths."""
    names = column_names(table, lambda first: _delimiter(table, first))
    return any(name.strip().lower() in paths for name in names)


class _Targets(NamedTuple):
    """The positions of the columns of targets. A table has targets of one kind, or none."""

    label: int | None = None
    text: int | None = None
    flags: tuple[int, ...] = ()
    """The columns of 0 and 1, one for each class."""
    numbers: tuple[tuple[str, int], ...] = ()
    """The columns of numbers, with the names that the user gave them."""


def _read(
    path: Path,
    choice: Choice,
    numbers: Sequence[str] = (),
    *,
    unlabelled: bool = False,
    named: tuple[str, ...] | None = None,
) -> tuple[dict[Split, Table], tuple[str, ...]]:
    """Return the rows of a table by split, and notes. Paths are not checked.

    If `numbers` names columns, these are the targets, and labels are not read. If `unlabelled` is true, a table without
    labels is accepted. The labels of a held-out table are in the column that is `named` as that of the training table,
    or in one with a usual name. Any other table can also have them in its only other column. Raises `DataError` if the
    table cannot be read, or has no column of paths or of targets.
    """
    cells = _read_cells(path)
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
    column, values, notes = find_split(
        str(path), free, lambda name: cells.column(cells.header.index(name)), choice.splits
    )
    split = None if column is None else cells.header.index(column)
    candidates = [
        place
        for place, name in enumerate(cells.header)
        if place not in (image, split, text) and name.lower() not in NAMES and not _is_index(cells, place)
    ]
    if numbers:
        places = places_of(str(path), numbers, cells.header)
        targets = _Targets(numbers=tuple(zip(numbers, places, strict=True)))
    elif text is not None and (choice.text is not None or (label is None and not _are_flags(cells, candidates))):
        targets = _Targets(text=text)
    elif label is None and _are_flags(cells, candidates):
        targets = _Targets(flags=tuple(candidates))
    else:
        if label is None and named is None and len(candidates) == 1 and not _are_measured(cells.column(candidates[0])):
            (label,) = candidates
        if label is None and not unlabelled:
            raise DataError(_without_labels(cells, candidates))
        if label is not None and not unlabelled:
            _refuse_boxes(cells, image, label, is_chosen=choice.label is not None)
        targets = _Targets(label)
    rows, about_cells = _rows(cells, choice, image, targets)
    used = {image, split, targets.label, targets.text, *targets.flags, *dict(targets.numbers).values()}
    rest = [
        name or "(without a name)"
        for place, name in enumerate(cells.header)
        if place not in used and not _is_index(cells, place)
    ]
    unused = (f"{path}: {plural(len(rest), 'column')} not used: {listed(rest)}",) if rest else ()
    classes = tuple(class_name(cells.header[place]) for place in targets.flags) or None
    labels = () if targets.label is None else (cells.header[targets.label],)
    table = Table(path, rows, classes, targets.text is not None, labels, path.parent)
    parts, about_splits = _divided(table, column, values, choice.splits)
    return parts, (*notes, *about_cells, *unused, *about_splits)


def _rows(cells: _Cells, choice: Choice, image: int, targets: _Targets) -> tuple[list[TableRow], tuple[str, ...]]:
    """Return the rows of a table, and notes on cells that are no targets. Raise `DataError` for a cell that should be a
    number, and if some rows have one label and others several."""
    has_labels = targets.label is not None and targets.text is None and not targets.numbers
    reader = LabelReader(choice.separator if has_labels else None, keep_missing=choice.keep_missing)
    captions, classes = TextReader(), {place: class_name(cells.header[place]) for place in targets.flags}
    rows = []
    for number, line in cells.lines:
        label: str | tuple[str, ...] | None
        if classes:
            label = tuple(name for place, name in classes.items() if str(line[place]).lower() in TRUE)
        else:
            label = reader(None if targets.label is None else line[targets.label])
        where = f"{cells.path}, line {number}"
        numbers = tuple(number_of(where, name, line[place]) for name, place in targets.numbers)
        texts = () if targets.text is None else captions(line[targets.text])
        rows.append(TableRow(str(line[image] or ""), label, number, numbers, texts))
    forms = {isinstance(row.label, tuple) for row in rows if row.label is not None}
    if len(forms) > 1:
        raise DataError(f"{cells.path}: some rows have one label and others a list of labels; use one form in all rows")
    if forms == {True}:
        reader.blank += sum(row.label is None for row in rows)
        rows = [row._replace(label=row.label or ()) for row in rows]
    return rows, (*reader.notes(str(cells.path)), *captions.notes(str(cells.path)))


def _refuse_boxes(cells: _Cells, image: int, label: int, *, is_chosen: bool) -> None:
    """Raise `DataError` if the rows describe objects and not images. This is so if a label is a JSON object or holds
    objects or lists, if the labels are in a column of boxes that the user did not choose, or if there are columns of
    boxes and several rows name the same image."""
    name = cells.header[label]
    parts = (part for cell in cells.column(label) for part in (cell if isinstance(cell, list) else [cell]))
    inner = next((part for part in parts if isinstance(part, dict | list)), None)
    boxes = [column for column in cells.header if column.lower() in BOXES]
    is_of_boxes = name in boxes and not is_chosen
    if inner is not None or is_of_boxes or (boxes and len(set(cells.column(image))) < len(cells.lines)):
        what = (
            f"the columns {listed(boxes)} are boxes or masks"
            if inner is None
            else f"{name!r} holds JSON objects or lists"
        )
        raise DataError(
            f"{cells.path}: {what}, which are not read from tables; write boxes as COCO, YOLO or Pascal VOC, and masks "
            "as PNG files, which --ignore-label 255 reads beside a table"
        )


# --- cells


def _delimiter(table: Path, first: str) -> str:
    """Return the character between cells. Spreadsheets of some countries write semicolons into .csv."""
    if table.suffix.lower() == ".tsv":
        return "\t"
    named = (
        one for one in DELIMITERS if {name.strip(' "').lower() for name in first.split(one)} & {*PATHS, *LABELS, *TEXTS}
    )
    return "," if "," in first else next((one for one in named if one in first), ",")


def _read_cells(path: Path) -> _Cells:
    cells_of = _json_cells if path.suffix.lower() == ".jsonl" else _csv_cells
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return cells_of(path, file)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path} as a table in UTF-8: {error}; save it in UTF-8") from error


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


def _divided(
    table: Table, column: str | None, values: Sequence[str], chosen: SplitNames | None
) -> tuple[dict[Split, Table], tuple[str, ...]]:
    """Return the rows of each split, and notes. A column of splits, whose value in each row is in `values`, divides the
    table, or else the folders of splits with which all paths begin. Otherwise all rows are of the training split. Raise
    `DataError` for an unknown split."""
    notes: tuple[str, ...] = ()
    where = f"{table.path}, column {column!r}"
    if column is None:
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
