"""The splits of a data set: their names on disk, the creation of a missing validation split, and the choice of splits
and labels that follows the name of data.

Held-out samples and subsets are selected by a hash of their keys or by position. A selection by hash is the same on
every machine and in any order of the samples. A larger selection contains every smaller selection. If samples are added
to a source, the selection changes for few of the other samples.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable
from urllib.parse import quote, unquote

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from vitrail.data.faults import Fault
from vitrail.data.source import Samples, Source, first_copies, samples_of, subset, target_kind, truth_of
from vitrail.data.targets import PLACED, Target, TargetKind, class_indices
from vitrail.errors import ConfigError, DataError, listed, plural
from vitrail.files import expanded

T = TypeVar("T")

Split = Literal["train", "validation", "test"]

SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training", "trainval"),
    "validation": ("val", "validation", "valid", "validate", "dev", "devel", "development", "eval", "evaluation"),
    "test": ("test", "testing"),
}
"""Words that name each split, whatever their case."""

SplitNames = Mapping[Split, tuple[str, ...]]
"""The names that form each split, as the user chose them. An empty mapping means that no name is that of a split."""

WORDS = {word: split for split, words in SPLITS.items() for word in words}

AFFIXES = frozenset({
    "set", "sets", "data", "dataset", "split", "images", "image", "imgs", "img", "jpg", "jpeg", "png", "pictures",
    "photos", "pics", "samples", "files", "folder", "dir", "seg", "x", "raw", "new", "final", "cropped", "resized",
    "cleaned", "labeled", "labelled", "part", "obj",
})  # fmt: skip
"""Words beside that of a split in a name such as "seg_train", "training_set" or "val_images"."""

START = re.compile(rf"({'|'.join(WORDS)})(?:[^a-z].*)?", re.I | re.S)
"""Names of files can go on after the split, such as "train-00000-of-00004.parquet"."""

FOLD = re.compile(r"(?:k|cv)?[-_ ]*(?:fold|split)[-_ ]*\w{1,3}|cv[-_ ]*\d+", re.I)

CHOICE = "--splits train=NAME,test=NAME"
"""The choice of splits in messages. In Python, `?train=NAME&test=NAME` follows the path of the data."""


@runtime_checkable
class Unlimited(Protocol):
    """A source that generates its samples and can generate more samples of the same classes."""

    def held_out(self, fraction: float) -> Source:
        """Return a new source with other samples. Its size is about `fraction` of the total size of this source and the
        new one."""


@dataclass(frozen=True)
class Splits:
    """The splits of a data set. The classes of the training split index the samples of all splits."""

    train: Source
    validation: Source | None
    """Validation split, which selects the best weights. It is never used for training."""
    test: Source | None
    """Test split, which is evaluated once, at the end. It is never used for training or for selecting weights."""
    notes: tuple[str, ...] = field(default=())
    """Remarks for the user, one sentence each, for example about skipped files."""
    title: str = "the data"
    """Name of the data in messages."""
    faults: tuple[Fault, ...] = field(default=())
    """Faults in the structure of the data that are tolerated, because the data is only checked."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a split has other classes than the training split, or the same in another order."""
        known = getattr(self.train, "classes", ())
        for split, source in self.sources.items():
            if (classes := getattr(source, "classes", ())) not in ((), known):
                raise ConfigError(
                    f"data: the {split} split has the classes {classes!r:.60}, but the training split has "
                    f"{known!r:.60}; give all splits the same classes in the same order, because targets are indices "
                    "of them"
                )

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @property
    def target_kind(self) -> TargetKind:
        return target_kind(self.train)

    @property
    def sources(self) -> dict[str, Source]:
        """The splits that the data has, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: source for split, source in named.items() if source is not None}

    @property
    def held_out(self) -> tuple[str, Source] | None:
        """Name and source of the split that evaluates a finished model: the test split if there is one, else the
        validation split."""
        if self.test is not None:
            return "test", self.test
        return None if self.validation is None else ("validation", self.validation)


def split_of(path: str, chosen: SplitNames | None = None) -> Split | None:
    """Return the split of a relative path, or of a value in a column. The file name decides, or else the nearest folder
    that is named after a split.

    For example, "train-00000.tar", "val/0.tar", "Testing" and "seg_train/a.csv" have a split. "latest.csv" and
    "images/0.tar" have none. With `chosen`, only the chosen names of files and folders (or patterns with *) count.
    """
    parts = path.split("/")
    if chosen is not None:
        starts = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        candidates = {*parts, *starts, parts[-1].split(".")[0]}
        named = ((split, name) for split, names in chosen.items() for name in names)
        return next((split for split, name in named if any(fnmatch.fnmatchcase(one, name) for one in candidates)), None)
    for part in reversed(parts):
        if split := _split_word(part.split(".")[0] or part):
            return split
        if match := START.fullmatch(part):
            return WORDS[match[1].lower()]
    return None


def named_splits(names: Iterable[str]) -> dict[str, Split]:
    """Return the split of each name that consists of the word of a split and of usual affixes, such as "Training",
    "seg_train" or "val_images". Words that all names have in common do not count, either."""
    names = list(names)
    common = frozenset.intersection(*(frozenset(_words(name)) for name in names)) if len(names) > 1 else frozenset()
    found = {name: _split_word(name, common - frozenset(WORDS)) for name in names}
    return {name: split for name, split in found.items() if split is not None}


def is_fold(name: str) -> bool:
    """Return True for the name of a part for cross-validation, such as "fold0" or "split_2"."""
    return FOLD.fullmatch(name) is not None


def _split_word(name: str, common: frozenset[str] = frozenset()) -> Split | None:
    rest = [word for word in _words(name) if word not in AFFIXES and word not in common and not word.isdecimal()]
    (word,) = rest if len(rest) == 1 else ("",)
    for affix in ("", "set", "data", "images", "imgs"):
        if word.endswith(affix) and (split := WORDS.get(word.removesuffix(affix))):
            return split
    return None


def _words(name: str) -> list[str]:
    """Return the words and numbers of a name in lower case. A capital after a small letter begins a word."""
    return re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())


def split_names(words: Sequence[str]) -> SplitNames:
    """Return the splits that words such as "train=Training" choose. A word without "=" is one more name of the split
    before it. The word "none" alone means that no name is that of a split. Raise `ConfigError` for any other word."""
    if list(words) == ["none"]:
        return {}
    chosen: dict[Split, tuple[str, ...]] = {}
    split: Split | None = None
    for word in words:
        before, equals, after = word.partition("=")
        split = _split_word(before) if equals else split
        name = (after if equals else word).strip().strip("/")
        if split is None or not name or ".." in name.split("/"):
            raise ConfigError(
                f"splits={','.join(words)} has {word!r}, which names no split; write train=NAME, validation=NAME or "
                "test=NAME, joined by commas, or none if no name is that of a split"
            )
        chosen[split] = (*chosen.get(split, ()), name)
    return chosen


def grouped(items: Iterable[T], split_of_item: Callable[[T], Split | None]) -> tuple[dict[Split, list[T]], list[T]]:
    """Return the items of each split, and those of no split. `split_of_item` returns the split of an item."""
    found: dict[Split | None, list[T]] = {}
    for item in items:
        found.setdefault(split_of_item(item), []).append(item)
    return {split: found[split] for split in SPLITS if split in found}, found.get(None, [])


def by_split(
    where: str, paths: Iterable[str], chosen: SplitNames | None = None
) -> tuple[dict[Split, list[str]], tuple[str, ...]]:
    """Return the sorted relative paths of each split, and notes for the user. If no path names a split, all paths are
    training data.

    Raise `DataError` if some paths name a split and others do not, if the paths are folds, or if a chosen split has
    none of the paths.
    """
    paths = sorted(paths)
    named, unnamed = grouped(paths, lambda path: split_of(path, chosen))
    if chosen:
        check_chosen(where, chosen, named, paths)
        return named, left_out(where, unnamed)
    if not named:
        if chosen is None and len(unnamed) > 1 and all(is_fold(path.split("/")[-1].split(".")[0]) for path in unnamed):
            raise DataError(folds(where, unnamed))
        return {"train": unnamed}, ()
    if unnamed:
        raise DataError(
            f"{where} has files that name their split, like {next(iter(named.values()))[0]}, and {unnamed[0]}, which "
            f"names none; begin the names of all files with train, val or test, or choose them: {CHOICE}"
        )
    return named, ()


def check_chosen(where: str, chosen: SplitNames, found: Mapping[Split, object], names: Sequence[str]) -> None:
    """Raise `DataError` if a split for which the user chose names has none of the data."""
    for split in chosen:
        if split not in found:
            raise DataError(
                f"{where} has nothing named {' or '.join(chosen[split])}, which is chosen as the {split} split; its "
                f"names are {listed(names)}"
            )


def left_out(where: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return a note on data that is in none of the chosen splits."""
    return (f"{where}: skipped {listed(names)}, which no split contains",) if names else ()


def folds(where: str, names: Sequence[str]) -> str:
    """Return the message for folds, of which nothing says which ones are for training."""
    return (
        f"{where} has the folds {listed(names)}, and nothing says which of them are for training; choose them, such as "
        f"with --splits train={','.join(names[1:3])},test={names[0]}"
    )


def splits_from(sources: Mapping[Split, Source], notes: Iterable[str] = (), faults: Iterable[Fault] = ()) -> Splits:
    """Return the splits of some sources. Without a training split, `train` has no samples."""
    train = sources["train"] if "train" in sources else subset(next(iter(sources.values())), [])
    return Splits(train, sources.get("validation"), sources.get("test"), tuple(notes), faults=tuple(faults))


def without_training(splits: Splits) -> DataError:
    """Return the error of data that has no training images."""
    named = " and a ".join(name for name in ("validation", "test") if getattr(splits, name) is not None)
    return DataError(
        f"{splits.title} has a {named} split but no training images; name the training data train, or choose it: "
        f"{CHOICE}"
    )


def check_classes(splits: Splits) -> None:
    """Raise `DataError` unless the targets are classes and there are at least two classes."""
    needed = "and classification needs one class per image; choose the task"
    problems: dict[TargetKind, str] = {
        "boxes": f"has boxes of objects, {needed} detection, or other data",
        "mask": f"has masks, {needed} segmentation, or other data",
        "texts": f"has texts, {needed} clip or siglip, or name a column of labels by adding ?label=COLUMN to the "
        "data's name",
        "numbers": f"has numbers ({', '.join(splits.classes)}) and no classes; classification needs classes: open it "
        "without columns of numbers, or train a regression",
    }
    without_labels = (
        "has no labels; classification needs a label for each image: label them, or choose a task that needs no labels"
    )
    if problem := problems.get(splits.target_kind, "" if splits.classes else without_labels):
        notes = splits.notes if splits.target_kind == "none" else ()  # they name the columns that could be labels
        raise DataError("\n".join((f"{splits.title} {problem}", *notes)))
    if len(splits.classes) < 2:
        raise DataError(one_class(splits).text)


def one_class(splits: Splits) -> Fault:
    """Return the fault of data with a single class."""
    is_mask = splits.target_kind == "mask"
    task, noun = ("segmentation", "pixels") if is_mask else ("classification", "images")
    return Fault(
        "one-class", "error", 1,
        f"{splits.title} has only one class, {splits.classes[0]!r}; {task} needs at least two",
        "Training refuses the data.",
        f"Add {noun} of another class{', such as a background that is not ignored' if is_mask else ''}.",
    )  # fmt: skip


def check_numbers(splits: Splits) -> None:
    """Raise `DataError` unless the targets are numbers, as regression needs."""
    if splits.target_kind != "numbers":
        held = f"classes ({', '.join(splits.classes[:5])})" if splits.classes else "no targets"
        held = "texts" if splits.target_kind == "texts" else held
        raise DataError(
            f"{splits.title} has {held} and no numbers; regression needs columns of numbers: name them with "
            "numbers=COLUMN"
        )


def check_texts(splits: Splits, task: str) -> None:
    """Raise `DataError` unless the targets are texts, and each split has different ones."""
    if splits.target_kind != "texts":
        held = f"classes ({', '.join(splits.classes[:5])})" if splits.classes else "no texts"
        raise DataError(
            f"{splits.title} has {held}, and {task} needs images with texts: a table with a column such as text or "
            "caption, tar shards with .txt files, or COCO's captions; choose a column by adding ?text=COLUMN"
        )
    if len(np.unique(samples_of(splits.train).targets.values)) < 2:
        raise DataError(f"{splits.title} has fewer than two different training texts, so {task} has nothing to compare")


CutMethod = Literal["stratified", "threshold"]
"""Method of selecting samples by hash. stratified: the number of samples is exact, and nearly the same fraction of each
label's samples is selected. threshold: the method of earlier versions. Samples are held out if their hash is below the
fraction. At least one sample of each class with several samples is held out. Each different set of labels counts as a
separate class."""

SLICE = re.compile(r"train\[(?P<start>-?\d+(?:(?:\.\d+)?%)?)?:(?P<stop>-?\d+(?:(?:\.\d+)?%)?)?\]")
"""A slice of the training images by position, such as train[-10000:] or train[99%:]."""

SWEEPS = 30
"""Number of times that the positions of samples with several labels are adjusted."""

NO_LABEL = (-1,)


def cut(source: Source, share: float, *, method: CutMethod = "stratified") -> tuple[Samples, Samples]:
    """Hold out the fraction `share` of the samples, by a hash of their keys. Return the rest and the held-out samples.

    The number of held-out samples is rounded. Nearly the same fraction of the samples of each label is held out. At
    least one sample of each label is kept, so fewer samples are held out if many labels have a single sample. Samples
    without a label count as samples of one more label. If the targets are numbers, all samples count as samples of one
    label.

    A sample that occurs several times, such as an image that pseudo labels repeat, is held out at most once, and the
    rest has no copy of it. The fraction is that of the different samples.
    """
    first = first_copies(source)
    once = np.flatnonzero(first == np.arange(len(first)))
    images = source if len(once) == len(source) else subset(source, once)
    held_out = _below(images, share) if method == "threshold" else _first(images, round(share * len(images)))
    return _divided(source, once[sorted(held_out)], first)


def cut_slice(source: Source, start: int, stop: int) -> tuple[Samples, Samples]:
    """Hold out the samples from `start` up to but excluding `stop`. Return the rest and the held-out samples.

    If a sample occurs several times, `cut` describes its copies.
    """
    first = first_copies(source)
    return _divided(source, np.unique(first[start:stop]), first)


def _divided(
    source: Source, held_out: Int64[np.ndarray, " m"], first: Int64[np.ndarray, " n"]
) -> tuple[Samples, Samples]:
    """Return the samples that show no held-out image, and the held-out samples. `first` is the result of
    `first_copies`."""
    samples = samples_of(source)
    return samples.taken(np.flatnonzero(~np.isin(first, held_out))), samples.taken(held_out)


def slice_bounds(text: str, count: int) -> tuple[int, int]:
    """Return the start and the stop of the slice `text` of `count` samples, as positions from 0 to `count`. The sample
    at `stop` is not part of the slice.

    Numbers in `text` count from the first sample. Negative numbers count from the end. Percentages are rounded to whole
    samples. Raise `ValueError` with the broken rule if `text` is not a slice, or if the slice is empty or out of range.
    """
    match = SLICE.fullmatch(text)
    if match is None:
        raise ValueError("is not a slice such as train[-10000:] or train[99%:]")
    start = 0 if match["start"] is None else _position(match["start"], count)
    stop = count if match["stop"] is None else _position(match["stop"], count)
    if start >= stop:
        raise ValueError(f"holds out none of {count:,} images")
    return start, stop


def drawn(source: Source, count: int, *, seed: int = 0, method: CutMethod = "stratified") -> list[int]:
    """Return the indices of `count` samples, chosen by a hash of seed and key. The label fractions are about those of
    `source`.

    A larger count returns the samples of a smaller count and more. If a label's fraction of `count` is less than half a
    sample, none of its samples may be selected.
    """
    return sorted(_ordered(source, f"subset {seed} ".encode(), method)[:count].tolist())


def drawn_per_class(source: Source, count: int, *, seed: int = 0, method: CutMethod = "stratified") -> list[int]:
    """Return the indices of `count` samples per class, chosen by a hash of seed and key. A class with fewer samples is
    kept whole.

    A sample with several labels, or with boxes of several classes, counts for each of them, so a class can have more
    than `count` samples. If the targets are numbers, masks or texts, or there are none, all samples count as one class.
    """
    places = _places(source, f"subset {seed} ".encode())
    if method == "stratified" and target_kind(source) in ("classes", "boxes"):
        return sorted(_by_rounds(_labels(source), places, count))
    return np.flatnonzero(ranks_in_groups(places, _class_groups(source)) < count).tolist()


def _below(source: Source, share: float) -> list[int]:
    """Return the samples whose hash is below `share`. If a class has several samples, at least one and not all of them
    are returned. The only sample of a class is not returned."""
    places, groups = _places(source, b""), _class_groups(source)
    wanted = np.bincount(groups, places < share)
    most = np.bincount(groups) - 1  # the only image of a class is needed for training
    return np.flatnonzero(ranks_in_groups(places, groups) < np.minimum(np.maximum(wanted, 1), most)[groups]).tolist()


def _first(source: Source, count: int) -> list[int]:
    """Return the first `count` samples of the stratified order. A sample is skipped if it is the only sample left of
    one of its labels."""
    labels = _labels(source)
    left = Counter(itertools.chain.from_iterable(labels))
    held_out: list[int] = []
    for index in _ordered(source, b"", "stratified").tolist():
        if len(held_out) == count:
            break
        if all(left[label] > 1 for label in labels[index]):
            held_out.append(index)
            left.subtract(labels[index])
    return held_out


def _ordered(source: Source, salt: bytes, method: CutMethod) -> Int64[np.ndarray, " n"]:
    """Return all samples in an order in which any first n samples have about the same label fractions as all
    samples."""
    places = _places(source, salt)
    if method == "stratified" and target_kind(source) == "classes":
        return _ordered_by_labels(_labels(source), places)
    return np.lexsort((places, _evenly_spaced(places, _groups(source))))


def _ordered_by_labels(labels: list[tuple[int, ...]], places: Float64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Return the order for samples with several labels each.

    A label is spread evenly over the order if the positions of its samples, sorted, are evenly spaced. The position of
    a sample is at first its hash. Each sweep moves every sample to the mean of the evenly spaced positions for its
    labels. Rare labels have more weight in this mean, because a rare label has fewer samples that can compensate for a
    deviation. All samples together count as one more label.
    """
    order = np.argsort(places, kind="stable")  # sums do not depend on the order of the samples in the source
    sizes = np.array([len(labels[index]) for index in order.tolist()], np.int64)
    rows = np.concatenate([np.repeat(np.arange(len(order)), sizes), np.arange(len(order))])
    own = np.fromiter(itertools.chain.from_iterable(labels[index] for index in order.tolist()), np.int64, sizes.sum())
    numbers = np.unique(np.concatenate([own + 2, np.zeros(len(order), np.int64)]), return_inverse=True)[1]
    weights = np.bincount(numbers)[numbers] ** -0.5
    total = np.bincount(rows, weights, len(order))
    positions = places[order]
    for _ in range(SWEEPS):
        positions = np.bincount(rows, weights * _evenly_spaced(positions[rows], numbers), len(order)) / total
    return order[np.argsort(positions, kind="stable")]


def _evenly_spaced(positions: Float64[np.ndarray, " n"], groups: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return evenly spaced positions in (0, 1) for the samples of each group. The order of the samples in each group
    does not change."""
    return (ranks_in_groups(positions, groups) + 0.5) / np.bincount(groups)[groups]


def ranks_in_groups(positions: Shaped[np.ndarray, " n"], groups: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Return the rank of each sample among those of its group, from 0. Samples with equal positions keep their
    order."""
    order = np.lexsort((positions, groups))
    sizes = np.bincount(groups)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return ranks


def _by_rounds(labels: list[tuple[int, ...]], places: Float64[np.ndarray, " n"], count: int) -> set[int]:
    """Return samples so that each label has at least `count` of them, or all that it has.

    In each of `count` rounds, every label with too few samples gets its next sample in the order of the hashes, rare
    labels first. The first rounds do not depend on `count`, so a larger count only adds samples.
    """
    members: dict[int, list[int]] = {}
    for index in np.argsort(places, kind="stable").tolist():
        for label in labels[index]:
            members.setdefault(label, []).append(index)
    rare_first = sorted(members, key=lambda label: (len(members[label]), label))
    following = {label: iter(each) for label, each in members.items()}
    chosen: set[int] = set()
    have: Counter[int] = Counter()
    for wanted in range(1, min(count, len(places)) + 1):
        for label in rare_first:
            index = None
            if have[label] < wanted:
                index = next((one for one in following[label] if one not in chosen), None)
            if index is not None:
                chosen.add(index)
                have.update(labels[index])
    return chosen


def _labels(source: Source) -> list[tuple[int, ...]]:
    """Return the labels of each sample. A sample without a label has the label -1. If the targets are numbers, all
    samples have the label -1."""
    if target_kind(source) == "numbers":
        return [NO_LABEL] * len(source)
    if target_kind(source) == "class":
        return [(label,) for label in truth_of(source).values.tolist()]
    alone: dict[Target, tuple[int, ...]] = {}
    targets = map(source.target, range(len(source)))
    return [alone.setdefault(target, class_indices(target) or NO_LABEL) for target in targets]


def _groups(source: Source) -> Int64[np.ndarray, " n"]:
    """Return the group number of each sample. Samples with equal targets are in the same group. If the targets are
    numbers for regression, all samples are in one group."""
    if target_kind(source) == "numbers":
        return np.zeros(len(source), np.int64)
    if target_kind(source) == "class":
        return truth_of(source).values + 1  # 0 without a label
    numbers: dict[Target, int] = {}
    targets = map(source.target, range(len(source)))
    return np.fromiter((numbers.setdefault(target, len(numbers)) for target in targets), np.int64, len(source))


def _class_groups(source: Source) -> Int64[np.ndarray, " n"]:
    """Return the group number of each sample. Samples with the same set of classes are in the same group. Texts, and
    masks that are not read, have no classes."""
    if target_kind(source) not in (*PLACED, "texts"):
        return _groups(source)
    numbers: dict[tuple[int, ...], int] = {}
    return np.fromiter((numbers.setdefault(labels, len(numbers)) for labels in _labels(source)), np.int64, len(source))


def _position(text: str, count: int) -> int:
    """Return the position that `text`, a bound of a slice, stands for. Raise `ValueError` if the position is out of
    range."""
    number = text.removesuffix("%").removeprefix("-")
    is_fraction = text.endswith("%")
    position = round(float(number) / 100 * count) if is_fraction else int(number)
    if float(number) > (100 if is_fraction else count):
        raise ValueError(f"has the bound {text}, which is beyond the {count:,} images")
    return count - position if text.startswith("-") else position


def _places(source: Source, salt: bytes) -> Float64[np.ndarray, " n"]:
    """Return a hash of each sample's key, as a number in [0, 1)."""
    keys = map(source.key, range(len(source)))
    hashes = b"".join(hashlib.blake2b(salt + os.fsencode(key), digest_size=8).digest() for key in keys)
    return np.frombuffer(hashes, ">u8") / 2.0**64


def with_validation(
    splits: Splits, spec: str, share: float, *, validation: str = "auto", method: CutMethod = "stratified"
) -> Splits:
    """Return the splits with a validation split.

    `validation` is "auto", "train" or a slice of the training images such as "train[99%:]". With "auto" the data's own
    validation split is used. If the data has none, and always with "train", the fraction `share` of the training images
    is held out by `method`; a fraction of 0 holds out none. A slice holds out the images at these positions. If the
    data has its own validation split and it is not used, it becomes the test split, unless the data has a test split.

    A source that generates its samples generates more samples instead of holding out some of them. Raise `DataError`
    if no image would be held out, or if a slice is out of range or leaves no image of a class to learn from.
    """
    if validation == "auto" and (splits.validation is not None or share == 0):
        return splits
    own, count = splits.validation, len(splits.train)
    if own is not None:
        splits = replace(splits, validation=None, test=splits.test or own)
    duty = "the test split" if splits.test is own else "not used, because the data also has a test split"
    duty = f"; its own validation split is {duty}" if own is not None else ""
    source = splits.train
    train: Source = source
    held_out: Source | None = None
    how = ""
    if SLICE.fullmatch(validation):
        train, held_out = _slice(splits, validation)
        how = validation
    elif share > 0 and isinstance(source, Unlimited):
        held_out = source.held_out(share)
    elif share > 0:
        train, held_out = cut(source, share, method=method)
        if not len(held_out) and method == "stratified":
            raise DataError(_nothing_held_out(splits, share))
        how = f"by a hash of their names, {100 * share:g}%"
    notes = splits.notes
    if how and held_out is not None:
        note = f"{len(held_out):,} of its {count:,} training images are held out for validation ({how})"
        if (copies := count - len(train) - len(held_out)) > 0:
            note += f", and training does not use {plural(copies, 'repetition')} of them"
        start = "" if own is not None else " has no validation split"
        notes = (*notes, f"data {spec!r}{start}: {note}{duty}")
    elif duty:
        notes = (*notes, f"data {spec!r}: no training image is held out{duty}")
    return replace(splits, train=train, validation=held_out, notes=notes)


def check_validation(text: str) -> Iterator[str]:
    """Yield a message unless `text` is "auto", "train" or a slice."""
    if text not in ("auto", "train") and SLICE.fullmatch(text) is None:
        yield (
            f"validation={text!r} is not auto, train or a slice of the training images; write a slice such as "
            "train[-10000:] for the last 10,000, or train[99%:] for the last hundredth"
        )


def _slice(splits: Splits, text: str) -> tuple[Samples, Samples]:
    """Return the training images outside and inside a slice. Raise `DataError` if one of the two has none."""
    count = len(splits.train)
    try:
        start, stop = slice_bounds(text, count)
    except ValueError as error:
        raise DataError(
            f"validation={text!r} {error}: {splits.title} has {plural(count, 'training image')}; choose positions "
            f"within these, such as train[{count - count // 10}:]"
        ) from None
    if stop - start == count:
        raise DataError(
            f"validation={text!r} holds out all {plural(count, 'training image')} of {splits.title}; leave some to "
            f"learn from, such as with train[{count - count // 10}:]"
        )
    train, held_out = cut_slice(splits.train, start, stop)
    if lost := _lost_classes(train, held_out):
        fraction = (stop - start) / count
        raise DataError(
            f"validation={text!r} holds out all images of {plural(len(lost), 'class')} of {splits.title}, such as "
            f"{lost[0]}: the images are in the order of their classes; hold out a fraction of each class instead, with "
            f"validation='train' and validation_share={fraction:.2g}"
        )
    return train, held_out


def _lost_classes(train: Source, held_out: Source) -> list[str]:
    """Return the names of the classes that have at least two held-out images and no training image."""
    if target_kind(train) in ("numbers", "texts", "none"):
        return []
    left, held = Counter(_labels_of(train)), Counter(_labels_of(held_out))
    return [train.classes[label] for label in sorted(held) if held[label] > 1 and not left[label]]


def _labels_of(source: Source) -> Iterator[int]:
    return (label for index in range(len(source)) for label in class_indices(source.target(index)))


def _nothing_held_out(splits: Splits, share: float) -> str:
    count = len(splits.train)
    is_single = target_kind(splits.train) == "class" and len({*_labels_of(splits.train)}) == count
    if is_single or round(share * count):
        reason = "each of its classes has only one training image, which is learned from; add images"
    else:
        reason = f"that is at most half an image; choose {1 / count:.2g} to hold out one"
    return (
        f"validation_share={share:g} of {plural(count, 'training image')} leaves the validation split of "
        f"{splits.title} empty: {reason}, or choose 0 to hold out none"
    )


USUAL = "split"
"""The column that always divides a table. Others do so only if all their values are names of splits."""

FLAGS = {"is_valid": "validation", "is_val": "validation", "is_validation": "validation", "is_test": "test"}
"""Columns of yes and no, each with the split of yes. The others are training data."""

NAMES = (USUAL, "set", "subset", "dataset", "data_set", "partition", "phase", "fold", *FLAGS)

TRUE = frozenset({"1", "1.0", "true"})
FALSE = frozenset({"0", "0.0", "false"})
YES, NO = TRUE | {"yes"}, FALSE | {"no"}
"""Values of the columns in `FLAGS`. In other columns, yes and no are names of classes."""


def find_split(
    title: str, columns: Sequence[str], values_of: Callable[[str], Sequence[Any]], chosen: SplitNames | None
) -> tuple[str | None, list[str], tuple[str, ...]]:
    """Return the column that divides a table, its value in each row, and notes. The notes are about a column of another
    name than split, and about columns that could divide the table and do not.

    The values of a column of yes and no are returned as the names of splits.
    """
    lower = {column.lower(): column for column in columns}
    notes: list[str] = []
    found: tuple[str | None, list[str]] = (None, [])
    for name in (name for name in NAMES if name in lower):
        column = lower[name]
        values = ["" if value is None else str(value).strip() for value in values_of(column)]
        shown = listed(sorted(set(values)), 4)
        if name in FLAGS and all(value.lower() in YES | NO for value in values):
            values = [FLAGS[name] if value.lower() in YES else "train" for value in values]
        if not any(values):
            continue
        parts = {split_of(value, chosen) for value in set(values)}
        divides = parts != {None} if chosen else None not in parts or name == USUAL
        if chosen == {}:
            continue
        if found[0] is None and divides:
            found = (column, values)
            if name != USUAL and not chosen:
                notes.append(
                    f"{title}: column {column!r} divides the rows into splits; to read all rows as training data, add "
                    "--splits none"
                )
        elif divides and found[0] is not None:
            notes.append(f"{title}: column {column!r} ({shown}) is not used, because {found[0]!r} divides the rows")
        else:
            notes.append(
                f"{title}: column {column!r} ({shown}) does not divide the rows into splits; to choose splits by its "
                f"values, add {CHOICE}"
            )
    return (*found, tuple(notes))


def divide(
    where: str, values: Sequence[str], chosen: SplitNames | None, row_name: Callable[[int], str]
) -> tuple[dict[Split, list[int]], tuple[str, ...]]:
    """Return the rows of each split, of which `values` holds the name in each row, and notes. `row_name` names a row in
    messages. Raise `DataError` for a name that is not one of a split."""
    parts, others = grouped(range(len(values)), lambda row: split_of(values[row], chosen))
    if others and chosen is None:
        raise DataError(
            f"{where}, {row_name(others[0])}: the split {values[others[0]]!r} is not one of train, val, test; choose "
            f"the values of the splits: {CHOICE}"
        )
    names = [value or "(empty)" for value in values]
    if chosen:
        check_chosen(where, chosen, parts, list(dict.fromkeys(names)))
    return parts, left_out(where, list(dict.fromkeys(names[row] for row in others)))


OPTIONS = {
    "splits": "--splits",
    "image": "?image=",
    "label": "?label=",
    "text": "?text=",
    "separator": "--label-separator",
    "keep_missing": "--keep-missing-words",
    "ignore": "--ignore-label",
}
"""The option or the word after the name by which a user makes each choice, for messages."""


@dataclass(frozen=True)
class Choice:
    """The choice of splits, columns and labels of some data. The defaults choose nothing."""

    splits: SplitNames | None = None
    """The names that form each split. None if the usual names are recognised."""
    image: str | None = None
    """The column of images or of their paths."""
    label: str | None = None
    """The column of labels."""
    separator: str | None = None
    """The text between the labels in a cell. "none" if a cell is always one label. None if the user did not choose."""
    keep_missing: bool = False
    """True if words for a missing value, such as None and NA, are names of classes."""
    text: str | None = None
    """The column of texts, or "" for one with a usual name. None if texts are read only where there are no labels."""
    ignore: str | None = None
    """The value in masks, or the name of its class, of pixels that have no class. "none" if all values are classes."""

    def unused(self, *used: str) -> list[str]:
        """Return the options of what was chosen beside the fields `used`."""
        return [OPTIONS[one.name] for one in fields(self) if one.name not in used and getattr(self, one.name)]


def choice_in(location: str) -> tuple[str, Choice]:
    """Return a location without the choice at its end, and this choice. A "?" in the path of a file is part of the
    path, and that of a URL can be followed by other words. Raise `DataError` or `ConfigError` for a wrong choice."""
    base, mark, query = location.rpartition("?")
    if not mark or os.path.lexists(location):
        return location, Choice()
    pairs = query.split("&")
    columns = () if "://" in base else ("image", "label", "text")
    names = (*SPLITS, "splits", "separator", "missing", "ignore", *columns)
    divided = [pair.partition("=") for pair in pairs]
    ours = [(name, unquote(value)) for name, _, value in divided if name in names]
    others = "&".join(pair for pair, (name, _, _) in zip(pairs, divided, strict=True) if name not in names)
    is_data = "://" not in base and (base.startswith("hf:") or os.path.lexists(base))
    if not ours and not is_data:
        return location, Choice()
    if (is_data and (others or not ours)) or not all(value for _, value in ours):
        raise DataError(
            f"{location!r} ends in ?{query}, which chooses nothing; write ?image=COLUMN, ?label=COLUMN, ?text=COLUMN, "
            "?train=NAME, ?separator=TEXT, ?missing=keep or ?ignore=VALUE, joined by &"
        )
    values = dict(ours)
    if twice := [name for name in values if name not in SPLITS and [one for one, _ in ours].count(name) > 1]:
        raise DataError(f"{location!r} chooses {listed(twice)} twice; leave one of them out")
    words = [value if name == "splits" else f"{name}={value}" for name, value in ours if name in (*SPLITS, "splits")]
    if values.get("missing", "keep") != "keep":
        raise DataError(f"{location!r} has missing={values['missing']!r}, and the only choice is missing=keep")
    choice = Choice(
        split_names(words) if words else None,
        values.get("image"), values.get("label"), values.get("separator"), "missing" in values, values.get("text"),
        values.get("ignore"),
    )  # fmt: skip
    return f"{base}?{others}" if others else base, choice


def chosen(
    location: str, splits: Iterable[str] = (), separator: str = "", *, keep_missing: bool = False, ignore: str = ""
) -> str:
    """Return a location with a choice at its end, such as "photos?train=Training&test=Testing" for the words
    "train=Training" and "test=Testing". Raise `ConfigError` for a wrong word, or if the location has such a choice."""
    before = choice_in(location)[1]
    names = split_names(words) if (words := list(splits)) else None
    given = {"splits": names, "separator": separator, "keep_missing": keep_missing, "ignore": ignore}
    for name, value in given.items():
        if (value or value == {}) and getattr(before, name) not in (None, False):
            raise ConfigError(f"{OPTIONS[name]}: {location!r} has this choice already; leave one out")
    pairs = [f"{split}={quote(name, safe='/*')}" for split, some in (names or {}).items() for name in some]
    pairs += ["splits=none"] * (names == {})
    pairs += [f"separator={quote(separator, safe='')}"] * bool(separator) + ["missing=keep"] * keep_missing
    pairs += [f"ignore={quote(ignore, safe='')}"] * bool(ignore)
    asked = before != Choice() or ("?" in location and "://" in location)
    return location + ("&" if asked else "?") + "&".join(pairs) if pairs else location


@dataclass(frozen=True)
class Request:
    """The data that a user named, and how it is to be read."""

    location: str
    """A path, a URL or a name, without a choice or an amount at its end."""
    choice: Choice = field(default_factory=Choice)
    classes: tuple[str, ...] | None = None
    """The classes that labels index, such as those of a model. By default the classes of the data."""
    numbers: tuple[str, ...] = ()
    """Columns of numbers that are the targets instead of classes."""
    unlabelled: bool = False
    """True if the data needs no labels."""

    @property
    def title(self) -> str:
        return f"data {self.location!r}"

    @property
    def path(self) -> Path:
        is_file = self.location.startswith("file://")
        return expanded(unquote(self.location.removeprefix("file://")) if is_file else self.location)

    @property
    def is_url(self) -> bool:
        return "://" in self.location and not self.location.startswith("file://")

    @property
    def is_folder(self) -> bool:
        return not self.is_url and self.path.is_dir()


@dataclass(frozen=True)
class Format:
    """A format of data."""

    recognises: Callable[[Request], object]
    """Returns a true value for data of this format."""
    open: Callable[[Request], Splits]
    """Opens the data. Raises `DataError`."""
    uses: tuple[str, ...] = ()
    """The fields of `Choice` on which the format acts. A choice of others is refused."""
    has_numbers: bool = False
    """True if samples can have numbers as targets."""
    name: str = ""
    """The form of the data's name in messages, if the data is not named by a path."""
