"""Masks: a PNG for each image, with the number of a class in each pixel, or with a colour for each class.

    images/train/1.jpg    masks/train/1.png (or 1_mask.png)    classes.txt

Line n of classes.txt, from 0, is the name of the class n. Lines with a colour ("road 128 64 128") make the masks those
of colours; so do those of labelmap.txt, which CVAT writes ("road:128,64,128::"). The value 255 has no class.
--ignore-label chooses another value.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitrail.data.formats.annotated import (
    IMAGES,
    ImageFiles,
    divided,
    is_in_masks,
    lines_of,
    missing_images,
    names_in,
    unlisted_images,
)
from vitrail.data.formats.folder import class_folders
from vitrail.data.objects import IGNORED, Mask
from vitrail.data.pixels.decode import GREY_LEVELS, JPEGS, layout_of
from vitrail.data.source import Samples, file_samples
from vitrail.data.splits import SPLITS, Request, Split, Splits, split_of, splits_from
from vitrail.data.targets import Targets, check_names, class_name
from vitrail.errors import DataError, UndecodableImage, listed, plural

FOLDERS = ("masks", "mask", "segmentationclass", "annotations", "labels", "gtfine", "gt", "ann_dir")
"""Names of folders with masks, in lower case."""

COLOUR = re.compile(r"(?P<name>.*?)[\s,:;#(]+(?P<red>\d{1,3})[\s,]+(?P<green>\d{1,3})[\s,]+(?P<blue>\d{1,3})[)\s:]*")

NO_CLASS = frozenset({"unlabelled", "unlabeled", "ignore", "ignored", "void"})
"""Names, in lower case, of what is not a class. Pixels with it are ignored, unless --ignore-label says otherwise."""

LISTS = ("classes.txt", "labels.txt", "labelmap.txt")
"""Names of files with the names of the classes."""


def masks_pair_up(root: Path) -> bool:
    """Return True if every mask has the name of an image in another folder, and the listed classes are not folders.

    Without the list, a folder called masks beside any other folder is taken for a class.
    """
    folders = mask_folders(root) if root.is_dir() else []
    path = _list_of_classes(root, folders)
    if path is None or {line.strip() for line in lines_of(path)} & {place.name for place in class_folders(root)}:
        return False
    _, missing = _images_of_masks(root, folders, ImageFiles(root))
    return not missing


def mask_folders(root: Path) -> list[Path]:
    """Return the folder of masks in `root`, or those in its folders of splits, such as train/masks."""
    inner = class_folders(root)
    for places in ([inner], [class_folders(folder) for folder in inner if split_of(folder.name)]):
        if found := [folder for some in places if (folder := _first_of_masks(some)) is not None]:
            return found
    return []


def _first_of_masks(folders: Sequence[Path]) -> Path | None:
    named = (folder for name in FOLDERS for folder in folders if folder.name.lower() == name)
    return next((one for one in named if any(path.suffix.lower() == ".png" for path in one.rglob("*"))), None)


def open_masks(request: Request) -> Splits:
    """Return the splits of images with masks. Raise `DataError` if the masks and their classes cannot be read."""
    root, known = request.path, request.classes
    title = f"data {str(root)!r}"
    folders = mask_folders(root)
    images = ImageFiles(root)
    of_image, missing = _images_of_masks(root, folders, images)
    names, colours = _classes(root, folders)
    skipped, notes = _ignored(title, names, request.choice.ignore)
    kept = [name for place, name in enumerate(names) if place not in skipped]
    if twice := [name for name, count in Counter(kept).items() if count > 1]:
        raise DataError(f"{title}: several classes are called {listed(twice)}; give each a name of its own")
    places = [-1 if place in skipped else kept.index(name) for place, name in enumerate(names)]
    lists = sorted(root.glob("ImageSets/Segmentation/*.txt"))
    splits, more = divided(images, sorted(of_image), request.choice.splits, lists)
    sources: dict[Split, Samples] = {}
    for split, keys in splits.items():
        found = [
            Mask(of_image[key], functools.partial(read_mask, root / of_image[key], colours), tuple(places))
            for key in keys
        ]
        ids = tuple(place for place in range(len(names)) if place not in skipped)
        targets = replace(Targets.of(found, "mask", tuple(kept)), ids=() if ids == (*range(len(kept)),) else ids)
        if known is not None and set(kept) == set(known):
            targets = targets.renumbered([known.index(name) for name in kept], known)
        sources[split] = file_samples(root, keys, [images.inodes[key] for key in keys], targets)
    used = {*of_image, *of_image.values(), *missing}
    unlisted = sorted(key for key in images.inodes if key not in used and not is_in_masks(key))
    inside = listed([f"{folder.relative_to(root).as_posix()}/" for folder in folders])
    faults = [
        *missing_images(f"{title}: masks", missing),
        *unlisted_images(title, unlisted, f"no mask in {inside} has their name"),
    ]
    if not sources or not any(map(len, sources.values())):
        raise DataError("\n".join([f"{title} has no image with a mask", *(fault.text for fault in faults)]))
    return splits_from({split: sources[split] for split in SPLITS if split in sources}, (*notes, *more), faults)


def _images_of_masks(root: Path, folders: Sequence[Path], images: ImageFiles) -> tuple[dict[str, str], list[str]]:
    """Return the mask of each image, as paths relative to `root`, and the masks without an image. Raise `DataError` if
    an image has two masks."""
    insides = tuple(f"{folder.relative_to(root).as_posix()}/" for folder in folders)
    of_image: dict[str, str] = {}
    missing = []
    for inside in insides:
        above = inside.removesuffix("/").rpartition("/")[0]
        start = f"{above}/" if above else ""
        tops = {key[len(start) :].split("/")[0] for key in images.inodes if key.startswith(start)}
        top = [name for name in sorted(tops) if name.lower() in IMAGES][:1]
        for name in [key for key in images.inodes if key.startswith(inside) and key.lower().endswith(".png")]:
            folder, _, file = name.removeprefix(inside).rpartition("/")
            # The folder of images that is divided like the masks, such as images/train for masks/train.
            near = "/".join(part for part in (above, *top, folder) if part)
            stem = file.rpartition(".")[0]
            stems = dict.fromkeys((stem, re.sub("[_-]mask$", "", stem, flags=re.I)))
            key = next(filter(None, (images.find(one, near, split_of(name), outside=insides) for one in stems)), None)
            if key is None:
                missing.append(name)
            elif key in of_image:
                raise DataError(
                    f"data {str(root)!r}: the masks {of_image[key]} and {name} both belong to {key}; keep one of them"
                )
            else:
                of_image[key] = name
    return of_image, missing


def is_special(line: str) -> bool:
    """Return True for a line of classes.txt that is a comment or has a colour."""
    return line.startswith("# ") or COLOUR.fullmatch(line) is not None


def _list_of_classes(root: Path, folders: Sequence[Path]) -> Path | None:
    places = [root / LISTS[0], *(folder / LISTS[0] for folder in folders), *(root / name for name in LISTS[1:])]
    return next((place for place in places if place.is_file()), None)


def _classes(root: Path, folders: Sequence[Path]) -> tuple[list[str], tuple[tuple[int, int, int], ...]]:
    """Return the names of the classes, and their colours, or () if masks hold numbers."""
    path = _list_of_classes(root, folders)
    if path is None:
        raise DataError(
            f"{root} has masks but no names of classes; add a classes.txt with the name of a class on each line, in "
            "the order of the numbers in the masks, from 0"
        )
    lines = [line for line in names_in(path) if not line.startswith("# ")]
    matches = [COLOUR.fullmatch(line) for line in lines]
    colours: list[tuple[int, int, int]] = []
    if lines and all(matches):
        colours = [(int(m["red"]), int(m["green"]), int(m["blue"])) for m in matches if m is not None]
        lines = [match["name"] for match in matches if match is not None]
        if len(set(colours)) < len(colours) or any(max(colour) > 255 for colour in colours):
            raise DataError(f"{path}: the colours are not different numbers from 0 to 255; correct them")
    elif any(matches):
        raise DataError(f"{path}: some lines have a colour and others have none; give every class a colour, or none")
    names = [class_name(line) for line in lines]
    check_names(str(path), names)
    if not 0 < len(names) <= IGNORED:
        raise DataError(f"{path} has {plural(len(names), 'name')}; a mask has 1 to {IGNORED} classes")
    return names, tuple(colours)


def _ignored(title: str, names: Sequence[str], ignored: str | None) -> tuple[set[int], tuple[str, ...]]:
    """Return the values of masks that have no class, and a note if a name decides about it. `ignored` is the value or
    the name without a class, "none" for no such value, or None for 255."""
    if ignored is None:
        found = {place for place, name in enumerate(names) if name.lower() in NO_CLASS}
        notes = tuple(
            f"{title}: pixels of {names[place]!r} ({place}) have no class, so they are neither learned nor measured; "
            "to learn it as a class, add --ignore-label none"
            for place in sorted(found)
        )
        return found, notes
    if ignored == "none" or ignored == str(IGNORED):
        return set(), ()
    if ignored in names:
        return {place for place, name in enumerate(names) if name == ignored}, ()
    if ignored.isdecimal() and int(ignored) < len(names):
        return {int(ignored)}, ()
    raise DataError(
        f"{title}: --ignore-label {ignored} is neither a value from 0 to {len(names) - 1} nor the name of a class; the "
        f"classes are {listed(names, 20)}"
    )


def read_mask(path: Path, colours: tuple[tuple[int, int, int], ...] = ()) -> UInt8[np.ndarray, "h w"]:
    """Return the values in a mask, or the index of each pixel's colour among `colours`. Raise `UndecodableImage` if the
    file cannot be read, or holds colours where numbers are expected or the other way round."""
    try:
        with Image.open(path) as image:
            if image.format in JPEGS:
                raise UndecodableImage(
                    f"mask {path} is a JPEG file, which does not keep numbers exactly; save it as PNG from its source"
                )
            levels = GREY_LEVELS.get(layout_of(image), 256)
            image.load()
            if colours:
                pixels = np.asarray(image.convert("RGBA"))
                if (pixels[..., 3] < 255).any():
                    raise UndecodableImage(f"mask {path} has transparent pixels, which have no colour; fill them")
                return _from_colours(path, pixels[..., :3], colours)
            if image.mode in ("LA", "RGB", "RGBA") and (grey := _grey(image)) is not None:
                return grey
            if image.mode not in ("L", "P", "1", "I", "I;16"):
                raise UndecodableImage(
                    f"mask {path} is in colour or partly transparent ({image.mode}), and numbers of classes are "
                    "expected; add the colour of each class to classes.txt, such as: road 128 64 128"
                )
            values = np.asarray(image) // (255 // (levels - 1))  # Pillow scales numbers of 2 and of 4 bits
    except UndecodableImage:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UndecodableImage(f"cannot read mask {path}: {error}") from error
    if values.max(initial=0) > IGNORED:
        raise UndecodableImage(f"mask {path} holds the value {values.max()}; the largest is {IGNORED}")
    return values.astype(np.uint8)


def _grey(image: Image.Image) -> UInt8[np.ndarray, "h w"] | None:
    """Return the numbers of a mask that was saved with equal channels, or None if its channels differ or some of its
    pixels are transparent."""
    channels = np.asarray(image)
    colours = channels[..., :-1] if image.mode in ("LA", "RGBA") else channels
    is_opaque = colours is channels or bool((channels[..., -1] == 255).all())
    return colours[..., 0].copy() if is_opaque and (colours == colours[..., :1]).all() else None


def _from_colours(
    path: Path, pixels: UInt8[np.ndarray, "h w 3"], colours: tuple[tuple[int, int, int], ...]
) -> UInt8[np.ndarray, "h w"]:
    codes = pixels.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    found = np.full(codes.shape, -1, np.int64)
    for place, (red, green, blue) in enumerate(colours):
        found[codes == (red << 16) + (green << 8) + blue] = place
    if (found < 0).any():
        row, column = (int(place) for place in np.argwhere(found < 0)[0])
        raise UndecodableImage(
            f"mask {path} has the colour {tuple(pixels[row, column].tolist())} at column {column}, row {row}, which no "
            "class has"
        )
    return found.astype(np.uint8)
