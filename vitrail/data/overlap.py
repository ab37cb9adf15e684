"""Search for images that training data shares with held-out images."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vitrail.data.source import Source, origin_of, stamp_of
from vitrail.errors import DataError

MOST_READ = 1000
"""Largest number of pairs of images with the same file name that are read and compared."""


def shared_images(train: Source, held_out: Source) -> list[int]:
    """Return the indices of held-out images that the training data also contains.

    Two samples are the same image if both come from the same place, such as a file or a part of a file, even under
    different names. Two images are also the same if they have the same file name and the same bytes or pixels. If more
    than 1,000 pairs have the same file name, only 1,000 evenly spaced pairs are compared.
    """
    if not len(train) or not len(held_out):
        return []
    origins = {origin: index for index in range(len(held_out)) if (origin := origin_of(held_out, index)) is not None}
    kind = (origin_of(train, 0) or "").partition(" ")[0]
    same = set()
    if any(origin.startswith(f"{kind} ") for origin in origins):
        for index in range(len(train)):
            other = origins.get(origin_of(train, index) or "")
            if other is None:
                continue
            # files on two disks can have the same inode, but hardly the same times as well
            if kind != "file" or stamp_of(train, index) == stamp_of(held_out, other):
                same.add(other)
    if kind != "fractal":
        same |= {
            other
            for one, other in _with_same_name(train, held_out)
            if other not in same and _equal(train, held_out, one, other)
        }
    return sorted(same)


def _with_same_name(train: Source, held_out: Source) -> Iterator[tuple[int, int]]:
    """Yield at most `MOST_READ` pairs of indices: a training image and a held-out image with the same file name in any
    folder.

    The pairs are counted and not listed, because classes whose images have the same numbers have millions of them.
    """
    names: dict[str, list[int]] = {}
    for index in range(len(held_out)):
        names.setdefault(held_out.key(index).rpartition("/")[2], []).append(index)
    counts = [len(names.get(train.key(index).rpartition("/")[2], ())) for index in range(len(train))]
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1])
    for place in np.unique(np.linspace(0, total - 1, min(MOST_READ, total)).astype(np.int64)).tolist():
        index = int(np.searchsorted(ends, place, side="right"))
        yield index, names[train.key(index).rpartition("/")[2]][place - int(ends[index]) + counts[index]]


def _equal(train: Source, held_out: Source, one: int, other: int) -> bool:
    try:
        mine, theirs = train[one].image, held_out[other].image
    except DataError:  # training will skip the image and report it
        return False
    if isinstance(mine, bytes) and isinstance(theirs, bytes):
        return mine == theirs != b""  # an empty file is a broken image, not a copy
    return isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray) and np.array_equal(mine, theirs)
