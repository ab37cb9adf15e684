"""Features in files of the user's: `.npy` with keys, which is read back mapped, and Parquet."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from vitrail.data.pipeline import Skipped
from vitrail.errors import DataError
from vitrail.evaluation.features.cache import map_features
from vitrail.evaluation.features.extract import FeatureSet
from vitrail.files import check_new_folder, partial_path, replacing_folder, saving
from vitrail.plain import from_plain, to_plain

__all__ = ["check_features_folder", "load_features", "parquet_library", "save_features", "save_parquet"]

FORMAT = 1
FEATURES, KEYS, ABOUT = NAMES = "features.npy", "keys.jsonl", "features.json"
PARQUET_ROWS = 8192
"""In a row group."""


@dataclass(frozen=True)
class _Written:
    """The content of `features.json`."""

    format: int
    images: int
    width: int
    classes: tuple[str, ...]
    several_labels: bool
    skipped: tuple[Skipped, ...]
    about: dict[str, Any] = field(default_factory=dict)


def save_features(features: FeatureSet, folder: Path, about: Mapping[str, Any] | None = None) -> None:
    """Writes a folder that `load_features` reads, over one that is there.

    `features.npy` has the vectors, `keys.jsonl` a line for each with its key and label (a class's number, a list of
    them, or null), `features.json` the class names, what was skipped, and `about`, plain values of the caller's. Raises
    `SaveError`.
    """
    written = _Written(
        FORMAT, len(features), features.width, features.classes, features.targets is not None, features.skipped,
        dict(about or {}),
    )  # fmt: skip
    with replacing_folder("features", folder, NAMES) as partial:
        np.save(partial / FEATURES, features.features)
        with (partial / KEYS).open("w", encoding="utf-8") as file:
            for row, key in enumerate(features.keys):
                file.write(json.dumps({"key": key, "label": _plain_label(features, row)}) + "\n")
        (partial / ABOUT).write_text(json.dumps(to_plain(written), indent=2) + "\n", encoding="utf-8")


def load_features(path: str | Path) -> FeatureSet:
    """What `save_features` wrote, the vectors mapped. Raises `DataError` for what is missing or does not fit."""
    folder = Path(path)
    if not (folder / ABOUT).is_file():
        inside = sorted(file.parent.name for file in folder.glob(f"*/{ABOUT}"))
        hint = f"; it has those of {', '.join(inside)}: name one" if inside else ""
        raise DataError(f"{folder} holds no features: it has no {ABOUT}{hint}")
    try:
        written = from_plain(_Written, json.loads((folder / ABOUT).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{folder / ABOUT} cannot be read: {error}") from error
    if written.format != FORMAT:
        raise DataError(f"{folder / ABOUT}: format={written.format} is not known; known is {FORMAT}")
    features = map_features(folder / FEATURES, (written.images, written.width))
    keys, labels, targets = _read_keys(folder / KEYS, written)
    return FeatureSet(features, labels, targets, keys, written.classes, written.skipped)


def check_features_folder(path: Path, *, overwrite: bool) -> None:
    """Raise `DestinationError` unless features may be saved at `path`: see `vitrail.files.check_new_folder`."""
    check_new_folder(path, NAMES, overwrite=overwrite)


def save_parquet(features: FeatureSet, path: Path) -> None:
    """Writes the columns key (string), label (int64, null for none; or a list) and feature (float32, of fixed length).

    Class names are in the schema's metadata, as JSON under "classes". Raises `SaveError`, and `DataError` where pyarrow
    is not installed.
    """
    arrow = parquet_library()
    several = features.targets is not None
    kinds = {
        "key": arrow.string(),
        "label": arrow.list_(arrow.int64()) if several else arrow.int64(),
        "feature": arrow.list_(arrow.float32(), features.width),
    }
    schema = arrow.schema(list(kinds.items()), metadata={"classes": json.dumps(features.classes)})
    partial = partial_path(path)
    with saving("features", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with arrow.parquet.ParquetWriter(partial, schema, use_dictionary=False) as file:
                for first in range(0, len(features), PARQUET_ROWS):
                    rows = range(first, min(first + PARQUET_ROWS, len(features)))
                    numbers = arrow.array(np.ascontiguousarray(features.features[rows.start : rows.stop]).reshape(-1))
                    columns = [
                        arrow.array([_printable(features.keys[row]) for row in rows], kinds["key"]),
                        arrow.array([_plain_label(features, row) for row in rows], kinds["label"]),
                        arrow.FixedSizeListArray.from_arrays(numbers, features.width),
                    ]
                    file.write_table(arrow.table(columns, schema=schema))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@functools.cache
def parquet_library() -> ModuleType:
    """pyarrow, imported at first use. Raises `DataError` where it is not installed."""
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(f"writing Parquet needs pyarrow: pip install 'vitrail[parquet]' ({error})") from error


def _plain_label(features: FeatureSet, row: int) -> int | list[int] | None:
    if features.targets is not None:
        return np.flatnonzero(features.targets[row]).tolist()
    label = int(features.labels[row])
    return None if label < 0 else label


def _printable(key: str) -> str:
    """Names of files need not be text, and a column of strings must be."""
    return key.encode("utf-8", "backslashreplace").decode()


def _read_keys(
    path: Path, written: _Written
) -> tuple[tuple[str, ...], Int64[np.ndarray, " n"], UInt8[np.ndarray, "n classes"] | None]:
    """Keys, labels and targets, one for each feature. Raises `DataError` with the line that does not fit."""
    keys: list[str] = []
    labels = np.full(written.images, -1, np.int64)
    targets = np.zeros((written.images, len(written.classes)), np.uint8) if written.several_labels else None
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                values = json.loads(line)
                key, label = values["key"], values["label"]
                several = label if isinstance(label, list) else [] if label is None else [label]
                fits = all(type(one) is int and 0 <= one < len(written.classes) for one in several)
                if not isinstance(key, str) or not fits or isinstance(label, list) != written.several_labels:
                    raise ValueError(f"it says {line.strip()[:80]}")
                if number < written.images:
                    keys.append(key)
                    if targets is not None:
                        targets[number, several] = 1
                    elif several:
                        labels[number] = several[0]
                else:
                    raise ValueError(f"there are {written.images:,} features")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}, line {len(keys) + 1} cannot be used: {error}") from error
    if len(keys) != written.images:
        raise DataError(f"{path} has {len(keys):,} lines for {written.images:,} features")
    return tuple(keys), labels, targets
