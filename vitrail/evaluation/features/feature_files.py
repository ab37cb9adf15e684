"""Feature files for users: `.npy` with keys, which Vitrail can load again, and Parquet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.batch import Skipped
from vitrail.data.formats.parquet import pyarrow
from vitrail.data.source import target_from_plain
from vitrail.data.targets import Target, TargetKind, Targets
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features.cache import map_features, npy_header
from vitrail.evaluation.features.extract import FeatureSet
from vitrail.files import only_writer, partial_path, replacing_folder, saving
from vitrail.settings import from_plain, to_plain
from vitrail.weights.saved import check_format, read_object

FORMAT = 2
"""Version of the files."""
FEATURES, KEYS, ABOUT = NAMES = "features.npy", "keys.jsonl", "features.json"
PARQUET_ROWS = 8192
"""Number of rows in a row group."""


@dataclass(frozen=True)
class _Written:
    """The content of `features.json`."""

    format: int
    images: int
    width: int
    classes: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    target_kind: TargetKind
    about: dict[str, Any]


def save_features(features: FeatureSet, folder: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write a folder that `load_features` reads. Earlier features in the folder are replaced.

    `features.npy` has the vectors. `keys.jsonl` has one line per vector, with the "key" of the sample and either a
    "label" (a class index, a list of class indices, or null) or "numbers". `features.json` has the class names, the
    skipped samples and `about`, which is any JSON object. Raise `SaveError` if a file cannot be written.
    """
    kind = features.truth.kind
    written = _Written(
        FORMAT, len(features), features.width, features.classes, features.skipped, kind, dict(about or {})
    )
    with replacing_folder("features", folder, NAMES) as partial:
        with (partial / FEATURES).open("wb") as file:  # np.save states no reason if the disk is full
            file.write(npy_header(len(features), features.width))
            file.write(np.ascontiguousarray(features.features, "<f4").data)
        with (partial / KEYS).open("w", encoding="utf-8") as file:
            for row, key in enumerate(features.keys):
                file.write(json.dumps({"key": key, _name_of(kind): features.truth.plain(row)}) + "\n")
        (partial / ABOUT).write_text(json.dumps(to_plain(written), indent=2) + "\n", encoding="utf-8")


def load_features(path: str | Path) -> FeatureSet:
    """Return the features that `save_features` wrote. The vectors are memory-mapped.

    Raise `DataError` if a file is missing or the files contradict each other.
    """
    folder = Path(path)
    written = _read_about(folder)
    features = map_features(folder / FEATURES, (written.images, written.width))
    keys, truth = _read_keys(folder / KEYS, written)
    return FeatureSet(
        features, truth, keys, written.classes, written.skipped, str(written.about.get("precision", "float32"))
    )


def feature_folders(path: str | Path) -> list[Path]:
    """Return the folders of features in an output of `vitrail embed`: `path` itself, or the folder of each split in it.

    Raise `DataError` if there are none.
    """
    folder = Path(path)
    if (folder / ABOUT).is_file():
        return [folder]
    found = sorted(file.parent for file in folder.glob(f"*/{ABOUT}"))
    if not found:
        raise DataError(
            f"{folder} holds no features: neither it nor a folder in it has {ABOUT}; name a folder that vitrail embed "
            "wrote"
        )
    return found


def about_features(path: str | Path) -> dict[str, Any]:
    """Return the description that `save_features` wrote of the features in a folder. Raise `DataError` if it cannot be
    read."""
    return dict(_read_about(Path(path)).about)


def _read_about(folder: Path) -> _Written:
    if not (folder / ABOUT).is_file():
        inside = sorted(file.parent.name for file in folder.glob(f"*/{ABOUT}"))
        hint = f"; it has those of {', '.join(inside)}: name one" if inside else ""
        raise DataError(f"{folder} holds no features: it has no {ABOUT}{hint}")
    values, again = read_object(folder / ABOUT, DataError), "write the features again with vitrail embed"
    check_format(values.get("format"), FORMAT, folder / ABOUT, DataError, again)
    try:
        return from_plain(_Written, values)
    except ConfigError as error:
        raise DataError(f"{folder / ABOUT} is damaged, or of another version of Vitrail: {error}; {again}") from error


def save_parquet(features: FeatureSet, path: Path) -> None:
    """Write a Parquet file with the columns key (string), label and feature (a list of float32 of fixed length).

    For single labels, `label` is an int64, or null for an unlabelled image. For several labels, `label` is a list of
    int64, and for texts a list of strings. For regression, the column `numbers` replaces `label`. `numbers` is a list
    of float64, with null for an unknown number. Class names are in the schema's metadata, as JSON under "classes".
    Raise `SaveError`, and `DataError` if pyarrow is not installed.
    """
    arrow = pyarrow("writing")
    truth = features.truth
    value_types = {
        "class": arrow.int64(), "classes": arrow.list_(arrow.int64()), "numbers": arrow.list_(arrow.float64()),
        "texts": arrow.list_(arrow.string()),
    }  # fmt: skip
    kinds = {
        "key": arrow.string(),
        _name_of(truth.kind): value_types[truth.kind],
        "feature": arrow.list_(arrow.float32(), features.width),
    }
    schema = arrow.schema(list(kinds.items()), metadata={"classes": json.dumps(features.classes)})
    path = path.resolve()  # the file that a symbolic link names is replaced
    partial = partial_path(path)  # always the same, so that the next command replaces what a killed one left
    with saving("features", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    with saving("features", path), only_writer(path, partial):
        try:
            with arrow.parquet.ParquetWriter(partial, schema, use_dictionary=False) as file:
                for first in range(0, len(features), PARQUET_ROWS):
                    rows = range(first, min(first + PARQUET_ROWS, len(features)))
                    numbers = arrow.array(np.ascontiguousarray(features.features[rows.start : rows.stop]).reshape(-1))
                    columns = [
                        arrow.array([printable_key(features.keys[row]) for row in rows], kinds["key"]),
                        arrow.array([truth.plain(row) for row in rows], value_types[truth.kind]),
                        arrow.FixedSizeListArray.from_arrays(numbers, features.width),
                    ]
                    file.write_table(arrow.table(columns, schema=schema))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _name_of(kind: TargetKind) -> str:
    """Return the name of the field or column that contains targets of this kind."""
    return "numbers" if kind == "numbers" else "label"


def printable_key(key: str) -> str:
    """Return a key as valid Unicode. File names can hold any bytes, but a column of strings cannot."""
    return key.encode("utf-8", "backslashreplace").decode()


def _read_keys(path: Path, written: _Written) -> tuple[tuple[str, ...], Targets]:
    """Return the key and the target of each feature. Raise `DataError` with the number of the first invalid line."""
    keys: list[str] = []
    targets: list[Target] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                values = json.loads(line)
                key, value = values["key"], values[_name_of(written.target_kind)]
                target = target_from_plain(value, written.target_kind, len(written.classes))
                if not isinstance(key, str):
                    raise ValueError(f"it is {line.strip()[:80]}")
                if len(keys) == written.images:
                    raise ValueError(f"there are {written.images:,} features")
                keys.append(key)
                targets.append(target)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}, line {len(keys) + 1} cannot be used: {error}") from error
    if len(keys) != written.images:
        raise DataError(f"{path} has {len(keys):,} lines for {written.images:,} features")
    kind = "class" if written.target_kind == "none" else written.target_kind
    return tuple(keys), Targets.of(targets, kind, written.classes)
