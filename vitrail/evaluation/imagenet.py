"""ImageNet's labels: matching of class folders to a head of 1,000 classes, ImageNet-V2, and the ReaL labels.

ImageNet's classes are numbered 0 to 999 in the order of their WordNet ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np
from jaxtyping import Int64

from vitrail.data import remote
from vitrail.errors import DataError, listed
from vitrail.evaluation.metrics.intervals import Metric, mean_interval
from vitrail.evaluation.outputs import Predictions
from vitrail.files import cache_folder, expanded, replacing_file, saving

T = TypeVar("T")

REAL_URL = "https://github.com/google-research/reassessed-imagenet/raw/master/real.json"
SYNSETS_URL = "https://storage.googleapis.com/download.tensorflow.org/data/imagenet_class_index.json"

IDS_SHA256 = "385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd"
"""Hash of ImageNet's 1,000 WordNet ids in their order, joined by line feeds."""

CLASSES = 1000
VALIDATION_IMAGES = 50_000
VALIDATION = re.compile(r"ILSVRC2012_val_([0-9]{8})(?![0-9])")
WORDNET = re.compile(r"(?<![A-Za-z0-9])n[0-9]{8}(?![0-9])")
LINE = re.compile(r"(n[0-9]{8})(?:[\s:,]+(.*))?")


@dataclass(frozen=True)
class Synset:
    """A class of WordNet, with its id and its names. The usual name comes first."""

    id: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class ClassMap:
    """The matching of a data set's classes to a model's outputs. `columns` has the index of the output for each
    class."""

    columns: tuple[int, ...]
    note: str
    """Message for the user about the rule that matched the classes."""


def map_classes(
    head_classes: Sequence[str], data_classes: Sequence[str], *, mapping: str | Path | None = None
) -> ClassMap:
    """Return the index of the head's output for each class of the data. The first rule that matches all classes is
    used:

    1. equal names of some or all of the head's classes, in any order;
    2. equal WordNet ids in the names, like "n01440764" and "n01440764 tench";
    3. numbers, like the folders "0" to "999" of ImageNet-V2, for a head of ImageNet's 1,000 classes;
    4. a list of ids and names (`read_synsets`) in the order of the head's outputs. The list is the file `mapping`, or
       for a head of 1,000 classes the public list. If the data has all 1,000 WordNet ids, no list is needed.

    Raise `DataError` with the names if no rule matches all classes, or if two classes of the data match one output.
    Raise `DataError` also if the list is needed, but is not available or does not have the head's classes.
    """
    if _plain(head_classes) == _plain(data_classes):
        return ClassMap(tuple(range(len(data_classes))), "the data has the model's classes, in their order")
    for what, key in (("names", str), ("WordNet ids", _id_in)):
        if columns := _by_key(head_classes, data_classes, key):
            return _distinct(data_classes, columns, f"the data's classes are matched with the model's by their {what}")
    if len(head_classes) == CLASSES and (numbers := _numbers(data_classes)):
        columns = imagenet_columns(head_classes)[numbers].tolist()
        return _distinct(
            data_classes, columns, "the data's classes are numbers, so they are taken as ImageNet's classes"
        )
    ids = [_id_in(name) for name in data_classes]
    if mapping is None and (len(head_classes) != CLASSES or not all(ids)):
        outputs = Counter(head_classes)
        raise _unmatched([name for name in data_classes if outputs[name] != 1], "the model's", head_classes)
    if mapping is None and _are_imagenet(ids):
        columns = imagenet_columns(head_classes)[np.argsort(np.argsort(ids))].tolist()
        return _distinct(
            data_classes,
            columns,
            "the data's classes are ImageNet's, so the model's outputs are assumed to be in ImageNet's order",
        )
    synsets = read_synsets(mapping)
    places = _places(synsets, data_classes)
    if missing := [name for name, place in zip(data_classes, places, strict=True) if place is None]:
        raise _unmatched(missing, "the list's", [synset.id for synset in synsets])
    order = _order(head_classes, synsets)
    columns = [order[place] for place in places if place is not None]
    return _distinct(data_classes, columns, "the data's classes are matched with the model's by a list of WordNet ids")


def imagenet_columns(head_classes: Sequence[str]) -> Int64[np.ndarray, " 1000"]:
    """Return the index of the output for each of ImageNet's 1,000 classes, by the WordNet ids in `head_classes`.

    If there are no ids, the outputs are assumed to be in ImageNet's order. Raise `DataError` for any other head.
    """
    if len(head_classes) != CLASSES:
        raise DataError(
            f"the model has {len(head_classes):,} outputs, but ImageNet's labels need a model with its 1,000 classes"
        )
    ids = [_id_in(name) for name in head_classes]
    if not all(ids):
        return np.arange(CLASSES)
    if not _are_imagenet(ids):
        raise DataError(f"the model's 1,000 classes, {listed(list(map(repr, head_classes)))}, are not ImageNet's")
    return np.argsort(ids)


def read_synsets(path: str | Path | None = None) -> tuple[Synset, ...]:
    """Return the classes that a file lists, in the order of the file. By default the file is the public list of
    ImageNet's classes.

    The public list is read from the cache (`$VITRAIL_DATA`), or downloaded from `SYNSETS_URL`. Each line has an id and
    optional names ("n01440764 tench, Tinca tinca", as in LOC_synset_mapping.txt). A JSON file has the form {"0":
    ["n01440764", "tench"], ...}. Raise `DataError` if the list cannot be read.
    """
    return _read("the list of ImageNet's WordNet ids", path, SYNSETS_URL, _parse_synsets)


def read_real(path: str | Path | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the reassessed labels of ImageNet's 50,000 validation images, in the order of the file names (2006.07159).

    `path` is a file real.json. By default the public file is read from the cache (`$VITRAIL_DATA`), or downloaded from
    `REAL_URL`. Raise `DataError` if the file cannot be read.
    """
    return _read("the ReaL labels", path, REAL_URL, _parse_real)


def real_accuracy(
    predictions: Predictions, real: Sequence[tuple[int, ...]], *, bootstrap: int = 1000, seed: int = 0
) -> tuple[Metric, int]:
    """Return the accuracy by the reassessed labels (2006.07159), with a 95 % interval, and the number of measured
    images.

    A prediction is correct if the likeliest class is one of the reassessed labels. Images without a reassessed label
    are skipped. File names like ILSVRC2012_val_00000001.JPEG identify the images.

    Raise `DataError` if a file name has another form, if the outputs are not ImageNet's 1,000 classes, or if no image
    has a reassessed label.
    """
    columns = imagenet_columns(predictions.classes)
    labels_of = real_labels(predictions.keys, real)
    likeliest = predictions.logits.argmax(axis=1)
    hits = [one in columns[list(labels)] for one, labels in zip(likeliest, labels_of, strict=True) if labels]
    return mean_interval(np.asarray(hits), resamples=bootstrap, seed=seed), len(hits)


def real_labels(keys: Sequence[str], real: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the reassessed labels of each image, by its file name.

    Raise `DataError` if a file name is not that of a validation image of ImageNet, or if no image has a label.
    """
    found = []
    for key in keys:
        match = VALIDATION.search(PurePosixPath(key).name)
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(real):
            raise DataError(
                f"image {key!r} is not one of ImageNet's validation images, whose names are "
                f"ILSVRC2012_val_00000001 to ILSVRC2012_val_{len(real):08}; only these have ReaL labels"
            )
        found.append(real[number - 1])
    if not any(found):
        raise DataError(f"none of {len(found):,} images has a ReaL label, so there is nothing to measure")
    return tuple(found)


def _plain(names: Sequence[str]) -> list[str]:
    """Return names without the suffixes that distinguish classes with equal names, as in "crane (517)"."""
    return [name.removesuffix(f" ({number})") for number, name in enumerate(names)]


def _id_in(name: str) -> str:
    """Return the WordNet id in a name, or "" if the name has no id."""
    match = WORDNET.search(name)
    return match[0] if match else ""


def _numbers(names: Sequence[str]) -> list[int]:
    """Return names as indices of ImageNet's classes, or an empty list if any name is not an index."""
    numbers = [int(name) if re.fullmatch("[0-9]{1,4}", name) else CLASSES for name in names]
    return numbers if max(numbers, default=0) < CLASSES else []


def _are_imagenet(ids: Sequence[str]) -> bool:
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest() == IDS_SHA256


def _by_key(head: Sequence[str], data: Sequence[str], key: Callable[[str], str]) -> list[int] | None:
    """Return, for each class of the data, the index of the output with the same key.

    Return None if the key of a class matches no output or several outputs.
    """
    columns: dict[str, list[int]] = {}
    for column, name in enumerate(head):
        columns.setdefault(key(name), []).append(column)
    found = [columns.get(key(name), []) if key(name) else [] for name in data]
    return [one[0] for one in found] if all(len(one) == 1 for one in found) else None


def _places(synsets: Sequence[Synset], data: Sequence[str]) -> list[int | None]:
    """Return the index in `synsets` of each class of the data, matched by WordNet id or usual name.

    The index is None if no synset or several synsets match the class.
    """
    usual: dict[str, list[int]] = {}
    for place, synset in enumerate(synsets):
        for key in {synset.id, *synset.names[:1]}:
            usual.setdefault(key, []).append(place)
    found = [usual.get(_id_in(name) or _usual(name), []) for name in data]
    return [one[0] if len(one) == 1 else None for one in found]


def _order(head: Sequence[str], synsets: Sequence[Synset]) -> list[int]:
    """Return the index of the output for each class of the list.

    At least half of the names must agree. Equality of all names is not required, because lists spell some names
    differently.
    """
    if all(map(_id_in, head)) and (columns := _by_key(head, [synset.id for synset in synsets], _id_in)):
        return columns
    if len(head) != len(synsets):
        raise DataError(f"the list has {len(synsets):,} WordNet ids, but the model has {len(head):,} outputs")
    pairs = [
        (index, _usual(name), synset.names[0])
        for index, (name, synset) in enumerate(zip(head, synsets, strict=True))
        if synset.names
    ]
    is_named = list(head) != [str(number) for number in range(len(head))]
    if is_named and pairs and sum(mine == theirs for _, mine, theirs in pairs) < len(pairs) / 2:
        index, mine, theirs = next(pair for pair in pairs if pair[1] != pair[2])
        raise DataError(
            f"the model's classes do not match the list: class {index} is {mine!r} in the model and {theirs!r} in the "
            "list"
        )
    return list(range(len(head)))


def _usual(name: str) -> str:
    """Return the first of several names, with spaces: "great white shark" for "great_white_shark, white shark"."""
    return name.split(",")[0].replace("_", " ").strip()


def _distinct(data: Sequence[str], columns: Sequence[int], note: str) -> ClassMap:
    first: dict[int, str] = {}
    for name, column in zip(data, columns, strict=True):
        if column in first:
            raise DataError(
                f"classes {first[column]!r} and {name!r} of the data both match output {column} of the model; "
                "merge them into one class"
            )
        first[column] = name
    return ClassMap(tuple(columns), note)


def _unmatched(missing: Sequence[str], whose: str, known: Sequence[str]) -> DataError:
    return DataError(
        f"classes of the data, {listed(list(map(repr, missing)))}, do not match exactly one of {whose}: "
        f"{listed(list(map(repr, known)))}; rename them, name a file of WordNet ids and names in the order of the "
        "model's outputs, or fine-tune the model on the data"
    )


def _read(what: str, named: str | Path | None, url: str, parse: Callable[[str, bytes], T]) -> T:
    """Return the parsed content of the named file, or of the cached file, which is downloaded if needed."""
    path = expanded(named) if named else cache_folder("imagenet") / PurePosixPath(url).name
    if named or path.exists():
        try:
            return parse(str(path), path.read_bytes())
        except OSError as error:
            raise DataError(f"cannot read {path}, {what}: {error.strerror}") from error
    try:
        data = remote.read_all(url)
    except (OSError, DataError) as error:
        raise DataError(
            f"{what} cannot be downloaded ({error}); download {url} elsewhere, and name the file or copy it to {path}"
        ) from error
    value = parse(url, data)
    with saving(what, path), replacing_file(path) as partial:
        partial.write_bytes(data)
    return value


def _parse_real(where: str, data: bytes) -> tuple[tuple[int, ...], ...]:
    try:
        labels = tuple(tuple(int(label) for label in one) for one in json.loads(data))
    except (ValueError, TypeError):
        labels = ()
    if len(labels) != VALIDATION_IMAGES or not all(0 <= label < CLASSES for one in labels for label in one):
        raise DataError(f"{where} does not hold ReaL labels, which are a list of 50,000 lists of numbers from 0 to 999")
    return labels


def _parse_synsets(where: str, data: bytes) -> tuple[Synset, ...]:
    try:
        text = data.decode("utf-8-sig").strip()
        if text.startswith("{"):
            entries = json.loads(text)
            pairs = [tuple(entries[str(number)][:2]) for number in range(len(entries))]
        else:
            matches = [LINE.fullmatch(line.strip()) for line in text.splitlines()]
            pairs = [match.groups() if match else ("", "") for match in matches]
        synsets = tuple(Synset(one, tuple(map(_usual, names.split(","))) if names else ()) for one, names in pairs)
    except (ValueError, TypeError, KeyError, AttributeError):
        synsets = ()
    ids = {synset.id for synset in synsets}
    if not ids or len(ids) < len(synsets) or not all(isinstance(one, str) and WORDNET.fullmatch(one) for one in ids):
        raise DataError(
            f'{where} is not a list of different WordNet ids: lines like "n01440764 tench, Tinca tinca", or JSON like '
            '{"0": ["n01440764", "tench"]}'
        )
    return synsets
