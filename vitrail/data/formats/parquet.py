"""Parquet files of images in Hugging Face's convention: a struct of bytes and path, and a label that is a number.

Parquet is read one row group at a time. In a shuffled order, a whole row group would have to be unpacked for every
image. The first use therefore unpacks the images of each file into a cache under `$VITRAIL_DATA` or ~/.cache/vitrail.
The cache takes as much disk space as the images. Labels are read from the Parquet file each time, which is fast.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import importlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float64, Int64

from vitrail.data.faults import Fault, is_own_output
from vitrail.data.formats.unpacked import Blob, open_blob, write_blob
from vitrail.data.pixels.decode import SUFFIXES
from vitrail.data.source import Files, Samples, Source
from vitrail.data.splits import (
    CHOICE,
    Choice,
    Split,
    Splits,
    by_split,
    check_chosen,
    divide,
    find_split,
    split_of,
    splits_from,
)
from vitrail.data.targets import (
    LabelColumn,
    LabelReader,
    MissingColumn,
    Targets,
    join,
    label_targets,
    number,
    number_column,
    places_of,
    refuse_flags,
    refuse_joined,
    text_column,
)
from vitrail.data.texts import TEXTS, TextReader, without_texts
from vitrail.errors import DataError, SaveError, check_known, listed, plural
from vitrail.files import cache_folder, saving

SUFFIX = ".parquet"

SHARD = re.compile(r"(?P<split>.+?)-(?P<number>\d+)-of-(?P<count>\d+)(?:-[0-9a-f]+)?", re.S)
"""File names of a split as the library `datasets` writes them, without the suffix. Older versions append a hash."""

T = TypeVar("T", LabelColumn, Targets)


class ParquetImages:
    """The images of some Parquet files, in order. The key of an image is the file's name and the row:
    `train/0000.parquet:17`. A row without an image has 0 bytes and counts as undecodable."""

    def __init__(self, names: Sequence[str], blobs: Sequence[Blob]) -> None:
        self._names = tuple(names)
        self._blobs = tuple(blobs)
        self._firsts = [0, *accumulate(len(blob) for blob in blobs)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def key(self, place: int) -> str:
        file, row = self._row(place)
        return f"{self._names[file]}:{row}"

    def image(self, place: int) -> bytes:
        file, row = self._row(place)
        return self._blobs[file][row]

    def stamp(self, place: int) -> str:
        """Return a text with the row number and the name of the row's file of unpacked images. The name contains a hash
        of the Parquet file's path, size and times, and of those of the files that its rows name."""
        file, row = self._row(place)
        return f"{self._blobs[file].path.name} {row}"

    def _row(self, place: int) -> tuple[int, int]:
        """Return the index of the file and the row in it."""
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
    if "train" in files and not sum(file.rows for file in files["train"]):
        raise DataError(f"{title} has an empty training split; training needs at least one row")
    image, label, text = _columns(files, choice, reads_texts=not numbers)
    every = (file.name for some in files.values() for file in some)
    notes = [*notes, *(f"{title} has only {incomplete}" for incomplete in missing_shards(every))]
    rows: dict[Split, Int64[np.ndarray, " n"]] = {}
    column = None
    if set(files) == {"train"}:
        column, rows, more = _divided(title, files["train"], choice, {image, label, text, *numbers})
        notes += more
        if rows:
            files = dict.fromkeys(rows, files["train"])
    faults: tuple[Fault, ...] = ()
    if numbers:
        targets, used = _number_targets(title, files, rows, numbers, notes), numbers
    elif text is not None:
        targets, used = _text_targets(title, files, rows, text, notes), (text,)
    else:
        targets, faults = _label_targets(title, files, rows, label, choice, classes, notes)
        used = () if label is None else (label,)
    if used:
        types = next(iter(files.values()))[0].types
        lower = {name.lower() for name in (image, column, *used) if name is not None}
        if rest := [name for name in types if name.lower() not in lower]:
            notes.append(f"{title}: {plural(len(rest), 'column')} not used: {listed(rest)}")
    blobs = _unpack(title, list(dict.fromkeys(file for split in targets for file in files[split])), image, notes)
    sources: dict[Split, Source] = {}
    for split, found in targets.items():
        reader = ParquetImages([file.name for file in files[split]], [blobs[file] for file in files[split]])
        sources[split] = Samples((reader,), rows[split] if rows else range(len(reader)), found)
    return splits_from(sources, notes, faults)


def missing_shards(names: Iterable[str]) -> Iterator[str]:
    """Yield a text for each group of Parquet files whose names state a larger number of files than there are."""
    shards: dict[tuple[str, str, int], set[int]] = {}
    for name in names:
        folder, slash, file = name.rpartition("/")
        if name.endswith(SUFFIX) and (match := SHARD.fullmatch(file.removesuffix(SUFFIX))):
            group = f"{folder}{slash}{match['split']}-", match["count"], len(match["number"])
            shards.setdefault(group, set()).add(int(match["number"]))
    for (stem, total, digits), present in shards.items():
        if len(present) < int(total):  # some programs number files from 1
            first = min({*range(int(total) in present, int(total) + 1)} - present)
            missing = f"{stem}{first:0{digits}}-of-*"
            yield f"{len(present)} of {int(total)} files {stem}*. The first missing file is {missing}"


def _divided(
    title: str, files: Sequence[ParquetFile], choice: Choice, taken: set[str | None]
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


def _of_splits(
    files: Mapping[Split, Sequence[ParquetFile]],
    rows: Mapping[Split, Int64[np.ndarray, " n"]],
    read: Callable[[Sequence[ParquetFile]], T],
) -> dict[Split, T]:
    """Return what `read` makes of the files of each split. If a column divides the rows, all splits have the same
    files, which are read once."""
    if not rows:
        return {split: read(some) for split, some in files.items()}
    whole = read(next(iter(files.values())))
    return {split: whole.rows(chosen) for split, chosen in rows.items()}


def _label_targets(
    title: str,
    files: Mapping[Split, Sequence[ParquetFile]],
    rows: Mapping[Split, Int64[np.ndarray, " n"]],
    label: str | None,
    choice: Choice,
    classes: tuple[str, ...] | None,
    notes: list[str],
) -> tuple[dict[Split, Targets], tuple[Fault, ...]]:
    """Return the labels of each split that is not skipped, and faults. Notes are added to `notes`."""
    reader = LabelReader(choice.separator, keep_missing=choice.keep_missing)
    labels: dict[Split, LabelColumn] = {}
    if label is not None:
        labels = _of_splits(
            {split: some for split, some in files.items() if label in some[0].types},
            rows,
            lambda some: join([str(file.path) for file in some], [file.labels(label, reader) for file in some]),
        )
    counts = {split: len(rows[split]) if rows else sum(file.rows for file in some) for split, some in files.items()}
    labels = {
        one: column for one, column in labels.items() if one == "train" or column.targets.values.max(initial=-1) >= 0
    }
    for split, count in list(counts.items()):
        if split != "train" and (count == 0 or (label is not None and split not in labels)):
            reason = "none of its images has a label" if count else "it is empty"
            notes.append(f"{title}: the {split} split is skipped, because {reason}")
            del counts[split]
    if not counts:
        raise DataError("\n".join((*notes, f"{title} has no split with labels")))
    notes += reader.notes(title)
    if label is None:
        notes.append(
            f"{title} has no column of labels, so its images are unlabelled; to use one of the columns "
            f"{next(iter(files.values()))[0].described}, add ?label= and its name to the data's name"
        )
        return {split: Targets.unknown("none", classes or (), count) for split, count in counts.items()}, ()
    labels = {split: labels[split] for split in counts}
    named = Counter[str]()
    for column in labels.values():
        named.update(column.counts())
    refuse_joined(title, named, choice.separator)
    return number(title, labels, classes)


def _text_targets(
    title: str,
    files: Mapping[Split, Sequence[ParquetFile]],
    rows: Mapping[Split, Int64[np.ndarray, " n"]],
    text: str,
    notes: list[str],
) -> dict[Split, Targets]:
    """Return the texts of each split that is not skipped. Notes are added to `notes`."""
    reader = TextReader()

    def read(some: Sequence[ParquetFile]) -> Targets:
        cells = (cell for file in some for cell in (file.cells(text) if text in file.types else [None] * file.rows))
        return Targets.of(map(reader, cells), "texts", ())

    targets = _with_known(title, _of_splits(files, rows, read), "text", notes)
    notes += reader.notes(title)
    return targets


def _number_targets(
    title: str,
    files: Mapping[Split, Sequence[ParquetFile]],
    rows: Mapping[Split, Int64[np.ndarray, " n"]],
    numbers: tuple[str, ...],
    notes: list[str],
) -> dict[Split, Targets]:
    """Return the numbers of each split that is not skipped. Notes are added to `notes`."""

    def read(some: Sequence[ParquetFile]) -> Targets:
        try:
            return Targets("numbers", numbers, np.concatenate([file.numbers(numbers) for file in some]))
        except MissingColumn:
            if some is files.get("train"):
                raise
            return Targets.unknown("numbers", numbers, sum(file.rows for file in some))

    return _with_known(title, _of_splits(files, rows, read), "number", notes)


def _with_known(title: str, found: Mapping[Split, Targets], noun: str, notes: list[str]) -> dict[Split, Targets]:
    """Return the training split and the splits in which a target is known. The others are skipped, with one more of
    `notes` for each. Raise `DataError` if there are no such splits."""
    kept = {split: targets for split, targets in found.items() if split == "train" or targets.known.any()}
    notes += [
        f"{title}: the {split} split is skipped, because none of its images has a {noun}"
        for split in found
        if split not in kept
    ]
    if not kept:
        raise DataError("\n".join((*notes, f"{title} has no split in which an image has a {noun}")))
    return kept


def _columns(
    files: Mapping[Split, Sequence[ParquetFile]], choice: Choice, *, reads_texts: bool
) -> tuple[str, str | None, str | None]:
    """Return the columns of images, labels and texts, found in the first training file. Texts are read if they were
    chosen, or if there are no labels.

    All other files must have the same columns, but a whole split may lack labels. Raises `DataError`.
    """
    first = (files.get("train") or next(iter(files.values())))[0]
    image = first.image_column(choice.image)
    label, text = first.label_column(choice.label), None
    if reads_texts and (choice.text is not None or label is None):
        text = first.text_column(choice.text)
    for some in files.values():
        for file in some:
            file.image_column(image)
            if label is not None and (label in file.types) != (label in some[0].types):
                raise DataError(
                    f"{some[0].path} and {file.path}: only one of the two has the column {label!r}; all files of a "
                    "split need it"
                )
    return image, label, text


def identity_of(path: Path) -> str:
    """Return a text of the path, size, modification time and inode change time of a file.

    The text changes when the file changes: programs that copy or unpack files cannot set the inode change time.
    """
    status = path.stat()
    return f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}"


def _unpack(title: str, files: Sequence[ParquetFile], column: str, notes: list[str]) -> dict[ParquetFile, Blob]:
    """Return the unpacked images of each file. Files in the cache are not unpacked again. If a file had to be unpacked,
    a note is added to `notes`."""
    folder = cache_folder("parquet")
    places = {file: folder / _blob_name(file, column) for file in files}
    blobs = {file: blob for file, place in places.items() if (blob := open_blob(place)) is not None}
    if not (missing := [file for file in files if file not in blobs]):
        return blobs
    needed = sum(file.image_bytes(column) for file in missing)
    with saving("unpacked images", folder):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
    if needed > free:
        raise SaveError(
            f"{title}: unpacking the images into {folder} takes {_size(needed)}, but only {_size(free)} are free "
            "there; set VITRAIL_DATA to a folder on a larger disk"
        )
    written = 0
    for file in missing:
        blobs[file] = write_blob(places[file], file.images(column))
        written += int(blobs[file].offsets[-1])
    for file in missing:
        if len(blobs[file]) != file.rows:
            raise DataError(f"{file.path} changed while it was read; run the command again")
    notes.append(
        f"{title}: the images were unpacked once into {folder} ({_size(written)}), for random access; files deleted "
        "there are made again when they are needed"
    )
    return blobs


def _blob_name(file: ParquetFile, column: str) -> str:
    identity = f"{file.identity}\0{column}{file.files_beside(column)}"
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
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


IMAGES = ("image", "img")
LABELS = ("label", "labels", "fine_label")
BATCH_BYTES = 2**23
"""Approximate number of bytes that are decoded at once. A larger number needs more memory and is not faster."""


class ParquetFile:
    """A Parquet file of a split, which follows Hugging Face's convention for images.

    In this convention, an image is a struct of the bytes and the path of an image file. The metadata of the schema name
    the image columns and the classes. Raises `DataError` if the file is not a Parquet file or is damaged.
    """

    def __init__(self, name: str, path: Path, identity: str) -> None:
        self.name = name
        """Relative path of the file, the same on every machine. The keys of samples begin with this path."""
        self.path = path
        self.identity = identity
        """Text that identifies the content of the file. The cache uses it to find the unpacked images."""
        with self._file() as file:
            schema = file.schema_arrow
            self.rows: int = file.metadata.num_rows
            self.types: dict[str, Any] = {field.name: field.type for field in schema}
            self._features = _features(schema.metadata or {})

    @property
    def described(self) -> str:
        """The names and types of all columns, for messages."""
        return ", ".join(f"{name} ({kind})" for name, kind in self.types.items()) or "none"

    def image_column(self, wanted: str | None) -> str:
        """Return the name of the image column, which is `wanted` if given. Raises `DataError` unless exactly one column
        fits."""
        if wanted is not None:
            self._require(wanted)
            if not self._holds_bytes(wanted):
                raise DataError(
                    f"{self.path}: column {wanted!r} has the type {self.types[wanted]}, which holds no images; a "
                    "column of images is binary, or a struct with a binary field called bytes"
                )
            return wanted
        found = [name for name in self.types if self._is_image(name) and self._holds_bytes(name)]
        if "image" in found:
            return "image"
        if len(found) > 1:
            raise DataError(
                f"{self.path} has several columns of images: {', '.join(found)}; choose one by adding, for example, "
                f"?image={found[0]} to the data's name"
            )
        if not found:
            raise DataError(
                f"{self.path} has no column of images: its columns are {self.described}; a column of images is a "
                f"struct of bytes and path, or a binary column called {' or '.join(IMAGES)}"
            )
        return found[0]

    def label_column(self, wanted: str | None) -> str | None:
        """Return the name of the label column, which is `wanted` if given, or None if the file has no labels. Raises
        `DataError`."""
        if wanted is not None:
            self._require(wanted)
            return wanted
        if "label" in self.types:
            return "label"
        stated = [name for name in self.types if _class_names(self._features.get(name)) is not None]
        found = stated or [name for name in LABELS if name in self.types]
        if len(found) > 1:
            raise DataError(
                f"{self.path} has several columns of labels: {', '.join(found)}; choose one by adding, for example, "
                f"?label={found[0]} to the data's name"
            )
        return found[0] if found else None

    def text_column(self, wanted: str | None) -> str | None:
        """Return the name of the column of texts: `wanted`, or if that is "" or None, the first one with a usual name.
        Raise `DataError` if there is none, unless `wanted` is None."""
        if wanted:
            self._require(wanted)
            return wanted
        lower = {name.lower(): name for name in self.types}
        found = next((lower[name] for name in TEXTS if name in lower), None)
        if found is None and wanted is not None:
            raise without_texts(str(self.path), list(self.types))
        return found

    def labels(self, column: str, reader: LabelReader) -> LabelColumn:
        """Return all labels of a column: class numbers, text, or lists of either. `reader` reads text. Raises
        `DataError`."""
        arrow, compute = pyarrow(), pyarrow().compute
        with self._file() as file:
            values = file.read(columns=[column], use_threads=False).column(column).combine_chunks()
            starts = None
            types = arrow.types
            if types.is_list(values.type) or types.is_large_list(values.type) or types.is_fixed_size_list(values.type):
                lengths = compute.fill_null(compute.list_value_length(values), 0).to_numpy(zero_copy_only=False)
                starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
                reader.blank += values.null_count
                values = values.flatten()
            kind = values.type
            if arrow.types.is_dictionary(kind):
                values = values.dictionary_decode()
                kind = values.type
            names = _class_names(self._features.get(column))
            if arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind):
                encoded = compute.dictionary_encode(values)
                return text_column(_numbers(encoded.indices), encoded.dictionary.to_pylist(), starts, reader)
            if arrow.types.is_floating(kind):
                values = self._whole(column, values)
                kind = values.type
            if arrow.types.is_boolean(kind) or arrow.types.is_integer(kind) or arrow.types.is_null(kind):
                numbers = _numbers(values)
                self._check_range(column, numbers, starts, names)
                if starts is not None and numbers.max(initial=0) < 2:
                    refuse_flags(f"{self.path}, column {column!r}", np.split(numbers, starts[1:-1]))
                if names is None:
                    return number_column(numbers, starts)
                return LabelColumn(label_targets(numbers, starts, names), "numbers with names")
        raise DataError(
            f"{self.path}: column {column!r} has the type {self.types[column]}, which holds no labels; labels are "
            f"whole numbers, text, or lists of them; a column of numbers to predict is named by --numbers {column}"
        )

    def texts(self, column: str) -> list[str]:
        """Return the values of a column as text, with "" for null."""
        return ["" if value is None else str(value) for value in self.cells(column)]

    def cells(self, column: str) -> list[Any]:
        """Return the values of a column."""
        with self._file() as file:
            return list(file.read(columns=[column], use_threads=False).column(column).to_pylist())

    def _whole(self, column: str, values: Any) -> Any:
        """Return class numbers that are stored as floats, which is how pandas writes them if one is missing. NaN is no
        label."""
        found = values.to_numpy(zero_copy_only=False).astype(np.float64)
        wrong = np.isfinite(found) & (found != np.floor(found)) | np.isinf(found)
        if wrong.any():
            raise DataError(
                f"{self.path}: column {column!r} holds {found[wrong.argmax()]}, which is not a whole number; labels "
                f"are whole numbers, text, or lists of them; numbers to predict are named by --numbers {column}"
            )
        return pyarrow().array(np.where(np.isnan(found), -1, found).astype(np.int64))

    def numbers(self, columns: Sequence[str]) -> Float64[np.ndarray, "n k"]:
        """Return the numbers in some columns, with NaN for null. Raise `DataError` if a column is missing or holds
        text."""
        arrow = pyarrow()
        names = [list(self.types)[place] for place in places_of(str(self.path), columns, list(self.types))]
        for name in names:
            kind = self.types[name]
            if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_decimal(kind)):
                raise DataError(
                    f"{self.path}: column {name!r} is of type {kind}, which holds no numbers{self._first_value(name)}; "
                    "regression needs whole numbers, floats or decimals"
                )
        with self._file() as file:
            table = file.read(columns=names, use_threads=False)
            found = [
                arrow.compute.fill_null(table.column(name).cast(arrow.float64()), math.nan).to_numpy() for name in names
            ]
        values = np.stack(found, axis=1).astype(np.float64)
        if np.isinf(values).any():
            row, place = np.argwhere(np.isinf(values))[0].tolist()
            raise DataError(
                f"{self.path}, row {row}: column {names[place]!r} holds {values[row, place]}, which is not a finite "
                "number"
            )
        return values

    def _first_value(self, column: str) -> str:
        """Return an example of a column's values for messages."""
        with self._file() as file:
            batches = file.iter_batches(64, columns=[column], use_threads=False)
            values = (value for batch in batches for value in batch.column(0).to_pylist() if value is not None)
            return next((f", like {str(value)[:40]!r}" for value in values), "")

    def image_bytes(self, column: str) -> int:
        """Return approximately how many bytes the images take. Repeated images are counted once."""
        with self._file() as file:
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            chunks = (group.column(number) for group in groups for number in range(group.num_columns))
            own = (chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{column}."))
            return sum(chunk.total_uncompressed_size for chunk in own)

    def images(self, column: str) -> Iterator[Any]:
        """Yield the bytes of each image as a buffer, in order. Yield None for a row without an image.

        At most two row groups are in memory. If a row has only a path, the image is read from that path, which is
        relative to the Parquet file and must lie inside its folder. Raises `DataError`.
        """
        arrow, compute = pyarrow(), pyarrow().compute
        rows = min(1024, max(1, BATCH_BYTES * self.rows // max(1, self.image_bytes(column))))
        row = 0
        with self._file() as file:
            for batch in file.iter_batches(rows, columns=[column], use_threads=False):
                values, paths = batch.column(0), None
                if arrow.types.is_struct(values.type):
                    if values.type.get_field_index("path") >= 0:
                        paths = compute.struct_field(values, "path")
                    values = compute.struct_field(values, "bytes")
                if arrow.types.is_dictionary(values.type):
                    values = values.dictionary_decode()
                for number, value in enumerate(values):
                    path = None if paths is None or value.is_valid else paths[number].as_py()
                    yield value.as_buffer() if path is None else self._beside(path, row)
                    row += 1

    def files_beside(self, column: str) -> str:
        """Return a text that changes when an image file changes that a row names in place of holding an image. It is ""
        if every row holds an image.

        If the statistics do not say so, or a row has no image, every existing file counts that a row names. Most rows
        that hold an image also have a name, which the image once had elsewhere.
        """
        with self._file() as file:
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            lacking = [
                number
                for number, group in enumerate(groups)
                for chunk in map(group.column, range(group.num_columns))
                if chunk.path_in_schema == f"{column}.bytes"
                and (chunk.statistics is None or chunk.statistics.null_count != 0)
            ]
            if not lacking or self.types[column].get_field_index("path") < 0:
                return ""
            rows = file.read_row_groups(lacking, [f"{column}.path"], use_threads=False).column(column)
        names = sorted({*pyarrow().compute.struct_field(rows, "path").to_pylist()} - {None})
        files = Files(self.path.parent, names, ())
        stamps = ((name, files.stamp(place)) for place, name in enumerate(names))
        return "".join(f"\0{name} {stamp}" for name, stamp in stamps if stamp[0].isdigit())  # not of missing files

    def _beside(self, path: str, row: int) -> bytes:
        folder = self.path.parent.resolve()
        target = (folder / path).resolve()
        if not target.is_relative_to(folder) or not target.is_file():
            raise DataError(
                f"{self.path}, row {row}: the row has no image but only the path {path!r}, and the folder {folder} "
                "does not contain that file"
            )
        return target.read_bytes()

    def _require(self, column: str) -> None:
        check_known(column, self.types, f"{self.path} has no column {column!r}", DataError)

    def _is_image(self, name: str) -> bool:
        feature = self._features.get(name)
        stated = isinstance(feature, dict) and feature.get("_type") == "Image"
        return stated or name in IMAGES or pyarrow().types.is_struct(self.types[name])

    def _holds_bytes(self, name: str) -> bool:
        types, kind = pyarrow().types, self.types[name]
        if types.is_struct(kind):
            place = kind.get_field_index("bytes")
            if place < 0:
                return False
            kind = kind.field(place).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))

    def _check_range(
        self,
        column: str,
        numbers: Int64[np.ndarray, " n"],
        starts: Int64[np.ndarray, " starts"] | None,
        names: tuple[str, ...] | None,
    ) -> None:
        """Raise `DataError` for a label that is out of range. The smallest is -1, for no label. If there are class
        names, the largest is the index of the last name."""
        count = 2**31 if names is None else len(names)
        wrong = (numbers < -1) | (numbers >= count)
        if wrong.any():
            place = int(wrong.argmax())
            row = place if starts is None else int(np.searchsorted(starts, place, side="right")) - 1
            rule = "numbered from 0" if names is None else f"0 to {count - 1}"
            raise DataError(
                f"{self.path}, row {row}: the label {numbers[place]} in column {column!r} is out of "
                f"range; the classes are {rule}, and -1 means no label"
            )

    @contextmanager
    def _file(self) -> Iterator[Any]:
        """Yield the open file. Every error in reading it becomes a `DataError`."""
        arrow = pyarrow()
        try:
            # A buffer makes pyarrow read a few pages at a time instead of a whole row group.
            with arrow.parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=2**20) as file:
                yield file
        except DataError:
            raise
        except (arrow.lib.ArrowException, OSError, ValueError, OverflowError) as error:
            text = " ".join(str(error).split())
            raise DataError(f"{self.path} cannot be read as Parquet: {text[:300]}") from error


@functools.cache
def pyarrow(action: str = "reading") -> ModuleType:
    """Import pyarrow for reading or writing Parquet, and return it. It is imported at first use, because the import is
    slow. Raise `DataError` if it is not installed."""
    try:
        for part in ("compute", "parquet"):
            importlib.import_module(f"pyarrow.{part}")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(f"{action} Parquet needs pyarrow: pip install 'vitrail[parquet]' ({error})") from error


def _numbers(values: Any) -> Int64[np.ndarray, " n"]:
    """Return an array of whole numbers with -1 for null."""
    arrow = pyarrow()
    filled = arrow.compute.fill_null(values.cast(arrow.int64()), -1)
    return np.asarray(filled.to_numpy(zero_copy_only=False), np.int64)


def _features(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """Return the column metadata of Hugging Face's `datasets`. It is empty if another program wrote the file."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """Return the class names of a feature with class labels or lists of class labels, or None for any other feature."""
    if isinstance(feature, list) and len(feature) == 1:
        return _class_names(feature[0])
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") in ("Sequence", "List", "LargeList"):
        return _class_names(feature.get("feature"))
    names = feature.get("names")
    if feature.get("_type") != "ClassLabel" or not isinstance(names, list):
        return None
    return tuple(str(name) for name in names)
