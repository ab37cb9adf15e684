"""The common part of the formats COCO, YOLO and Pascal VOC. It finds image files by the names in annotations, and turns
lists of boxes into targets. Everything in an annotation that cannot be used becomes a fault of the data."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.faults import Fault, Severity, first_bytes, is_from_system, shown, unknown_class
from vitrail.data.formats.folder import IMAGES, Scan, word
from vitrail.data.objects import ObjectRows, Outline, outline_column
from vitrail.data.pixels.decode import open_image
from vitrail.data.source import Samples, file_samples, files_of
from vitrail.data.splits import (
    CHOICE,
    SPLITS,
    Request,
    Split,
    SplitNames,
    Splits,
    check_chosen,
    grouped,
    left_out,
    split_of,
    splits_from,
)
from vitrail.data.targets import Targets, check_names, class_name
from vitrail.errors import DataError, UndecodableImage, listed, plural

SLIGHT = 0.01
"""Largest fraction of an image's side by which a box can reach beyond the image because of rounding."""


class Annotation(NamedTuple):
    """One object, as a file states it."""

    image: int
    """Index of its image in `AnnotatedImages.keys`."""
    category: int
    """Index of its category in the list of categories, or -1 for an unknown one."""
    box: tuple[float, float, float, float]
    """Left, top, right and bottom, as fractions of the image."""
    where: str
    """The file and the line or number of the object, for messages."""
    crowd: bool = False
    area: float = float("nan")
    """Area as a fraction of the image, or NaN if the file does not state it."""
    outline: Outline | None = None


@dataclass
class AnnotatedImages:
    """The images of one split and the objects in them, as read from files."""

    keys: list[str] = field(default_factory=list)
    """Path of each image below the root of the data."""
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """Height and width of each image as its annotation states them, or 0 and 0."""
    ids: list[int | str] = field(default_factory=list)
    """The number or the name that the annotation gives each image, if it gives some."""
    objects: list[Annotation] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


BESIDE = (".json", ".xml", ".yaml", ".yml")
"""Suffixes of files that can hold annotations or describe them."""


FOREIGN = {
    "LabelMe": re.compile(rb'"shapes"\s*:'),
    "VGG Image Annotator": re.compile(rb'"(?:_via_\w+|regions)"\s*:'),
    "CVAT": re.compile(rb"<annotations>\s*<version>"),
    "CreateML": re.compile(rb'"coordinates"\s*:'),
    "Supervisely": re.compile(rb'"classTitle"\s*:'),
}
"""Patterns by which the annotations of a program are recognised, whose own format is not read."""


def foreign_annotations(root: Path) -> str:
    """Return a sentence that names an annotation of one of the `FOREIGN` programs, or an empty text."""
    for path in files_beside_images(root):
        head = first_bytes(path, 1 << 16)
        program = next((name for name, pattern in FOREIGN.items() if pattern.search(head)), None)
        if program is not None:
            return f"{path.relative_to(root)} is an annotation of {program}, whose own format is not read"
    return ""


def files_beside_images(root: Path) -> list[Path]:
    """Return the files that can hold annotations: `root` itself if it is a file, or those in the folder `root`, in the
    folders directly in it and in those of annotations/, sorted. Each folder is listed once, because it can hold many
    images."""
    if root.is_file():
        return [root]
    found = []
    folders = [str(root)]
    for number, folder in enumerate(folders):
        has_folders = not number or Path(folder).name.lower() == "annotations"
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.lower().endswith(BESIDE):
                    found.append(Path(entry.path))
                elif has_folders and not is_from_system(entry.name) and entry.is_dir():
                    folders.append(entry.path)
    return sorted(found)


class ImageFiles:
    """The image files below a folder, which annotations name by their paths."""

    def __init__(self, root: Path) -> None:
        scan = Scan(root)
        self.root = root
        self.inodes = dict(sorted(scan.images("")))
        self.others = sorted(scan.others)
        """Paths of all other files."""
        self._named: defaultdict[str, list[str]] = defaultdict(list)
        for key in self.inodes:
            self._named[key.rpartition("/")[2].casefold()].append(key)
            self._named[os.path.splitext(key.rpartition("/")[2])[0].casefold()].append(key)  # noqa: PTH122

    def find(
        self, name: str, near: str = "", split: Split | None = None, *, outside: tuple[str, ...] = ()
    ) -> str | None:
        """Return the path of the image that a name or a path of another machine means, or None.

        The last part of the name decides, without the spaces around it unless a file has them. If several images
        outside of the folders `outside` have it, the longest common end of the paths decides, then the name in the
        folder `near`, then this folder, then the split.
        Raise `DataError` if several remain.
        """
        place = name.replace("\\", "/")
        parts = (place if place.rpartition("/")[2].casefold() in self._named else place.strip()).split("/")
        named = self._named.get(parts[-1].casefold(), ())
        found = [key for key in named if not is_in_masks(key) and not key.startswith(outside)]
        rules: tuple[Callable[[str], int], ...] = (
            lambda key: len(os.path.commonprefix([key.split("/")[::-1], parts[::-1]])),  # noqa: RUF071 (of lists)
            lambda key: key == f"{near}/{name}",
            lambda key: key.startswith(f"{near}/") if near else "/" not in key,
            lambda key: split is not None and split_of(key.rpartition("/")[0]) == split,
        )
        for rule in rules:
            if len(found) > 1:
                best = max(map(rule, found))
                found = [key for key in found if rule(key) == best]
        if len(found) > 1:
            raise DataError(
                f"{self.root}: the annotations name an image {name!r}, and {listed(found, 4)} have this name; give "
                "every image a name of its own, or write its path into the annotation"
            )
        return found[0] if found else None

    def size(self, key: str, where: str) -> tuple[int, int]:
        """Return the height and width of an image, whose annotation `where` does not state them.

        Raise `DataError` if the image cannot be read, or if its EXIF tag turns or mirrors it: then nothing says whether
        its boxes were drawn before or after that.
        """
        try:
            image = open_image((self.root / key).read_bytes())
        except (OSError, UndecodableImage) as error:
            raise DataError(f"{where} does not state the size of {key}, which cannot be read: {error}") from error
        if image.orientation != 1:
            raise DataError(
                f"{where} does not state the size of {key}, whose EXIF tag turns or mirrors it; write the width and "
                "height of the image that the boxes were drawn on"
            )
        return image.size


MASKS = frozenset({
    "masks", "mask", "segmentationclass", "segmentationobject", "segmentationclasspng", "segmentationobjectpng",
    "segmentationclassvisualization", "segmentationobjectvisualization", "ann_dir", "gtfine", "trimaps",
})  # fmt: skip


def is_in_masks(key: str) -> bool:
    """Return True for an image in a folder of masks. Below a folder of images, "mask" is a name like others."""
    folders = [part.lower() for part in key.split("/")[:-1]]
    first = next((place for place, part in enumerate(folders) if part in MASKS), None)
    return first is not None and not any(word(part) in IMAGES for part in folders[:first])


def open_images_alone(
    request: Request,
    opener: Callable[[Request], Splits],
    masks_in: Callable[[Path, ImageFiles], Collection[str]] | None = None,
) -> Splits:
    """Return the images of data with boxes or masks, without these. Images that are held out if `opener` reads the
    annotations are held out here too. If it cannot read them, the names of folders divide the images. `masks_in`
    returns the files that are masks."""
    root, chosen = request.path, request.choice.splits
    images = ImageFiles(root if root.is_dir() else root.parent)
    masks = masks_in(root, images) if masks_in else ()
    keys = [key for key in images.inodes if not is_in_masks(key) and key not in masks]
    try:
        read = opener(replace(request, unlabelled=False)).sources
    except DataError as error:
        splits, notes = divided(images, keys, chosen)
        notes = (*notes, f"{root}: its annotations cannot be read, so they do not divide the images: {error}")
    else:
        files = {split: one for split, source in read.items() if (one := files_of(source)) is not None}
        paths = {one.root / key: split for split, one in files.items() for key in one.keys}
        owners = {key: paths[images.root / key] for key in keys if images.root / key in paths}
        others = [key for key in keys if key not in owners]
        more, notes = ({}, left_out(str(root), others)) if chosen or not others else divided(images, others, chosen)
        owners |= {key: split for split, some in more.items() for key in some}
        splits = {split: [key for key in keys if owners.get(key) == split] for split in SPLITS}
    sources = {
        split: file_samples(
            images.root, some, [images.inodes[key] for key in some], Targets.unknown("none", (), len(some))
        )
        for split, some in splits.items()
        if some
    }
    if not sources:
        raise DataError(f"{root}: all images lie in folders of masks; name the folder of the images as the data")
    return splits_from(sources, (*notes, f"{root}: only the images are used, and not their boxes or masks"))


def is_size(sides: Iterable[Any]) -> bool:
    """Return True for the height and width of an image. Other values, such as texts, 0 and infinity, state no size."""
    return all(isinstance(side, int | float) and 1 <= side < 2**31 for side in sides)


def fault_at(
    places: Sequence[str], kind: str, severity: Severity, text: str, training: str, advice: str
) -> list[Fault]:
    """Return a fault about some places in the data, such as lines and names of files. Its text ends with the first of
    them. Without places, there is no fault."""
    return [Fault(kind, severity, len(places), f"{text}: {shown(places)}", training, advice)] if places else []


def missing_images(where: str, names: Sequence[str]) -> list[Fault]:
    """Return the fault of images that an annotation names and that do not exist, if there are any."""
    return fault_at(
        names, "missing-image", "error", f"{where} names {plural(len(names), 'image')} that cannot be found",
        "Training refuses the data. This check skips these images.",
        "Add these images, or remove them from the annotations.",
    )  # fmt: skip


def unstated_sizes(where: str, names: Sequence[str]) -> list[Fault]:
    """Return the fault of images whose annotation does not state their size, if there are any."""
    return fault_at(
        names, "unstated-size", "note",
        f"{where} state no size of {plural(len(names), 'image')}, so it is read from them",
        "Boxes are taken as pixels of these images.", "Nothing needs to be done if the images have not been resized.",
    )  # fmt: skip


def unlisted_images(where: str, names: Sequence[str], reason: str) -> list[Fault]:
    """Return the fault of images without annotation, in a format in which each image has one, if there are any."""
    return fault_at(
        names, "unlisted-image", "warning", f"{where}: skipped {plural(len(names), 'image')}, because {reason}",
        "These images are skipped. An image without objects has an annotation that is empty.",
        "Annotate these images, or remove them.",
    )  # fmt: skip


def divided(
    images: ImageFiles, keys: Sequence[str], chosen: SplitNames | None, lists: Sequence[Path] = ()
) -> tuple[dict[Split, list[str]], tuple[str, ...]]:
    """Return the annotated images `keys` of each split, and notes. Lists of images, which are named after splits,
    divide them, or else the names of folders. Raise `DataError` if only some images are in a folder of a split."""
    named = {path: split_of(path.name, chosen) for path in lists}
    used = {path: split for path, split in named.items() if split is not None and _is_plain(path, images)}
    if chosen is None and any(path.stem.lower() == "train" for path in used):
        used = {path: split for path, split in used.items() if path.stem.lower() != "trainval"}
    names = sorted({key.rpartition("/")[0] or key for key in keys} | {path.name for path in lists})
    if used and chosen != {}:
        found, notes = _by_lists(images, set(keys), used)
        check_chosen(str(images.root), chosen or {}, found, names)
        return found, notes
    found, unnamed = grouped(keys, lambda key: split_of(key.rpartition("/")[0], chosen))
    check_chosen(str(images.root), chosen or {}, found, names)
    if not found:
        return {"train": unnamed}, ()
    if unnamed and not chosen:
        raise DataError(
            f"{images.root} has images in folders of splits, like {next(iter(found.values()))[0]}, and others, "
            f"like {unnamed[0]}; choose the splits: {CHOICE}"
        )
    return found, left_out(str(images.root), unnamed)


def _is_plain(path: Path, images: ImageFiles) -> bool:
    """Return True for a list of images. Lists of one class have a second column of 1, 0 and -1."""
    lines = [line.strip() for line in lines_of(path) if line.strip()]
    of_class = all(line.split()[-1] in ("1", "0", "-1") and len(line.split()) > 1 for line in lines)
    return bool(lines) and not (of_class and images.find(lines[0]) is None)


def lines_of(path: Path, errors: str = "strict") -> list[str]:
    """Return the lines of a text. Raise `DataError` if it cannot be read. `errors` treats bytes that are not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} as UTF-8: {error}") from error


def names_in(paths: Sequence[Path]) -> list[str]:
    """Return the names of classes in one or more equal lists, one on each line. Raise `DataError` if a list cannot be
    read, if lists differ, or if a line between the names is empty, because then it is not clear which numbers the names
    after it have."""
    found: list[list[str]] = []
    for path in paths:
        names = "\n".join(line.strip() for line in lines_of(path)).rstrip("\n").split("\n")
        if "" in names and len(names) > 1:
            raise DataError(f"{path}: line {names.index('') + 1} is empty; remove it, or write the name of a class")
        found.append([name for name in names if name])
        if found[-1] != found[0]:
            raise DataError(
                f"{paths[0]} and {path} list different classes, {found[0]} and {found[-1]}; give all labels the same "
                "numbers"
            )
    return found[0]


def _by_lists(
    images: ImageFiles, annotated: set[str], lists: Mapping[Path, Split]
) -> tuple[dict[Split, list[str]], tuple[str, ...]]:
    found: dict[Split, list[str]] = {}
    taken: dict[str, Split] = {}
    notes: list[str] = []
    for path, split in lists.items():
        names = [line for line in lines_of(path) if line.strip()]
        absent = []
        for name in names:
            key = images.find(name)
            if key is None or key not in annotated:
                absent.append(name)
            elif taken.setdefault(key, split) != split:
                raise DataError(
                    f"{path}: the image {name} is also in the list of the {taken[key]} split; training must not see "
                    "held-out images, so remove it from one of the lists"
                )
            elif key not in found.setdefault(split, []):
                found[split].append(key)
        if absent:
            notes.append(
                f"{path}: skipped {plural(len(absent), 'name')} without an image or without an annotation: "
                f"{listed(absent, 4)}"
            )
    notes += left_out(str(images.root), sorted(annotated - set(taken)))
    return {split: found[split] for split in SPLITS if split in found}, tuple(notes)


def object_splits(
    title: str,
    images: ImageFiles,
    found: Mapping[Split, AnnotatedImages],
    categories: Sequence[str],
    known: tuple[str, ...] | None,
    *,
    ids: Sequence[int] = (),
    notes: Iterable[str] = (),
    faults: Iterable[Fault] = (),
) -> Splits:
    """Return the splits of images with boxes. `faults` are those that do not belong to the images of one split.

    `categories` are the names of the categories in the order of their numbers, and `ids` the numbers themselves. With
    `known`, such as the classes of a model, objects of other categories are a fault. Boxes are clipped to their
    images. Raise `DataError` if there is no image, or no object in any of them.
    """
    names = tuple(class_name(name) for name in categories)
    check_names(title, names)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{title}: several categories are called {listed(twice)}; give each a name of its own")
    faults = [*(fault for one in found.values() for fault in one.faults), *faults]
    if not any(one.keys for one in found.values()):
        raise DataError("\n".join([f"{title} has no images that are annotated", *(fault.text for fault in faults)]))
    sources: dict[Split, Samples] = {}
    for split, one in found.items():
        kept, rows, more = _checked(f"{title}, {split} split" if len(found) > 1 else title, one)
        faults += more
        owners = np.array([one.objects[place].image for place in kept], np.int64)
        labels = np.array([one.objects[place].category for place in kept], np.int64)
        starts = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=len(one.keys)), dtype=np.int64)])
        targets = Targets("boxes", names, labels, starts, objects=rows, ids=tuple(ids))
        if known is not None:
            faults += _unknown(split, targets, known)
            targets = targets.renumbered([known.index(name) if name in known else -1 for name in names], known)
        inodes = [images.inodes[key] for key in one.keys]
        sources[split] = file_samples(images.root, one.keys, inodes, targets, one.ids)
    if not any(len(source.targets.values) for source in sources.values()):
        raise DataError("\n".join([f"{title}: no image has an object", *(fault.text for fault in faults)]))
    usable = {
        split: sources[split]
        for split in SPLITS
        if split in sources and (split == "train" or len(sources[split].targets.values))
    }
    skipped = [f"{title}: the {split} split is skipped, because it has no object" for split in sources.keys() - usable]
    faults += _empty(title, usable)
    return splits_from(usable, (*notes, *skipped), faults)


def _unknown(split: Split, targets: Targets, known: tuple[str, ...]) -> Iterator[Fault]:
    used = [name for place, name in enumerate(targets.names) if name not in known and (targets.values == place).any()]
    if used:
        count = sum(int((targets.values == targets.names.index(name)).sum()) for name in used)
        text = f"the {split} split has unknown classes: {listed(used)}; the known classes are: {listed(known, 20)}"
        yield unknown_class(split, count, text)


def _empty(title: str, sources: Mapping[Split, Samples]) -> Iterator[Fault]:
    """Yield a note about the images without objects, which are kept."""
    counts = {
        split: int((np.diff(one.targets.starts) == 0).sum())
        for split, one in sources.items()
        if one.targets.starts is not None
    }
    parts = ", ".join(plural(count, f"{split} image") for split, count in counts.items() if count)
    yield Fault(
        "without-objects", "note", sum(counts.values()), f"{title}: without any object: {parts}",
        "These images are learned as background, and count in the evaluation.",
        "Nothing needs to be done, unless objects in them were not annotated.",
    )  # fmt: skip


def _checked(where: str, one: AnnotatedImages) -> tuple[list[int], ObjectRows, list[Fault]]:
    """Return the places of the objects that can be used, by image, their columns, and the faults of the others."""
    objects = one.objects
    boxes = np.array([item.box for item in objects], np.float64).reshape(len(objects), 4)
    finite = np.isfinite(boxes).all(axis=1)
    known = np.array([item.category >= 0 for item in objects], np.bool_)
    inside = boxes.clip(0, 1)
    with np.errstate(invalid="ignore"):
        has_area = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        outside = has_area & ~(inside[:, 2:] > inside[:, :2]).all(axis=1)
        beyond = np.abs(boxes - inside).max(axis=1, initial=0) * (finite & has_area & ~outside)
    usable = finite & known & has_area & ~outside
    rows = np.array([(item.image, item.category, *item.box) for item in objects], np.float64).reshape(len(objects), 6)
    repeated = usable.copy()
    repeated[np.unique(rows, axis=0, return_index=True)[1]] = False
    cases: tuple[tuple[str, Severity, Any, str, str, str], ...] = (
        ("unknown-category", "error", ~known, "of a category that is not listed",
         "Training refuses the data, because it is not known what these objects are. This check skips them.",
         "Add the category, or correct the objects."),
        ("not-a-number", "error", ~finite, "whose box is not made of numbers",
         "Training refuses the data. This check skips these objects.", "Correct these boxes."),
        ("empty-box", "warning", finite & ~has_area, "whose box has no width or no height, or ends before it begins",
         "Training does not use these objects.", "Correct or remove these boxes."),
        ("outside-box", "warning", finite & outside, "whose box lies outside of the image",
         "Training does not use these objects.", "Correct these boxes: they may belong to an image of another size."),
        ("clipped-box", "warning", beyond > SLIGHT, "whose box reaches beyond the image",
         "These boxes are clipped to the image.", "Correct these boxes, or leave them to be clipped."),
        ("repeated-box", "warning", repeated, "with the class and the box of another one of the same image",
         "Each of these counts as an object of its own, so a model that finds the object once misses the others.",
         "Remove the copies, unless there are such objects."),
        ("slightly-clipped-box", "note", (beyond > 1e-9) & (beyond <= SLIGHT),
         "whose box reaches beyond the image by at most 1 % of its side",
         "These boxes are clipped to the image.", "Nothing needs to be done."),
    )  # fmt: skip
    faults: list[Fault] = []
    for kind, severity, wrong, text, effect, advice in cases:
        places = [objects[row].where for row in np.flatnonzero(wrong).tolist()]
        counted = f"{len(places):,} of {plural(len(objects), 'object')}"
        faults += fault_at(places, kind, severity, f"{where}: {counted} {text}", effect, advice)
    kept = sorted(np.flatnonzero(usable).tolist(), key=lambda row: objects[row].image)
    chosen = [objects[row] for row in kept]
    columns = ObjectRows(
        inside[kept],
        np.array([item.crowd for item in chosen], np.bool_),
        np.array([item.area for item in chosen], np.float64),
        np.array(one.sizes, np.int64).reshape(len(one.keys), 2),
        outline_column([item.outline for item in chosen]),
    )
    return kept, columns, faults
