"""Every exception that Vitrail raises on purpose, and the wording they share.

    VitrailError                 exit code 1: something of ours, or the machine's
    ├── NonFiniteLoss            training diverged; the last good checkpoint is named
    ├── SaveError                a file could not be written; what was there before is intact
    ├── Stopped                  exit code 75: stopped on request, resumable
    └── UserError                exit code 2: wrong usage or input (also a ValueError)
        ├── ConfigError          a setting, a name or a combination of them
        ├── DataError            a data set
        │   └── UndecodableImage one image
        ├── RunError             a run folder or its checkpoints
        ├── BundleError          a model on disk
        └── DestinationError     a path to write to that is taken

A message gives the value, the rule, and the choices: `pool='avg' is not one of 'cls', 'gap'`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "BundleError",
    "ConfigError",
    "DataError",
    "DestinationError",
    "NonFiniteLoss",
    "RunError",
    "SaveError",
    "Stopped",
    "UndecodableImage",
    "UserError",
    "VitrailError",
    "nearest",
]


class VitrailError(Exception):
    """Anything that Vitrail reports in one message instead of a traceback."""

    exit_code = 1


class NonFiniteLoss(VitrailError):
    """The loss or the gradient became NaN or infinite."""


class SaveError(VitrailError):
    """A file could not be written, for want of space or of permission."""


class Stopped(VitrailError):
    """The run was asked to stop, saved a checkpoint in its folder `run`, and can go on."""

    exit_code = 75

    def __init__(self, message: str, run: Path) -> None:
        super().__init__(message)
        self.run = run


class UserError(VitrailError, ValueError):
    """Wrong usage or wrong input: the user can mend it."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is out of its range, unknown, or at odds with another."""


class DataError(UserError):
    """A data set cannot be used as it is."""


class UndecodableImage(DataError):
    """One image is not an image, is cut short, or claims to be too large."""


class RunError(UserError):
    """A run folder exists already, is missing, or holds nothing to resume from."""


class BundleError(UserError):
    """A model on disk is missing a file, was altered, or does not fit."""


class DestinationError(UserError):
    """A path that is to be written exists already and may not be replaced."""


def nearest(value: str, choices: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest choices, or else all of them."""
    names = list(choices)
    likeness = {name: difflib.SequenceMatcher(None, value.lower(), name.lower()).ratio() for name in names}
    close = sorted((name for name in names if likeness[name] >= 0.5), key=likeness.__getitem__, reverse=True)[:3]
    return f"nearest: {', '.join(close)}" if close else f"choices: {', '.join(names)}"
