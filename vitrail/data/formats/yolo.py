"""Boxes and polygons in YOLO's text: a file for each image, and a line for each object.

    images/train/1.jpg    labels/train/1.txt    data.yaml           or    1.jpg    1.txt    classes.txt

A line has the number of the class, from 0, and four numbers (centre x, centre y, width, height) or the corners of a
polygon (x, y, x, y, ...), all as fractions of the image. An image without a file has no objects.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]

from vitrail.data.faults import Fault, shown
from vitrail.data.formats.annotated import (
    AnnotatedImages,
    Annotation,
    ImageFiles,
    divided,
    fault_at,
    is_in_masks,
    lines_of,
    names_in,
    object_splits,
)
from vitrail.data.formats.folder import IMAGES, word
from vitrail.data.objects import box_around
from vitrail.data.splits import SPLITS, Request, Split, SplitNames, Splits, left_out
from vitrail.errors import DataError, listed, plural

NAMES = ("classes.txt", "obj.names", "_darknet.labels", "labels.txt")
"""Files with the name of a class on each line."""

LINE = re.compile(r"\s*\d+(\.0*)?(\s+-?[\d.]+(e-?\d+)?){4,}\s*", re.I)


READ = frozenset({"path", "train", "val", "test", "nc", "names"})
"""Fields of a description that are read."""


def holds_yolo(root: Path, files: Iterable[Path]) -> bool:
    """Return True if `files`, which are `root` or lie in it, have a description of YOLO data, or if there are labels in
    text in `root`."""
    return any(path in (root, root / path.name) and _described(path) for path in files) or (
        root.is_dir() and next(_label_files(root), None) is not None
    )


def _description(root: Path) -> Path | None:
    """Return the file in a folder that describes the data. Raise `DataError` if there are several, or if a file cannot
    be read."""
    paths = [path for pattern in ("*.yaml", "*.yml") for path in sorted(root.glob(pattern)) if path.is_file()]
    found = [path for path in paths if lines_of(path, "replace") and _described(path)]
    if len(found) > 1:
        raise DataError(f"{root} has several descriptions of YOLO data: {listed([p.name for p in found])}; name one")
    return found[0] if found else None


def _described(path: Path) -> dict[str, Any]:
    """Return the content of a description, or nothing if the file is another kind of YAML. Raise `DataError` if it is
    not valid."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        return {}
    text, fault = "", None
    try:
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")  # of which YAML takes only UTF-8
        values, as_text = yaml.safe_load(text), yaml.load(text, Loader=yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        fault, values = error, dict.fromkeys(re.findall(r"^(\w+)\s*:", text, re.MULTILINE))
    if not (isinstance(values, dict) and "names" in values and {"train", "val", "test", "nc"} & values.keys()):
        return {}
    if fault is not None:
        raise DataError(f"{path} is not valid YAML: {' '.join(str(fault).split())}; correct it") from fault
    root = yaml.compose(text)
    for node in (root, *(value for key, value in root.value if key.value == "names")):
        keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        if twice := [key for key, count in Counter(keys).items() if count > 1 and (node is not root or key in READ)]:
            raise DataError(f"{path} states {twice[0]} twice, so one of its values would be lost; remove one")
    return {**values, "names": as_text["names"]}  # the class `no` is not the value False


def _label_files(root: Path) -> Iterator[Path]:
    """Yield text files with labels, in a folder of labels or beside images with a list of classes."""
    folders = [root, *(place for place in sorted(root.iterdir()) if place.is_dir())]
    for folder in folders:
        named = folder.name.lower() in ("labels", "label") or any((folder / name).is_file() for name in NAMES)
        for path in itertools.chain(folder.glob("*.txt"), folder.glob("*/*.txt")) if named else ():
            if path.name not in NAMES and _begins_with_labels(path):
                yield path


def _begins_with_labels(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return LINE.fullmatch(file.readline(1 << 16)) is not None
    except (OSError, UnicodeDecodeError):
        return False


def open_yolo(request: Request) -> Splits:
    """Return the splits of images with YOLO's labels. Raise `DataError` if they cannot be read."""
    root = request.path
    description = root if root.is_file() else _description(root)
    folder = root.parent if root.is_file() else root
    title = f"data {str(root)!r}"
    values = _described(description) if description is not None else {}
    stated, train = Path(str(values.get("path"))), values.get("train")
    if root.is_file() and stated.is_absolute() and isinstance(train, str):
        folder = stated if (stated / train).exists() and not (folder / train).exists() else folder
    if "kpt_shape" in values:
        raise DataError(f"{description} describes keypoints (kpt_shape); only boxes and polygons are read")
    images = ImageFiles(folder)
    names = _class_names(folder, description, values, images.others)
    splits, notes = _splits(folder, description, values, images, request.choice.splits)
    texts = {name for name in images.others if name.lower().endswith(".txt")}
    found = {split: _images(folder, keys, texts, len(names)) for split, keys in splits.items()}
    counts = [found_one for one in found.values() for found_one in one.objects]
    if counts and all(item.outline is not None and len(item.outline[0]) == 4 for item in counts):  # type: ignore[index]
        notes = (*notes, f"{title}: every object has four corners; if they are rotated boxes, upright ones are learned")
    faults = [*_beyond(title, list(found.values()), names), *_alone(folder, images, texts)]
    return object_splits(title, images, found, names, request.classes, notes=notes, faults=faults)


def _class_names(folder: Path, description: Path | None, values: Mapping[str, Any], others: Sequence[str]) -> list[str]:
    names = values.get("names")
    if isinstance(names, dict):
        if {*names} != {str(number) for number in range(len(names))}:
            raise DataError(f"{description}: the numbers of the names {sorted(names)} are not 0, 1, 2 and so on")
        names = [names[str(number)] for number in range(len(names))]
    if names is None:
        lists = [name for name in others if name.rpartition("/")[2].lower() in NAMES]
        if not lists:
            if others_yaml := [name for name in others if name.endswith((".yaml", ".yml")) and "/" not in name]:
                raise DataError(
                    f"{folder} has YOLO's labels, but {others_yaml[0]} does not describe them: it is valid YAML with "
                    "names, and with train, val, test or nc; correct it"
                )
            raise DataError(
                f"{folder} has YOLO's labels but no names of classes; add a classes.txt with a name on each line, or a "
                "data.yaml"
            )
        names = names_in([folder / name for name in lists])
    if not isinstance(names, list) or not names:
        raise DataError(f"{description or folder}: names are a list of the names of the classes, and not {names!r}")
    if "nc" in values and str(values["nc"]) != str(len(names)):
        raise DataError(f"{description} has {len(names)} names, but states nc: {values['nc']}; correct one of them")
    return [str(name) for name in names]


def _splits(
    folder: Path,
    description: Path | None,
    values: Mapping[str, Any],
    images: ImageFiles,
    chosen: SplitNames | None,
) -> tuple[dict[Split, list[str]], tuple[str, ...]]:
    """Return the images of each split, and notes."""
    keys = [key for key in images.inodes if not is_in_masks(key)]
    read = (values.get(name) for name in ("train", "val", "test"))
    stated = dict(zip(SPLITS, (one if isinstance(one, list) else [one] if one else [] for one in read), strict=True))
    if description is not None and chosen is None and any(stated.values()):
        found: dict[Split, list[str]] = {}
        notes: list[str] = []
        for split in SPLITS:
            some: list[str] = []
            for entry in stated[split]:
                taken = () if entry in stated["train"] else found.get("train", ())
                own = _entry(folder, values, images, keys, str(entry), taken)
                if own is None and split == "train":
                    raise DataError(
                        f"{description}: {entry!r} is neither a folder with images below {folder} nor a list of images"
                    )
                if own is None:
                    notes.append(f"{description}: the {split} split {entry!r} has no images, so it is skipped")
                some += own or ()
            if some:
                found[split] = list(dict.fromkeys(some))
        if not found:
            raise DataError(f"{description} names no images below {folder}; correct its train, val and test")
        return found, (
            *notes,
            *left_out(str(folder), sorted(set(keys) - {key for some in found.values() for key in some})),
        )
    return divided(images, keys, chosen)


def _entry(
    folder: Path,
    values: Mapping[str, Any],
    images: ImageFiles,
    keys: Sequence[str],
    entry: str,
    taken: Collection[str],
) -> list[str] | None:
    """Return the images of an entry of a description, a folder or a list of images in a file, or None if there is
    neither. The description can come from another machine, so the end of a path decides. The
    folder of an entry is missing if only the end of the entry fits, and only to images `taken` by another entry."""
    parts, own = (
        [part for part in text.replace("\\", "/").split("/") if part not in ("", ".", "..")]
        for text in (f"{values.get('path', '')}/{entry}", entry)
    )
    for first in range(len(parts)):
        place = "/".join(parts[first:])
        if (folder / place).is_file() and place.lower().endswith(".txt"):
            lines = lines_of(folder / place)
            found = {line: images.find(line) for line in lines if line.strip()}
            if absent := [line for line, key in found.items() if key is None]:
                raise DataError(
                    f"{folder / place} names {plural(len(absent), 'image')} that cannot be found: {shown(absent)}; "
                    "add them, or remove their lines"
                )
            return [key for key in found.values() if key is not None]
        some = [key for key in keys if key.startswith(f"{place}/")]
        if some and (len(parts) - first >= len(own) or not set(some) <= {*taken}):
            return some
    return None


def _label_of(key: str, texts: set[str]) -> str | None:
    """Return the label file of an image: in the folder labels instead of images, or else beside the image."""
    stem = re.sub(r"\.[^./]*$", ".txt", key)
    parts = stem.split("/")
    places = [place for place, part in enumerate(parts[:-1]) if word(part) in IMAGES]
    names = ("labels", "label", "Labels", "LABELS")
    moved = ["/".join([*parts[:place], name, *parts[place + 1 :]]) for place in reversed(places) for name in names]
    return next((name for name in (*moved, stem, f"labels/{parts[-1]}") if name in texts), None)


def _images(folder: Path, keys: Sequence[str], texts: set[str], classes: int) -> AnnotatedImages:
    result = AnnotatedImages(list(keys), [(0, 0)] * len(keys))
    broken: list[str] = []
    for row, key in enumerate(keys):
        if (name := _label_of(key, texts)) is None:
            continue
        for number, line in enumerate(lines_of(folder / name), start=1):
            if not (cells := line.split()):
                continue
            where = f"{name}, line {number}"
            if (found := _annotation(folder / name, row, cells, where, classes)) is None:
                broken.append(f"{where} ({line.strip()[:60]})")
            else:
                result.objects.append(found)
    result.faults += fault_at(
        broken, "broken-line", "error", f"{folder}: {plural(len(broken), 'line')} of labels that cannot be read",
        "Training refuses the data. This check skips these lines.",
        "Write the number of the class, and then four numbers of a box or the corners of a polygon.",
    )  # fmt: skip
    return result


def _annotation(path: Path, row: int, cells: Sequence[str], where: str, classes: int) -> Annotation | None:
    """Return the object of a line, or None if the line cannot be read."""
    try:
        values = [float(cell) for cell in cells]
    except ValueError:
        return None
    if len(values) == 6:
        raise DataError(f"{path} has lines of six numbers, which are predictions with a probability and not labels")
    is_box = len(values) == 5
    if not (is_box or (len(values) >= 7 and len(values) % 2)) or not values[0].is_integer():
        return None
    category = int(values[0]) if 0 <= values[0] < classes else -1
    where = where if category >= 0 else f"{where} (class {int(values[0])})"
    if is_box:
        x, y, width, height = values[1:]
        return Annotation(row, category, (x - width / 2, y - height / 2, x + width / 2, y + height / 2), where)
    corners = np.array(values[1:], np.float64).reshape(-1, 2)
    return Annotation(row, category, box_around((corners,)), where, outline=(corners,))


def _beyond(title: str, found: Sequence[AnnotatedImages], names: Sequence[str]) -> Iterator[Fault]:
    """Yield a fault that suggests why numbers of classes are beyond the names, if the numbers seem to begin with 1."""
    unknown = [item.where for one in found for item in one.objects if item.category < 0]
    numbers = {int(match[1]) for where in unknown if (match := re.search(r"\(class (\d+)\)$", where))}
    has_first = any(item.category == 0 for one in found for item in one.objects)
    if numbers == {len(names)} and not has_first:
        yield Fault(
            "numbers-from-1", "error", len(unknown),
            f"{title}: the numbers of classes go from 1 to {len(names)}, and YOLO counts from 0; subtract 1 from all",
            "Training refuses the data, because every object would get the class after its own.",
            "Subtract 1 from the number of the class on every line.",
        )  # fmt: skip


def _alone(folder: Path, images: ImageFiles, texts: set[str]) -> list[Fault]:
    """Return the faults of label files that belong to no image, or to several."""
    used = Counter(name for key in images.inodes if (name := _label_of(key, texts)) is not None)
    alone = sorted(name for name in texts - used.keys() if _begins_with_labels(folder / name))
    shared = sorted(name for name, count in used.items() if count > 1)
    return [
        *fault_at(
            shared, "labels-of-several-images", "warning",
            f"{folder}: {plural(len(shared), 'file')} of labels with several images of the same name",
            "Each of these images gets the labels.", "Rename the images, or remove those that are not annotated.",
        ),
        *fault_at(
            alone, "labels-without-image", "warning",
            f"{folder}: {plural(len(alone), 'file')} of labels without an image of the same name",
            "These labels are not used.", "Add the images, or remove the files.",
        ),
    ]  # fmt: skip
