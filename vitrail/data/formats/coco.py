"""Boxes, outlines and captions in COCO's JSON: one file per split, with lists of images, categories and annotations.

    annotations/instances_train2017.json    train2017/    ...        or    train/_annotations.coco.json    train/1.jpg

Images are found by their names below the folder of the data, wherever they lie. Categories are in the order of their
numbers, which the data's classes keep.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.faults import Fault, first_bytes, is_own_record
from vitrail.data.formats.annotated import (
    AnnotatedImages,
    Annotation,
    ImageFiles,
    fault_at,
    files_beside_images,
    is_in_masks,
    is_size,
    missing_images,
    object_splits,
    unlisted_images,
    unstated_sizes,
)
from vitrail.data.objects import Outline, Runs, box_around, packed_lengths
from vitrail.data.source import file_samples
from vitrail.data.splits import (
    CHOICE,
    Request,
    Split,
    SplitNames,
    Splits,
    check_chosen,
    left_out,
    named_splits,
    split_of,
    splits_from,
)
from vitrail.data.targets import Targets
from vitrail.data.texts import TextReader
from vitrail.errors import DataError, listed, plural

HEAD = 1 << 16

OTHERS = re.compile(r"(captions|person_keypoints|panoptic|image_info|stuff)_", re.I)
"""Beginnings of COCO's files that hold something else than boxes."""

LEAST_NUMBERS = 6
"""Smallest number of coordinates of a polygon, which has three points."""

TITLE = re.compile(r"^(?:instances|captions|annotations?|coco|_)+[-_.]*", re.I)
"""Beginning of a file's name before that of its split."""


def annotation_files(files: Iterable[Path]) -> list[Path]:
    """Return the COCO files among some files."""
    return [path for path in files if path.suffix.lower() == ".json" and not is_own_record(path) and _is_coco(path)]


def _is_coco(path: Path) -> bool:
    """Return True for a file with images, annotations or categories, but not with categories alone, which Label Studio
    writes beside YOLO's text."""
    head = first_bytes(path, HEAD)
    found = {*re.findall(rb'"(images|annotations|categories)"\s*:', head)}
    has_only_categories = found == {b"categories"} and len(head) < HEAD
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{") and bool(found) and not has_only_categories


def open_coco(request: Request) -> Splits:
    """Return the splits of COCO files. If texts are asked for, captions are preferred to boxes. Raise `DataError` if
    the files cannot be read, or hold something else than boxes or captions."""
    root, title = request.path, f"data {str(request.path)!r}"
    folder = root if root.is_dir() else root.parent
    folder = folder.parent if folder.name.lower() in ("annotations", "annotation", "labels") else folder
    found_files = annotation_files(files_beside_images(root))
    unread: tuple[str, ...] = ()
    captions = [path for path in found_files if path.name.lower().startswith("captions")]
    are_chosen = request.choice.text is not None or all(OTHERS.match(path.name) for path in found_files)
    if root.is_dir() and captions and are_chosen:
        others = sorted(path.relative_to(root).as_posix() for path in found_files if path not in captions)
        found_files, unread = captions, left_out(str(root), others)
    files, notes = _by_split(root, found_files, request.choice.splits)
    notes = (*unread, *notes)
    read = {split: _read(path) for split, path in files.items()}
    first = next(iter(read))
    if all(_holds_captions(one) for one in read.values()):
        return _captions(str(root), ImageFiles(folder), files, read, notes)
    categories = _categories(files[first], read[first])
    for split, path in files.items():
        if (other := _categories(path, read[split])) != categories:
            strange = dict(set(other.items()) ^ set(categories.items()))
            raise DataError(
                f"{path} and {files[first]} have different categories: {listed(list(strange.values()))}; give both "
                "files the same numbers and names"
            )
    images = ImageFiles(folder)
    found = {split: _images(files[split], one, images, split) for split, one in read.items()}
    for split, one in read.items():
        _add_objects(found[split], files[split], one, categories)
    faults = []
    if root.is_dir():
        listed_keys = {key for one in found.values() for key in one.keys}
        unlisted = sorted(key for key in images.inodes if key not in listed_keys and not is_in_masks(key))
        faults = unlisted_images(title, unlisted, "no COCO file lists them")
    return object_splits(
        title, images, found, [*categories.values()], request.classes,
        ids=list(categories), notes=notes, faults=faults,
    )  # fmt: skip


def _holds_captions(values: Mapping[str, Any]) -> bool:
    return any(isinstance(one, dict) and "caption" in one for one in values["annotations"][:100])


def _captions(
    title: str,
    images: ImageFiles,
    files: Mapping[Split, Path],
    read: Mapping[Split, Mapping[str, Any]],
    notes: Sequence[str],
) -> Splits:
    """Return the images of COCO files with their captions as texts."""
    sources, faults, reader = {}, [], TextReader()
    for split, values in read.items():
        result = _images(files[split], values, images, split, sized=False)
        rows = {number: row for row, number in enumerate(result.ids)}
        texts: list[tuple[str, ...]] = [()] * len(rows)
        strange = []
        known = {one["id"] for one in values["images"]}
        for one in values["annotations"]:
            number = one.get("image_id") if isinstance(one, dict) else None
            row = rows.get(number) if isinstance(number, int | str) else None
            if row is not None:
                texts[row] = tuple(dict.fromkeys(texts[row] + reader(one.get("caption"))))
            elif not (isinstance(number, int | str) and number in known):
                strange.append(f"image_id {number!r}")
        faults += [*result.faults, *_unknown_images(files[split], strange)]
        targets = Targets.of(texts, "texts", ())
        if not targets.known.any():
            raise DataError("\n".join([f"{files[split]}: no image has a caption", *(fault.text for fault in faults)]))
        inodes = [images.inodes[key] for key in result.keys]
        sources[split] = file_samples(images.root, result.keys, inodes, targets, result.ids)
    return splits_from(sources, (*notes, *reader.notes(f"data {title!r}")), faults)


def _unknown_images(path: Path, strange: Sequence[str]) -> list[Fault]:
    """Return the fault of annotations of images that are not listed, if there are any."""
    return fault_at(
        strange, "unknown-image", "error",
        f"{path}: {plural(len(strange), 'annotation')} of images that are not listed",
        "Training refuses the data. This check skips these annotations.",
        "List these images, or remove the annotations.",
    )  # fmt: skip


def _by_split(
    root: Path, files: Sequence[Path], chosen: SplitNames | None
) -> tuple[dict[Split, Path], tuple[str, ...]]:
    """Return the file of each split, and notes on files that are not read. Raise `DataError` if it is not clear which
    file that is."""
    if root.is_file():
        if chosen:
            raise DataError(f"{root} is a single file, which --splits cannot divide; leave --splits out")
        return {"train": root}, ()
    others = [path for path in files if OTHERS.match(path.name)]
    files = [path for path in files if path not in others] or list(files)
    names = {path: path.relative_to(root).as_posix() for path in files}
    skipped = left_out(str(root), [path.relative_to(root).as_posix() for path in others if path not in files])
    if len(files) == 1 and chosen is None:
        return {"train": files[0]}, skipped
    found: dict[Split, Path] = {}
    unnamed = []
    words = named_splits(path.stem for path in names) if chosen is None else {}
    for path, name in names.items():
        parent, _, last = name.rpartition("/")
        titled = None if chosen else split_of(f"{parent}/{TITLE.sub('', last)}".strip("/"))
        split = split_of(name, chosen) or titled or words.get(path.stem)
        if split is None:
            unnamed.append(name)
        elif split in found:
            raise DataError(
                f"{root} has two COCO files of the {split} split: {names[found[split]]} and {name}; name one of them "
                f"as the data, or choose: {CHOICE}"
            )
        else:
            found[split] = path
    if chosen:
        check_chosen(str(root), chosen, found, list(names.values()))
        return found, (*skipped, *left_out(str(root), unnamed))
    if unnamed:
        raise DataError(
            f"{root} has several COCO files, and the name of {unnamed[0]} is not that of a split; name one of them as "
            f"the data, or choose: {CHOICE}"
        )
    return found, skipped


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    for name in ("images", "annotations", "categories"):
        if isinstance(values, dict) and name == "categories" and _holds_captions(values):
            continue
        if not isinstance(values, dict) or not isinstance(values.get(name), list):
            raise DataError(
                f"{path} has no list of {name}; a file of COCO's boxes has images, annotations and categories"
            )
    return values


def _categories(path: Path, values: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of the categories by their numbers, in the order of the numbers."""
    found: dict[int, str] = {}
    for one in values["categories"]:
        if not isinstance(one, dict) or type(one.get("id")) is not int or not isinstance(one.get("name"), str):
            raise DataError(f"{path}: the category {one!r} has no number (id) and name")
        if one["id"] in found:
            raise DataError(f"{path}: two categories have the number {one['id']}: {found[one['id']]} and {one['name']}")
        found[one["id"]] = one["name"]
    if not found:
        raise DataError(f"{path} has no categories, so it does not say what the objects are")
    return dict(sorted(found.items()))


def _images(
    path: Path,
    values: Mapping[str, Any],
    images: ImageFiles,
    split: Split,
    *,
    sized: bool = True,
) -> AnnotatedImages:
    """Return the images of a file. If `sized` is true, the size of each image is needed."""
    result = AnnotatedImages()
    near = path.parent.relative_to(images.root).as_posix() if path.parent != images.root else ""
    missing, unstated = list[str](), list[str]()
    known = set()
    for one in values["images"]:
        if not isinstance(one, dict) or "id" not in one or not isinstance(one.get("file_name"), str):
            raise DataError(f"{path}: the image {one!r} has no number (id) and file_name")
        if not isinstance(one["id"], int | str):
            raise DataError(f"{path}: the number (id) of the image {one['file_name']} is {one['id']!r}")
        if one["id"] in known:
            raise DataError(f"{path}: two images have the number {one['id']}; give each image its own")
        known.add(one["id"])
        if (key := images.find(one["file_name"], near, split)) is None:
            missing.append(one["file_name"])
            continue
        result.keys.append(key)
        result.ids.append(one["id"])
        if not sized:
            continue
        sides: tuple[Any, Any] = one.get("height"), one.get("width")
        if not is_size(sides):
            sides = images.size(key, str(path))
            unstated.append(one["file_name"])
        result.sizes.append((int(sides[0]), int(sides[1])))
    if twice := [key for key, count in Counter(result.keys).items() if count > 1]:
        raise DataError(f"{path}: several entries are of the same image file: {listed(twice, 4)}; state each file once")
    result.faults += [*missing_images(str(path), missing), *unstated_sizes(f"{path}: the entries", unstated)]
    return result


def _add_objects(result: AnnotatedImages, path: Path, values: Mapping[str, Any], categories: Mapping[int, str]) -> None:
    """Add the objects of a file to its images, with their faults."""
    known = {one["id"] for one in values["images"]}
    rows = {number: row for row, number in enumerate(result.ids)}
    places = {number: place for place, number in enumerate(categories)}
    strange, with_keypoints, short, ignored = (list[str]() for _ in range(4))
    for number, one in enumerate(values["annotations"]):
        if not isinstance(one, dict):
            raise DataError(f"{path}: annotation {number} is not an object with fields")
        where = f"{path.name}, annotation {one.get('id', number)}"
        if "segments_info" in one:
            raise DataError(f"{path} is a panoptic file; only boxes and the outlines of objects are read")
        owner = one.get("image_id")
        row = rows.get(owner) if isinstance(owner, int | str) else None
        if row is None:
            if not (isinstance(owner, int | str) and owner in known):
                strange.append(f"{where}: image_id {owner!r}")
            continue
        with_keypoints += [where] * bool(one.get("keypoints"))
        result.objects.append(_annotation(path, where, one, row, result.sizes[row], places))
        polygons = outline if isinstance(outline := one.get("segmentation"), list) else []
        short += [where] * any(len(part) < LEAST_NUMBERS for part in polygons)
        ignored += [where] * bool(one.get("ignore") and not one.get("iscrowd"))
    result.faults += [
        *fault_at(
            ignored, "ignored", "note",
            f"{path}: {plural(len(ignored), 'object')} with the field ignore, which are read like all others",
            "They are learned and counted as all others, as in pycocotools.",
            "Set iscrowd to 1 for what is to be ignored.",
        ),
        *_unknown_images(path, strange),
        *fault_at(
            short, "short-polygon", "note",
            f"{path}: {plural(len(short), 'outline')} with a polygon of fewer than three points. Such polygons are "
            "skipped",
            "The other polygons of these objects, or else their boxes, are learned.", "Correct these outlines.",
        ),
        *fault_at(
            with_keypoints, "keypoints", "note",
            f"{path}: the keypoints of {plural(len(with_keypoints), 'object')} are not read",
            "Only boxes and outlines are learned.", "Nothing needs to be done.",
        ),
    ]  # fmt: skip


def _annotation(
    path: Path, where: str, one: Mapping[str, Any], row: int, size: tuple[int, int], places: Mapping[int, int]
) -> Annotation:
    height, width = size
    outline = _outline(path, where, one.get("segmentation"), size)
    box: Any = one.get("bbox")
    if isinstance(box, list) and len(box) == 5:
        raise DataError(f"{where}: the box has five numbers, so it is rotated; only upright boxes are read")
    if not box and outline is not None:
        sides = box_around(outline)
    else:
        is_read = isinstance(box, list) and len(box) == 4 and all(type(one) in (int, float) for one in box)
        x, y, across, down = map(float, box) if is_read else (math.nan,) * 4
        sides = x / width, y / height, (x + across) / width, (y + down) / height
    if (crowd := one.get("iscrowd")) not in (None, 0, 1, "0", "1"):  # True equals 1
        raise DataError(f"{where}: iscrowd is {crowd!r}, but it must be 0 or 1")
    area = one.get("area")
    is_stated = isinstance(area, int | float) and math.isfinite(area) and area > 0
    category = one.get("category_id")
    return Annotation(
        row,
        places.get(category, -1) if type(category) is int else -1,
        sides,
        where,
        crowd in (1, "1"),
        float(area) / (width * height) if is_stated and area is not None else math.nan,
        outline,
    )


def _outline(path: Path, where: str, value: Any, size: tuple[int, int]) -> Outline | None:
    """Return the outline of an object: polygons in pixels, run lengths, or none."""
    if not value:
        return None
    if isinstance(value, dict) and isinstance(value.get("size"), list) and "counts" in value:
        if tuple(value["size"]) != size:
            raise DataError(
                f"{where}: the run lengths are of {value['size']} pixels (height, width), and the image has "
                f"{list(size)}; both must have the same size"
            )
        counts = value["counts"]
        lengths = packed_lengths(counts) if isinstance(counts, str) else counts
        if not (
            isinstance(lengths, list)
            and all(type(length) is int and length >= 0 for length in lengths)
            and sum(lengths) == size[0] * size[1]
        ):
            raise DataError(f"{where}: the run lengths do not add up to the {size[0] * size[1]} pixels of the image")
        return Runs(size, counts.encode()) if isinstance(counts, str) else Runs.from_lengths(size, counts)
    if isinstance(value, list) and all(
        isinstance(part, list)
        and len(part) % 2 == 0
        and all(type(one) in (int, float) and math.isfinite(one) for one in part)
        for part in value
    ):
        parts = (part for part in value if len(part) >= LEAST_NUMBERS)
        polygons = [np.array(part, np.float64).reshape(-1, 2) / size[::-1] for part in parts]
        return tuple(polygons) or None
    raise DataError(f"{where} of {path}: the segmentation is neither polygons [[x, y, ...], ...] nor run lengths")
