"""Access to one Parquet file: the image and label columns, the labels as numbers, and the bytes of the images."""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from vitrail.data.labels import LabelReader
from vitrail.data.sources.tables.label_column import LabelColumn, text_column
from vitrail.data.sources.tables.number_column import places_of
from vitrail.errors import DataError, nearest

IMAGES = ("image", "img")
LABELS = ("label", "labels", "fine_label")
BATCH_BYTES = 2**23
"""Approximate number of bytes that are decoded at once. A larger number needs more memory and is not faster."""


class ParquetColumns:
    """The columns of a Parquet file that follows Hugging Face's convention for images.

    In this convention, an image is a struct of the bytes and the path of an image file. The metadata of the schema name
    the image columns and the classes. Raises `DataError` if the file is not a Parquet file or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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

    def labels(self, column: str, reader: LabelReader) -> LabelColumn:
        """Return all labels of a column: class numbers, text, or lists of either. `reader` reads text. Raises
        `DataError`."""
        arrow, compute = _pyarrow(), _pyarrow().compute
        with self._file() as file:
            values = file.read(columns=[column], use_threads=False).column(column).combine_chunks()
            starts = None
            if _is_list(values.type):
                lengths = compute.fill_null(compute.list_value_length(values), 0).to_numpy(zero_copy_only=False)
                starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
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
                labels = LabelColumn(numbers.astype(np.int32), starts, names, stated=names is not None)
                self._check_range(column, numbers, labels)
                return labels
        raise DataError(
            f"{self.path}: column {column!r} has the type {self.types[column]}, which holds no labels; labels are "
            f"whole numbers, text, or lists of them; a column of numbers to predict is named by --numbers {column}"
        )

    def texts(self, column: str) -> list[str]:
        """Return the values of a column as text, with "" for null."""
        with self._file() as file:
            values = file.read(columns=[column], use_threads=False).column(column).to_pylist()
        return ["" if value is None else str(value) for value in values]

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
        return _pyarrow().array(np.where(np.isnan(found), -1, found).astype(np.int64))

    def numbers(self, columns: Sequence[str]) -> Float64[np.ndarray, "n k"]:
        """Return the numbers in some columns, with NaN for null. Raise `DataError` if a column is missing or holds
        text."""
        arrow = _pyarrow()
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
            for batch in file.iter_batches(64, columns=[column], use_threads=False):
                for value in batch.column(0).to_pylist():
                    if value is not None:
                        return f", like {str(value)[:40]!r}"
        return ""

    def image_bytes(self, column: str) -> int:
        """Return approximately how many bytes the images take. Repeated images are counted once."""
        total = 0
        with self._file() as file:
            for group in range(file.metadata.num_row_groups):
                chunks = file.metadata.row_group(group)
                for number in range(chunks.num_columns):
                    chunk = chunks.column(number)
                    if f"{chunk.path_in_schema}.".startswith(f"{column}."):
                        total += chunk.total_uncompressed_size
        return total

    def images(self, column: str) -> Iterator[Any]:
        """Yield the bytes of each image as a buffer, in order. Yield None for a row without an image.

        At most two row groups are in memory. If a row has only a path, the image is read from that path, which is
        relative to the Parquet file and must lie inside its folder. Raises `DataError`.
        """
        arrow, compute = _pyarrow(), _pyarrow().compute
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
        if column not in self.types:
            raise DataError(f"{self.path} has no column {column!r}; {nearest(column, self.types)}")

    def _is_image(self, name: str) -> bool:
        feature = self._features.get(name)
        stated = isinstance(feature, dict) and feature.get("_type") == "Image"
        return stated or name in IMAGES or _pyarrow().types.is_struct(self.types[name])

    def _holds_bytes(self, name: str) -> bool:
        types, kind = _pyarrow().types, self.types[name]
        if types.is_struct(kind):
            place = kind.get_field_index("bytes")
            if place < 0:
                return False
            kind = kind.field(place).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))

    def _check_range(self, column: str, numbers: Int64[np.ndarray, " n"], labels: LabelColumn) -> None:
        """Raise `DataError` for a label that is out of range. The smallest is -1, for no label. If there are class
        names, the largest is the index of the last name."""
        count = 2**31 if labels.names is None else len(labels.names)
        wrong = (numbers < -1) | (numbers >= count)
        if wrong.any():
            place = int(wrong.argmax())
            rule = "numbered from 0" if labels.names is None else f"0 to {count - 1}"
            raise DataError(
                f"{self.path}, row {labels.row_of(place)}: the label {numbers[place]} in column {column!r} is out of "
                f"range; the classes are {rule}, and -1 means no label"
            )

    @contextmanager
    def _file(self) -> Iterator[Any]:
        """Yield the open file. Every error in reading it becomes a `DataError`."""
        arrow = _pyarrow()
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
def _pyarrow() -> ModuleType:
    """Import pyarrow, and return it. It is imported at first use, because the import is slow."""
    try:
        for part in ("compute", "parquet"):
            importlib.import_module(f"pyarrow.{part}")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(f"reading Parquet needs pyarrow: pip install 'vitrail[parquet]' ({error})") from error


def _is_list(kind: Any) -> bool:
    types = _pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _numbers(values: Any) -> Int64[np.ndarray, " n"]:
    """Return an array of whole numbers with -1 for null."""
    arrow = _pyarrow()
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
