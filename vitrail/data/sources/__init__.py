"""Kinds of data, each a `Source`, and `open_data`, which turns what the user types into one for each split."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from vitrail.data.source import Source, cut
from vitrail.data.sources import fashion_mnist
from vitrail.data.sources.folder import FolderSource, class_folders
from vitrail.data.sources.idx import IdxSource, find_idx
from vitrail.errors import DataError, nearest

__all__ = ["NAMES", "Splits", "open_data"]

NAMES = ("bundled", "fashion-mnist")
SPLIT_FOLDERS = {"train": ("train",), "validation": ("val", "validation", "valid"), "test": ("test",)}


@dataclass(frozen=True)
class Splits:
    """What a data SPEC holds. All splits are indexed by the classes of the training split."""

    train: Source
    validation: Source | None
    """Chooses the best weights. Its images are never trained on."""
    test: Source | None
    """Measured once, at the end. Nothing is ever trained or chosen on it."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know, a sentence each: what was cut, what was left out."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @property
    def held_out(self) -> tuple[str, Source] | None:
        """The split that measures a finished model, with its name: the test split, or else the validation split."""
        if self.test is not None:
            return "test", self.test
        return None if self.validation is None else ("validation", self.validation)


def open_data(spec: str, *, validation_share: float, classes: tuple[str, ...] | None = None) -> Splits:
    """Opens `spec`: "bundled", "fashion-mnist", a folder of IDX files, or of class folders, with or without splits.

    Where a validation split is missing, `validation_share` of the training images is cut by a hash of their keys (0
    leaves none). `classes` indexes the samples by those of a model. Raises `DataError`.
    """
    if spec == "bundled":
        splits = _idx(fashion_mnist.BUNDLED, fashion_mnist.CLASSES)
    elif spec == "fashion-mnist":
        splits = _idx(fashion_mnist.locate(), fashion_mnist.CLASSES)
    else:
        root = Path(spec).expanduser()
        if not root.exists():
            hint = "" if "/" in spec else f", and no data set of that name ({nearest(spec, NAMES)})"
            raise DataError(f"data {spec!r} does not exist: there is no such folder{hint}")
        if not root.is_dir():
            raise DataError(
                f"data {spec!r} is a file; it must be a folder of class folders, or one of {', '.join(NAMES)}"
            )
        splits = _idx(root, classes) if find_idx(root, "train") else _folders(root, classes)
    if classes is not None and splits.classes != classes:
        raise DataError(
            f"the classes of data {spec!r}, {', '.join(splits.classes)}, are not the model's: {', '.join(classes)}"
        )
    if len(splits.classes) < 2:
        raise DataError(f"data {spec!r} has one class, {splits.classes[0]!r}; telling classes apart needs two or more")
    return _with_validation(splits, spec, validation_share)


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
    places = {split: [f for f in found if f.name.lower() in names] for split, names in SPLIT_FOLDERS.items()}
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


def _with_validation(splits: Splits, spec: str, share: float) -> Splits:
    if splits.validation is not None or share == 0:
        return splits
    train, validation = cut(splits.train, share)
    note = (
        f"data {spec!r} has no validation split: {len(validation):,} of its {len(splits.train):,} training images were "
        f"cut for it (by a hash of their names, {share:.0%})"
    )
    return replace(splits, train=train, validation=validation, notes=(*splits.notes, note))
