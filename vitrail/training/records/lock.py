"""The lock of a run's folder. Only the process that holds it may train the run or replace the folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.errors import RunError
from vitrail.files import saving

__all__ = ["LOCK", "check_unlocked", "is_locked", "locked"]

LOCK = "run.lock"
"""Name of the file in the run's folder that is locked. The file names the process that holds the lock."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder inside the `with` block. The operating system releases the lock if the process
    ends in any other way.

    Raises `RunError` if another process or thread holds the lock. On a file system without locks, nothing is locked.
    """
    path = folder / LOCK
    with saving("the lock", path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _acquire(file):
            raise RunError(_in_use(folder))
        with contextlib.suppress(OSError):  # the lock holds even if the disk is too full for this text
            os.ftruncate(file, 0)
            os.write(file, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
    finally:
        os.close(file)


def check_unlocked(folder: Path) -> None:
    """Raise `RunError` if a process holds the lock of a run's folder."""
    if is_locked(folder):
        raise RunError(_in_use(folder))


def is_locked(folder: Path) -> bool:
    """Return True if a process holds the lock of a run's folder."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _acquire(file)
    finally:
        os.close(file)


def _acquire(file: int) -> bool:
    """Acquire the lock of an open file. Return False if it is held elsewhere, or if its holder has deleted the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return os.fstat(file).st_nlink > 0


def _in_use(folder: Path) -> str:
    """Return the message about a run that another process trains."""
    try:
        holder = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        process, host = int(holder["process"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return (
            f"run {folder} is in use: another process trains it, and two processes must not train one run; wait until "
            "that process ends"
        )
    there = "" if host == socket.gethostname() else f" on {host}"
    return (
        f"run {folder} is in use: process {process}{there} trains it, and two processes must not train one run; wait "
        f"until that process ends, or stop it with kill {process}{there}"
    )
