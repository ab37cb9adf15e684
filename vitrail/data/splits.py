"""The three splits of a data set, their names on disk, and the creation of a missing validation split."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

from vitrail.data.faults import Fault
from vitrail.data.selection import SLICE, CutMethod, cut, cut_slice, slice_bounds
from vitrail.data.source import Source, Subset, TargetKind, class_indices, target_kind
from vitrail.errors import ConfigError, DataError, listed, plural

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
    "cleaned", "labeled", "labelled", "part",
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

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @property
    def target_kind(self) -> TargetKind:
        return target_kind(self.train)

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
        return next((split for split, names in chosen.items() if _any_matches(candidates, names)), None)
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


def _any_matches(candidates: Iterable[str], names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(candidate, name) for candidate in candidates for name in names)


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


def by_split(
    where: str, paths: Iterable[str], chosen: SplitNames | None = None
) -> tuple[dict[Split, list[str]], tuple[str, ...]]:
    """Return the sorted relative paths of each split, and notes for the user. If no path names a split, all paths are
    training data.

    Raise `DataError` if some paths name a split and others do not, if the paths are folds, or if a chosen split has
    none of the paths.
    """
    paths = sorted(paths)
    found: dict[Split | None, list[str]] = {}
    for path in paths:
        found.setdefault(split_of(path, chosen), []).append(path)
    unnamed = found.pop(None, [])
    named: dict[Split, list[str]] = {split: found[split] for split in SPLITS if split in found}
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
    train = sources["train"] if "train" in sources else Subset(next(iter(sources.values())), [])
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
    if splits.target_kind == "numbers":
        raise DataError(
            f"{splits.title} has numbers ({', '.join(splits.classes)}) and no classes; classification needs classes: "
            "open it without columns of numbers, or train a regression"
        )
    if not splits.classes:
        raise DataError(
            f"{splits.title} has no labels; classification needs a label for each image: label them, or choose a task "
            "that needs no labels"
        )
    if len(splits.classes) < 2:
        raise DataError(one_class(splits).text)


def one_class(splits: Splits) -> Fault:
    """Return the fault of data with a single class."""
    return Fault(
        "one-class", "error", 1,
        f"{splits.title} has only one class, {splits.classes[0]!r}; classification needs at least two",
        "Training refuses the data.",
        "Add images of another class.",
    )  # fmt: skip


def check_numbers(splits: Splits) -> None:
    """Raise `DataError` unless the targets are numbers, as regression needs."""
    if splits.target_kind != "numbers":
        held = f"classes ({', '.join(splits.classes[:5])})" if splits.classes else "no targets"
        raise DataError(
            f"{splits.title} has {held} and no numbers; regression needs columns of numbers: name them with "
            "numbers=COLUMN"
        )


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


def _slice(splits: Splits, text: str) -> tuple[Subset, Subset]:
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
    if target_kind(train) in ("numbers", "none"):
        return []
    left, held = Counter(_labels_of(train)), Counter(_labels_of(held_out))
    return [train.classes[label] for label in sorted(held) if held[label] > 1 and not left[label]]


def _labels_of(source: Source) -> Iterator[int]:
    return (label for index in range(len(source)) for label in class_indices(source.target(index)))


def _nothing_held_out(splits: Splits, share: float) -> str:
    count = len(splits.train)
    if round(share * count):
        reason = "each of its classes has only one training image, which is learned from; add images"
    else:
        reason = f"that is less than half an image; choose at least {0.5 / count:.2g}"
    return (
        f"validation_share={share:g} of {plural(count, 'training image')} leaves the validation split of "
        f"{splits.title} empty: {reason}, or choose 0 to hold out none"
    )
