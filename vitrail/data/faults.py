"""Faults in the structure of a data set, which are found while it is opened, and the folders and files that are never
data."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitrail.errors import DataError, plural

SYSTEM_NAMES = frozenset(
    {"__macosx", "@eadir", "@recycle", "#recycle", "#snapshot", "$recycle.bin", "system volume information",
     "lost+found", "__pycache__", "thumbs.db", "desktop.ini"}
)  # fmt: skip
"""Names, in lower case, of files and folders that operating systems, network storage and other programs make. Some of
them hold copies or thumbnails of images."""

OWN_RECORDS = {
    "run.json": "config", "report.json": "saliency", "compare.json": "paired", "explain.json": "files",
    "study.json": "study", "bench.json": "evaluations", "suite.json": "suite", "noisy-student.json": "teacher",
    "features.json": "target_kind", "labels.json": "teacher", "model.json": "preprocess",
}  # fmt: skip
"""Files in which Vitrail describes a folder of its output, each with a field that it has."""


TABLES = (".csv", ".tsv", ".jsonl")
"""Suffixes of tables of images."""

Severity = Literal["error", "warning", "note"]
"""An error makes training fail. With a warning, training works and prints a note, but the model is worse or its metrics
are wrong. A note is only information."""


@dataclass(frozen=True)
class Fault:
    """A fault in the structure of a data set. `vitrail data check` shows it as a finding of the same fields."""

    kind: str
    """Identifier of the fault, such as "empty-folder"."""
    severity: Severity
    count: int
    """Number of folders, classes or files that the fault is about."""
    text: str
    training: str
    """The effect on training."""
    advice: str
    """Action that the user can take."""


MOST_SHOWN = 5
"""Number of places that a message about a fault names."""


def shown(places: Sequence[str]) -> str:
    """Return the first of some places, such as lines and names of files, for a message."""
    return "; ".join(places[:MOST_SHOWN]) + ("; and so on" if len(places) > MOST_SHOWN else "")


def unknown_class(
    split: str,
    images: int,
    text: str,
    effect: str = "",
    advice: str = "Add training images of these classes, or correct or remove these labels.",
) -> Fault:
    """Return the fault of a held-out split that has labels which no training image has. Unless another `effect` is
    given, the check of the data counts these images as unlabelled."""
    effect = effect or f"counts {plural(images, 'image')} of the {split} split as unlabelled"
    return Fault(
        "unknown-class", "error", images, text,
        "Training refuses the data, because a network cannot learn a class without training images. This check "
        f"{effect}.",
        advice,
    )  # fmt: skip


def is_from_system(name: str) -> bool:
    """Return True if a file or a folder of this name is hidden, or made by an operating system or network storage."""
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def first_bytes(path: Path, count: int) -> bytes:
    """Return the beginning of a file, or nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""


def is_own_output(folder: Path, depth: int = 2) -> bool:
    """Return True for a folder that Vitrail wrote, such as a run or a report, and for a folder that holds only such
    folders. The files in it decide, not its name."""
    if any(is_own_record(folder / name) for name in OWN_RECORDS):
        return True
    if not depth:
        return False
    inner = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if not entry.is_dir():
                    return False
                inner.append(Path(entry.path))
    except OSError:
        return False
    return bool(inner) and all(is_own_output(one, depth - 1) for one in inner)


def is_own_record(path: Path) -> bool:
    """Return True for a file in which Vitrail describes a folder of its output. Its content decides, not its name."""
    if path.name not in OWN_RECORDS or not path.is_file():
        return False
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and OWN_RECORDS[path.name] in values


def column_names(table: Path, delimiter_of: Callable[[str], str] = lambda first: ",") -> list[str]:
    """Return the names of a table's columns, which its first line states. Return nothing if it cannot be read.
    `delimiter_of` returns the character between the cells of this line."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline(2**20)
        if table.suffix.lower() != ".jsonl":
            return next(csv.reader([first], delimiter=delimiter_of(first)), [])
        fields = json.loads(first)
    except (OSError, ValueError, RecursionError, csv.Error):
        return []
    return list(fields) if isinstance(fields, dict) else []


def has_predictions(table: Path) -> bool:
    """Return True for a table of predictions, as `vitrail predict` prints them. They are not labels."""
    names = column_names(table)
    if table.suffix.lower() == ".jsonl":
        return set(names) in (
            {"image", "label", "probability", "probabilities"}, {"image", "numbers"}, {"image", "error"}
        )  # fmt: skip
    return len(names) > 2 and names[0] == "image" and names[-1] == "error"


def refuse(faults: Iterable[Fault]) -> tuple[str, ...]:
    """Return the texts of harmless faults, as notes for the user. Raise `DataError` if a fault is an error. The message
    then names all faults that are at least a warning."""
    faults = tuple(faults)
    if any(fault.severity == "error" for fault in faults):
        named = sorted((fault for fault in faults if fault.severity != "note"), key=lambda fault: fault.severity)
        raise DataError("\n".join(fault.text for fault in named))
    return tuple(fault.text for fault in faults)
