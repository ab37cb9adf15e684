"""Kinds of data, each a `Source`, and `open_data`, which turns what the user types into one for each split."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from vitrail.data.source import Mixture, Source, Widened, take, take_per_class, target_kind
from vitrail.data.sources import fashion_mnist
from vitrail.data.sources.files import FileSource, refuse_shared
from vitrail.data.sources.folder import FolderSource, class_folders
from vitrail.data.sources.fractals import open_fractals
from vitrail.data.sources.hub_data import open_hub_data
from vitrail.data.sources.idx import IdxSource, find_idx
from vitrail.data.sources.parquet import looks_like_parquet, open_parquet
from vitrail.data.sources.shard_paths import looks_like_shards
from vitrail.data.sources.shards import open_shards
from vitrail.data.sources.table import SUFFIXES as TABLES
from vitrail.data.sources.table import open_table, tables_in
from vitrail.data.splits import SPLITS, Splits, with_validation
from vitrail.errors import DataError, nearest

__all__ = ["NAMES", "mix_in", "open_data"]

NAMES = ("bundled", "fashion-mnist", "fractals:CLASSES:SAMPLES", "hf:ORG/NAME")

SUBSET = re.compile(r"(?P<location>.+)\[(?P<inside>[^\[\]]*)\]", re.S)
SHARE = re.compile(r"\d*\.\d+")
AMOUNT = re.compile(r":(?P<number>\d+|\d*\.\d+)(?P<percent>%?)")


def open_data(
    spec: str,
    *,
    validation_share: float,
    classes: tuple[str, ...] | None = None,
    per_class: int | None = None,
    subset_seed: int = 0,
) -> Splits:
    """Opens what `spec` names: a path or a name, and in brackets how much of it to train on.

    Where a validation split is missing, `validation_share` of the training images is cut by a hash of their keys (0
    leaves none). `[:1000]`, `[:10%]` and `per_class` then take some of the rest, so that every amount is chosen and
    measured on the same images; which, `subset_seed` decides. `classes` indexes the samples by those of a model.
    Raises `DataError`.
    """
    location, amount = _amount_of(spec)
    splits = _open(location, classes, validation_share)
    if classes is not None and splits.classes != classes:
        raise DataError(
            f"the classes of data {spec!r}, {', '.join(splits.classes)}, are not the model's: {', '.join(classes)}"
        )
    if not splits.classes:
        raise DataError(f"data {spec!r} has no labels: there is no class to learn or to measure")
    if len(splits.classes) < 2:
        raise DataError(f"data {spec!r} has one class, {splits.classes[0]!r}; telling classes apart needs two or more")
    for split, source in (("validation", splits.validation), ("test", splits.test)):
        if isinstance(splits.train, FileSource) and isinstance(source, FileSource):
            refuse_shared(splits.train, source, split)
    splits = with_validation(splits, spec, validation_share)
    return _less(splits, spec, amount, per_class, subset_seed)


def mix_in(splits: Splits, more: tuple[str, ...]) -> Splits:
    """The same with more to train on: each of `more` is "SHARE:SPEC", its share of all samples that are drawn.

    Classes of the same name are one, others come after those of `splits`, in all of its splits. Raises `DataError`.
    """
    sources, weights = [splits.train], [1.0]
    for text in more:
        share, _, spec = text.partition(":")
        if SHARE.fullmatch(share) is None or not 0 < float(share) < 1 or not spec:
            raise DataError(
                f"mix {text!r} is not a share between 0 and 1, a colon and a data set, like 0.3:more/images"
            )
        sources.append(open_data(spec, validation_share=0.0).train)
        weights.append(float(share))
    weights[0] = 1 - sum(weights[1:])
    if weights[0] <= 0:
        raise DataError(
            f"the shares of mix, {', '.join(more)}, leave nothing of the data itself; keep their sum below 1"
        )
    if len({target_kind(source) == "classes" for source in sources}) > 1:
        raise DataError(f"mix {', '.join(more)}: some of the data has one label for each image, other data several")
    if not more:
        return splits
    train = Mixture(sources, weights)

    def widened(source: Source | None) -> Source | None:
        return source if source is None or source.classes == train.classes else Widened(source, train.classes)

    return replace(splits, train=train, validation=widened(splits.validation), test=widened(splits.test))


def _open(location: str, classes: tuple[str, ...] | None, validation_share: float) -> Splits:
    if location == "bundled":
        return _idx(fashion_mnist.BUNDLED, fashion_mnist.CLASSES)
    if location == "fashion-mnist":
        return _idx(fashion_mnist.locate(), fashion_mnist.CLASSES)
    if location.startswith("fractals:"):
        fractals = open_fractals(location)
        return Splits(fractals, fractals.held_out(validation_share) if validation_share else None, None)
    if location.startswith("hf:"):
        return open_hub_data(location, classes)
    path = Path(location).expanduser()
    if looks_like_shards(location if "://" in location else str(path)):
        return open_shards(location if "://" in location else str(path), classes)
    if looks_like_parquet(path):
        return open_parquet(path, classes)
    if not path.exists():
        hint = "" if "/" in location else f", and no data set of that name ({nearest(location, NAMES)})"
        raise DataError(f"data {location!r} does not exist: there is no such file or folder{hint}")
    if path.is_file():
        if path.suffix.lower() in TABLES:
            return open_table([path], classes)
        kinds = ", ".join((*TABLES, ".tar", ".parquet"))
        raise DataError(
            f"data {location!r} is a file of no known kind ({kinds}); a folder of class folders would do, or one of "
            f"{', '.join(NAMES)}"
        )
    if find_idx(path, "train"):
        return _idx(path, classes)
    if tables := tables_in(path):
        return open_table(tables, classes)
    return _folders(path, classes)


def _amount_of(spec: str) -> tuple[str, str]:
    """Path or name, and the amount in brackets after it; a path that ends in brackets and exists is a path."""
    match = SUBSET.fullmatch(spec)
    if match is None or Path(spec).expanduser().exists():
        return spec, ""
    if AMOUNT.fullmatch(match["inside"]) is None:
        raise DataError(
            f"data {spec!r} ends in [{match['inside']}], which is not an amount; [:1000] takes 1,000 of the training "
            "images, [:10%] a tenth of them"
        )
    return match["location"], match["inside"]


def _less(splits: Splits, spec: str, amount: str, per_class: int | None, seed: int) -> Splits:
    """The same splits with fewer images to train on."""
    train = splits.train
    if match := AMOUNT.fullmatch(amount):
        share = float(match["number"]) / 100
        if match["percent"] and share > 1:
            raise DataError(f"data {spec!r} takes {match['number']}% of its images; 100% are all")
        count = round(share * len(train)) if match["percent"] else round(float(match["number"]))
        if not match["percent"] and (count > len(train) or "." in match["number"]):
            raise DataError(
                f"data {spec!r} takes {match['number']} of its training images, which are {len(train):,}; give a whole "
                "number of at most as many, or a share like [:10%]"
            )
        train = take(train, count, seed=seed)
    if per_class is not None:
        train = take_per_class(train, per_class, seed=seed)
    if train is splits.train:
        return splits
    if not len(train):
        raise DataError(f"data {spec!r} leaves no image to train on, of {len(splits.train):,}")
    held = {train.target(index) for index in range(len(train))}
    absent = sum(number not in held for number in range(len(train.classes))) if target_kind(train) != "classes" else 0
    note = (
        f"{len(train):,} of {len(splits.train):,} training images are taken, the same ones in every run with this seed"
    )
    if absent:
        note += f"; {absent} of the {len(train.classes)} classes have none among them"
    return replace(splits, train=train, notes=(*splits.notes, note))


def _idx(root: Path, classes: tuple[str, ...] | None) -> Splits:
    opened: dict[str, Source | None] = {}
    for split in ("train", "validation", "test"):
        files = find_idx(root, split)
        opened[split] = IdxSource(*files, classes) if files else None
        classes = classes or (opened["train"].classes if opened["train"] else None)
    assert opened["train"] is not None, "find_idx saw a training split before this was called"
    return Splits(opened["train"], opened["validation"], opened["test"])


def _folders(root: Path, classes: tuple[str, ...] | None) -> Splits:
    found = class_folders(root)
    if not found:
        raise DataError(
            f"{root} is empty: it has no class folders, and no train/, val/ or test/ with class folders in it"
        )
    places = {split: [f for f in found if f.name.lower() in names] for split, names in SPLITS.items()}
    if not any(places.values()):
        train = FolderSource(root, classes)
        return Splits(train, None, None, _ignored(train))
    for split, folders in places.items():
        if len(folders) > 1:
            raise DataError(
                f"{root} has {' and '.join(folder.name for folder in folders)}: which is the {split} split?"
            )
    if not places["train"]:
        raise DataError(f"{root} has {', '.join(folder.name for folder in found)} but no train/ to learn from")
    train = FolderSource(places["train"][0], classes)
    rest = {s: FolderSource(places[s][0], train.classes) if places[s] else None for s in ("validation", "test")}
    left_out = [folder.name for folder in found if not any(folder in folders for folders in places.values())]
    notes = [f"{root}: {', '.join(left_out)} left out, being none of train/, val/, test/"] if left_out else []
    for source in (train, *rest.values()):
        notes += _ignored(source) if source else ()
    return Splits(train, rest["validation"], rest["test"], tuple(notes))


def _ignored(source: FolderSource) -> tuple[str, ...]:
    if not source.ignored:
        return ()
    return (f"{source.root}: {source.ignored} files left out, whose suffixes are not those of images",)
