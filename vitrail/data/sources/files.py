"""The base class of folder and table sources. Every image is a file, which is read when the sample is requested."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from vitrail.data.faults import Fault
from vitrail.data.source import Sample, Target, TargetKind
from vitrail.data.sources.tables.number_column import NumberColumns
from vitrail.errors import UndecodableImage, plural


class FileSource:
    """Image files below a folder, named by relative paths, with one target per file.

    `targets` holds one target per file, or is None if there are no targets. `inodes` holds the inode of each file. If a
    file was removed or cannot be read, reading the sample raises `UndecodableImage`, so that training can skip it.
    """

    def __init__(
        self,
        root: Path,
        keys: list[str],
        targets: Sequence[Target] | NumberColumns | None,
        inodes: Sequence[int] | Shaped[np.ndarray, " n"],
        classes: tuple[str, ...],
    ) -> None:
        self.root = root
        self.classes = classes
        self._keys = keys
        self._targets = targets
        self.inodes = np.asarray(inodes, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Sample:
        key = self._keys[index]
        path = os.path.join(self.root, key)  # noqa: PTH118 (making a Path takes longer than reading a small file)
        try:
            with open(path, "rb", buffering=0) as file:
                return Sample(key, file.read(), self.target(index))
        except OSError as error:
            raise UndecodableImage(f"cannot read {path}: {error.strerror}") from error

    def key(self, index: int) -> str:
        return self._keys[index]

    def target(self, index: int) -> Target:
        target = None if self._targets is None else self._targets[index]
        return target if target is None or isinstance(target, tuple) else int(target)

    @property
    def target_kind(self) -> TargetKind:
        if self._targets is None:
            return "none"
        if isinstance(self._targets, NumberColumns):
            return "numbers"
        return "classes" if any(isinstance(target, tuple) for target in self._targets[:1]) else "class"

    def stamp(self, index: int) -> str:
        """Return the file's size, modification time and inode change time.

        Programs that copy or unpack files cannot set the inode change time.
        """
        try:
            status = os.stat(os.path.join(self.root, self._keys[index]))  # noqa: PTH116, PTH118 (as above)
        except OSError as error:
            return str(error.strerror)
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"

    def origin(self, index: int) -> str:
        """Return the file's inode, which is the same under all names of the file."""
        return f"file {self.inodes[index]}"


def join_files(root: Path, sources: Sequence[FileSource], classes: tuple[str, ...] | None) -> FileSource:
    """Return the files of several folders below `root` as one source, in the order of the folders. By default the
    classes are the sorted classes of all folders."""
    if classes is None:
        classes = tuple(sorted({name for source in sources for name in source.classes}))
    numbers = {name: number for number, name in enumerate(classes)}
    keys = [
        f"{source.root.relative_to(root).as_posix()}/{source.key(index)}"
        for source in sources
        for index in range(len(source))
    ]
    targets = [
        numbers[source.classes[target]]
        for source in sources
        for target in map(source.target, range(len(source)))
        if isinstance(target, int)
    ]
    inodes = np.concatenate([source.inodes for source in sources])
    return FileSource(root, keys, targets if classes else None, inodes, classes)


def shared_files(train: FileSource, other: FileSource, split: str) -> Iterator[Fault]:
    """Yield a fault if the training split and another split contain the same file, even under different names."""
    common = np.intersect1d(train.inodes, other.inodes)
    mine, theirs = (_first_paths(source, common) for source in (train, other))
    pairs = [(path, theirs[file]) for file, path in mine.items() if file in theirs]
    if pairs:
        yield Fault(
            "shared-files", "error", len(pairs),
            f"the training split and the {split} split share {plural(len(pairs), 'file')}, such as {pairs[0][0]} and "
            f"{pairs[0][1]}; training must not see held-out images, so remove one copy of each",
            "Training refuses the data.",
            "Remove one copy of each file.",
        )  # fmt: skip


def _first_paths(source: FileSource, inodes: Shaped[np.ndarray, " n"]) -> dict[tuple[int, int], Path]:
    """Return the first path of each file that has one of these inodes. Files on two disks can have the same inode, so
    the keys are pairs of device and inode. Files that cannot be read are skipped."""
    found: dict[tuple[int, int], Path] = {}
    for index in np.flatnonzero(np.isin(source.inodes, inodes)):
        path = source.root / source.key(int(index))
        with contextlib.suppress(OSError):
            status = path.stat()
            found.setdefault((status.st_dev, status.st_ino), path)
    return found


def inode_of(entry: os.DirEntry[str]) -> int:
    """Return the inode of the file that an entry refers to. For a broken link, return the inode of the link."""
    if not entry.is_symlink():
        return entry.inode()
    try:
        return entry.stat().st_ino
    except OSError:
        return entry.inode()


def inodes_in(folder: Path) -> dict[str, int]:
    """Return the inodes of the files in a folder, by name. A folder that cannot be read has none."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: inode_of(entry) for entry in entries}
    except OSError:
        return {}
