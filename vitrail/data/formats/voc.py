"""Boxes in Pascal VOC's XML: a file for each image.

    Annotations/1.xml    JPEGImages/1.jpg    ImageSets/Main/train.txt        or    train/1.xml    train/1.jpg

Lists in ImageSets/Main divide the images into splits, or else the names of folders do. Coordinates are used as they
are: 0 is the left or upper edge of the image, as labelling programs of today write it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from vitrail.data.faults import first_bytes
from vitrail.data.formats.annotated import (
    AnnotatedImages,
    Annotation,
    ImageFiles,
    divided,
    fault_at,
    is_in_masks,
    is_size,
    missing_images,
    object_splits,
    unlisted_images,
    unstated_sizes,
)
from vitrail.data.pixels.decode import without_suffix
from vitrail.data.splits import Request, Splits, split_of
from vitrail.errors import DataError, plural


def holds_voc(files: Iterable[Path]) -> bool:
    """Return True if annotations in XML are among some files. The first XML file of each folder decides."""
    described = [path for path in files if path.suffix.lower() == ".xml" and not path.name.startswith(".")]
    first = {path.parent: path for path in reversed(described)}
    # CVAT's annotations begin with <annotations>.
    return any(re.search(rb"<annotation[\s>]", first_bytes(path, 1 << 12)) for path in first.values())


def open_voc(request: Request) -> Splits:
    """Return the splits of images with XML files. Raise `DataError` if a file cannot be read."""
    root = request.path
    folder = root.parent if root.name.lower() in ("annotations", "annotation", "xml", "labels") else root
    title = f"data {str(root)!r}"
    images = ImageFiles(folder)
    files = [name for name in images.others if name.lower().endswith(".xml") and "/." not in f"/{name}"]
    read = {name: one for name in files if (one := _read(folder / name)) is not None}
    of_image: dict[str, str] = {}
    missing, renamed = list[str](), list[str]()
    files_named = {key.rpartition("/")[2] for key in images.inodes}
    for name, one in read.items():
        place, _, file = name.rpartition("/")
        stem, stated = file[:-4], one.findtext("filename", "").strip()
        key = images.find(stem, place, split_of(name)) or images.find(stated, place, split_of(name))
        if key is None:
            missing.append(name)
        elif key in of_image:
            raise DataError(f"{title}: {of_image[key]} and {name} both belong to the image {key}; keep one of them")
        else:
            of_image[key] = name
            is_other = stated != key.rpartition("/")[2] and without_suffix(stated) != stem
            renamed += [name] * (is_other and stated in files_named)
    lists = sorted(folder.glob("ImageSets/Main/*.txt")) or sorted(folder.glob("ImageSets/*.txt"))
    splits, notes = divided(images, sorted(of_image), request.choice.splits, lists)
    names = sorted({one.findtext("name", "").strip() for tree in read.values() for one in tree.iter("object")})
    found = {
        split: _images(images, [(key, of_image[key]) for key in keys], read, names) for split, keys in splits.items()
    }
    unlisted = sorted(key for key in images.inodes if key not in of_image and not is_in_masks(key))
    if not found:
        raise DataError("\n".join([f"{title}: no list in ImageSets names an image with an XML file", *notes]))
    faults = [
        *missing_images(f"{title}: annotations in XML", missing),
        *unlisted_images(title, unlisted, "no XML file belongs to them"),
        *fault_at(
            renamed,
            "other-image",
            "warning",
            f"{title}: {plural(len(renamed), 'annotation')} whose filename is that of another image",
            "The name of the XML file decides, so these objects belong to the image of this name.",
            "Rename the XML files, or correct their filename.",
        ),
    ]
    return object_splits(title, images, found, names, request.classes, notes=notes, faults=faults)


def _read(path: Path) -> ElementTree.Element | None:
    """Return the root of an annotation, or None if the file is another kind of XML."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:
        raise DataError(f"{path} is not valid XML: {error}") from error
    return root if root.tag == "annotation" else None


def _images(
    images: ImageFiles, pairs: Sequence[tuple[str, str]], read: dict[str, ElementTree.Element], names: Sequence[str]
) -> AnnotatedImages:
    result = AnnotatedImages()
    difficult, outlined, unstated = list[str](), list[str](), list[str]()
    for key, name in pairs:
        tree = read[name]
        height, width = (_number(tree.findtext(f"size/{side}")) for side in ("height", "width"))
        if not is_size((height, width)):
            height, width = images.size(key, name)
            unstated.append(name)
        row = len(result.keys)
        result.keys.append(key)
        result.sizes.append((int(height), int(width)))
        for number, one in enumerate(tree.iter("object")):
            if one.find("robndbox") is not None:
                raise DataError(f"{images.root / name} has rotated boxes (robndbox); only upright boxes are read")
            left, top, right, bottom = (
                _number(one.findtext(f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax")
            )
            difficult += [name] * (one.findtext("difficult", "0").strip() == "1")
            outlined += [name] * (one.find("polygon") is not None)
            result.objects.append(
                Annotation(
                    row,
                    names.index(one.findtext("name", "").strip()),
                    (left / width, top / height, right / width, bottom / height),
                    name
                    if 0 <= left < right and 0 <= top < bottom
                    else f"{name}, line {_line(images.root / name, number)}",
                )
            )
    result.faults += [
        *unstated_sizes(f"{images.root}: annotations", unstated),
        *fault_at(
            difficult, "difficult", "note",
            f"{images.root}: {plural(len(difficult), 'object')} marked as difficult, which are read like all others",
            "They are learned and counted as all others.", "Nothing needs to be done.",
        ),
        *fault_at(
            outlined, "polygons", "note",
            f"{images.root}: {plural(len(outlined), 'object')} with a polygon, of which only the box is read",
            "Boxes are learned, and no outlines.", "To learn outlines, write them as COCO or YOLO.",
        ),
    ]  # fmt: skip
    return result


def _number(text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:
        return math.nan


def _line(path: Path, number: int) -> int:
    """Return the line on which an object of a file begins."""
    text = path.read_text(encoding="utf-8", errors="replace")
    starts = [match.start() for match in re.finditer(r"<object\b", text)]
    return text.count("\n", 0, starts[number]) + 1 if number < len(starts) else 1
