"""Folders of image files: one folder per class, with or without folders of splits, or images without classes."""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data import formats
from vitrail.data.faults import OWN_RECORDS, Fault, first_bytes, is_from_system, is_own_output, shown, unknown_class
from vitrail.data.pixels.decode import HEAD, SUFFIXES, is_image
from vitrail.data.source import Samples, Source, file_samples, files_of, inode_of, inodes_in
from vitrail.data.splits import (
    CHOICE,
    SPLITS,
    Request,
    Split,
    SplitNames,
    Splits,
    check_chosen,
    folds,
    grouped,
    is_fold,
    left_out,
    named_splits,
    split_of,
    splits_from,
)
from vitrail.data.targets import Targets, check_names, class_name
from vitrail.errors import DataError, listed, plural


def join_files(root: Path, parts: Sequence[Samples], classes: tuple[str, ...] | None) -> Samples:
    """Return the files of several folders below `root` as one source, in the order of the folders. By default the
    classes are the sorted classes of all folders."""
    names = tuple(sorted({name for part in parts for name in part.classes})) if classes is None else classes
    targets = [part.targets.renumbered([names.index(name) for name in part.classes], names) for part in parts]
    folders = [files for part in parts if (files := files_of(part)) is not None]
    keys = [f"{files.root.relative_to(root).as_posix()}/{key}" for files in folders for key in files.keys]
    return file_samples(root, keys, np.concatenate([files.inodes for files in folders]), Targets.joined(targets))


ENDINGS = tuple(SUFFIXES)
"""The suffixes as the tuple that `str.endswith` expects."""

ALL = ", ".join(sorted(SUFFIXES))
"""The suffixes in messages."""


class FolderImages(NamedTuple):
    """The images in class folders, or in a folder without classes."""

    samples: Samples
    faults: tuple[Fault, ...]
    """Faults of folders that are never data, of folders without images, of images outside of class folders, and of
    skipped files whose content is an image."""
    others: tuple[str, ...]
    """Paths of the files without a suffix of an image format, which are skipped."""


def read_folder(
    root: Path, classes: tuple[str, ...] | None = None, *, unlabelled: bool = False, tolerant: bool = False
) -> FolderImages:
    """Return the images in class folders and their subfolders, in the order of their paths.

    By default the classes are the sorted names of the folders that hold images, as `class_name` writes them. If
    `classes` of another split or a model is given, a folder with any other name is an error; with `tolerant`, the
    folder is left out, and is a fault. If `unlabelled` is true, all images in `root` and its subfolders are samples
    without a target. Hidden files, hidden folders, the folders of operating systems and the output of Vitrail are
    skipped. Links are followed, but each folder is read only once. Raises `DataError`.
    """
    scan = Scan(root)
    if unlabelled:
        if not (images := sorted(scan.images(""))):
            raise DataError(f"{root} has no images ({ALL}), neither in it nor in its folders")
        faults = (*([_own_output(root, scan.own)] if scan.own else ()), *unread_images(root, scan.others))
        targets = Targets.unknown("none", (), len(images))
        samples = file_samples(root, [key for key, _ in images], [inode for _, inode in images], targets)
        return FolderImages(samples, faults, tuple(scan.others))
    scan.own = _own_folders(root)
    if not (folders := [folder.name for folder in class_folders(root)]):
        raise DataError(f"{root} has no class folders; it needs one folder of images for each class")
    named = {name: class_name(name) for name in folders}
    check_names(str(root), named.values())
    owners = {(root / name).resolve(): name for name in reversed(folders)}
    scan.entered |= owners.keys()  # no link inside a class folder takes the images of another one
    distinct = {*owners.values()}
    found = {name: sorted(scan.images(name)) if name in distinct else [] for name in folders}
    empty = [name for name, images in found.items() if not images]
    if len(empty) == len(folders) and not tolerant:
        raise DataError(f"{root} has no images ({ALL}) in its class folders: {listed(empty)}; add images")
    present = dict.fromkeys(sorted(named[name] for name in folders if found[name]))
    classes = tuple(present) if classes is None else classes
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in folders if found[name] and named[name] not in numbers]
    strange = f"{root} has unknown classes: {listed(unknown, 20)}; the known classes are: {listed(classes, 20)}"
    if unknown and not tolerant:
        raise DataError(strange)
    masks = {key for images in found.values() for key in masks_among([key for key, _ in images])}
    found = {name: [image for image in images if image[0] not in masks] for name, images in found.items()}
    kept = {name: images for name, images in found.items() if images and named[name] in numbers}
    labels = np.repeat(
        np.array([numbers[named[name]] for name in kept], np.int64), [len(images) for images in kept.values()]
    )
    inodes = array("Q", (inode for images in kept.values() for _, inode in images))
    lost = sum(len(found[name]) for name in unknown)
    faults = (
        *([unknown_class(
            "", lost, strange, f"leaves out {plural(lost, 'image')} of {root.name}/",
            "Add training images of these classes, or remove their folders.",
        )] if unknown else ()),
        Fault(
            "empty-folder", "warning", len(empty),
            f"{root}: skipped {plural(len(empty), 'class folder')} without images: {listed(empty)}",
            "These folders are skipped, so they are not classes.",
            f"Add images ({ALL}), or remove the folders.",
        ),
        *_joined(root, {name: named[name] for name in kept}),
        _own_output(root, scan.own),
        _loose(root),
        Fault(
            "masks-among-images", "warning", len(masks),
            f"{root}: skipped {plural(len(masks), 'file')} with names of masks of other images in the same class: "
            f"{shown(sorted(masks))}",
            "These files are skipped.", "Nothing needs to be done, unless they are images of their class: rename them.",
        ),
        *unread_images(root, scan.others, empty),
    )  # fmt: skip
    keys = [key for images in kept.values() for key, _ in images]
    samples = file_samples(root, keys, inodes, Targets("class", classes, labels))
    return FolderImages(samples, tuple(fault for fault in faults if fault.count), tuple(scan.others))


def masks_among(keys: Sequence[str]) -> list[str]:
    """Return the images of a class whose names are those of masks: 1_mask.png beside 1.png, and all images in a folder
    such as masks/ beside images/."""
    inner = {Path(folder) for folder in {key.rpartition("/")[0] for key in keys}}
    with_images = {folder.parent for folder in inner if word(folder.name) in IMAGES}
    masks = tuple(f"{one}/" for one in inner if word(one.name) in TARGETS and one.parent in with_images)
    named = [key for key in keys if key.rpartition(".")[0].endswith(("_mask", "-mask"))]
    stems = {key.rpartition(".")[0] for key in keys} if named else set()
    return [key for key in keys if key.startswith(masks)] + [
        key for key in named if key.rpartition(".")[0][:-5] in stems
    ]


class Scan:
    """A search for images below a folder, with what it skips."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entered = {root.resolve()}
        """The folders that have been found, of which none is entered again through a link."""
        self.others: list[str] = []
        """Files without an image suffix."""
        self.own: list[str] = []

    def images(self, folder: str) -> list[tuple[str, int]]:
        """Return the relative paths and inodes of the images in a folder and its subfolders."""
        found: list[tuple[str, int]] = []
        folders = []
        names = set()
        start = f"{folder}/" if folder else ""
        try:
            scanned = os.scandir(self.root / folder)
        except OSError as error:
            raise DataError(f"folder {self.root / folder} cannot be read: {error.strerror}") from None
        with scanned as entries:
            for entry in entries:
                if is_from_system(entry.name):
                    continue
                if _is_folder(entry):
                    folders.append(f"{start}{entry.name}")
                elif entry.name.lower().endswith(ENDINGS):
                    found.append((f"{start}{entry.name}", inode_of(entry)))
                else:
                    names.add(entry.name)
        if folder and not names.isdisjoint(OWN_RECORDS) and is_own_output(self.root / folder):
            self.own.append(folder)
            return []
        self.others += [f"{start}{name}" for name in sorted(names)]
        for inner in sorted(folders):  # sorted, so that every machine follows the same one of two equal links
            if (place := (self.root / inner).resolve()) not in self.entered:
                self.entered.add(place)
                found += self.images(inner)
        return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _joined(root: Path, names: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault if the names of several folders are written differently and mean the same class."""
    classes = Counter(names.values())
    if alike := [name for name, one in names.items() if classes[one] > 1]:
        yield Fault(
            "joined-folders", "note", len(alike),
            f"{root}: the names {listed(list(map(repr, alike)))} differ only in spaces at their ends or in the form of "
            "Unicode, so folders of the same name are one class",
            "Folders of the same name are one class.",
            "Give all folders of a class the same name.",
        )  # fmt: skip


def unread_images(root: Path, others: Sequence[str], empty: Sequence[str] = ()) -> Iterator[Fault]:
    """Yield a fault if some of the skipped files `others`, which are paths relative to `root`, are images by their
    content. It is an error if they are the only images of a class, whose folder is then among those in `empty`."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for other in others:
        folder, _, name = other.rpartition("/")
        groups[folder, os.path.splitext(name)[1].lower()].append(other)  # noqa: PTH122 (thousands of names)
    unread = {  # three files of one suffix in one folder are enough
        place: names
        for place, names in groups.items()
        if any(is_image(first_bytes(root / name, HEAD)) for name in names[:3])
    }
    if not unread:
        return
    files = [name for names in unread.values() for name in names]
    counts = Counter(suffix or "no suffix" for (_, suffix), names in unread.items() for _ in names)
    lost = sorted({name.partition("/")[0] for name in files} & set(empty))
    only = f", and the class folders {listed(lost)} have no other images" if lost else ""
    yield Fault(
        "unread-images", "error" if lost else "warning", len(files),
        f"{root}: skipped {plural(len(files), 'file')} with images whose suffixes are not those of image formats that "
        f"are read ({listed([f'{suffix}: {count:,}' for suffix, count in counts.most_common()])}), such as "
        f"{files[0]}{only}",
        "Training refuses the data, because classes would be missing." if lost else "These images are skipped.",
        f"Rename or convert the images to files with the suffixes {ALL}, or remove them.",
    )  # fmt: skip


def _own_folders(root: Path) -> list[str]:
    """Return the names of the folders in `root` that Vitrail wrote."""
    return [name for name in _subfolders(root) if not is_from_system(name) and is_own_output(root / name)]


def _own_output(root: Path, own: list[str]) -> Fault:
    """Return the fault of folders in `root` that Vitrail wrote, which are never data."""
    return Fault(
        "own-output", "note", len(own),
        f"{root}: skipped {plural(len(own), 'folder')} that Vitrail wrote: {listed(sorted(own), 3)}",
        "These folders are skipped, with the pictures of runs and reports in them.",
        "Nothing needs to be done. Outside of the data, such folders are easier to find.",
    )  # fmt: skip


def _loose(root: Path) -> Fault:
    """Return the fault of images beside the class folders."""
    with os.scandir(root) as entries:
        count = sum(_is_image(entry) for entry in entries)
    return Fault(
        "loose-images", "warning", count,
        f"{root}: skipped {plural(count, 'image')} outside of the class folders",
        "These images have no label, so they are skipped.",
        "Move the images into the folders of their classes, or remove them.",
    )  # fmt: skip


def _subfolders(root: Path) -> list[str]:
    """Return the names of the folders directly in `root`, sorted. Raise `DataError` if it may not be read."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if _is_folder(entry))
    except OSError as error:
        raise DataError(f"folder {root} cannot be read: {error.strerror}") from error


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(ENDINGS) and not entry.name.startswith(".") and entry.is_file()


def class_folders(root: Path) -> list[Path]:
    """Return the folders directly below `root`, sorted, without those that are never data: hidden folders, those of
    operating systems, and the output of Vitrail."""
    folders = [root / name for name in _subfolders(root) if not is_from_system(name)]
    return [folder for folder in folders if not is_own_output(folder)]


def has_images(root: Path) -> bool:
    """Return True if at least one image lies directly in `root`."""
    with os.scandir(root) as entries:
        return any(map(_is_image, entries))


def holds_images(root: Path, depth: int = 4) -> bool:
    """Return True if at least one image lies in `root` or in a folder at most `depth` levels below it."""
    return has_images(root) or (depth > 0 and any(holds_images(inner, depth - 1) for inner in class_folders(root)))


IMAGES = frozenset({"images", "image", "imgs", "img", "jpegimages", "jpgimages", "imgdir", "leftimg8bit"})
"""Names of folders that hold all images of a data set or of a class, without case and punctuation."""

UNLABELLED = frozenset({"unknown", "unlabelled", "unlabeled"})
"""Names of folders in a held-out split whose images have no labels."""

TARGETS = frozenset({
    "masks", "mask", "labels", "annotations", "annotation", "segmentationclass", "segmentationobject", "segmentation",
    "segmentations", "groundtruth", "gt", "gtfine", "anndir", "bboxes", "boxes", "trimaps", "imagesets",
})  # fmt: skip
"""Names of folders beside the images that hold masks or boxes."""

PAIRED = re.compile(r"(.+?)[ _-]?(?:masks?|labels?|annot(?:ation)?s?|gt)", re.I)
"""Name of a folder of masks or boxes, such as train_masks. The first group is the name of the folder of the images."""

TINY_IMAGENET = "val_annotations.txt"
"""The table of the validation images of TinyImageNet: file, class and box, separated by tabs, without a header."""

Places = dict[Split, list[Path]]


def open_folders(request: Request) -> Splits:
    """Return the splits of a folder, with the faults in its structure. The classes of held-out splits are those of the
    training split; images of other classes are skipped, and are a fault.

    The usual names of splits are recognised, unless the user chose the names of the folders. Raise `DataError` if there
    is no image, if the folders can be splits or classes, if they hold masks or boxes, or if a folder has a class that
    is not among those of the request.
    """
    root, classes, unlabelled, chosen = request.path, request.classes, request.unlabelled, request.choice.splits
    inner = class_folders(root)
    if not inner and not unlabelled:
        if has_images(root) and request.choice.text is not None:
            raise DataError(f"{root} has images without texts; name a table with columns such as path and caption")
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
        refuse_targets(root, inner)
    places, notes = _places(root, inner, chosen, unlabelled)
    if not places:
        is_plain = unlabelled and (len(inner) < 2 or has_images(root))
        found = read_folder(root, classes, unlabelled=is_plain)
        return splits_from({"train": found.samples}, (*notes, *_ignored(root, found)), found.faults)
    for place in places.get("train", []):
        refuse_targets(place, class_folders(place))
    first = next(iter(places.values()))[0]
    plain = unlabelled and (len(class_folders(first)) < 2 or has_images(first))
    sources: dict[Split, Source] = {}
    faults = [*(_ambiguous(root, places) if chosen is None else ()), _own_output(root, _own_folders(root))]
    for split, folders in places.items():
        opened: list[Samples] = []
        for place in folders if chosen else folders[:1]:
            doubled = place / place.name
            place = doubled if not has_images(place) and class_folders(place) == [doubled] else place
            if split != "train" and (reason := _without_labels(place, plain, classes or ())):
                if (place / TINY_IMAGENET).is_file():
                    opened.append(_tiny_imagenet(place, classes))
                else:
                    notes += (f"{root}: skipped {place.relative_to(root)}/ ({split} split), because {reason}",)
                continue
            found = read_folder(place, classes, unlabelled=plain, tolerant=split != "train")
            notes, faults = (*notes, *_ignored(place, found)), [*faults, *found.faults]
            opened.append(found.samples)
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
    if not any(map(holds_images, folders)) and (
        holders := [folder.name for folder in folders if formats.tar.looks_like_shards(str(folder))]
    ):
        raise DataError(
            f"{root} has shards in the folders {listed(holders)}, and their names are not those of splits; choose the "
            f"splits: {CHOICE}"
        )
    named = named_splits(names)
    places, others = grouped(folders, lambda folder: named.get(folder.name))
    if not places and not unlabelled:
        if len(names) > 1 and all(map(is_fold, names)):
            raise DataError(folds(str(root), names))
        _refuse_alike(root, folders)
    if not places:
        return {}, ()
    skipped = ", ".join(folder.name for folder in others)
    left = (f"{root}: skipped {skipped}, because only train/, val/ and test/ are read",) if others else ()
    if unlabelled and others and "train" not in places:
        return {}, (f"{root}: {listed(list(named))} is read like {skipped}, because there is no train/",)
    if unlabelled:
        return places, left
    flat = "train" in places and not class_folders(places["train"][0]) and has_images(places["train"][0])
    rivals = [folder for folder in others if has_images(folder) or ("train" not in places and holds_images(folder))]
    if flat and not rivals:
        raise DataError(
            f"{places['train'][0]} has images but no class folders; a folder of this name holds the class folders of "
            "the training split, so put the images of each class into a folder of its own. If all folders are classes, "
            "add --splits none"
        )
    if ("train" in places and not flat) or not rivals:
        return places, left
    if len(folders) == 2 and not _alike(folders):
        (name,) = named
        note = f"{root}: {name}/ is read as a class, because {rivals[0].name}/ is not a split"
        return {}, (f"{note}; to read splits, choose them: {CHOICE}",)
    raise DataError(
        f"{root} has {listed(list(named))} beside {listed([rival.name for rival in rivals])}, and nothing says if "
        f"these folders are splits or classes; choose the splits with {CHOICE}, or add --splits none if all are classes"
    )


def _matching(root: Path, names: tuple[str, ...]) -> list[Path]:
    """Return the folders in `root` that the names or patterns of a split match. Raise `DataError` for a text that is
    neither a name nor a pattern."""
    try:
        found = [path for name in names for path in sorted(root.glob(name)) if path.is_dir() and path != root]
    except (ValueError, IndexError):
        raise DataError(
            f"{root}: {listed(names)} cannot be folders in it; a split has names such as images/train, and patterns "
            "such as fold[1-4]"
        ) from None
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


def word(name: str) -> str:
    """Return the name of a folder without case, punctuation and a last word that says how masks or images are kept."""
    return re.sub(r"[\W_](?:png|jpe?g|tiff?|human|machine)$|[\W_]", "", name, flags=re.I).lower()


def refuse_targets(root: Path, folders: list[Path]) -> None:
    """Raise `DataError` if there are folders of masks or boxes beside those of the images."""
    names = [folder.name for folder in folders]
    targets = [name for name in names if word(name) in TARGETS]
    images = [name for name in names if word(name) in IMAGES]
    flat = [name for name in named_splits(names) if has_images(root / name)]
    for name in names:  # train_masks/ beside train/
        pair = PAIRED.fullmatch(name)
        if pair is not None and pair[1] in names and split_of(pair[1]) and has_images(root / pair[1]):
            targets, flat = [name, *targets], [pair[1], *flat]
    if targets and (images or flat):
        raise DataError(
            f"{root} has {targets[0]}/ beside {(images or flat)[0]}/, which is the layout of data with masks or boxes, "
            "but neither annotations of COCO, YOLO or Pascal VOC nor masks beside images were found in it. For masks, "
            "use images/SPLIT and masks/SPLIT, in which an image and its mask have the same name; masks are PNG, TIFF "
            "or BMP files, because JPEG and GIF do not keep the number of a class in each pixel. For classes "
            "in folders, and for a task that needs no labels, "
            f"name {root / (images or flat)[0]} as the data; for other classes, name a table of paths and labels. If "
            f"{targets[0]}/ and {(images or flat)[0]}/ are classes, add --splits none"
        )


def _without_labels(place: Path, plain: bool, classes: tuple[str, ...]) -> str:
    """Return the reason why the images of a held-out split have no labels, or an empty text if they have."""
    if not holds_images(place):
        return "it has no images"
    if plain:
        return ""
    names = [folder.name for folder in class_folders(place)]
    if not [name for name in names if name in classes or word(name) not in IMAGES | UNLABELLED]:
        return "its images are not in class folders, so they have no labels"
    return ""


def _tiny_imagenet(place: Path, classes: tuple[str, ...] | None) -> Samples:
    """Return the validation split of TinyImageNet. Raise `DataError` for a missing image or an unknown class."""
    lines = (place / TINY_IMAGENET).read_text(encoding="utf-8-sig").splitlines()
    rows = [(cells[0], cells[1]) for cells in (line.split("\t") for line in lines) if len(cells) > 1]
    classes = tuple(sorted({name for _, name in rows})) if classes is None else classes
    numbers = {name: number for number, name in enumerate(classes)}
    inodes = inodes_in(place / "images")
    for file, name in rows:
        if file not in inodes or name not in numbers:
            what = f"the image {file} does not exist" if file not in inodes else f"{name!r} is not a class of train/"
            raise DataError(f"{place / TINY_IMAGENET}: {what}; unpack the data again")
    targets = Targets("class", classes, np.array([numbers[name] for _, name in rows], np.int64))
    return file_samples(place, [f"images/{file}" for file, _ in rows], [inodes[file] for file, _ in rows], targets)


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
    words = {folder: word(folder.name) for folder in folders}
    never = IMAGES if IMAGES.isdisjoint(words.values()) else IMAGES | TARGETS  # "mask" alone can be a class
    usual = (folder for folder in folders if words[folder] not in never)
    return len(list(islice(filter(holds_images, usual), 2))) == 2


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


def _ignored(root: Path, found: FolderImages) -> Iterator[str]:
    if found.samples.targets.kind == "none" and has_images(root) and len(folders := class_folders(root)) > 1:
        yield (
            f"{root}: the folders {listed([folder.name for folder in folders])} are not read as classes, because "
            "images lie beside them"
        )
    if not found.others:
        return
    yield f"{root}: skipped {plural(len(found.others), 'file')} without a suffix of an image format"
    # Only the first files are opened, because there can be one for each image.
    beside = [root / name for name in found.others if name.lower().endswith(formats.annotated.BESIDE)][:20]
    if beside and (formats.coco.annotation_files(beside) or formats.voc.holds_voc(beside)):
        yield (
            f"{root}: the folders are classes, and annotations such as {beside[0].relative_to(root)} are not read; to "
            "learn boxes, keep the images and their annotations apart from other folders, or name the file of the "
            "annotations"
        )
