"""The splits of a data set: their names on disk, for folders, files and the values of a column, and the name of data
(SPEC), which can choose them: a path, a URL or a word, after it the choice of splits and columns, and an amount in
brackets, such as "photos?train=Training[:10%]"."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote, unquote

import numpy as np

from vitrail.data.faults import Fault
from vitrail.data.source import Source, samples_of, subset, target_kind
from vitrail.data.targets import TargetKind
from vitrail.errors import ConfigError, DataError, listed
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
            classes = getattr(source, "classes", ())
            if repr(classes) not in ("()", repr(known)):  # as texts, because those of a user's source can be an array
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
    """Return the sorted relative paths of each split, and notes for the user. If no path names a split, words that all
    names have in common do not count, such as that of the data in "imagenet-val-000000.tar". If the names are then not
    those of several splits, all paths are training data.

    Raise `DataError` if some paths name a split and others do not, if the paths are folds, or if a chosen split has
    none of the paths.
    """
    paths = sorted(paths)
    named, unnamed = grouped(paths, lambda path: split_of(path, chosen))
    if not named and chosen is None:
        stems = {path: path.rpartition("/")[2].split(".")[0] for path in paths}
        splits = named_splits(stems.values())
        if len({*splits.values()}) > 1:  # the word of one split alone divides nothing
            named, unnamed = grouped(paths, lambda path: splits.get(stems[path]))
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
    """Return the splits of some sources. Without a training split, `train` has no samples. Faults with
    a count of 0 are left out."""
    train = sources["train"] if "train" in sources else subset(next(iter(sources.values())), [])
    return Splits(
        train,
        sources.get("validation"),
        sources.get("test"),
        tuple(notes),
        faults=tuple(fault for fault in faults if fault.count),
    )


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


# --- the name of data


SUBSET = re.compile(r"(?P<location>.+)\[(?P<inside>[^\[\]]*)\]", re.S)
AMOUNT = re.compile(r":(?P<number>\d+|\d*\.\d+)(?P<percent>%?)")


def divided_spec(spec: str) -> tuple[str, str]:
    """Split `spec` into the path or name and the amount in brackets. If `spec` as a whole is an existing path, its
    brackets are part of the path, and the amount is empty."""
    match = SUBSET.fullmatch(spec)
    if match is None or expanded(spec).exists():
        return spec, ""
    if AMOUNT.fullmatch(match["inside"]) is None:
        raise DataError(
            f"data {spec!r} ends in [{match['inside']}], which is not an amount; write [:1000] for 1,000 training "
            "images, or [:10%] for a tenth of them"
        )
    return match["location"], match["inside"]


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


def with_choice(
    spec: str, splits: Sequence[str] = (), separator: str = "", *, keep_missing: bool = False, ignore: str = ""
) -> str:
    """Return the name of the same data with a choice of splits and labels before the amount, such as
    "photos?train=Training&test=Testing" for the words "train=Training" and "test=Testing". Raise `ConfigError` for a
    wrong word, or if the name has such a choice."""
    location, amount = divided_spec(spec)
    before = choice_in(location)[1]
    names = split_names(splits) if splits else None
    given = {"splits": names, "separator": separator, "keep_missing": keep_missing, "ignore": ignore}
    for name, value in given.items():
        if (value or value == {}) and getattr(before, name) not in (None, False):
            raise ConfigError(f"{OPTIONS[name]}: {location!r} has this choice already; leave one out")
    pairs = [f"{split}={quote(name, safe='/*')}" for split, some in (names or {}).items() for name in some]
    pairs += ["splits=none"] * (names == {})
    pairs += [f"separator={quote(separator, safe='')}"] * bool(separator) + ["missing=keep"] * keep_missing
    pairs += [f"ignore={quote(ignore, safe='')}"] * bool(ignore)
    if pairs:
        asked = before != Choice() or ("?" in location and "://" in location)
        location += ("&" if asked else "?") + "&".join(pairs)
    return f"{location}[{amount}]" if amount else location


def absolute_spec(spec: str) -> str:
    """Return the same data with the absolute path if it is on the disk, for a file that is read from any folder."""
    location, _ = choice_in(divided_spec(spec)[0])
    path = expanded(location)
    if location in ("bundled", "fashion-mnist") or not path.exists():
        return spec
    return f"{path.absolute()}{spec[len(location) :]}"


def has_amount(spec: str) -> bool:
    """Return True if `spec` selects an amount of its training images, such as "photos[:10%]"."""
    return bool(divided_spec(spec)[1])


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
