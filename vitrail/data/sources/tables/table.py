"""Tables of image files, as CSV, TSV or JSON lines. A table has a column of paths, and a column of labels or a 0/1
column per class.

Paths are relative to the table. The first row names the columns, and the columns are recognised by their names:

    path,label          file,rose,daisy        {"file_name": "1.jpg", "label": "rose"}
    a/1.jpg,rose        1.jpg,1,0
    a/2.jpg,daisy       2.jpg,1,1

A column of splits divides the table. Alternatively, a folder can hold one table per split, and each table is named
after its split. For regression, the caller names the columns of numbers, and labels are not read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from vitrail.data.choice import Choice
from vitrail.data.faults import Fault, has_predictions
from vitrail.data.labels import check_names, refuse_joined, whole_numbers
from vitrail.data.source import Target
from vitrail.data.sources.files import FileSource, inodes_in
from vitrail.data.sources.folder import class_folders
from vitrail.data.sources.tables.number_column import MissingColumn, NumberColumns
from vitrail.data.sources.tables.rows import SUFFIXES, Row, Table, divided, has_paths, read
from vitrail.data.splits import CHOICE, Split, SplitNames, Splits, by_split, split_of, splits_from
from vitrail.errors import DataError, listed, nearest, plural

MOST_SHOWN = 5
"""Number of rows that the message about a fault names."""


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
    """Return the tables directly in a folder. If some of them have a column of paths, the others are left out."""
    found = sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in SUFFIXES and entry.is_file())
    found = [table for table in found if not has_predictions(table)]
    useful = [table for table in found if has_paths(table)]
    empty = [table for table in found if split_of(table.name) and not table.stat().st_size]
    return sorted(useful + empty) if useful else found


def open_table(
    tables: list[Path],
    classes: tuple[str, ...] | None,
    *,
    numbers: tuple[str, ...] = (),
    unlabelled: bool = False,
    choice: Choice | None = None,
    is_folder: bool = False,
) -> Splits:
    """Return the splits of one table, which a column or the folders of its paths can divide, or of one table per split.

    If `is_folder` is true, the name of a single table also states its split. If `numbers` names columns, the numbers in
    these columns are the targets. Otherwise the labels are the targets. If `unlabelled` is true, a table without labels
    is accepted. Held-out splits without labels or without rows are skipped with a note. Rows whose file cannot be used
    are left out, and are a fault. If `classes` is None, so are rows of held-out splits with a label that no training
    row has. Raises `DataError`.
    """
    choice = choice or Choice()
    root = Path(os.path.commonpath([table.parent for table in tables]))
    where = str(root if len(tables) > 1 else tables[0])
    parts, notes = _parts(root, where, tables, numbers, choice, unlabelled=unlabelled, is_folder=is_folder)
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
    parts = _renamed(parts)
    if not unlabelled:
        refuse_joined(where, _counts(parts.values()), choice)
    files: dict[Split, dict[str, tuple[Row, int]]] = {}
    faults: list[Fault] = []
    for split, part in parts.items():
        files[split], found = _files(part)
        faults += found
        if not files[split]:
            raise DataError("\n".join(fault.text for fault in found))
        parts[split] = part._replace(rows=[row for row, _ in files[split].values()])
    if numbers:
        classes = numbers
    else:
        first = "train" if "train" in parts else next(iter(parts))
        known = classes is not None
        classes = _classes(parts[first], unlabelled) if classes is None else classes
        for split in [split for split in parts if known or split != first]:
            strange = [row for row in parts[split].rows if not set(classes).issuperset(row.names)]
            if strange and known:
                unknown = next(name for name in strange[0].names if name not in classes)
                raise DataError(_unknown_label(parts[split].path, strange[0].line, unknown, classes))
            if strange:
                faults.append(_unknown_class(parts[split].path, split, strange, classes))
                left = set(strange)
                files[split] = {key: pair for key, pair in files[split].items() if pair[0] not in left}
    sources = {split: _source(part.path.parent, files[split], classes) for split, part in parts.items() if files[split]}
    return splits_from(sources, notes, faults)


def _parts(
    root: Path,
    where: str,
    tables: list[Path],
    numbers: tuple[str, ...],
    choice: Choice,
    *,
    unlabelled: bool,
    is_folder: bool,
) -> tuple[dict[Split, Table], tuple[str, ...]]:
    """Read the tables. Return the rows of each split, and notes."""
    names = [table.relative_to(root).as_posix() for table in tables]
    if len(tables) == 1 and not (is_folder and (split_of(names[0], choice.splits) or split_of(root.name))):
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
            parts[split] = read(path, choice, numbers, unlabelled=unlabelled or split != "train")
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

    def one(row: Row) -> Row:
        if isinstance(row.label, tuple):
            return row._replace(label=tuple(whole[name] for name in row.label))
        return row if row.label is None else row._replace(label=whole[row.label])

    return {split: part._replace(rows=list(map(one, part.rows))) for split, part in parts.items()} if whole else parts


def _counts(tables: Iterable[Table]) -> Counter[str]:
    """Return the number of rows of each class, for tables with one label per image."""
    return Counter(row.label for table in tables for row in table.rows if isinstance(row.label, str))


def _source(root: Path, files: dict[str, tuple[Row, int]], classes: tuple[str, ...]) -> FileSource:
    """Return the image files of some rows, in their order. `classes` holds the names of classes or numbers."""
    rows = [row for row, _ in files.values()]
    inodes = [inode for _, inode in files.values()]
    if rows[0].numbers:
        values = NumberColumns(np.array([row.numbers for row in rows], np.float64))
        return FileSource(root, list(files), values, inodes, classes)
    places = {name: place for place, name in enumerate(classes)}
    labels: list[Target] = []
    for row in rows:
        found = tuple(sorted({places[name] for name in row.names}))
        labels.append(found if isinstance(row.label, tuple) else found[0] if found else None)
    return FileSource(root, list(files), labels if classes else None, inodes, classes)


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


def _unknown_class(table: Path, split: Split, rows: list[Row], classes: tuple[str, ...]) -> Fault:
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


def _files(table: Table) -> tuple[dict[str, tuple[Row, int]], list[Fault]]:
    """Return the row and the inode of each file, by its path relative to the table, and the faults of the other rows.

    Every folder is listed once, because a million calls of stat would take longer.
    """
    folder = table.path.parent
    listings: dict[str, dict[str, int]] = {}
    found: dict[str, tuple[Row, int]] = {}
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
        elif key in found:
            repeated.append(f"line {row.line}: {row.path}, which is also in line {found[key][0].line}")
        else:
            found[key] = (row, inode)
    hint = _alike(folder, first_missing) if first_missing else ""
    return found, list(_faults(table, outside, missing, repeated, hint))


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
            shown = "; ".join(rows[:MOST_SHOWN]) + ("; and so on" if len(rows) > MOST_SHOWN else "")
            yield Fault(
                kind, "error", len(rows),
                f"{table.path}: {len(rows):,} of {plural(count, 'row')} name {text} ({shown}){more}",
                "Training refuses the data. This check leaves these rows out.",
                advice,
            )  # fmt: skip
