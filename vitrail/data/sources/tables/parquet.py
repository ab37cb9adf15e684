"""Parquet files of images in Hugging Face's convention: a struct of bytes and path, and a label that is a number.

Parquet is read one row group at a time. In a shuffled order, a whole row group would have to be unpacked for every
image. The first use therefore unpacks the images of each file into a cache under `$VITRAIL_DATA` or ~/.cache/vitrail.
The cache takes as much disk space as the images. Labels are read from the Parquet file each time, which is fast.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from vitrail.data.choice import Choice
from vitrail.data.faults import Fault, is_own_output
from vitrail.data.labels import LabelReader, refuse_joined
from vitrail.data.pixels.formats import SUFFIXES
from vitrail.data.source import Sample, Target, TargetKind
from vitrail.data.sources.blob import Blob, open_blob, write_blob
from vitrail.data.sources.tables.label_column import LabelColumn, join, number
from vitrail.data.sources.tables.number_column import MissingColumn, NumberColumns
from vitrail.data.sources.tables.parquet_columns import ParquetColumns
from vitrail.data.sources.tables.split_column import divide, find_split
from vitrail.data.splits import CHOICE, Split, Splits, by_split, check_chosen, split_of, splits_from
from vitrail.errors import DataError, SaveError, listed, plural
from vitrail.files import cache_folder, saving

SUFFIX = ".parquet"


class ParquetFile(NamedTuple):
    """One file of a split."""

    name: str
    """Relative path of the file, the same on every machine. The keys of samples begin with this path."""
    path: Path
    identity: str
    """Text that identifies the content of the file. The cache uses it to find the unpacked images."""


class ParquetSource:
    """The rows of some Parquet files, in order. The key of a sample is the file's name and the row:
    `train/0000.parquet:17`.

    If `rows` is given, the samples are these rows of all files together, and `targets` holds one target for each of
    them. A row without an image has 0 bytes and counts as undecodable.
    """

    def __init__(
        self,
        names: Sequence[str],
        blobs: Sequence[Blob],
        targets: LabelColumn | NumberColumns | None,
        classes: tuple[str, ...],
        rows: Int64[np.ndarray, " n"] | None = None,
    ) -> None:
        self.classes = classes
        self._rows = rows
        self._names = tuple(names)
        self._blobs = tuple(blobs)
        self._targets = targets
        self._firsts = [0, *accumulate(len(blob) for blob in blobs)]

    def __len__(self) -> int:
        return self._firsts[-1] if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        file, row = self._place(index)
        return Sample(f"{self._names[file]}:{row}", self._blobs[file][row], self.target(index))

    def key(self, index: int) -> str:
        file, row = self._place(index)
        return f"{self._names[file]}:{row}"

    def target(self, index: int) -> Target:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return None if self._targets is None else self._targets[index]

    @property
    def target_kind(self) -> TargetKind:
        if self._targets is None:
            return "none"
        if isinstance(self._targets, NumberColumns):
            return "numbers"
        return "class" if self._targets.starts is None else "classes"

    def stamp(self, index: int) -> str:
        """Return a text with the row number and the name of the row's file of unpacked images. The name contains a hash
        of the Parquet file's path, size and times."""
        file, row = self._place(index)
        return f"{self._blobs[file].path.name} {row}"

    def _place(self, index: int) -> tuple[int, int]:
        """Return the index of the file and the row in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        place = index if self._rows is None else int(self._rows[index])
        file = bisect.bisect_right(self._firsts, place) - 1
        return file, place - self._firsts[file]


def looks_like_parquet(path: Path) -> bool:
    """Return True for the path of a Parquet file, and for a folder with a Parquet file at most two levels below it."""
    return path.suffix.lower() == SUFFIX or (path.is_dir() and _has_parquet(path, 2, is_root=True))


def open_parquet(
    location: Path,
    classes: tuple[str, ...] | None,
    numbers: tuple[str, ...] = (),
    choice: Choice | None = None,
) -> Splits:
    """Open a Parquet file, or a folder of them. The names of files or folders determine the splits, or else a column of
    splits.

    Images that are not in the cache are unpacked, and a note reports this. Raises `DataError`. Raises `SaveError` if
    the disk has too little space for the unpacked images.
    """
    choice = choice or Choice()
    chosen, root = choice.splits, location
    if root.is_dir():
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob(f"*{SUFFIX}") if path.is_file())
        names = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
        folders = {parent for name in names for parent in (root / name).parents if parent.is_relative_to(root)}
        own = {folder for folder in folders if folder != root and is_own_output(folder)}
        names = [name for name in names if own.isdisjoint((root / name).parents)]
        tops = {name.split("/")[0] for name in names if "/" in name and split_of(name.partition("/")[2])}
        several = sorted(top for top in tops if split_of(top) is None)
        if len(several) > 1 and chosen is None:
            raise DataError(
                f"{root} holds several data sets, in the folders {', '.join(several)}; open one of them, such as "
                f"{root / several[0]}"
            )
    elif root.is_file():
        names, root = [root.name], root.parent
    else:
        raise DataError(f"there is no file or folder {root}")
    if not names:
        raise DataError(f"{root} has no {SUFFIX} files in it")
    single = len(names) == 1 and location.is_file()  # a single file is the training split, whatever its name is
    if single:
        splits: dict[Split, list[str]] = {"train": names}
        notes: tuple[str, ...] = ()
    else:
        splits, notes = by_split(str(root), names, chosen)
        choice = replace(choice, splits={}) if chosen else choice  # the choice is that of files, not of rows
        tops = {name.split("/")[0] for name in splits.get("train", ()) if "/" in name}
        if len(tops) > 1 and len(splits) == 1 and not chosen:
            notes += (f"{root}: the files in {listed(sorted(tops))} are all training data; to choose splits, {CHOICE}",)
    files = {
        split: [ParquetFile(name, root / name, identity_of(root / name)) for name in some]
        for split, some in splits.items()
    }
    return open_files(str(location), files, choice, classes, notes, numbers=numbers)


def open_files(
    title: str,
    files: Mapping[Split, Sequence[ParquetFile]],
    choice: Choice,
    classes: tuple[str, ...] | None,
    notes: Iterable[str] = (),
    *,
    numbers: tuple[str, ...] = (),
) -> Splits:
    """Return the splits of some files. `title` names the data in messages. Raises the errors of `open_parquet`.

    If `numbers` names columns, the numbers in these columns are the targets. Otherwise the labels are the targets.
    """
    opened = {split: [ParquetColumns(file.path) for file in some] for split, some in files.items()}
    if "train" in opened and not sum(file.rows for file in opened["train"]):
        raise DataError(f"{title} has an empty training split; training needs at least one row")
    image, label = _columns(opened, choice)
    notes = list(notes)
    rows: dict[Split, Int64[np.ndarray, " n"]] = {}
    column = None
    if set(opened) == {"train"}:
        column, rows, more = _divided(title, opened["train"], choice, {image, label, *numbers})
        notes += more
        if rows:
            files, opened = dict.fromkeys(rows, files["train"]), dict.fromkeys(rows, opened["train"])
    targets: Mapping[Split, LabelColumn | NumberColumns]
    faults: tuple[Fault, ...] = ()
    if numbers:
        targets, names = _numbers(title, opened, rows, numbers, notes), numbers
        kept = list(targets)
    else:
        targets, kept, names, faults = _labels(title, opened, rows, label, choice, classes, notes)
    if label is not None or numbers:
        used = {image, column, *(numbers or (label,))}
        types = next(iter(opened.values()))[0].types
        lower = {name.lower() for name in used if name is not None}
        if rest := [name for name in types if name.lower() not in lower]:
            notes.append(f"{title}: {plural(len(rest), 'column')} not used: {listed(rest)}")
    pairs = [pair for split in kept for pair in zip(files[split], opened[split], strict=True)]
    blobs, unpacking_notes = _unpack(title, list(dict.fromkeys(pairs)), image)
    sources = {
        split: ParquetSource(
            [file.name for file in files[split]], [blobs[file] for file in files[split]], targets.get(split), names,
            rows.get(split),
        )
        for split in kept
    }  # fmt: skip
    return splits_from(sources, (*notes, *unpacking_notes), faults)


def _divided(
    title: str, files: Sequence[ParquetColumns], choice: Choice, taken: set[str | None]
) -> tuple[str | None, dict[Split, Int64[np.ndarray, " n"]], list[str]]:
    """Return the column of splits, the rows of each split, and notes. Without such a column, there are no rows."""
    free = [name for name in files[0].types if name not in taken and all(name in file.types for file in files)]
    column, values, notes = find_split(
        title, free, lambda name: [text for file in files for text in file.texts(name)], choice.splits
    )
    if column is None:
        if choice.splits:
            check_chosen(title, choice.splits, {}, [file.path.name for file in files])
        return None, {}, list(notes)
    where = f"{title}, column {column!r}"
    parts, skipped = divide(where, values, choice.splits, lambda row: f"row {row}")
    return column, {split: np.array(rows, np.int64) for split, rows in parts.items()}, [*notes, *skipped]


def _labels(
    title: str,
    opened: Mapping[Split, Sequence[ParquetColumns]],
    rows: Mapping[Split, Int64[np.ndarray, " n"]],
    label: str | None,
    choice: Choice,
    classes: tuple[str, ...] | None,
    notes: list[str],
) -> tuple[dict[Split, LabelColumn], list[Split], tuple[str, ...], tuple[Fault, ...]]:
    """Return the labels of each split, the splits that are not skipped, the classes, and faults. Notes are added to
    `notes`."""
    kept, labels = list(opened), {}
    reader = LabelReader(choice)
    whole: LabelColumn | None = None
    for split, some in opened.items():
        if label is not None and label in some[0].types:
            if whole is None or not rows:
                whole = join([str(file.path) for file in some], [file.labels(label, reader) for file in some])
            labels[split] = whole.taken(rows[split]) if rows else whole
        count = len(rows[split]) if rows else sum(file.rows for file in some)
        if split != "train" and (count == 0 or (label is not None and (split not in labels or labels[split].is_empty))):
            reason = "none of its images has a label" if count else "it is empty"
            notes.append(f"{title}: the {split} split is skipped, because {reason}")
            kept.remove(split)
            labels.pop(split, None)
    if not kept:
        raise DataError("\n".join((*notes, f"{title} has no split with labels")))
    notes += reader.notes(title)
    if label is None:
        notes.append(
            f"{title} has no column of labels, so its images are unlabelled; to use one of the columns "
            f"{next(iter(opened.values()))[0].described}, add ?label= and its name to the data's name"
        )
        return labels, kept, classes or (), ()
    counts = Counter[str]()
    for column in labels.values():
        counts.update(column.counts())
    refuse_joined(title, counts, choice)
    names, labels, faults = number(title, labels, classes)
    return labels, kept, names, faults


def _numbers(
    title: str,
    opened: Mapping[Split, Sequence[ParquetColumns]],
    rows: Mapping[Split, Int64[np.ndarray, " n"]],
    numbers: tuple[str, ...],
    notes: list[str],
) -> dict[Split, NumberColumns]:
    """Return the numbers of each split. A split in which no number is known is skipped, with one more of `notes`."""
    values: dict[Split, NumberColumns] = {}
    for split, some in opened.items():
        try:
            found = np.concatenate([file.numbers(numbers) for file in some])
            values[split] = NumberColumns(found[rows[split]] if rows else found)
        except MissingColumn:
            if split == "train":
                raise
        if split != "train" and (split not in values or np.isnan(values[split].values).all()):
            notes.append(f"{title}: the {split} split is skipped, because none of its images has a number")
            values.pop(split, None)
    return values


def _columns(opened: Mapping[Split, Sequence[ParquetColumns]], choice: Choice) -> tuple[str, str | None]:
    """Return the columns of images and labels, found in the first training file.

    All other files must have the same columns, but a whole split may lack labels. Raises `DataError`.
    """
    first = (opened.get("train") or next(iter(opened.values())))[0]
    image = first.image_column(choice.image)
    label = first.label_column(choice.label)
    for some in opened.values():
        for file in some:
            file.image_column(image)
            if label is not None and (label in file.types) != (label in some[0].types):
                raise DataError(
                    f"{some[0].path} and {file.path}: only one of the two has the column {label!r}; all files of a "
                    "split need it"
                )
    return image, label


def identity_of(path: Path) -> str:
    """Return a text of the path, size, modification time and inode change time of a file.

    The text changes when the file changes: programs that copy or unpack files cannot set the inode change time.
    """
    status = path.stat()
    return f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}"


def _unpack(
    title: str, files: Sequence[tuple[ParquetFile, ParquetColumns]], column: str
) -> tuple[dict[ParquetFile, Blob], tuple[str, ...]]:
    """Return the unpacked images of each file, and a note if a file had to be unpacked. Files in the cache are not
    unpacked again."""
    folder = cache_folder("parquet")
    places = {file: folder / _blob_name(file, column) for file, _ in files}
    blobs = {file: blob for file, place in places.items() if (blob := open_blob(place)) is not None}
    missing = [(file, columns) for file, columns in files if file not in blobs]
    if not missing:
        return blobs, ()
    needed = sum(columns.image_bytes(column) for _, columns in missing)
    with saving("unpacked images", folder):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
    if needed > free:
        raise SaveError(
            f"{title}: unpacking the images into {folder} takes {_size(needed)}, but only {_size(free)} are free "
            "there; set VITRAIL_DATA to a folder on a larger disk"
        )
    written = 0
    for file, columns in missing:
        blobs[file] = write_blob(places[file], columns.images(column))
        written += int(blobs[file].offsets[-1])
    for file, columns in missing:
        if len(blobs[file]) != columns.rows:
            raise DataError(f"{file.path} changed while it was read; run the command again")
    note = (
        f"{title}: the images were unpacked once into {folder} ({_size(written)}), for random access; files deleted "
        "there are made again when they are needed"
    )
    return blobs, (note,)


def _blob_name(file: ParquetFile, column: str) -> str:
    digest = hashlib.sha256(f"{file.identity}\0{column}".encode("utf-8", "surrogateescape")).hexdigest()
    return f"{Path(file.name).stem[:80]}-{digest[:24]}.images"


def _has_parquet(folder: Path, depth: int, *, is_root: bool) -> bool:
    """Return True if a folder has a Parquet file at most `depth` levels below it.

    The search of a subfolder ends at its first image, because a folder of images may hold a million of them.
    """
    subfolders = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                suffix = Path(entry.name).suffix.lower()
                if entry.name.startswith("."):
                    continue
                if suffix == SUFFIX:
                    return True
                if suffix in SUFFIXES and not is_root:
                    return False
                if depth and entry.is_dir() and not is_own_output(Path(entry.path)):
                    subfolders.append(Path(entry.path))
    except OSError:
        return False
    return any(_has_parquet(subfolder, depth - 1, is_root=False) for subfolder in subfolders)


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count / 1e6:,.2f} MB"
