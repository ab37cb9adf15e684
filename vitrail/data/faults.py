"""Faults in the structure of a data set, which are found while it is opened, and the folders that are never data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vitrail.errors import DataError, plural

__all__ = ["Fault", "is_system_folder", "refuse", "unknown_class"]

SYSTEM_FOLDERS = frozenset(
    {"__macosx", "@eadir", "@recycle", "#recycle", "#snapshot", "$recycle.bin", "system volume information",
     "lost+found", "__pycache__"}
)  # fmt: skip
"""Names, in lower case, of folders that operating systems, network storage and other programs make. Some of them hold
copies or thumbnails of images."""


@dataclass(frozen=True)
class Fault:
    """A fault in the structure of a data set. `vitrail data check` shows it as a finding of the same fields."""

    kind: str
    """Identifier of the fault, such as "empty-folder"."""
    severity: Literal["error", "warning", "note"]
    """Training refuses data with an error. It ignores all other faults with a note."""
    count: int
    """Number of folders, classes or files that the fault is about."""
    text: str
    training: str
    """The effect on training."""
    advice: str


def unknown_class(split: str, images: int, text: str) -> Fault:
    """Return the fault of a held-out split that has labels which no training image has. The check of the data counts
    these images as unlabelled."""
    return Fault(
        "unknown-class", "error", images, text,
        "Training refuses the data, because a network cannot learn a class without training images. This check counts "
        f"{plural(images, 'image')} of the {split} split as unlabelled.",
        "Add training images of these classes, or correct or remove these labels.",
    )  # fmt: skip


def is_system_folder(name: str) -> bool:
    """Return True if a folder of this name is hidden, or is made by an operating system or by network storage."""
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS


def refuse(faults: Iterable[Fault]) -> tuple[str, ...]:
    """Return the texts of harmless faults, as notes for the user. Raise `DataError` if a fault is an error. The message
    then names all faults that are at least a warning."""
    faults = tuple(faults)
    if any(fault.severity == "error" for fault in faults):
        named = sorted((fault for fault in faults if fault.severity != "note"), key=lambda fault: fault.severity)
        raise DataError("\n".join(fault.text for fault in named))
    return tuple(fault.text for fault in faults)
