"""IDX files, the format of the MNIST family: a header with the shape, then unsigned bytes, plain or gzipped."""

from __future__ import annotations

import copy
import gzip
import hashlib
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from vitrail.data.source import Sample, TargetKind
from vitrail.errors import DataError, listed

SPLIT_PREFIXES = {"train": ("train",), "test": ("t10k", "test"), "validation": ("val", "validation")}


class IdxSource:
    """Grey images and their labels from a pair of IDX files, both held in memory. Raises `DataError`."""

    def __init__(self, images: Path, labels: Path, classes: tuple[str, ...] | None = None) -> None:
        self.images = read_idx(images)
        self.labels = read_idx(labels)
        if self.images.ndim != 3 or self.labels.ndim != 1 or len(self.images) != len(self.labels):
            raise DataError(
                f"{images} has the shape {self.images.shape} and {labels} the shape {self.labels.shape}; images must "
                "be (n, height, width) and labels (n,) with the same n"
            )
        highest = int(self.labels.max(initial=0))
        self.classes = classes or tuple(str(number) for number in range(highest + 1))
        if highest >= len(self.classes):
            raise DataError(
                f"{labels} has the label {highest}, but the {len(self.classes)} classes are numbered from 0"
            )

    target_kind: TargetKind = "class"

    def matched(self, known: tuple[str, ...]) -> IdxSource:
        """Return this source with the classes `known`, such as those of a model. Each label is the class that is called
        by its number. Raises `DataError` if there is no such class."""
        used = np.unique(self.labels).tolist()
        if missing := [str(label) for label in used if str(label) not in known]:
            raise DataError(
                f"the labels of IDX files are numbers without names, and {listed(missing)} are not among the known "
                f"classes, {listed(known, 20)}; use data that names its classes"
            )
        places = np.zeros(256, np.int64)
        places[used] = [known.index(str(label)) for label in used]
        made = copy.copy(self)
        made.labels, made.classes = places[self.labels], known
        return made

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), self.images[index, :, :, None], self.target(index))

    def key(self, index: int) -> str:
        return str(index)

    def target(self, index: int) -> int:
        return int(self.labels[index])

    def stamp(self, index: int) -> str:
        """Return a hash of the pixels."""
        return hashlib.blake2b(self.images[index], digest_size=16).hexdigest()


def has_idx(folder: Path) -> bool:
    """Return True if `folder` has the files of at least one split."""
    return any(find_idx(folder, split) for split in SPLIT_PREFIXES)


def find_idx(folder: Path, split: str) -> tuple[Path, Path] | None:
    """Return the image file and the label file of a split ("train", "validation" or "test") in `folder`, or None."""
    for prefix in SPLIT_PREFIXES[split]:
        for suffix in (".gz", ""):
            images = folder / f"{prefix}-images-idx3-ubyte{suffix}"
            labels = folder / f"{prefix}-labels-idx1-ubyte{suffix}"
            if images.is_file() and labels.is_file():
                return images, labels
    return None


def unlabelled_idx(folder: Path) -> Iterator[str]:
    """Yield a note on each split that has images and no labels."""
    for split, prefixes in SPLIT_PREFIXES.items():
        images = [path for prefix in prefixes for path in folder.glob(f"{prefix}-images-idx3-ubyte*")]
        if images and not find_idx(folder, split):
            yield f"{folder}: the {split} split is skipped, because {images[0].name} has no file of labels beside it"


def read_idx(path: Path) -> UInt8[np.ndarray, " ..."]:
    """Return the array in an IDX file of unsigned bytes. Raises `DataError` for another format or a truncated file."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not an IDX file of unsigned bytes: it begins with {data[:4].hex() or 'nothing'}")
    dimensions = data[3]
    start = 4 + 4 * dimensions
    sizes = data[4:start]
    shape = tuple(int(size) for size in np.frombuffer(sizes[: len(sizes) // 4 * 4], ">u4"))
    if (
        len(shape) < dimensions
        or dimensions > 4
        or max(shape, default=0) >= 2**31
        or len(data) - start != math.prod(shape)
    ):
        raise DataError(
            f"{path} is damaged: its header states the shape {shape}, but {max(0, len(data) - start)} bytes follow"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
