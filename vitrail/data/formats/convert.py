"""Data with boxes or masks, written in the format of COCO, YOLO or Pascal VOC, or as masks.

Images are copied byte for byte. `convert` returns notes with the number of things that a format cannot express.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from vitrail.data.formats.masks import is_special
from vitrail.data.formats.pack import encoded
from vitrail.data.objects import IGNORED, Mask, Objects, Runs, box_around
from vitrail.data.pixels.decode import image_size_of, without_suffix
from vitrail.data.source import Samples, samples_of
from vitrail.data.splits import Splits
from vitrail.errors import DataError, UndecodableImage, listed, plural
from vitrail.files import check_new_folder, replacing_folder

AnnotationFormat = Literal["coco", "yolo", "voc", "masks"]

NAMES: dict[str, str] = {"train": "train", "validation": "val", "test": "test"}
"""Names of the splits in folders and files."""

BACKGROUND = "background"
"""Class of the pixels outside of all objects, if boxes become masks."""


def convert(
    splits: Splits, destination: Path, to: AnnotationFormat, progress: Callable[[int], None] = lambda done: None
) -> tuple[str, ...]:
    """Write all splits into a new folder, and return notes on what the format cannot express.

    A class in a mask becomes one object, because a mask does not separate objects. Raise `DataError` if the data has
    neither boxes nor masks, or if an image cannot be read, and `DestinationError` if the folder is not empty.
    """
    if splits.target_kind not in ("boxes", "mask"):
        raise DataError(f"{splits.title} has neither boxes nor masks, so it cannot be written as {to}; leave out --to")
    check_new_folder(destination, (), overwrite=False)
    sources = {NAMES[split]: samples_of(source) for split, source in splits.sources.items() if len(source)}
    with replacing_folder("the data", destination, ()) as folder:
        writer = WRITERS[to](folder, sources)
        done = itertools.count(1)
        for split, source in sources.items():
            stems = _stems(source)
            for index in range(len(source)):
                sample = source[index]
                data, suffix = encoded(sample)
                try:
                    size = image_size_of(sample.image)
                    if isinstance(sample.target, Objects):
                        sample.target.check_size(size)
                    target = writer.fitting(sample.target, size)
                except UndecodableImage as error:
                    raise DataError(f"{sample.key} of {splits.title}: {error}") from error
                path = folder / writer.images(split) / f"{stems[index]}.{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                writer.write(split, path, size, target, source, index)
                progress(next(done))
        writer.finish()
    return tuple(f"{plural(count, noun)} {text}" for (noun, text), count in writer.lost.items())


def _stems(source: Samples) -> list[str]:
    """Return a name of its own for each image, without a suffix. Images of different folders keep these in their names,
    and those that still share one, such as 1.jpg and 1.PNG, get a number."""
    keys = [Path(without_suffix(source.key(index))) for index in range(len(source))]
    counts = Counter(key.name.casefold() for key in keys)
    names: dict[str, str] = {}
    for key in keys:
        stem = key.name if counts[key.name.casefold()] == 1 else "_".join(key.parts)
        numbered = (f"{stem}_{number}" for number in itertools.count(2))
        name = next(one for one in itertools.chain([stem], numbered) if one.casefold() not in names)
        names[name.casefold()] = name
    return list(names.values())


class _Writer(ABC):
    """Writes the annotations of one image after another."""

    def __init__(self, folder: Path, sources: Mapping[str, Samples]) -> None:
        self.folder = folder
        self.names = next(iter(sources.values())).classes
        self.lost: Counter[tuple[str, str]] = Counter()
        """Numbers of things that the format cannot express. A key is a noun and the rest of a sentence about it."""
        self.numbers: Sequence[int] = ()  # of the classes in the format
        self.begin(sources)
        ids = next(iter(sources.values())).targets.ids
        if ids and tuple(self.numbers) != ids:
            self.lost["class", f"whose numbers ({listed([*map(str, ids)])}) are not kept"] = len(ids)

    def begin(self, sources: Mapping[str, Samples]) -> None:  # noqa: B027
        """Prepare for all splits."""

    def images(self, split: str) -> str:
        """Return the folder of the images of a split."""
        return f"images/{split}"

    def fitting(self, target: Any, size: tuple[int, int]) -> Any:
        """Return a target in the form that the format expresses."""
        if not isinstance(target, Mask):
            return target
        found = objects_of_mask(target, size)
        if found.areas.sum() < 1 - 0.5 / math.prod(size):
            self.lost["mask", "with pixels without a class, which become pixels outside of all objects"] += 1
        return found

    @abstractmethod
    def write(self, split: str, path: Path, size: tuple[int, int], target: Any, source: Samples, index: int) -> None:
        """Write the annotation of an image, which lies at `path` and has a height and width."""

    def finish(self) -> None:  # noqa: B027
        """Write what belongs to all images."""

    def without_crowds(self, target: Objects) -> Objects:
        """Return the objects that are not crowds, which only COCO can express."""
        if crowds := int(target.crowd.sum()):
            self.lost["box", "around many objects (a crowd), skipped because only COCO can express it"] += crowds
        kept = np.flatnonzero(~target.crowd)
        outlines = tuple(target.outlines[row] for row in kept) if target.outlines else ()
        return replace(
            target, labels=target.labels[kept], boxes=target.boxes[kept], crowd=target.crowd[kept],
            areas=target.areas[kept], outlines=outlines,
        )  # fmt: skip


def objects_of_mask(mask: Mask, size: tuple[int, int]) -> Objects:
    """Return one object for each class in a mask, with the pixels of the class as its outline."""
    indices = mask.indices(size)
    labels = [int(label) for label in np.unique(indices) if label != IGNORED]
    outlines = tuple(Runs.of(indices == label) for label in labels)
    areas = np.array([float((indices == label).mean()) for label in labels], np.float64)
    return Objects.of(labels, list(map(box_around, outlines)), areas=areas, outlines=outlines, size=size)


class CocoWriter(_Writer):
    """Writes `annotations/instances_SPLIT.json` and `images/SPLIT`. Numbers of categories and images are kept."""

    def begin(self, sources: Mapping[str, Samples]) -> None:
        self.numbers = next(iter(sources.values())).targets.ids or range(1, len(self.names) + 1)
        categories = [{"id": number, "name": name} for number, name in zip(self.numbers, self.names, strict=True)]
        self.files: dict[str, dict[str, list[Any]]] = {
            split: {"images": [], "annotations": [], "categories": categories} for split in sources
        }

    def write(self, split: str, path: Path, size: tuple[int, int], target: Any, source: Samples, index: int) -> None:
        file = self.files[split]
        height, width = size
        number = image_id(source, index, index + 1)
        file["images"].append({"id": number, "file_name": path.name, "height": height, "width": width})
        for row, label in enumerate(target.labels.tolist()):
            left, top, right, bottom = (target.boxes[row] * (width, height, width, height)).tolist()
            one: dict[str, Any] = {
                "id": len(file["annotations"]) + 1,
                "image_id": number,
                "category_id": self.numbers[label],
                "bbox": [_short(left), _short(top), _short(right - left), _short(bottom - top)],
                "area": _short(target.area(row, size)),
                "iscrowd": int(target.crowd[row]),
            }
            outline = target.outlines[row] if target.outlines else None
            if isinstance(outline, Runs):
                one["segmentation"] = {"size": list(outline.size), "counts": outline.counts.decode()}
            elif outline is not None:
                one["segmentation"] = [[_short(x) for x in (part * (width, height)).ravel()] for part in outline]
            file["annotations"].append(one)

    def finish(self) -> None:
        (self.folder / "annotations").mkdir()
        for split, values in self.files.items():
            path = self.folder / "annotations" / f"instances_{split}.json"
            text = json.dumps(values, ensure_ascii=False)
            path.write_text(text, encoding="utf-8", errors="backslashreplace")


def image_id(source: Samples, index: int, otherwise: int) -> int | str:
    """Return the number or the name that the data gives an image, or `otherwise` if it gives none."""
    part, place = source.place(index)
    ids = getattr(source.readers[part], "ids", ())
    return ids[place] if ids else otherwise


def _short(value: float) -> float:
    """Return a number of pixels without the digits that are rounding."""
    return round(float(value), 4)


class YoloWriter(_Writer):
    """Writes `images/SPLIT`, `labels/SPLIT` and `data.yaml`."""

    def begin(self, sources: Mapping[str, Samples]) -> None:
        import yaml  # type: ignore[import-untyped]

        self.numbers = range(len(self.names))
        described = {**{split: f"images/{split}" for split in sources}, "names": dict(enumerate(self.names))}
        text = yaml.safe_dump(described, sort_keys=False, allow_unicode=True)
        (self.folder / "data.yaml").write_text(text, encoding="utf-8")

    def write(self, split: str, path: Path, size: tuple[int, int], target: Any, source: Samples, index: int) -> None:
        target = self.without_crowds(target)
        lines = []
        for row, label in enumerate(target.labels.tolist()):
            outline = target.outlines[row] if target.outlines else None
            if isinstance(outline, Runs):
                self.lost["outline", "of pixels instead of polygons, of which YOLO gets the boxes"] += 1
            elif outline is not None and len(outline) > 1:
                self.lost["outline", "of several polygons, of which YOLO gets the boxes"] += 1
            if isinstance(outline, tuple) and len(outline) == 1:
                corners = outline[0].clip(0, 1)
                if (corners != outline[0]).any():
                    self.lost["outline", "partly beyond the image, with corners moved to its border"] += 1
                if (np.abs(target.boxes[row] - box_around((corners,))) * np.tile(size[::-1], 2)).max() >= 1:
                    self.lost["box", "other than that around the outline, which YOLO gets instead"] += 1
                if len(corners) == 4:  # read as the corners of a rotated box otherwise
                    corners = np.concatenate([corners, corners[-1:]])
                numbers = corners.ravel().tolist()
            else:
                left, top, right, bottom = target.boxes[row].tolist()
                numbers = [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
            lines.append(" ".join([str(label), *(f"{number:.8g}" for number in numbers)]) + "\n")
        place = self.folder / "labels" / split / f"{path.stem}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("".join(lines), encoding="utf-8")


class VocWriter(_Writer):
    """Writes `JPEGImages`, `Annotations` and `ImageSets/Main`."""

    def begin(self, sources: Mapping[str, Samples]) -> None:
        stems = [stem for source in sources.values() for stem in _stems(source)]
        if twice := [stem for stem, count in Counter(stems).items() if count > 1]:
            raise DataError(
                f"images of several splits have the same names, which VOC cannot express: {listed(twice, 4)}; rename "
                "them"
            )
        if wrong := [
            stem for stem in stems if re.search(r"[\0-\x08\n-\x1f\x85\u2028\u2029\ud800-\udfff\ufffe\uffff]", stem)
        ]:
            raise DataError(
                "VOC names each image on a line of text and in XML, which cannot hold the control characters, line "
                f"breaks or bytes in {listed([*map(repr, wrong)], 4)}; rename these images"
            )
        self.lists: dict[str, list[str]] = {split: [] for split in sources}
        self.unused = set(range(len(self.names)))
        (self.folder / "Annotations").mkdir()

    def images(self, split: str) -> str:
        return "JPEGImages"

    def write(self, split: str, path: Path, size: tuple[int, int], target: Any, source: Samples, index: int) -> None:
        target = self.without_crowds(target)
        self.lists[split].append(path.stem)
        root = ElementTree.Element("annotation")
        _add(root, "filename", path.name)
        place = ElementTree.SubElement(root, "size")
        for name, value in (("width", size[1]), ("height", size[0]), ("depth", 3)):
            _add(place, name, str(value))
        self.unused -= set(target.labels.tolist())
        for row, label in enumerate(target.labels.tolist()):
            one = ElementTree.SubElement(root, "object")
            _add(one, "name", self.names[label])
            for name in ("truncated", "difficult"):
                _add(one, name, "0")
            box = ElementTree.SubElement(one, "bndbox")
            sides = (target.boxes[row] * np.tile(size[::-1], 2)).tolist()
            for name, value in zip(("xmin", "ymin", "xmax", "ymax"), sides, strict=True):
                _add(box, name, f"{_short(value):.12g}")
            if target.outlines and target.outlines[row] is not None:
                self.lost["outline", "skipped, because VOC has boxes only"] += 1
        ElementTree.indent(root)
        ElementTree.ElementTree(root).write(self.folder / "Annotations" / f"{path.stem}.xml", encoding="utf-8")

    def finish(self) -> None:
        if self.unused:
            names = listed([self.names[label] for label in sorted(self.unused)])
            self.lost["class", f"without an object ({names}), which VOC cannot express"] = len(self.unused)
        lists = self.folder / "ImageSets" / "Main"
        lists.mkdir(parents=True)
        for split, stems in self.lists.items():
            (lists / f"{split}.txt").write_text("".join(f"{stem}\n" for stem in stems), encoding="utf-8")


def _add(parent: ElementTree.Element, name: str, text: str) -> None:
    ElementTree.SubElement(parent, name).text = text


class MaskWriter(_Writer):
    """Writes `images/SPLIT`, `masks/SPLIT` and `classes.txt`. Pixels outside of all objects are of the class
    background, and a smaller object covers a larger one."""

    def begin(self, sources: Mapping[str, Samples]) -> None:
        self.first = int(any(source.target_kind == "boxes" for source in sources.values()))
        self.numbers = range(self.first, self.first + len(self.names))
        names = [BACKGROUND] * self.first + list(self.names)
        if len(set(names)) < len(names) or len(names) > IGNORED:
            raise DataError(
                f"{plural(len(names), 'class')} with {BACKGROUND} cannot be written as masks, which have up "
                f"to {IGNORED} classes with different names; rename or remove some"
            )
        if strange := [name for name in names if is_special(name)]:
            raise DataError(
                f"masks cannot have the class names {listed(strange)}: in classes.txt, a line that begins with # is a "
                "comment, and three numbers at the end of a line are a colour; rename the classes"
            )
        (self.folder / "classes.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")

    def fitting(self, target: Any, size: tuple[int, int]) -> Any:
        if isinstance(target, Mask):
            return target.indices(size)
        found = np.zeros(size, np.uint8)
        for row in np.flatnonzero(target.crowd).tolist():
            found[target.mask(row, size)] = IGNORED
        labels = target.labels[~target.crowd]
        if joined := int((np.bincount(labels)[labels] > 1).sum()):
            self.lost["object", "in images with several of the same class, which masks do not separate"] += joined
        areas = (target.boxes[:, 2:] - target.boxes[:, :2]).prod(axis=1)
        for row in np.argsort(-areas, kind="stable").tolist():
            if not target.crowd[row]:
                found[target.mask(row, size)] = int(target.labels[row]) + self.first
                if not (target.outlines and target.outlines[row] is not None):
                    self.lost["object", "without an outline, drawn as a box"] += 1
        return found

    def write(self, split: str, path: Path, size: tuple[int, int], target: Any, source: Samples, index: int) -> None:
        place = self.folder / "masks" / split / f"{path.stem}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(target).save(place)


WRITERS: dict[AnnotationFormat, type[_Writer]] = {
    "coco": CocoWriter,
    "yolo": YoloWriter,
    "voc": VocWriter,
    "masks": MaskWriter,
}
