"""Many small pieces of bytes in one file, each found by its number: what makes sequential formats random-access.

The pieces come first, one after the other, then where each begins (int64), then how many there are and a magic word.
A reader keeps the offsets in memory and opens the file for each piece, so that threads and processes share it freely.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from vitrail.errors import DataError
from vitrail.files import saving

__all__ = ["Blob", "open_blob", "write_blob"]

MAGIC = b"vitrail blob v1\n"
TAIL = 8 + len(MAGIC)


@dataclass(frozen=True, eq=False)
class Blob:
    """A file of pieces. Raises `DataError` where it has vanished or was cut since it was opened."""

    path: Path
    offsets: Int64[np.ndarray, " offsets"]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(file, stop - start, start)
                while len(data) < stop - start:  # one read gives at most 2 GiB
                    more = os.pread(file, stop - start - len(data), start + len(data))
                    if not more:
                        raise OSError(None, "it is cut short")
                    data += more
            finally:
                os.close(file)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}; it is written anew by the next run") from error
        return data


def open_blob(path: Path) -> Blob | None:
    """The blob in this file; None where there is none, or a damaged one."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            tail = file.read()
            count = int.from_bytes(tail[:8], "little")
            end = size - TAIL - 8 * (count + 1)
            if tail[8:] != MAGIC or end < 0:
                return None
            file.seek(end)
            offsets = np.frombuffer(file.read(8 * (count + 1)), "<i8").astype(np.int64, copy=False)
    except OSError:
        return None
    whole = len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == end and not (np.diff(offsets) < 0).any()
    return Blob(path, offsets) if whole else None


def write_blob(path: Path, pieces: Iterable[Any]) -> Blob:
    """Writes the pieces (anything with bytes; None is 0 bytes) unless another process has just done so.

    The file appears whole or not at all. Of several processes, one writes and the others wait for it. Raises
    `SaveError`, and whatever `pieces` raises.
    """
    with saving("images laid out for random access", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path) as (file, partial):
            try:
                if (blob := open_blob(path)) is not None:
                    return blob
                offsets = _write(file, pieces)
                os.fsync(file.fileno())
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
    return Blob(path, offsets)


def _write(file: Any, pieces: Iterable[Any]) -> Int64[np.ndarray, " offsets"]:
    file.truncate(0)  # of what a process that was killed has left
    offsets, end = [np.zeros(1, np.int64)], 0
    lengths: list[int] = []
    for piece in pieces:
        lengths.append(0 if piece is None else file.write(piece))
        if len(lengths) == 65536:  # a list of a million takes five times as much as the array
            offsets.append(end + np.cumsum(lengths, dtype=np.int64))
            end = int(offsets[-1][-1])
            lengths = []
    offsets.append(end + np.cumsum(lengths, dtype=np.int64))
    joined = np.concatenate(offsets)
    file.write(joined.astype("<i8", copy=False))
    file.write((len(joined) - 1).to_bytes(8, "little") + MAGIC)
    file.flush()
    return joined


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[tuple[Any, Path]]:
    """A file to write that no other process has open so, and its path, which is `path` where the disk has locks."""
    partial = path.with_name(f"{path.name}.partial")
    while True:
        with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                break
            if _is_at(file, partial):
                yield file, partial
                return
            # Whoever had it has given it its name or removed it in the meantime: try again.
    partial.unlink(missing_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    with partial.open("xb") as file:
        yield file, partial


def _is_at(file: Any, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
