"""Every exception that Vitrail raises on purpose, and helpers for the text of messages.

    VitrailError                 exit code 1: a fault of Vitrail or of the machine
    ├── NonFiniteLoss            training diverged; the message names the last good checkpoint
    ├── ExportFailed             an exported file does not compute what the network computes
    ├── SaveError                a file could not be written; the earlier file is intact
    ├── ProcessError             another process of the run has ended, or does not answer
    ├── Stopped                  exit code 75: the run stopped on request and can be resumed
    └── UserError                exit code 2: wrong usage or input (also a ValueError)
        ├── ConfigError          a setting, a name or a combination of them
        ├── DataError            a data set
        │   └── UndecodableImage one image
        ├── RunError             a run folder or its checkpoints
        │   └── RunComplete      exit code 0: nothing is left of the run that should be resumed
        ├── BundleError          a model on disk
        └── DestinationError     an output path that is already taken or cannot be made
    Interrupted                  exit code 75: a `KeyboardInterrupt` after which the same call continues

A message states the value, the rule and the choices: `pool='avg' is not one of 'cls', 'gap'`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path


class VitrailError(Exception):
    """Base class of all errors that Vitrail reports as a message without a traceback."""

    exit_code = 1
    is_reported = False
    """True if another process of the run prints the same message."""


class NonFiniteLoss(VitrailError):
    """The loss or the gradient became NaN or infinite."""


class ExportFailed(VitrailError):
    """A network could not be exported, or the exported file does not compute what the network computes."""


class SaveError(VitrailError):
    """A file could not be written because space or permission is missing."""


class ProcessError(VitrailError):
    """Another process that trains the same network has ended, or does not answer."""


class Stopped(VitrailError):
    """The run was asked to stop. It saved a checkpoint in its folder `run` and can be resumed."""

    exit_code = 75

    def __init__(self, message: str, run: Path) -> None:
        super().__init__(message)
        self.run = run


class Interrupted(KeyboardInterrupt):
    """A computation was interrupted, and its finished part is kept. The same call continues it.

    It is a `KeyboardInterrupt`, so that `except Exception` does not hold back an interrupt.
    """

    exit_code = 75

    def __init__(self, message: str, options: tuple[str, ...] = ()) -> None:
        """`options` are command-line options that the repeated command needs in addition."""
        super().__init__(message)
        self.options = options


class UserError(VitrailError, ValueError):
    """Wrong usage or wrong input, which the user can correct."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is out of range, unknown, or in conflict with another setting."""


class DataError(UserError):
    """A data set cannot be used as it is."""


class UndecodableImage(DataError):
    """An image cannot be decoded: it is not an image, is truncated, or declares too many pixels."""


class RunError(UserError):
    """A run folder exists already, is missing, or cannot be resumed."""


class RunComplete(RunError):
    """A run that should be resumed has nothing left to do. The command succeeds, so that a queue that repeats it until
    it succeeds comes to an end."""

    exit_code = 0


class BundleError(UserError):
    """A model on disk lacks a file, was altered, or cannot be used as requested."""


class DestinationError(UserError):
    """An output path exists already and may not be replaced, or it cannot be made."""


MOST_CHOICES = 100
"""Largest number of names that a message lists: more than there are recipes, and fewer than a data set can have
classes."""


def nearest(value: str, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar choices, or the first 100 choices if none is
    similar."""
    names = list(choices)
    likeness = {name: difflib.SequenceMatcher(None, value.lower(), name.lower()).ratio() for name in names}
    close = sorted((name for name in names if likeness[name] >= 0.5), key=likeness.__getitem__, reverse=True)[:3]
    return f"nearest: {', '.join(close)}" if close else f"choices: {listed(names, MOST_CHOICES)}"


def check_known(name: str, known: Collection[str], problem: str, kind: type[UserError] = ConfigError) -> None:
    """Raise an error of class `kind` unless `known` has the name. Its message states the `problem` and the nearest
    names."""
    if name not in known:
        raise kind(f"{problem}; {nearest(str(name), known)}")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun in the singular or plural, such as "1 image", "1,200 images" or "2 classes"."""
    many = f"{noun}es" if noun.endswith(("s", "x")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else many}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return names joined by commas. A list of more than `most` names is shortened, such as "a, b, c, d, e and 12
    more".
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"
