"""Tar shards in the WebDataset convention: `rose/1.jpg` and `rose/1.cls` (or .json) in a tar are one sample.

The members of a sample have the same path up to the first dot of the file's name, or up to the last dot if the name has
several and no sample ends at the first. The label is the number or name of a
class. It is in the .cls file, or in the field "label", "cls" or "class" of the .json file, where it can be a list.
Texts are in the .txt file, or in a field such as "caption" of the .json file.
Images are read in any order, by an index.
"""

from __future__ import annotations

import functools
import glob
import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from vitrail.data import remote
from vitrail.data.faults import Fault, unknown_class
from vitrail.data.formats.pack import FILE, UNFINISHED, Manifest, parse
from vitrail.data.formats.tar_index import RawLabel, Shard, Version, is_numbers, open_shard, version_of
from vitrail.data.pixels.decode import SUFFIXES as IMAGE_SUFFIXES
from vitrail.data.source import Samples
from vitrail.data.splits import SPLITS, Split, SplitNames, Splits, by_split, split_of, splits_from
from vitrail.data.targets import Target, TargetKind, Targets, check_names, class_name, places_of, refuse_flags
from vitrail.data.texts import TextReader
from vitrail.errors import DataError, nearest, plural
from vitrail.files import expanded

OPEN_FILES = 64
"""Maximum number of shards that a source has open at once."""

MOST_CLASSES = 1_000_000
"""Limit for labels. A label of this number or more is an error."""

THREADS = 16
"""Number of threads that open shards at URLs. Many threads help, because the first scan waits for one request per image
that is not small."""


def open_shards(
    location: str,
    classes: tuple[str, ...] | None,
    numbers: tuple[str, ...] = (),
    chosen: SplitNames | None = None,
    *,
    texts: bool = False,
) -> Splits:
    """Open a .tar file, a folder of them (flat, or in train/, val/, test/), a pattern such as `name-{000..012}.tar`, or
    a URL of these that fsspec supports.

    If `classes` is given, such as the classes of a model, labels are indices into `classes`. Otherwise the class names
    come from dataset.json or classes.json beside the shards. Without these files, they are the sorted training labels.
    If labels are only numbers, the names are "0" to the highest number. The targets are texts if no sample has a label,
    or if `texts` is true. Raises `DataError`.
    """
    located = locate(location, chosen)
    opened = _open(located)
    notes = list(located.notes)
    for split in list(opened):
        if split != "train" and len(opened) > 1 and not any(len(shard.index) for shard in opened[split]):
            notes.append(f"{location}: the {split} split is skipped, because it has no images")
            del opened[split]
    every = [shard.index for shards in opened.values() for shard in shards]
    labels = [label for index in every for label in index.labels]
    count = sum(len(index.texts) for index in every)
    faults: list[Fault] = []
    are_texts = count > 0 and (texts or not (labels or numbers))
    if count and not are_texts:
        notes.append(f"{location}: {plural(count, 'text')} of its images not used, because they have labels")
    if are_texts:
        if numbers:
            raise DataError(
                f"data {location!r} has texts in its shards, but numbers={','.join(numbers)} asks for numbers"
            )
        if labels:
            notes.append(f"{location}: labels are not used, because texts are asked for")
        targets = _text_targets(location, opened, notes)
    elif any(map(is_numbers, labels)):
        targets = _number_targets(location, located, opened, labels, numbers)
    elif numbers:
        raise DataError(
            f"data {location!r} has no numbers in its shards, but numbers={','.join(numbers)} asks for some"
        )
    else:
        targets, faults = _class_targets(location, located, opened, classes)
    sources: dict[Split, Samples] = {}
    for split, found in targets.items():
        reader = ShardImages(opened[split])
        sources[split] = Samples((reader,), range(len(reader)), found)
        if ignored := sum(shard.index.ignored for shard in opened[split]):
            files = plural(ignored, "file")
            notes.append(
                f"{location}, {split}: skipped {files} that are neither the image nor the label or text of a sample"
            )
        if doubtful := sum(shard.index.doubtful for shard in opened[split]):
            notes.append(
                f"{location}, {split}: {plural(doubtful, 'image')} with another label or text in the .json file than "
                "the one that is used, which is that of the .cls or .txt file, or of the first of the fields label, "
                "cls and class"
            )
        if (missing := int((~found.known).sum())) and not are_texts:
            notes.append(f"{location}, {split}: {missing:,} of {plural(len(found), 'image')} without a label")
    return splits_from(sources, notes, faults)


def _text_targets(location: str, opened: Mapping[Split, list[Shard]], notes: list[str]) -> dict[Split, Targets]:
    """Return the texts of each split that has some. Notes are added to `notes`."""
    found = {}
    for split, shards in opened.items():
        if split != "train" and len(opened) > 1 and not any(len(shard.index.texts) for shard in shards):
            notes.append(f"{location}: the {split} split is skipped, because none of its images has a text")
            continue
        indices = [shard.index for shard in shards]
        counts = np.concatenate([index.text_counts for index in indices]).tolist()
        every = (index.texts[row] for index in indices for row in range(len(index.texts)))
        found[split] = Targets.of((tuple(itertools.islice(every, count)) for count in counts), "texts", ())
        unread = TextReader()
        unread.empty, unread.broken = np.sum([index.unread for index in indices], axis=0).tolist()
        notes += unread.notes(f"{location}, {split}")
    return found


def _number_targets(
    location: str,
    located: Located,
    opened: Mapping[Split, list[Shard]],
    labels: Sequence[RawLabel],
    numbers: tuple[str, ...],
) -> dict[Split, Targets]:
    """Return the numbers of each split, which are the `labels` of all shards. `numbers` selects some of them. By
    default all are used."""
    lengths = {len(label) if isinstance(label, tuple) and is_numbers(label) else 0 for label in labels}
    names = located.classes or tuple(str(place) for place in range(max(lengths)))
    if lengths != {len(names)}:
        raise DataError(
            f"data {location!r}: some samples have {len(names)} numbers, and others have classes or another count of "
            "numbers; give the same numbers to all samples, and null for an unknown number"
        )
    places = places_of(f"data {location!r}", numbers, names) if numbers else list(range(len(names)))
    picked = {label: _picked(label, places) for label in labels}
    return {split: _targets(shards, picked, "numbers", numbers or names) for split, shards in opened.items()}


def _class_targets(
    location: str, located: Located, opened: Mapping[Split, list[Shard]], known: tuple[str, ...] | None
) -> tuple[dict[Split, Targets], list[Fault]]:
    """Return the classes of each split, and faults.

    Classes are those that are `known`, or those that a file beside the shards names. Without either, they are collected
    from the labels of the first split. Another label of a held-out split then counts as missing, and is a fault.
    Otherwise, a label of no class raises `DataError`.
    """
    names, numbered = known or located.classes, located.classes
    found: dict[Split, Targets] = {}
    faults: list[Fault] = []
    for split, shards in opened.items():
        distinct = _distinct(shards)
        refuse_flags(shards[0].path, (label for label in distinct if isinstance(label, tuple)))
        names = _found(distinct) if names is None else names
        resolved, strange = _resolve(distinct, names, numbered)
        if strange:
            label, one = next(iter(strange.items()))
            shard, code = distinct[label]
            unknown = f"{shard.path}: sample {_example(shard, code)!r} {_unknown(one, names, numbered)}"
            if split == "train" or known is not None or numbered is not None:
                raise DataError(unknown)
            faults.append(unknown_class(split, _count(shards, strange), unknown))
        found[split] = _targets(shards, resolved, _label_kind(shards, resolved, names), names)
    if len({targets.kind for targets in found.values() if targets.known.any()}) > 1:
        raise DataError(
            f"data {location!r} has one label per image in one split and lists of labels in another; use the same "
            "form in all splits"
        )
    return found, faults


def _targets(
    shards: Sequence[Shard], meanings: Mapping[RawLabel, Target], kind: TargetKind, names: tuple[str, ...]
) -> Targets:
    """Return the targets of the samples of some shards, in the order of the shards and of the files in each tar. Raise
    `DataError` if there are none."""
    if not sum(len(shard.index) for shard in shards):
        paths = ", ".join(shard.path for shard in shards[:3]) + (" and the others" if len(shards) > 3 else "")
        ignored = sum(shard.index.ignored for shard in shards)
        other = f", but {plural(ignored, 'other file')}" if ignored else ""
        raise DataError(f"{paths}: there are no images{other}; a sample is an image such as 1.jpg, with 1.cls")
    none: Target = () if kind == "classes" else None
    parts = []
    for shard in shards:
        table = [*(meanings.get(label, none) for label in shard.index.labels), none]  # the last element is for code -1
        parts.append(Targets.of(table, kind, names).rows(shard.index.codes))
    return Targets.joined(parts)


class ShardImages:
    """The images of tar shards. Raises `DataError` if two samples have the same key."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple((shard.path, shard.version) for shard in shards)
        lengths = np.concatenate([np.diff(shard.index.key_ends, prepend=0) for shard in shards])
        self._key_ends = np.cumsum(lengths, dtype=np.int64)
        self._keys = np.concatenate([shard.index.keys for shard in shards])
        self._places = np.repeat(np.arange(len(shards), dtype=np.int32), [len(shard.index) for shard in shards])
        self._offsets = np.concatenate([shard.index.offsets for shard in shards])
        self._sizes = np.concatenate([shard.index.sizes for shard in shards])
        self._refuse_duplicate_keys(np.concatenate([shard.index.hashes for shard in shards]))
        self._descriptor = _cache()

    def __len__(self) -> int:
        return len(self._sizes)

    def image(self, place: int) -> bytes:
        path, version = self.shards[self._places[place]]
        offset, size = int(self._offsets[place]), int(self._sizes[place])
        if remote.is_remote(path):
            try:
                data = remote.read(path, offset, offset + size)
            except OSError as error:
                raise DataError(f"cannot read shard {path}: {error}") from error
        else:
            try:
                descriptor = self._descriptor(path, version)  # the name keeps it open until the bytes are read
                data = os.pread(descriptor.number, size, offset)
            except OSError as error:
                raise DataError(f"cannot read shard {path}: {error.strerror}") from error
            if len(data) != size:
                raise DataError(f"shard {path} was truncated while it was in use; run the command again")
        return data

    def key(self, place: int) -> str:
        stop = int(self._key_ends[place])
        start = int(self._key_ends[place - 1]) if place else 0
        return os.fsdecode(self._keys[start:stop].tobytes())

    def stamp(self, place: int) -> str:
        """Return the shard's path and version, and the offset of the image in it."""
        path, version = self.shards[self._places[place]]
        return " ".join(map(str, (path, *version[: 2 + bool(version.changed)], self._offsets[place])))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_descriptor"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._descriptor = _cache()

    def _refuse_duplicate_keys(self, hashes: np.ndarray) -> None:
        order = np.argsort(hashes, kind="stable")
        for place in np.flatnonzero(np.diff(hashes[order]) == 0):
            one, other = int(order[place]), int(order[place + 1])
            if self.key(one) == self.key(other):  # different keys can have the same hash
                first, second = self.shards[self._places[one]][0], self.shards[self._places[other]][0]
                raise DataError(
                    f"{first} and {second} both have a sample {self.key(one)!r}; keys must be unique, so give the keys "
                    "of each shard a different prefix, or open only one of the shards"
                )


class _Descriptor:
    """An open file. It is closed when the cache and all reading threads have released it."""

    def __init__(self, path: str, version: Version) -> None:
        self.number = os.open(path, os.O_RDONLY)
        if version_of(self.number)[:2] != version[:2]:  # a new name or mode also sets the inode change time
            raise DataError(f"shard {path} was changed after it was opened; run the command again")

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def _cache() -> Callable[[str, Version], _Descriptor]:
    # The cache uses no Python lock, so a process can be forked while another thread uses it.
    return functools.lru_cache(maxsize=OPEN_FILES)(_Descriptor)


def _open(located: Located) -> dict[Split, list[Shard]]:
    """Open all shards. Raises `DataError` if the size of a shard differs from the size in dataset.json."""
    paths = [path for paths in located.shards.values() for path in paths]
    threads = THREADS if paths and remote.is_remote(paths[0]) else 1
    with ThreadPoolExecutor(threads) as pool:
        opened = dict(zip(paths, pool.map(open_shard, paths), strict=True))
    for path, shard in opened.items():
        stated = located.sizes.get(path)
        if stated is not None and stated != shard.version.size:
            raise DataError(
                f"shard {path} has {shard.version.size:,} bytes, but the dataset.json beside it states {stated:,}; the "
                "shard was changed or copied incompletely, so copy or pack it again"
            )
    return {split: [opened[path] for path in paths] for split, paths in located.shards.items()}


def _distinct(shards: Sequence[Shard]) -> dict[RawLabel, tuple[Shard, int]]:
    """Return the distinct labels. Each label comes with one shard that contains it and the label's code in that
    shard."""
    distinct: dict[RawLabel, tuple[Shard, int]] = {}
    for shard in shards:
        for code in np.unique(shard.index.codes).tolist():
            if code >= 0:
                distinct.setdefault(shard.index.labels[code], (shard, code))
    return distinct


def _several(label: RawLabel) -> tuple[int | str, ...]:
    return cast(tuple[int | str, ...], label) if isinstance(label, tuple) else (label,)


def _picked(label: RawLabel, columns: Sequence[int]) -> Target:
    """Return the numbers in some columns, with NaN for an unknown number. Return None if all are unknown."""
    numbers = cast(tuple[float | None, ...], label)
    picked = tuple(math.nan if (number := numbers[column]) is None else number for column in columns)
    return None if all(map(math.isnan, picked)) else picked


def _example(shard: Shard, code: int) -> str:
    """Return the key of the first sample with a label, for messages."""
    index = int(np.argmax(shard.index.codes == code))
    start = int(shard.index.key_ends[index - 1]) if index else 0
    return os.fsdecode(shard.index.keys[start : shard.index.key_ends[index]].tobytes())


def _found(distinct: dict[RawLabel, tuple[Shard, int]]) -> tuple[str, ...]:
    """Return the class names for the labels: the sorted names, or the numbers from 0 to the highest label."""
    names: set[str] = set()
    highest, numbered = -1, ""
    for label, (shard, code) in distinct.items():
        for one in _several(label):
            if isinstance(one, str):
                names.add(class_name(one))
            elif one > highest:
                highest, numbered = one, f"{shard.path}: the label {one} of {_example(shard, code)!r}"
    if names and numbered:
        raise DataError(
            f"{numbered} is a number, but other labels are names, such as {min(names)!r}; use either numbers or names"
        )
    if highest >= MOST_CLASSES:
        raise DataError(f"{numbered} is not a class number; class numbers are below {MOST_CLASSES:,}")
    check_names("the labels of the shards", names)
    return tuple(sorted(names)) if names else tuple(str(number) for number in range(highest + 1))


def _resolve(
    distinct: dict[RawLabel, tuple[Shard, int]], classes: tuple[str, ...], numbered: tuple[str, ...] | None
) -> tuple[dict[RawLabel, Target], dict[RawLabel, int | str]]:
    """Return the class indices of each label, and the first unknown class of each label that has one. A list of labels
    is returned without unknown classes. A single label that is an unknown class becomes None."""
    numbers = {name: number for number, name in enumerate(classes)}
    resolved: dict[RawLabel, Target] = {}
    strange: dict[RawLabel, int | str] = {}
    for label in distinct:
        found: set[int] = set()
        for one in _several(label):
            name = _meaning(one, numbered)
            if name in numbers:
                found.add(numbers[name])
            else:
                strange.setdefault(label, one)
        resolved[label] = tuple(sorted(found)) if isinstance(label, tuple) else found.pop() if found else None
    return resolved, strange


def _count(shards: Sequence[Shard], labels: Collection[RawLabel]) -> int:
    """Return the number of samples with one of these labels."""
    return sum(
        int((shard.index.codes == code).sum())
        for shard in shards
        for code, label in enumerate(shard.index.labels)
        if label in labels
    )


def _label_kind(shards: Sequence[Shard], labels: Iterable[RawLabel], classes: tuple[str, ...]) -> TargetKind:
    """Return the kind of classes that labels state. Raise `DataError` if only some images have a list of labels."""
    kinds = {isinstance(label, tuple) for label in labels}
    if len(kinds) > 1 or (kinds == {True} and any((shard.index.codes < 0).any() for shard in shards)):
        where = f"{shards[0].path}" + (" and the others" if len(shards) > 1 else "")
        raise DataError(
            f"{where}: some images have a list of labels, others have one label or none; give every image a list, "
            "which can be empty"
        )
    return "classes" if kinds == {True} else "class" if classes else "none"


def _meaning(label: int | str, numbered: tuple[str, ...] | None) -> int | str:
    """Return the name of a label's class. A number is the name of its class unless the shards name their classes. A
    number without a name among those stays a number."""
    if isinstance(label, str):
        return class_name(label)
    if numbered is None:
        return str(label)
    return numbered[label] if 0 <= label < len(numbered) else label


def _unknown(label: int | str, classes: tuple[str, ...], numbered: tuple[str, ...] | None) -> str:
    """Return the end of a message about a label that is not among the classes."""
    name = _meaning(label, numbered)
    if isinstance(name, int):
        return f"has the label {label!r}; the {len(numbered or ()):,} classes are numbered from 0"
    meaning = f", which is {name!r}" if numbered and name != label else ""
    return f"has the label {label!r}{meaning}; it is not among the known classes ({nearest(name, classes)})"


SUFFIXES = (".tar", ".tar.gz", ".tgz")
"""File suffixes of tar files. Compressed ones are recognised so that a message can explain why they are refused."""

OTHER_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet", ".json", ".zip", ".rar", ".7z", *IMAGE_SUFFIXES)
MOST = 1_000_000


@dataclass(frozen=True)
class Located:
    """Paths or URLs of shards, by split and in order."""

    shards: dict[Split, list[str]]
    classes: tuple[str, ...] | None
    """The classes from dataset.json or classes.json beside the shards, if there is such a file."""
    notes: tuple[str, ...]
    """Notes on shards that are in no split."""
    sizes: dict[str, int]
    """Size of each shard in bytes, by path, from dataset.json beside the shards. Empty without such a file."""


def looks_like_shards(location: str, chosen: SplitNames | None = None) -> bool:
    """Return True if `open_shards` should open this location.

    It opens .tar files, patterns and folders of .tar files, and all URLs except those of tables. A folder qualifies if
    it has packed shards, if it has .tar files that are in or named after train, val or test, or if it has .tar files
    and no subfolders.
    """
    bare = location.partition("?")[0] if remote.is_remote(location) else location
    if bare.endswith(SUFFIXES) or (_is_pattern(bare) and ".tar" in bare):
        return True
    if remote.is_remote(location):
        return not bare.endswith(OTHER_SUFFIXES)
    root = expanded(location)
    if not root.is_dir():
        return False
    if (root / FILE).is_file() or (root / UNFINISHED).is_file():
        return True
    found = _in_folder(root, chosen)
    if any(split_of(path, chosen) is not None for path in found):
        return True
    return bool(found) and not any(entry.is_dir() for entry in root.iterdir() if not entry.name.startswith("."))


def locate(location: str, chosen: SplitNames | None = None) -> Located:
    """Return the shards that a location names. `chosen` states the names of the splits. Raises `DataError`."""
    if not remote.is_remote(location):
        location = str(expanded(location))
    if _is_pattern(location) and not Path(location).exists():  # a file may have brackets in its name
        return _pattern(location, chosen)
    if location.partition("?")[0].endswith(SUFFIXES) and not Path(location).is_dir():
        folder, slash, _ = location.rpartition("/")
        if chosen:
            raise DataError(f"data {location!r} is a single shard, which --splits cannot divide; leave --splits out")
        return _located({"train": [location]}, folder + slash)
    return _folder(location, chosen)


def _is_pattern(location: str) -> bool:
    # A question mark in a URL begins its query.
    return re.search(r"[*{]" if remote.is_remote(location) else r"[*{?[]", location) is not None


def _pattern(location: str, chosen: SplitNames | None) -> Located:
    """Return the shards that match a pattern. If all shards are named after the same split, they are used for
    training."""
    folder, slash, _ = re.split(r"[*{]" if remote.is_remote(location) else r"[*{?[]", location)[0].rpartition("/")
    base = folder + slash
    found: list[str] = []
    for pattern in _expand(location.removeprefix(base)):
        if not _is_pattern(f"{base}{pattern}"):
            found.append(pattern)
            continue
        if remote.is_remote(location):
            matches = remote.glob(folder, pattern)
        else:
            matches = glob.glob(pattern, root_dir=base or None)  # noqa: PTH207 (Path.glob keeps no relative paths)
        found += [match for match in matches if match.endswith(SUFFIXES)]
    found = list(dict.fromkeys(found))
    if not found:
        raise DataError(f"data {location!r}: no file matches this pattern; correct the pattern")
    if missing := [path for path in found if not remote.is_remote(base) and not Path(base + path).exists()]:
        raise DataError(
            f"data {location!r}: {len(missing):,} of {len(found):,} shards are missing, such as {base + missing[0]}"
        )
    if not chosen and len({split_of(path) for path in found}) == 1:
        return _located({"train": [base + path for path in sorted(found)]}, base)
    named, notes = by_split(location, found, chosen)
    return _located({split: [base + path for path in paths] for split, paths in named.items()}, base, notes)


def _expand(pattern: str) -> list[str]:
    """Return all strings that a pattern with {000..012} or {train,val} stands for, as in a shell."""
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices: list[list[str]] = []
    for number, piece in enumerate(pieces):
        bounds = re.fullmatch(r"(\d+)\.\.(\d+)", piece) if number % 2 else None
        if bounds is not None:
            first, last = int(bounds[1]), int(bounds[2])
            if not first <= last < first + MOST:
                raise DataError(
                    f"{{{piece}}} in {pattern!r} is not a range from a number to a larger one, with at most {MOST:,} "
                    "numbers"
                )
            width = len(bounds[1]) if bounds[1].startswith("0") else 0
            choices.append([str(value).zfill(width) for value in range(first, last + 1)])
        else:
            choices.append(piece.split(",") if number % 2 else [piece])
    if math.prod(map(len, choices)) > MOST:
        raise DataError(f"{pattern!r} stands for more than {MOST:,} shards, which is the maximum")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _folder(location: str, chosen: SplitNames | None) -> Located:
    base = location.rstrip("/") + "/"
    if (packed := _manifest(base)) is not None:
        if chosen:
            raise DataError(f"data {location!r} was packed with its splits, so --splits has no effect; leave it out")
        return _located(
            {
                split: [base + record.name for record in packed.shards[split]]
                for split in SPLITS
                if split in packed.shards
            },
            base,
        )
    if _file(base + UNFINISHED) is not None:
        again = f"vitrail data pack SPEC {shlex.quote(location)}"
        raise DataError(f"{location} is not packed completely; continue with: {again}")
    if remote.is_remote(base):
        found = [path for path in remote.list_files(base) if _is_shard(path, chosen)]
    else:
        found = _in_folder(Path(base), chosen)
    if not found:
        only = "; other formats must be on the disk, so download the data" if remote.is_remote(base) else ""
        raise DataError(f"{location} has no shards; it needs .tar files, directly or in train/, val/ or test/{only}")
    named, notes = by_split(location, found, chosen)
    return _located({split: [base + path for path in paths] for split, paths in named.items()}, base, notes)


def _in_folder(root: Path, chosen: SplitNames | None = None) -> list[str]:
    paths = (path.relative_to(root).as_posix() for depth in ("*", "*/*") for path in root.glob(depth))
    return sorted(path for path in paths if _is_shard(path, chosen))


def _is_shard(path: str, chosen: SplitNames | None) -> bool:
    """Return True for the relative path of a tar directly in a folder or in a subfolder that is named after a split."""
    folder, _, name = path.rpartition("/")
    return name.endswith(SUFFIXES) and not name.startswith(".") and (not folder or split_of(folder, chosen) is not None)


def _located(shards: dict[Split, list[str]], base: str, notes: tuple[str, ...] = ()) -> Located:
    """Return the shards with the classes and sizes from dataset.json or classes.json in their folder."""
    if (packed := _manifest(base)) is not None:
        records = (record for records in packed.shards.values() for record in records)
        return Located(shards, packed.classes, notes, {base + record.name: record.size for record in records})
    if (data := _file(f"{base}classes.json")) is None:
        return Located(shards, None, notes, {})
    try:
        names = json.loads(data)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise DataError(f"{base}classes.json must be a list of names without repetitions")
    return Located(shards, tuple(names), notes, {})


def _manifest(base: str) -> Manifest | None:
    data = _file(base + FILE)
    return None if data is None else parse(base + FILE, data)


def _file(path: str) -> bytes | None:
    """Return the bytes of a small file, or None if it does not exist."""
    try:
        return remote.read_all(path) if remote.is_remote(path) else Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if remote.is_remote(path) and isinstance(error, PermissionError):
            return None  # some servers give this answer for a missing file
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
