"""Files written so that a reader finds all of them or none, and read so that a flipped bit is seen."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitrail.errors import SaveError

__all__ = ["cache_folder", "recover_folder", "replacing_folder", "saving", "sha256", "write_json"]


def cache_folder(name: str) -> Path:
    """Where things of one kind are kept that can be made or fetched again: below `$VITRAIL_DATA`, or else
    ~/.cache/vitrail. It may not exist yet."""
    return Path(os.environ.get("VITRAIL_DATA") or Path.home() / ".cache" / "vitrail").expanduser() / name


@contextmanager
def saving(what: str, path: Path) -> Iterator[None]:
    """Turns a failure to write into `SaveError`, which says what was being written, where, and what went wrong."""
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"could not save {what} to {path}: {error.strerror or error}; what was there is intact"
        ) from error


@contextmanager
def replacing_folder(what: str, path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path`, which takes its place if the block ends well, and vanishes if not.

    Everything is flushed to the disk before the names change. Raises `SaveError`.
    """
    path = path.resolve()
    partial = path.with_name(f"{path.name}.partial")
    try:
        with saving(what, path):
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(None, "it is a file, and a folder is to be written there")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            for entry in (*partial.rglob("*"), partial):
                _flush(entry)
            _swap(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Pretty JSON, replaced in one step."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recover_folder(path: Path) -> None:
    """Gives a folder its name back where a process was killed while `replacing_folder` swapped it for a new one."""
    old = path.with_name(f"{path.name}.replaced")
    if old.exists() and not path.exists():
        old.rename(path)


def _swap(new: Path, path: Path) -> None:
    """Gives `new` the name `path`; what had it is deleted, but only once that has gone well."""
    old = path.with_name(f"{path.name}.replaced")
    recover_folder(path)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
