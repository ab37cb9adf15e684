"""Features on disk: an entry for each (data, weights, preprocessing, precision), filled by any number of processes.

An entry is a folder NAME with `features.npy` and `entry.json`; it is there whole or not at all. Until then it is
NAME.partial, with a byte for each sample in `done`. Features reach the disk before these bytes do, so that a process
that is killed loses its last seconds and nothing else.

Processes agree by `flock` on NAME.lock, which the system ends with the process that holds it: nobody waits for the
dead. A process that finds the lock taken waits, for whoever has it began earlier and computes the same.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, UInt8
from torch import nn

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, fingerprint, stamp_of
from vitrail.errors import DataError
from vitrail.files import cache_folder, saving
from vitrail.plain import from_plain, to_plain
from vitrail.weights.bundle import weights_sha256

__all__ = [
    "Entry",
    "Identity",
    "Kept",
    "Lock",
    "Partial",
    "data_fingerprint",
    "default_cache",
    "map_features",
    "weights_fingerprint",
]

FORMAT = 1
"""Of entries, and of what `embed` computes: a new number leaves all earlier entries aside."""

FEATURES = "features.npy"
ABOUT = "entry.json"
DONE = "done"
THERE, UNDECODABLE = 1, 2
"""What `done` says of a sample; 0 is to do."""

RECORD_SECONDS = 5.0
"""Between two records of what is done: what a killed process loses at most."""

SAMPLED = 16
"""Images that are hashed where a source cannot say what changes when one does."""

CHUNK = 2**25
"""Bytes of features that are copied at once."""


@dataclass(frozen=True)
class Identity:
    """What features follow from: those of another identity are never used."""

    data: str
    weights: str
    preprocess: Preprocess
    precision: str
    format: int = FORMAT


@dataclass(frozen=True)
class _About:
    """The content of `entry.json`."""

    identity: Identity
    skipped: tuple[tuple[int, str], ...]
    """Samples without a row, and why."""


@dataclass(frozen=True, eq=False)
class Kept:
    """What an entry holds."""

    features: Float32[np.ndarray, "n d"]
    """Mapped from the file, read-only."""
    skipped: dict[int, str]
    """Samples without a row, and why."""


def default_cache() -> Path:
    """Where features are kept unless another folder is named: `$VITRAIL_DATA`/features, or ~/.cache/vitrail/features.

    It may not exist yet. What is deleted there is computed anew when it is needed.
    """
    return cache_folder("features")


def weights_fingerprint(network: nn.Module) -> str:
    """A hash of the network's config and of its weights, in 3 % of the time that a batch of 32 images takes."""
    kind = f"{type(network).__qualname__} {getattr(network, 'config', None)!r}"
    return hashlib.sha256(f"{kind}\n{weights_sha256(network)}".encode()).hexdigest()


def data_fingerprint(source: Source) -> str:
    """A hash of all keys and labels in order, and of what the source can say of its images without decoding them.

    Files are told apart by size and times, shards and Parquet files likewise, arrays by their pixels. Of a source that
    cannot say (`stamp_of`), 16 images spread over it are read and hashed: a change to another goes unseen.
    """
    digest = hashlib.sha256(fingerprint(source).encode())
    if isinstance(getattr(source, "identity", None), str):  # all of it is in the fingerprint
        return digest.hexdigest()
    for index in range(len(source)):
        stamp = stamp_of(source, index)
        if stamp is None:
            break
        digest.update(os.fsencode(f"{stamp}\n"))
    else:
        return digest.hexdigest()
    for index in np.unique(np.linspace(0, len(source) - 1, SAMPLED).round().astype(int)).tolist():
        image = source[index].image
        shape = "" if isinstance(image, bytes) else str(image.shape)
        digest.update(f"{index} {shape}\n".encode())
        digest.update(image if isinstance(image, bytes) else np.ascontiguousarray(image).data)
    return digest.hexdigest()


def map_features(path: Path, shape: tuple[int, int]) -> Float32[np.ndarray, "n d"]:
    """A file of features, mapped read-only. Raises `DataError` where it is not one of this shape, or is cut short."""
    try:
        features = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, SyntaxError, TypeError, OverflowError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if features.dtype != np.float32 or features.shape != shape or not features.flags.c_contiguous:
        raise DataError(f"{path} holds {features.dtype} of {features.shape}, not float32 of {shape}")
    return features


@dataclass(frozen=True)
class Entry:
    """The place in a cache for the features of so many samples, `width` numbers each. Writing raises `SaveError`."""

    cache: Path
    identity: Identity
    samples: int
    width: int

    @property
    def folder(self) -> Path:
        """Entries of the same data begin with the same name."""
        values = json.dumps(to_plain(self.identity), sort_keys=True)
        return self.cache / f"{self._data}-{hashlib.sha256(values.encode()).hexdigest()[:16]}"

    @property
    def partial(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.partial")

    @property
    def _data(self) -> str:
        return self.identity.data[:16]

    def read(self) -> Kept | None:
        """What is there; None where nothing is. Raises `DataError` where it is damaged."""
        return self._read(self.folder) if self.folder.exists() else None

    def whole(self) -> Kept | None:
        """What is there whole; None where nothing is, or a damaged entry."""
        with contextlib.suppress(DataError):
            return self.read()
        return None

    def others(self) -> str | None:
        """In which ways cached features of the same data differ from these; None where there are none.

        Of several, those that differ least: "other weights", "other preprocessing, precision".
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
        """A lock that is not held yet; None where the disk has no locks."""
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
        """What is there whole, even where its writer was killed before it got its name. For who holds the lock alone;
        a damaged entry is removed."""
        if (kept := self.whole()) is not None:
            return kept
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(DataError):
            self._read(self.partial)
            self._rename()
            return self.read()
        return None

    def finish(self, reason: Callable[[int], str]) -> Kept:
        """Makes the entry of its partial folder, once all is done. For who holds the lock alone. `reason` says of a
        sample why it could not be decoded. Raises `DataError` where the disk does not give back what was written."""
        with saving("features", self.folder):
            with contextlib.closing(Partial(self)) as partial:
                done = partial.done()
            if not done.all():
                raise OSError(None, "it was removed while it was written")
            skipped = tuple((row, reason(row)) for row in np.flatnonzero(done == UNDECODABLE).tolist())
            text = json.dumps(to_plain(_About(self.identity, skipped)), indent=2)
            _write_flushed(self.partial / ABOUT, lambda file: file.write(text.encode()))
            if skipped:
                self._leave_out(done == THERE)
            self._rename()
        kept = self.read()
        assert kept is not None, "it was just renamed"
        return kept

    def _read(self, folder: Path) -> Kept:
        about = _parse(folder / ABOUT)
        if about.identity != self.identity:
            raise DataError(f"{folder / ABOUT} is of other features")
        shape = (self.samples - len(about.skipped), self.width)
        return Kept(map_features(folder / FEATURES, shape), dict(about.skipped))

    def _leave_out(self, kept: Bool[np.ndarray, " n"]) -> None:
        """Replaces the file of features by one with those rows only."""
        features = map_features(self.partial / FEATURES, (self.samples, self.width))
        rows = np.flatnonzero(kept)
        step = max(1, CHUNK // (4 * self.width))

        def write(file: io.BufferedWriter) -> None:
            file.write(_header(len(rows), self.width))
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
    """A lock on an entry, of this process until the end of `Entry.locked` or of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def share(self) -> None:
        """With other processes that fill the entry."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def alone(self, on_wait: Callable[[], None]) -> None:
        """Once nobody else has it; `on_wait` is called where that takes a time."""
        try:  # the system ends the shared lock first, so two that share it do not wait for each other
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)


class Partial:
    """An entry that is being filled, by one process or by several at different rows. All methods raise `SaveError`.

    Rows are written to the file, not to a mapping of it: a disk that is full is then an error, not the end of the
    process.
    """

    def __init__(self, entry: Entry) -> None:
        header = _header(entry.samples, entry.width)
        self._folder, self._samples = entry.folder, entry.samples
        self._start, self._row = len(header), 4 * entry.width
        self._pending: list[tuple[int, bytes]] = []
        self._recorded = time.monotonic()
        size = self._start + entry.samples * self._row
        folder = entry.partial
        with saving("features", self._folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._features = os.open(folder / FEATURES, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if os.fstat(self._features).st_size != size:
                # Another process may be here too: what it has written so far must stay.
                (folder / DONE).unlink(missing_ok=True)
                os.ftruncate(self._features, size)
                _reserve(self._features, size)
            _write_at(self._features, header, 0)  # each time: who made the file may have been killed before this
            self._done = os.open(folder / DONE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def done(self) -> UInt8[np.ndarray, " n"]:
        """What is recorded of each sample: 0 is to do."""
        with saving("features", self._folder):
            read = os.pread(self._done, self._samples, 0)
        return np.frombuffer(read.ljust(self._samples, b"\0"), np.uint8)

    def write(self, first: int, values: Float32[np.ndarray, "b d"], valid: Bool[np.ndarray, " b"]) -> None:
        """The features of successive samples from `first` on, and which of them could be decoded."""
        with saving("features", self._folder):
            _write_at(self._features, np.ascontiguousarray(values).tobytes(), self._start + first * self._row)
        self._pending.append((first, np.where(valid, THERE, UNDECODABLE).astype(np.uint8).tobytes()))
        if time.monotonic() - self._recorded >= RECORD_SECONDS:
            self.record()

    def record(self) -> None:
        """Brings what was written to the disk, then says that it is there."""
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


def _parse(path: Path) -> _About:
    try:
        return from_plain(_About, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _header(rows: int, width: int) -> bytes:
    """How an .npy file of float32 (rows, width) begins."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})
    return file.getvalue()


def _reserve(file: int, size: int) -> None:
    """Has the disk set bytes aside, where it can: that it is too small is better known now than after hours."""
    try:
        os.posix_fallocate(file, 0, size)
    except AttributeError:
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write_at(file: int, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view:  # a write takes 2 GiB at most, and less where the disk is nearly full
        count = os.pwrite(file, view, place)
        view, place = view[count:], place + count


def _write_flushed(path: Path, write: Callable[[io.BufferedWriter], object]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
