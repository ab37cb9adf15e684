"""The folder of an entry of the cache while it is filled.

The folder has `features.npy` with a row for each sample, and a file `done` with a byte for each sample. The features of
a sample are written to disk before its byte. A killed process therefore loses only a few seconds of work.
"""

from __future__ import annotations

import errno
import io
import os
import time
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, UInt8

from vitrail.files import saving

FEATURES = "features.npy"
DONE = "done"
THERE, UNDECODABLE = 1, 2
"""Bytes in the file `done` for a sample whose features are computed, and for an undecodable sample. 0 means that the
sample is not computed yet."""

RECORD_SECONDS = 5.0
"""Seconds between two updates of `done`: the most work that a killed process loses."""


class Partial:
    """A folder of features that one or more processes are filling, each with different rows. All methods raise
    `SaveError`.

    Rows are written with ordinary writes, because writing to a memory-mapped file on a full disk kills the process.
    """

    def __init__(self, folder: Path, samples: int, width: int) -> None:
        header = npy_header(samples, width)
        self._folder, self._samples = folder, samples
        self._start, self._row = len(header), 4 * width
        self._pending: list[tuple[int, bytes]] = []
        self._recorded = time.monotonic()
        size = self._start + samples * self._row
        with saving("features", self._folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._features = os.open(folder / FEATURES, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if os.fstat(self._features).st_size != size:
                # Another process may be filling the same entry, so the rows that it has written must stay.
                (folder / DONE).unlink(missing_ok=True)
                os.ftruncate(self._features, size)
                _reserve(self._features, size)
            # Every process writes the header, because the one that made the file may have been killed before it did.
            _write_at(self._features, header, 0)
            self._done = os.open(folder / DONE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def done(self) -> UInt8[np.ndarray, " n"]:
        """Return the recorded value of each sample. 0 means that the sample is not computed yet."""
        with saving("features", self._folder):
            read = os.pread(self._done, self._samples, 0)
        return np.frombuffer(read.ljust(self._samples, b"\0"), np.uint8)

    def write(self, first: int, values: Float32[np.ndarray, "b d"], valid: Bool[np.ndarray, " b"]) -> None:
        """Write the features of consecutive samples, starting at row `first`. `valid` marks the decoded samples."""
        with saving("features", self._folder):
            _write_at(self._features, np.ascontiguousarray(values).tobytes(), self._start + first * self._row)
        self._pending.append((first, np.where(valid, THERE, UNDECODABLE).astype(np.uint8).tobytes()))
        if time.monotonic() - self._recorded >= RECORD_SECONDS:
            self.record()

    def record(self) -> None:
        """Flush the features to disk, then record their samples as done."""
        with saving("features", self._folder):
            if self._pending:
                os.fsync(self._features)
            for first, marks in self._pending:
                _write_at(self._done, marks, first)
        self._pending, self._recorded = [], time.monotonic()

    def close(self) -> None:
        try:
            self.record()
        finally:
            os.close(self._features)
            os.close(self._done)


def npy_header(rows: int, width: int) -> bytes:
    """Return the header of an .npy file of float32 (rows, width)."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})
    return file.getvalue()


def _reserve(file: int, size: int) -> None:
    """Reserve disk space if the file system supports it. A full disk is then detected before any features are
    computed."""
    try:
        os.posix_fallocate(file, 0, size)
    except AttributeError:
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write_at(file: int, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view:  # one write takes at most 2 GiB, and less if the disk is nearly full
        count = os.pwrite(file, view, place)
        view, place = view[count:], place + count
