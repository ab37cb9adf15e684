"""A file format for many byte strings (pieces) with random access by index. Images of formats without random access are
cached in such files.

The file contains the pieces one after another, then the offset of each piece (int64), the number of pieces, and a magic
number. A reader keeps the offsets in memory and opens the file again for each piece, so threads and processes can read
it at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from vitrail.errors import DataError
from vitrail.files import saving

MAGIC = b"vitrail blob v1\n"
TAIL = 8 + len(MAGIC)


@dataclass(frozen=True, eq=False)
class Blob:
    """An opened file of pieces. Reading a piece raises `DataError` if the file was removed or truncated after
    opening."""

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
                while len(data) < stop - start:  # one call reads at most 2 GiB
                    more = os.pread(file, stop - start - len(data), start + len(data))
                    if not more:
                        raise OSError(None, "the file is truncated")
                    data += more
            finally:
                os.close(file)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}; the next run writes it again") from error
        return data


def open_blob(path: Path) -> Blob | None:
    """Return the blob in this file, or None if there is no file or it is damaged."""
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
    """Write the pieces, and return the blob. If another process has just written the file, return that blob.

    A piece is any buffer. None is written as 0 bytes. The file is written under a temporary name and then renamed. If
    several processes want to write the same blob, one process writes and the others wait. Raises `SaveError`, and any
    error that `pieces` raises.
    """
    with saving("unpacked images", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(path) as (file, partial):
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
    file.truncate(0)  # a killed process may have left bytes
    ends = array("q", [0])  # a list of a million numbers takes five times the memory
    for piece in pieces:
        ends.append(ends[-1] + (0 if piece is None else file.write(piece)))
    offsets = np.array(ends, np.int64)
    file.write(offsets.astype("<i8", copy=False))
    file.write((len(offsets) - 1).to_bytes(8, "little") + MAGIC)
    file.flush()
    return offsets


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[tuple[Any, Path]]:
    """Yield a partial file that only this process writes, and its path.

    All processes use the same partial file, and only the process that has its lock writes. If the file system does not
    support locks, each process writes a separate partial file.
    """
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
            # The process that held the lock has renamed or removed the file in the meantime, so try again.
    partial.unlink(missing_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    with partial.open("xb") as file:
        yield file, partial


def _is_at(file: Any, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
