"""The cache of features. It has one entry for each combination of data, weights, preprocessing and precision.

An entry is a folder NAME with `features.npy` and `entry.json`. It appears only when it is complete. Until then, the
folder is called NAME.partial (`partial.py`).

Several processes can fill an entry. They coordinate by `flock` on NAME.lock. The system releases a lock when its
process ends, so no process waits for a dead one. A process that finds the lock taken waits, because another process is
computing the same features.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32

from vitrail.errors import DataError
from vitrail.evaluation.features.identity import Identity
from vitrail.evaluation.features.partial import DONE, FEATURES, THERE, UNDECODABLE, Partial, npy_header
from vitrail.files import cache_folder, saving
from vitrail.settings import from_plain, to_plain

ABOUT = "entry.json"

CHUNK = 2**25
"""Number of bytes of features that are copied at a time."""


@dataclass(frozen=True)
class _About:
    """The content of `entry.json`."""

    identity: Identity
    skipped: tuple[tuple[int, str], ...]
    """Samples without a row in the features, with the reasons."""


@dataclass(frozen=True, eq=False)
class Kept:
    """The content of an entry."""

    features: Float32[np.ndarray, "n d"]
    """Features, memory-mapped and read-only."""
    skipped: dict[int, str]
    """Samples without a row in the features, with the reasons."""


def default_cache() -> Path:
    """Return the default folder of the cache: `$VITRAIL_DATA`/features, or ~/.cache/vitrail/features.

    The folder may not exist yet. Users may delete entries; deleted entries are computed again when they are needed.
    """
    return cache_folder("features")


def map_features(path: Path, shape: tuple[int, int]) -> Float32[np.ndarray, "n d"]:
    """Return the features in a file, memory-mapped and read-only.

    Raise `DataError` if the array in the file has another shape or is truncated.
    """
    try:
        features = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, SyntaxError, TypeError, OverflowError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if features.dtype != np.float32 or features.shape != shape or not features.flags.c_contiguous:
        raise DataError(f"{path} holds {features.dtype} of {features.shape}, not float32 of {shape}")
    return features


@dataclass(frozen=True)
class Entry:
    """One entry of the cache: an array of features of shape (`samples`, `width`). Failed writes raise `SaveError`."""

    cache: Path
    identity: Identity
    samples: int
    width: int

    @property
    def folder(self) -> Path:
        """The folder of the entry. The name of the folder begins with a hash of the data, so that all entries of the
        same data can be found."""
        values = json.dumps(to_plain(self.identity), sort_keys=True)
        return self.cache / f"{self._data}-{hashlib.sha256(values.encode()).hexdigest()[:16]}"

    @property
    def partial(self) -> Path:
        """The folder while the entry is filled."""
        return self.folder.with_name(f"{self.folder.name}.partial")

    def filling(self) -> Partial:
        """Open the partial folder to write rows. Raise `SaveError`."""
        return Partial(self.partial, self.samples, self.width)

    @property
    def _data(self) -> str:
        return self.identity.data[:16]

    def read(self) -> Kept | None:
        """Return the content of the entry, or None if there is no entry. Raise `DataError` if the entry is damaged, and
        `SaveError` if the cache may not be searched."""
        with saving("features", self.folder):
            exists = self.folder.exists()
        return self._read(self.folder) if exists else None

    def whole(self) -> Kept | None:
        """Return the content of the entry. Return None if the entry is missing or damaged."""
        with contextlib.suppress(DataError):
            return self.read()
        return None

    def others(self) -> str | None:
        """Return the difference between this entry and other cached features of the same data, such as "other weights".

        If there are several other entries, return the difference to the most similar entry. Return None if there are
        none.
        """
        found: list[list[str]] = []
        for path in self.cache.glob(f"{self._data}-*/{ABOUT}"):
            with contextlib.suppress(DataError):
                other = _parse(path).identity
                names = {"weights": "weights", "preprocess": "preprocessing", "precision": "precision"}
                differing = [
                    text for name, text in names.items() if getattr(other, name) != getattr(self.identity, name)
                ]
                found += [differing] if differing and other.data == self.identity.data else []
        closest = min(found, key=len, default=[])
        return f"other {', '.join(closest)}" if closest else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[Lock | None]:
        """Yield a lock that is not acquired yet. Yield None if the file system does not support locks."""
        with saving("features", self.folder):
            self.cache.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder.with_name(f"{self.folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_UN)
            has_locks = True
        except BlockingIOError:
            has_locks = True
        except OSError:
            has_locks = False
        try:
            yield Lock(lock) if has_locks else None
        finally:
            os.close(lock)

    def adopt(self) -> Kept | None:
        """Return the content of a complete entry, or None if there is none.

        If a process was killed after the last sample and before the renaming of the folder, the folder is renamed here.
        A damaged entry is removed. The caller must hold the exclusive lock.
        """
        if (kept := self.whole()) is not None:
            return kept
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(DataError):
            self._read(self.partial)
            self._rename()
            return self.read()
        return None

    def finish(self, reason: Callable[[int], str]) -> Kept:
        """Turn the partial folder into the entry after the last sample, and return the content of the entry.

        The caller must hold the exclusive lock. `reason` returns the reason why a sample could not be decoded. Raise
        `DataError` if the file does not contain what was written.
        """
        with saving("features", self.folder):
            with contextlib.closing(self.filling()) as partial:
                done = partial.done()
            if not done.all():
                raise OSError(None, "it was removed while it was written")
            skipped = tuple((row, reason(row)) for row in np.flatnonzero(done == UNDECODABLE).tolist())
            text = json.dumps(to_plain(_About(self.identity, skipped)), indent=2)
            _write_flushed(self.partial / ABOUT, lambda file: file.write(text.encode()))
            if skipped:
                self._remove_rows(done == THERE)
            self._rename()
        kept = self.read()
        assert kept is not None, "it was just renamed"
        return kept

    def _read(self, folder: Path) -> Kept:
        about = _parse(folder / ABOUT)
        if about.identity != self.identity:
            raise DataError(f"{folder / ABOUT} belongs to other features")
        shape = (self.samples - len(about.skipped), self.width)
        return Kept(map_features(folder / FEATURES, shape), dict(about.skipped))

    def _remove_rows(self, kept: Bool[np.ndarray, " n"]) -> None:
        """Replace the file of features by a file with only the rows that the mask `kept` selects."""
        features = map_features(self.partial / FEATURES, (self.samples, self.width))
        rows = np.flatnonzero(kept)
        step = max(1, CHUNK // (4 * self.width))

        def write(file: io.BufferedWriter) -> None:
            file.write(npy_header(len(rows), self.width))
            for first in range(0, len(rows), step):
                file.write(features[rows[first : first + step]].data)

        fewer = self.partial / f"fewer-{FEATURES}"
        _write_flushed(fewer, write)
        fewer.replace(self.partial / FEATURES)

    def _rename(self) -> None:
        with saving("features", self.folder):
            (self.partial / DONE).unlink(missing_ok=True)
            self.partial.rename(self.folder)


class Lock:
    """A lock on an entry. It is released at the end of `Entry.locked` or of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def share(self) -> None:
        """Acquire the lock in shared mode. Several processes that fill the entry can hold the lock at once."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def alone(self, on_wait: Callable[[], None]) -> None:
        """Acquire the lock exclusively, and wait until all other processes have released it.

        `on_wait` is called once if another process holds the lock.
        """
        try:  # the system releases the shared lock first, so two processes with a shared lock do not deadlock
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)


def _parse(path: Path) -> _About:
    try:
        return from_plain(_About, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _write_flushed(path: Path, write: Callable[[io.BufferedWriter], object]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
