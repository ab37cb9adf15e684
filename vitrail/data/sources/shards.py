"""Tar shards in the WebDataset convention: `rose/1.jpg` and `rose/1.cls` (or .json) in a tar are one sample.

A sample's members share what comes before the first dot of the file's name. Its label is a class's number or name in a
.cls, or in "label", "cls" or "class" of a .json, where it can be a list. Images are read at random, by an index.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np

from vitrail.data import remote
from vitrail.data.source import Sample, Target, TargetKind
from vitrail.data.sources.number_column import places_of
from vitrail.data.sources.shard_paths import Located, locate, looks_like_shards
from vitrail.data.sources.tar_index import RawLabel, Shard, Version, is_numbers, open_shard, version_of
from vitrail.data.splits import SPLITS, Split, Splits
from vitrail.errors import DataError, nearest

__all__ = ["ShardSource", "looks_like_shards", "open_shards"]

OPEN_FILES = 64
"""How many shards a source has open at once."""

MOST_CLASSES = 1_000_000
"""A larger number is no class's."""

THREADS = 16
"""That open shards behind URLs: they wait for a server, at first once for each image that is not small."""


def open_shards(location: str, classes: tuple[str, ...] | None, numbers: tuple[str, ...] = ()) -> Splits:
    """Opens a .tar file, a folder of them (flat, or in train/, val/, test/), `name-{000..012}.tar` or a glob, or a URL
    of these that fsspec knows.

    `classes` indexes the samples by those of a model. Else their names are those in dataset.json or classes.json beside
    the shards, else those that training labels give, sorted, else "0" to the highest number. Raises `DataError`.
    """
    located = locate(location)
    opened = _open(located)
    named = classes or located.classes
    sources: dict[Split, ShardSource] = {}
    if any(_has_numbers(shard) for shards in opened.values() for shard in shards):
        return _with_numbers(location, located, opened, numbers)
    if numbers:
        raise DataError(
            f"data {location!r} has no numbers in its shards, but numbers={','.join(numbers)} asks for some"
        )
    for split in SPLITS:
        if split in opened:
            sources[split] = ShardSource(opened[split], named, numbered=located.classes)
            named = named or sources[split].classes
    first, *others = sources.values()
    for other in others:
        if isinstance(first.target(0), tuple) != isinstance(other.target(0), tuple):
            raise DataError(f"data {location!r} has images with one label in one split and with several in another")
    notes = tuple(note for split, source in sources.items() for note in _notes(location, split, source))
    return Splits(sources["train"], sources.get("validation"), sources.get("test"), notes)


def _has_numbers(shard: Shard) -> bool:
    return any(is_numbers(label) for label in shard.index.labels)


def _with_numbers(
    location: str, located: Located, opened: Mapping[Split, list[Shard]], numbers: tuple[str, ...]
) -> Splits:
    """Open shards whose samples have numbers: all of them, or those named by `numbers`."""
    lengths = {
        len(label) if is_numbers(label) else 0
        for shards in opened.values()
        for shard in shards
        for label in shard.index.labels
        if isinstance(label, tuple)
    }
    plain = any(not is_numbers(label) for shards in opened.values() for shard in shards for label in shard.index.labels)
    names = located.classes or tuple(str(place) for place in range(max(lengths)))
    if plain or lengths != {len(names)}:
        raise DataError(
            f"data {location!r}: some samples have {len(names)} numbers, and others have classes or another count of "
            "numbers; give the same numbers to all samples, null for one that is unknown"
        )
    places = places_of(f"data {location!r}", numbers, names) if numbers else list(range(len(names)))
    sources = {
        split: ShardSource(opened[split], numbers or names, columns=places) for split in SPLITS if split in opened
    }
    notes = tuple(note for split, source in sources.items() for note in _notes(location, split, source))
    return Splits(sources["train"], sources.get("validation"), sources.get("test"), notes)


class ShardSource:
    """The samples of tar shards, in the order of the shards and in each in that of the tar.

    `classes` are the names that labels index; without them, they are found in the labels. `numbered` are the names that
    the shards' numbers stand for, where these are others. If samples have numbers to learn, `columns` says which of
    them are the targets, and `classes` names these. Raises `DataError` for labels that are not among them, and
    where two samples have one key. A million samples, with keys of 26 bytes, take 61 MB.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        classes: tuple[str, ...] | None = None,
        *,
        numbered: tuple[str, ...] | None = None,
        columns: Sequence[int] | None = None,
    ) -> None:
        self.shards = tuple((shard.path, shard.version) for shard in shards)
        self.ignored = sum(shard.index.ignored for shard in shards)
        distinct = _distinct(shards)
        self.classes = _found(distinct) if classes is None else classes
        self._labels, self._codes = _codes(
            shards,
            _resolve(distinct, self.classes, numbered or self.classes)
            if columns is None
            else {label: _picked(label, columns) for label in distinct},
            numbers=columns is not None,
        )
        self.target_kind: TargetKind = "class" if self.classes else "none"
        if any(isinstance(label, tuple) for label in self._labels):
            self.target_kind = "classes" if columns is None else "numbers"
        lengths = np.concatenate([np.diff(shard.index.key_ends, prepend=0) for shard in shards])
        self._key_ends = np.cumsum(lengths, dtype=np.int64)
        self._keys = np.concatenate([shard.index.keys for shard in shards])
        self._places = np.repeat(np.arange(len(shards), dtype=np.int32), [len(shard.index) for shard in shards])
        self._offsets = np.concatenate([shard.index.offsets for shard in shards])
        self._sizes = np.concatenate([shard.index.sizes for shard in shards])
        if len(self) == 0:
            names = ", ".join(path for path, _ in self.shards[:3])
            raise DataError(f"{names} and the others have no images" if len(shards) > 3 else f"{names} has no images")
        self._refuse_twice(np.concatenate([shard.index.hashes for shard in shards]))
        self._descriptor = _cache()

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, index: int) -> Sample:
        label = self.target(index)
        path, version = self.shards[self._places[index]]
        offset, size = int(self._offsets[index]), int(self._sizes[index])
        if remote.is_remote(path):
            try:
                data = remote.read(path, offset, offset + size)
            except OSError as error:
                raise DataError(f"cannot read shard {path}: {error}") from error
        else:
            try:
                descriptor = self._descriptor(path, version)  # held by its name until the bytes are read
                data = os.pread(descriptor.number, size, offset)
            except OSError as error:
                raise DataError(f"cannot read shard {path}: {error.strerror}") from error
            if len(data) != size:
                raise DataError(f"shard {path} was cut short while it was in use")
        return Sample(self.key(index), data, label)

    def key(self, index: int) -> str:
        stop = int(self._key_ends[index])
        start = int(self._key_ends[index - 1]) if index % len(self) else 0
        return os.fsdecode(self._keys[start:stop].tobytes())

    def target(self, index: int) -> Target:
        return self._labels[self._codes[index]]

    def stamp(self, index: int) -> str:
        """The shard's path and version, and the image's place in it."""
        path, version = self.shards[self._places[index]]
        return f"{path} {version.size} {version.tag} {self._offsets[index]}"

    def unlabelled(self) -> int:
        """How many have no label."""
        return int((self._codes == len(self._labels) - 1).sum())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_descriptor"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._descriptor = _cache()

    def _refuse_twice(self, hashes: np.ndarray) -> None:
        order = np.argsort(hashes, kind="stable")
        for place in np.flatnonzero(np.diff(hashes[order]) == 0):
            one, other = int(order[place]), int(order[place + 1])
            if self.key(one) == self.key(other):  # hashes alone may meet
                first, second = self.shards[self._places[one]][0], self.shards[self._places[other]][0]
                raise DataError(
                    f"{first} and {second} both have a sample {self.key(one)!r}; keys name samples, so begin those of "
                    "each shard differently, or leave one of them out"
                )


class _Descriptor:
    """An open file, until nobody uses it. Threads that read from it when it leaves the cache do so to their end."""

    def __init__(self, path: str, version: Version) -> None:
        self.number = os.open(path, os.O_RDONLY)
        if version_of(self.number) != version:
            raise DataError(f"shard {path} was changed after it was opened; open the data anew")

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def _cache() -> Callable[[str, Version], _Descriptor]:
    # It is written in C and takes no lock of ours, so a process can be forked while another thread is in it.
    return functools.lru_cache(maxsize=OPEN_FILES)(_Descriptor)


def _open(located: Located) -> dict[Split, list[Shard]]:
    """All shards, each at the size that was said of it."""
    paths = [path for paths in located.shards.values() for path in paths]
    threads = THREADS if paths and remote.is_remote(paths[0]) else 1
    with ThreadPoolExecutor(threads) as pool:
        opened = dict(zip(paths, pool.map(open_shard, paths), strict=True))
    for path, shard in opened.items():
        said = located.sizes.get(path)
        if said is not None and said != shard.version.size:
            raise DataError(
                f"shard {path} has {shard.version.size:,} bytes, and the dataset.json beside it says {said:,}; it was "
                "changed, or not all of it was copied"
            )
    return {split: [opened[path] for path in paths] for split, paths in located.shards.items()}


def _distinct(shards: Sequence[Shard]) -> dict[RawLabel, tuple[Shard, int]]:
    """The labels that samples have, each with a shard in which one has it, and its code there."""
    distinct: dict[RawLabel, tuple[Shard, int]] = {}
    for shard in shards:
        for code in np.unique(shard.index.codes).tolist():
            if code >= 0:
                distinct.setdefault(shard.index.labels[code], (shard, code))
    return distinct


def _several(label: RawLabel) -> tuple[int | str, ...]:
    return cast(tuple[int | str, ...], label) if isinstance(label, tuple) else (label,)


def _picked(label: RawLabel, columns: Sequence[int]) -> Target:
    """Return the numbers in some columns, NaN for one that is unknown, or None if none of them is known."""
    numbers = cast(tuple[float | None, ...], label)
    picked = tuple(math.nan if (number := numbers[column]) is None else number for column in columns)
    return None if all(map(math.isnan, picked)) else picked


def _example(shard: Shard, code: int) -> str:
    """The key of the first sample with a label."""
    index = int(np.argmax(shard.index.codes == code))
    start = int(shard.index.key_ends[index - 1]) if index else 0
    return os.fsdecode(shard.index.keys[start : shard.index.key_ends[index]].tobytes())


def _found(distinct: dict[RawLabel, tuple[Shard, int]]) -> tuple[str, ...]:
    """Class names as labels have them: sorted names, or all numbers up to the highest."""
    names: set[str] = set()
    highest, numbered = -1, ""
    for label, (shard, code) in distinct.items():
        for one in _several(label):
            if isinstance(one, str):
                names.add(one)
            elif one > highest:
                highest, numbered = one, f"{shard.path}: the label {one} of {_example(shard, code)!r}"
    if names and numbered:
        raise DataError(f"{numbered} is a number, and others are names, like {min(names)!r}; write all in one way")
    if highest >= MOST_CLASSES:
        raise DataError(f"{numbered} is not a class's number: more than {MOST_CLASSES:,} are not expected")
    if unprintable := sorted(name for name in names if not name.isprintable()):
        raise DataError(f"labels have class names that cannot be written down: {unprintable}; rename them")
    return tuple(sorted(names)) if names else tuple(str(number) for number in range(highest + 1))


def _resolve(
    distinct: dict[RawLabel, tuple[Shard, int]], classes: tuple[str, ...], numbered: tuple[str, ...]
) -> dict[RawLabel, Target]:
    """Each label by the indices of its classes. Raises `DataError` for one that is not among them."""
    numbers = {name: number for number, name in enumerate(classes)}
    resolved: dict[RawLabel, Target] = {}
    for label, (shard, code) in distinct.items():
        found: set[int] = set()
        for one in _several(label):
            name = numbered[one] if isinstance(one, int) and 0 <= one < len(numbered) else one
            if name not in numbers:
                raise DataError(_unknown(shard, code, one, name, classes, numbered))
            found.add(numbers[name])
        resolved[label] = tuple(sorted(found)) if isinstance(label, tuple) else found.pop()
    return resolved


def _codes(
    shards: Sequence[Shard], resolved: dict[RawLabel, Target], *, numbers: bool
) -> tuple[list[Target], np.ndarray]:
    """The distinct labels, None at the end; and for each sample which of these it has (int32)."""
    labels: list[Target] = [*dict.fromkeys(resolved.values()), None]
    places = {label: place for place, label in enumerate(labels)}
    none = places[None]
    parts = []
    for shard in shards:
        table = [places[resolved[label]] if label in resolved else none for label in shard.index.labels]
        parts.append(np.array([*table, none], np.int32)[shard.index.codes])  # the last is that of code -1
    codes = np.concatenate(parts)
    kinds = {isinstance(label, tuple) for label in resolved}
    if not numbers and (len(kinds) > 1 or (kinds == {True} and bool((codes == none).any()))):
        where = f"{shards[0].path}" + (" and the others" if len(shards) > 1 else "")
        raise DataError(
            f"{where}: some images have a list of labels and others one or none; give lists to all, empty where none "
            "holds"
        )
    return labels, codes


def _unknown(
    shard: Shard, code: int, label: int | str, name: int | str, classes: tuple[str, ...], numbered: tuple[str, ...]
) -> str:
    start = f"{shard.path}: sample {_example(shard, code)!r} has the label {label!r}"
    if isinstance(name, int):
        return f"{start}; the {len(numbered):,} classes are numbered from 0"
    meaning = f", which is {name!r}" if name != label else ""
    return f"{start}{meaning}; it is not among the classes that are known ({nearest(name, classes)})"


def _notes(location: str, split: Split, source: ShardSource) -> Iterable[str]:
    if source.ignored:
        yield f"{location}, {split}: {source.ignored:,} files left out, which are neither images nor labels of images"
    if missing := source.unlabelled():
        yield f"{location}, {split}: {missing:,} of {len(source):,} images have no label"
