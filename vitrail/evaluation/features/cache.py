"""The cache of features. It has one entry for each combination of data, weights, preprocessing and precision.

An entry is a folder NAME with `features.npy` and `entry.json`. It appears only when it is complete. Until then, the
folder is called NAME.partial.

Several processes can fill an entry. They coordinate by `flock` on NAME.lock. The system releases a lock when its
process ends, so no process waits for a dead one. A process that finds the lock taken waits, because another process is
computing the same features.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, UInt8
from torch import nn

from vitrail.data.pixels.decode import pixel_limit
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, evenly, fingerprint, identity_of, samples_of
from vitrail.errors import DataError
from vitrail.files import cache_folder, saving
from vitrail.settings import from_plain, to_plain
from vitrail.weights.bundle import weights_sha256

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
    reason: Callable[[int], str]
    """Returns why a sample cannot be decoded, or "" if it can be."""

    @property
    def folder(self) -> Path:
        """The folder of the entry. The name of the folder begins with a hash of the data, so that all entries of the
        same data can be found."""
        values = json.dumps(to_plain(self.identity), sort_keys=True)
        return self.cache / f"{self.identity.data[:16]}-{hashlib.sha256(values.encode()).hexdigest()[:16]}"

    @property
    def partial(self) -> Path:
        """The folder while the entry is filled."""
        return self.folder.with_name(f"{self.folder.name}.partial")

    def filling(self) -> Partial:
        """Open the partial folder to write rows. Raise `SaveError`."""
        return Partial(self.partial, self.samples, self.width)

    def read(self) -> Kept | None:
        """Return the content of the entry, or None if there is no entry. Raise `DataError` if the entry is damaged, or
        if it lacks images that can be decoded now, such as with a decoder that was installed later. Of these, one is
        tried for each of the most common reasons. Raise `SaveError` if the cache may not be searched."""
        with saving("features", self.folder):
            exists = self.folder.exists()
        if not exists:
            return None
        kept = self._read(self.folder)
        examples = {why: row for row, why in kept.skipped.items()}
        for why, _ in Counter(kept.skipped.values()).most_common(SAMPLED):
            if not self.reason(examples[why]):
                raise DataError(f"{self.folder} lacks images that can be decoded now, although each once {why}")
        return kept

    def whole(self) -> Kept | None:
        """Return the content of the entry. Return None if the entry is missing or damaged."""
        with contextlib.suppress(DataError):
            return self.read()
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[Lock | None]:
        """Yield a lock that is not acquired yet. Yield None if the file system does not support locks."""
        with saving("features", self.folder):
            self.cache.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder.with_name(f"{self.folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        has_locks = True
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_UN)
        except OSError as error:
            has_locks = isinstance(error, BlockingIOError)  # another process has it
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
            return self._read(self.folder)
        return None

    def finish(self) -> Kept:
        """Turn the partial folder into the entry after the last sample, and return the content of the entry.

        The caller must hold the exclusive lock. Raise `DataError` if the file does not contain what was written.
        """
        with saving("features", self.folder):
            with contextlib.closing(self.filling()) as partial:
                done = partial.done()
            if not done.all():
                raise OSError(None, "it was removed while it was written")
            rows = np.flatnonzero(done == UNDECODABLE).tolist()
            skipped = tuple((row, self.reason(row) or "could not be decoded at first") for row in rows)
            text = json.dumps(to_plain(_About(self.identity, skipped)), indent=2)
            _write_flushed(self.partial / ABOUT, lambda file: file.write(text.encode()))
            if skipped:
                self._remove_rows(done == THERE)
            self._rename()
        return self._read(self.folder)

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


@dataclass(frozen=True)
class Lock:
    """A lock on an entry. It is released at the end of `Entry.locked` or of the process."""

    descriptor: int

    def share(self) -> None:
        """Acquire the lock in shared mode. Several processes that fill the entry can hold the lock at once."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def alone(self, on_wait: Callable[[], None]) -> None:
        """Acquire the lock exclusively, and wait until all other processes have released it.

        `on_wait` is called once if another process holds the lock.
        """
        try:  # the system releases the shared lock first, so two processes with a shared lock do not deadlock
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)


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


# The identity of features: everything that determines them, with hashes of the data and of the weights.


FORMAT = 2
"""Version of the entries and of the computation in `embed`. Entries of other versions are ignored."""

SAMPLED = 16
"""Number of images that are hashed if a source has no method `stamp`."""


@dataclass(frozen=True)
class Identity:
    """Everything that determines the features. A cache entry is used only if its identity equals the requested
    identity."""

    data: str
    weights: str
    preprocess: Preprocess
    precision: str
    layer: str = "embedding"
    max_pixels: int = field(default_factory=pixel_limit)
    """Larger images are skipped."""
    format: int = FORMAT


def weights_fingerprint(network: nn.Module) -> str:
    """Return a hash of the network's config and weights."""
    kind = f"{type(network).__qualname__} {getattr(network, 'config', None)!r}"
    return hashlib.sha256(f"{kind}\n{weights_sha256(network)}".encode()).hexdigest()


def data_fingerprint(source: Source) -> str:
    """Return a hash of all keys and targets in order, and of the images' identities, without decoding any image.

    Files, shards and Parquet files are identified by size and modification time. Arrays are identified by their pixels.
    If a source has no method `stamp`, 16 evenly spaced images are read and hashed. A change to any other image is then
    not detected.
    """
    digest = hashlib.sha256(fingerprint(source).encode())
    if identity_of(source) is not None:  # the source's own fingerprint includes the images
        return digest.hexdigest()
    samples = samples_of(source)
    for index in range(len(source)):
        stamp = samples.stamp(index)
        if stamp is None:
            break
        digest.update(os.fsencode(f"{stamp}\n"))
    else:
        return digest.hexdigest()
    for index in evenly(len(source), SAMPLED).tolist():
        image = source[index].image
        shape = "" if isinstance(image, bytes) else str(image.shape)
        digest.update(f"{index} {shape}\n".encode())
        digest.update(image if isinstance(image, bytes) else np.ascontiguousarray(image).data)
    return digest.hexdigest()


# The folder of an entry of the cache while it is filled. The folder has `features.npy` with a row for each sample,
# and a file `done` with a byte for each sample. The features of a sample are written to disk before its byte. A
# killed process therefore loses only a few seconds of work.


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
