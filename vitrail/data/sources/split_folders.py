"""A folder of class folders, with or without folders of splits, opened as one source per split."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from vitrail.data.faults import Fault
from vitrail.data.sources.files import FileSource, inodes_in, join_files
from vitrail.data.sources.folder import FolderSource, class_folders, has_images, holds_images, other_folders
from vitrail.data.sources.shards.shard_paths import looks_like_shards
from vitrail.data.sources.tables.table import tables_in
from vitrail.data.splits import (
    CHOICE,
    SPLITS,
    Split,
    SplitNames,
    Splits,
    check_chosen,
    folds,
    is_fold,
    left_out,
    named_splits,
    splits_from,
)
from vitrail.errors import DataError, listed, plural

IMAGES = frozenset({"images", "image", "imgs", "img", "jpegimages", "jpgimages"})
"""Names of folders that hold all images of a data set or of a class, without case and punctuation."""

UNLABELLED = frozenset({"unknown", "unlabelled", "unlabeled"})
"""Names of folders in a held-out split whose images have no labels."""

TARGETS = frozenset({
    "masks", "mask", "labels", "annotations", "annotation", "segmentationclass", "segmentationobject", "segmentation",
    "segmentations", "groundtruth", "gt", "bboxes", "boxes", "trimaps", "imagesets",
})  # fmt: skip
"""Names of folders beside the images that hold masks or boxes."""

TINY_IMAGENET = "val_annotations.txt"
"""The table of the validation images of TinyImageNet: file, class and box, separated by tabs, without a header."""

Places = dict[Split, list[Path]]


def open_folders(root: Path, classes: tuple[str, ...] | None, unlabelled: bool, chosen: SplitNames | None) -> Splits:
    """Return the splits of a folder, with the faults in its structure. The classes of held-out splits are those of the
    training split; images of other classes are skipped, and are a fault.

    The usual names of splits are recognised, unless `chosen` states the names of the folders. Raise `DataError` if
    there is no image, if the folders can be splits or classes, if they hold masks or boxes, or if a folder has a class
    that is not among `classes`.
    """
    inner = class_folders(root)
    if not inner and not (unlabelled and has_images(root)):
        if has_images(root):
            raise DataError(
                f"{root} has images but no class folders, so its images have no labels; put the images of each class "
                "into a folder of its own, or choose a task that needs no labels"
            )
        raise DataError(
            f"{root} has no class folders, and no train/, val/ or test/ with class folders; put the images of each "
            "class into a folder of its own"
        )
    if chosen is None:
        _refuse_targets(root, inner)
    places, notes = _places(root, inner, chosen, unlabelled)
    if not places:
        is_plain = unlabelled and (len(inner) < 2 or has_images(root))
        train = FolderSource(root, classes, unlabelled=is_plain)
        return splits_from({"train": train}, (*notes, *_ignored(train)), train.faults)
    for place in places.get("train", []):
        _refuse_targets(place, class_folders(place))
    first = next(iter(places.values()))[0]
    plain = unlabelled and (len(class_folders(first)) < 2 or has_images(first))
    sources: dict[Split, FileSource] = {}
    faults = [*(_ambiguous(root, places) if chosen is None else ()), *other_folders(root)]
    for split, folders in places.items():
        opened: list[FileSource] = []
        for place in folders if chosen else folders[:1]:
            doubled = place / place.name
            place = doubled if not has_images(place) and class_folders(place) == [doubled] else place
            if split != "train" and (reason := _without_labels(place, plain, classes or ())):
                if (place / TINY_IMAGENET).is_file():
                    opened.append(_tiny_imagenet(place, classes))
                else:
                    notes += (f"{root}: skipped {place.relative_to(root)}/ ({split} split), because {reason}",)
                continue
            source = FolderSource(place, classes, unlabelled=plain, tolerant=split != "train")
            notes, faults = (*notes, *_ignored(source)), [*faults, *source.faults]
            opened.append(source)
        if opened:
            joined = opened[0] if len(opened) == 1 else join_files(root, opened, None if plain else classes)
            if split == "train" or len(joined):
                sources[split] = joined
            classes = joined.classes if not plain else classes
    if not sources:
        raise DataError("\n".join((*notes, f"{root} has no split with labelled images; add class folders to one")))
    return splits_from(sources, notes, faults)


def _places(
    root: Path, folders: list[Path], chosen: SplitNames | None, unlabelled: bool
) -> tuple[Places, tuple[str, ...]]:
    """Return which of the folders in `root` are those of each split, and notes. There are none if all are class
    folders. Raise `DataError` if nothing says which of the two they are, or if a chosen folder does not exist."""
    names = [folder.name for folder in folders]
    if chosen is not None:
        found = {split: _matching(root, wanted) for split, wanted in chosen.items()}
        places = {split: found[split] for split in SPLITS if found.get(split)}
        check_chosen(str(root), chosen, places, names)
        used = {place.relative_to(root).parts[0] for some in places.values() for place in some}
        return places, left_out(str(root), [name for name in names if name not in used]) if chosen else ()
    if not any(map(holds_images, folders)) and any(looks_like_shards(str(folder)) for folder in folders):
        holders = [folder.name for folder in folders if looks_like_shards(str(folder))]
        raise DataError(
            f"{root} has shards in the folders {listed(holders)}, and their names are not those of splits; choose the "
            f"splits: {CHOICE}"
        )
    named = named_splits(names)
    places = {split: [one for one in folders if named.get(one.name) == split] for split in SPLITS}
    places = {split: some for split, some in places.items() if some}
    others = [folder for folder in folders if folder.name not in named]
    if not places and not unlabelled:
        if len(names) > 1 and all(map(is_fold, names)):
            raise DataError(folds(str(root), names))
        _refuse_alike(root, folders)
    if not places or unlabelled:
        return places if "train" in places or not others else {}, ()
    flat = "train" in places and not class_folders(places["train"][0]) and has_images(places["train"][0])
    rivals = [folder for folder in others if has_images(folder) or ("train" not in places and holds_images(folder))]
    if flat and not rivals:
        raise DataError(
            f"{places['train'][0]} has images but no class folders; a folder of this name holds the class folders of "
            "the training split, so put the images of each class into a folder of its own. If all folders are classes, "
            "add --splits none"
        )
    if ("train" in places and not flat) or not rivals:
        skipped = ", ".join(folder.name for folder in others)
        note = f"{root}: skipped {skipped}, because only train/, val/ and test/ are read"
        return places, (note,) if others else ()
    if len(folders) == 2 and not _alike(folders):
        (name,) = named
        note = f"{root}: {name}/ is read as a class, because {rivals[0].name}/ is not a split"
        return {}, (f"{note}; to read splits, choose them: {CHOICE}",)
    raise DataError(
        f"{root} has {listed(list(named))} beside {listed([rival.name for rival in rivals])}, and nothing says if "
        f"these folders are splits or classes; choose the splits with {CHOICE}, or add --splits none if all are classes"
    )


def _matching(root: Path, names: tuple[str, ...]) -> list[Path]:
    """Return the folders that the names or patterns of a split match, relative to `root`."""
    found = [path for name in names for path in sorted(root.glob(name)) if path.is_dir()]
    return list(dict.fromkeys(found))


def _refuse_alike(root: Path, folders: list[Path]) -> None:
    """Raise `DataError` if all folders contain folders of the same names, as splits do."""
    if _alike(folders):
        names = [folder.name for folder in folders]
        shared = listed([folder.name for folder in class_folders(folders[0])], 3)
        raise DataError(
            f"{root}: the folders {listed(names)} contain folders of the same names ({shared}), so they can be splits, "
            f"folds or classes; choose the splits, such as with --splits train={names[0]},test={names[1]}, or add "
            "--splits none if the folders are classes"
        )


def _alike(folders: list[Path]) -> bool:
    """Return True if there are several folders without images of their own, and one of them contains at least two
    folders and those of all others."""
    inner: list[set[str]] = []
    for folder in folders:
        inner.append({one.name for one in class_folders(folder)})
        if len(inner[-1]) < 2 or has_images(folder):
            return False
    return len(inner) > 1 and all(names <= max(inner, key=len) for names in inner)


def _word(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _refuse_targets(root: Path, folders: list[Path]) -> None:
    """Raise `DataError` if there are folders of masks or boxes beside those of the images."""
    names = [folder.name for folder in folders]
    targets = [name for name in names if _word(name) in TARGETS]
    images = [name for name in names if _word(name) in IMAGES]
    flat = [name for name in named_splits(names) if has_images(root / name)]
    if targets and (images or flat):
        raise DataError(
            f"{root} has {targets[0]}/ beside {(images or flat)[0]}/, which is the layout of data with masks or boxes "
            "(such as Pascal VOC, COCO or YOLO), and classification needs one class per image; put the images of each "
            f"class into a folder of its own, name a table of paths and labels, or open {root / (images or flat)[0]} "
            "for a task that needs no labels. If these folders are classes, add --splits none"
        )


def _without_labels(place: Path, plain: bool, classes: tuple[str, ...]) -> str:
    """Return the reason why the images of a held-out split have no labels, or an empty text if they have."""
    if not holds_images(place):
        return "it has no images"
    if plain:
        return ""
    names = [folder.name for folder in class_folders(place)]
    if not [name for name in names if name in classes or _word(name) not in IMAGES | UNLABELLED]:
        return "its images are not in class folders, so they have no labels"
    return ""


def _tiny_imagenet(place: Path, classes: tuple[str, ...] | None) -> FileSource:
    """Return the validation split of TinyImageNet. Raise `DataError` for a missing image or an unknown class."""
    lines = (place / TINY_IMAGENET).read_text(encoding="utf-8").splitlines()
    rows = [(cells[0], cells[1]) for cells in (line.split("\t") for line in lines) if len(cells) > 1]
    classes = tuple(sorted({name for _, name in rows})) if classes is None else classes
    numbers = {name: number for number, name in enumerate(classes)}
    inodes = inodes_in(place / "images")
    for file, name in rows:
        if file not in inodes or name not in numbers:
            what = f"the image {file} does not exist" if file not in inodes else f"{name!r} is not a class of train/"
            raise DataError(f"{place / TINY_IMAGENET}: {what}; unpack the data again")
    return FileSource(
        place, [f"images/{file}" for file, _ in rows], [numbers[name] for _, name in rows],
        [inodes[file] for file, _ in rows], classes,
    )  # fmt: skip


def has_classes(root: Path, chosen: SplitNames | None = None) -> bool:
    """Return True if class folders give the images below `root` their labels, directly or in folders of splits."""
    if chosen:
        return any(_are_classes(class_folders(one)) for names in chosen.values() for one in _matching(root, names))
    folders = class_folders(root)
    named = named_splits(folder.name for folder in folders)
    if named and chosen is None:
        return any(_are_classes(class_folders(folder)) for folder in folders if folder.name in named)
    return _are_classes(folders)


def _are_classes(folders: list[Path]) -> bool:
    """Return True if at least two folders have images, and their names are not those of folders with all images."""
    words = [_word(folder.name) for folder in folders]
    never = IMAGES if IMAGES.isdisjoint(words) else IMAGES | TARGETS  # "mask" alone can be a class
    usual = (folder for folder, word in zip(folders, words, strict=True) if word not in never)
    return len(list(islice(filter(holds_images, usual), 2))) == 2


def wrapped(root: Path) -> Path | None:
    """Return the only folder in `root` if it holds several folders and `root` nothing else than hidden and unrelated
    files. Return None if `root` itself is the data."""
    folders = class_folders(root)
    if len(folders) != 1 or named_splits([folders[0].name]) or has_images(root):
        return None
    inner = folders[0]
    is_data = len(class_folders(inner)) > 1 or looks_like_shards(str(inner)) or tables_in(inner) or wrapped(inner)
    return inner if is_data else None


def _ambiguous(root: Path, places: Mapping[Split, list[Path]]) -> Iterator[Fault]:
    """Yield a fault for every split that several folders are named after. Only the first of these folders was read."""
    for split, folders in places.items():
        if len(folders) > 1:
            yield Fault(
                "ambiguous-split", "error", len(folders),
                f"{root} has {' and '.join(folder.name for folder in folders)}, but only one folder can be the "
                f"{split} split; rename or remove the others, or choose the splits: {CHOICE}",
                f"Training refuses the data. This check reads {folders[0].name}/ only.",
                "Rename or remove all but one of these folders, or choose them with --splits.",
            )  # fmt: skip


def _ignored(source: FolderSource) -> tuple[str, ...]:
    if not source.ignored:
        return ()
    return (f"{source.root}: skipped {plural(source.ignored, 'file')} without a suffix of an image format",)
