"""What folders and tables share: images that are files of their own, read when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.data.source import Sample, Target
from vitrail.errors import DataError, UndecodableImage

__all__ = ["FileSource", "inode_of", "refuse_shared"]


class FileSource:
    """Image files below a folder, by their relative paths, each with a label.

    A million of them take about 150 MB. `inodes` says which file on the disk each path leads to. A file that has gone
    since, or that may not be read, is one image lost: it raises `UndecodableImage`.
    """

    def __init__(
        self, root: Path, keys: list[str], labels: Sequence[Target], inodes: Sequence[int], classes: tuple[str, ...]
    ) -> None:
        self.root = root
        self.classes = classes
        self._keys = keys
        self._labels = labels
        self.inodes = np.asarray(inodes, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Sample:
        key = self._keys[index]
        path = os.path.join(self.root, key)  # noqa: PTH118 (a Path takes longer to make than a small file to read)
        try:
            with open(path, "rb", buffering=0) as file:
                return Sample(key, file.read(), self.target(index))
        except OSError as error:
            raise UndecodableImage(f"cannot read {path}: {error.strerror}") from error

    def key(self, index: int) -> str:
        return self._keys[index]

    def target(self, index: int) -> Target:
        label = self._labels[index]
        return label if label is None or isinstance(label, tuple) else int(label)

    def stamp(self, index: int) -> str:
        """The file's size and times. The second time is its inode's, which no copy or unpacking can set."""
        try:
            status = os.stat(os.path.join(self.root, self._keys[index]))  # noqa: PTH116, PTH118 (as above)
        except OSError as error:
            return str(error.strerror)
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def refuse_shared(train: FileSource, other: FileSource, split: str) -> None:
    """Raises `DataError` where files of another split are among those to train on, under whichever names."""
    common = np.intersect1d(train.inodes, other.inodes)
    pairs = []
    for inode in common:
        mine, theirs = (
            source.root / source.key(int(np.flatnonzero(source.inodes == inode)[0])) for source in (train, other)
        )
        if mine.samefile(theirs):  # inodes are counted on each disk anew
            pairs.append((mine, theirs))
    if pairs:
        raise DataError(
            f"{len(pairs):,} files are in the training split and in the {split} split, like {pairs[0][0]} and "
            f"{pairs[0][1]}; a held-out image must not be trained on: remove one of each"
        )


def inode_of(entry: os.DirEntry[str]) -> int:
    """Of the file that an entry leads to; of a link that leads nowhere, its own."""
    if not entry.is_symlink():
        return entry.inode()
    try:
        return entry.stat().st_ino
    except OSError:
        return entry.inode()
