"""Masks: a file for each image, with the number of a class in each pixel, or with a colour for each class.

    images/train/1.jpg    masks/train/1.png (or 1_mask.png)    classes.txt

Line n of classes.txt, from 0, is the name of the class n. Lines with a colour ("road 128 64 128") make the masks those
of colours; so do the lists that other programs write (`LISTS`). The value 255 has no class. --ignore-label chooses
another value.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitrail.data.formats.annotated import (
    ImageFiles,
    divided,
    is_in_masks,
    lines_of,
    missing_images,
    names_in,
    unlisted_images,
)
from vitrail.data.formats.folder import IMAGES, PAIRED, class_folders, word
from vitrail.data.objects import IGNORED, Mask
from vitrail.data.pixels.decode import GREY_LEVELS, JPEGS, layout_of
from vitrail.data.source import Samples, file_samples
from vitrail.data.splits import SPLITS, Request, Split, Splits, split_of, splits_from
from vitrail.data.targets import Targets, check_names, class_name
from vitrail.errors import DataError, UndecodableImage, listed, plural

FOLDERS = (
    "masks", "mask", "segmentationclass", "segmentationclasspng", "annotations", "labels", "gtfine", "gt", "ann_dir",
)  # fmt: skip
"""Names of folders with masks, in lower case."""

LOSSLESS = (".png", ".tif", ".tiff", ".bmp")
"""Suffixes of masks, in lower case. JPEG and WebP change numbers, and GIF may store them in another order."""

MASK_ENDING = re.compile(r"[_-](?:masks?|labels?|seg(?:mentation)?|gt|L|gt(?:Fine|Coarse)_[a-z\d]+)(?=\.[^.]*$)", re.I)
"""The end of a mask's name, before the suffix. The name of the image lacks it."""

KINDS: dict[str, tuple[str, ...]] = {
    "_gtFine_labelTrainIds": (
        "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation",
        "terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
    ),
    "_gtFine_labelIds": (
        "unlabeled", "ego vehicle", "rectification border", "out of roi", "static", "dynamic", "ground", "road",
        "sidewalk", "parking", "rail track", "building", "wall", "fence", "guard rail", "bridge", "tunnel", "pole",
        "polegroup", "traffic light", "traffic sign", "vegetation", "terrain", "sky", "person", "rider", "car",
        "truck", "bus", "caravan", "trailer", "train", "motorcycle", "bicycle",
    ),
    "_gtFine_color": (),
    "_gtFine_instanceIds": (),
}  # fmt: skip
"""Ends of the names of masks in Cityscapes, which has several for each image, with the names of their classes. The
first kind that the data has is read."""

COLOUR = re.compile(r"(?:(.*?)[\s,:;#(]+)?(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\d{1,3})(?:\s+(\D.*)|[)\s:]*)")
"""A line with the colour of a class before its name, as in CamVid, or after it."""

NUMBERED = re.compile(r"(\d+)\s*[:,]\s*(.+)")
"""A line with the value of a class, such as "0: road"."""

NO_CLASS = frozenset({"unlabelled", "unlabeled", "ignore", "ignored", "void"})
"""Names, in lower case, of what is not a class. Pixels with it are ignored, unless --ignore-label says otherwise."""

LISTS = (
    "classes.txt", "class_names.txt", "labels.txt", "labelmap.txt", "label_colors.txt", "class_dict.csv",
    "label_class_dict.csv", "_classes.csv",
)  # fmt: skip
"""Names of files with the names of the classes, also those of LabelMe, CVAT, CamVid, Kaggle and Roboflow. A table
begins with the names of its columns."""


def masks_pair_up(root: Path) -> bool:
    """Return True if every mask has the name of an image in another folder, and the listed classes are not folders.

    Without the list, a folder called masks beside any other folder is taken for a class.
    """
    insides = mask_folders(root)
    listed_names = {
        part
        for path in _lists_of_classes(root, insides)
        for line in lines_of(path)
        for part in (line.strip(), *re.split(r"[\s,:;]+", line))  # "cat", or "0: cat"
    }
    if not listed_names or listed_names & {place.name for place in class_folders(root)}:
        return False
    of_image, missing, _ = _images_of_masks(root, insides, images := ImageFiles(root))
    # A class can have images such as 1.png and 1_gt.png. So masks among the images need to be those of all images.
    return bool(of_image) and not missing and (insides != ("",) or 2 * len(of_image) == len(images.inodes))


def mask_folders(root: Path) -> tuple[str, ...]:
    """Return how the paths of masks below `root` begin: masks/, that beside a folder of images, such as train_masks/,
    or those in its folders of splits, such as train/masks/. Return "" if a list of classes and masks with endings of
    their names lie in `root` or in its folders."""
    inner = class_folders(root)
    for places in ([inner], [class_folders(folder) for folder in inner if split_of(folder.name)]):
        if found := [folder for some in places for folder in _named_masks(some)]:
            return tuple(f"{folder.relative_to(root).as_posix()}/" for folder in found)
    beside = [root, *inner] if _lists_of_classes(root) else []
    names = (name for place in beside for name in os.listdir(place) if MASK_ENDING.search(name))  # noqa: PTH208 (many)
    return ("",) if any(name.lower().endswith(LOSSLESS) for name in names) else ()


def _named_masks(folders: Sequence[Path]) -> list[Path]:
    """Return the first of some folders that is called like masks, or those of splits, such as train_masks beside
    train."""
    names = [folder.name for folder in folders]
    named = [folder for name in FOLDERS for folder in folders if folder.name.lower() == name]
    paired = [
        one
        for one in folders
        # CVAT calls undivided data "default". Other pairs, such as face and face_mask, can be classes.
        if (pair := PAIRED.fullmatch(one.name)) and pair[1] in names and (split_of(pair[1]) or pair[1] == "default")
    ]
    found = [one for one in (*named, *paired) if any(path.suffix.lower() in LOSSLESS for path in one.rglob("*"))]
    return found[:1] if {*found} & {*named} else found


def open_masks(request: Request) -> Splits:
    """Return the splits of images with masks. Raise `DataError` if the masks and their classes cannot be read."""
    root, known = request.path, request.classes
    title = f"data {str(root)!r}"
    insides = mask_folders(root)
    images = ImageFiles(root)
    of_image, missing, kinds = _images_of_masks(root, insides, images)
    names, colours = _classes(root, insides, kinds)
    skipped, notes = _ignored(title, names, request.choice.ignore)
    kept = [name for place, name in enumerate(names) if place not in skipped]
    if twice := [name for name, count in Counter(kept).items() if count > 1]:
        raise DataError(f"{title}: several classes are called {listed(twice)}; give each a name of its own")
    places = [-1 if place in skipped else kept.index(name) for place, name in enumerate(names)]
    splits, more = divided(
        images, sorted(of_image), request.choice.splits, sorted(root.glob("ImageSets/Segmentation/*.txt"))
    )
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
    others = sorted({*images.inodes} - {*of_image} - mask_files(root, images))
    inside = listed([f"{root}/{inside}" for inside in insides])
    faults = [
        *missing_images(f"{title}: masks", missing),
        *unlisted_images(title, [key for key in others if not is_in_masks(key)], f"no mask in {inside} has their name"),
    ]
    if kinds[1:]:
        read, *unread = (f"*{kind}.png" for kind in kinds)
        notes = (*notes, f"{title}: the masks {read} are read, and {listed(unread)} are not")
    if not sources or not any(map(len, sources.values())):
        raise DataError("\n".join([f"{title} has no image with a mask", *(fault.text for fault in faults)]))
    return splits_from({split: sources[split] for split in SPLITS if split in sources}, (*notes, *more), faults)


def mask_files(root: Path, images: ImageFiles) -> set[str]:
    """Return the paths of all masks among the images below `root`, and of all other files in folders of masks."""
    if (insides := mask_folders(root)) == ("",):
        return {*_images_of_masks(root, insides, images)[0].values()}
    return {key for key in images.inodes if key.startswith(insides)}


def _images_of_masks(
    root: Path, insides: Sequence[str], images: ImageFiles
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the mask of each image, as paths relative to `root`, the masks without an image, and the kinds of masks of
    Cityscapes. Raise `DataError` if an image has two masks."""
    outside = tuple(filter(None, insides))
    kinds = [kind for kind in KINDS if any(name.endswith(f"{kind}.png") for name in images.inodes)]
    of_image: dict[str, str] = {}
    missing = []
    for inside in insides:
        above, _, last = inside.removesuffix("/").rpartition("/")
        start = f"{above}/" if above else ""
        tops = {key[len(start) :].split("/")[0] for key in images.inodes if key.startswith(start)}
        pair = PAIRED.fullmatch(last)
        top = [pair[1]] if pair else [name for name in sorted(tops) if word(name) in IMAGES][:1]
        for name in [key for key in images.inodes if key.startswith(inside) and key.lower().endswith(LOSSLESS)]:
            folder, _, file = name.removeprefix(inside).rpartition("/")
            # The folder of images that is divided like the masks, such as images/train for masks/train.
            near = "/".join(part for part in (above, *top, folder) if part)
            stem = file.rpartition(".")[0]
            base = MASK_ENDING.sub("", file).rpartition(".")[0]
            # A mask that is stored in several formats is read from PNG.
            is_copy = not file.lower().endswith(".png") and f"{name.rpartition('.')[0]}.png" in images.inodes
            if is_copy or stem.endswith(tuple(kinds[1:])) or (base == stem and not inside):
                continue
            # The names of images in Cityscapes, DeepGlobe and Potsdam have endings, too.
            stems = [*([stem] if inside else []), *(base + end for end in ("", "_leftImg8bit", "_sat", "_RGB"))]
            key = next(filter(None, (images.find(one, near, split_of(name), outside=outside) for one in stems)), None)
            if key in of_image:
                raise DataError(
                    f"data {str(root)!r}: the masks {of_image[key]} and {name} both belong to {key}; keep one of them"
                )
            if key is not None:
                of_image[key] = name
            elif inside:
                missing.append(name)
    return of_image, missing, kinds


def is_special(line: str) -> bool:
    """Return True for a line of classes.txt that has another meaning than a name."""
    return line.startswith(("# ", "__ignore__")) or any(one.fullmatch(line) for one in (COLOUR, NUMBERED))


def _lists_of_classes(root: Path, insides: Sequence[str] = ()) -> list[Path]:
    """Return the lists of classes that have the first name among `LISTS`, in `root`, in its folders of splits and in
    those of masks."""
    splits = (place for place in class_folders(root) if split_of(place.name))
    places = dict.fromkeys((root, *splits, *(root / inside for inside in insides)))
    found = ([place / name for place in places if (place / name).is_file()] for name in LISTS)
    return next(filter(None, found), [])


def _classes(
    root: Path, insides: Sequence[str], kinds: Sequence[str]
) -> tuple[list[str], tuple[tuple[int, int, int], ...]]:
    """Return the names of the classes, and their colours, or () if masks hold numbers."""
    lists = _lists_of_classes(root, insides)
    if not lists and kinds and KINDS[kinds[0]]:
        return list(KINDS[kinds[0]]), ()
    if not lists:
        raise DataError(
            f"{root} has masks but no names of classes; add a classes.txt with the name of a class on each line, in "
            "the order of the numbers in the masks, from 0, or with a name and its colour on each line, such as: road "
            "128 64 128"
        )
    path = lists[0]
    lines = [line for line in names_in(lists) if not line.startswith("# ")]
    if path.suffix == ".csv" or lines[:1] == ["__ignore__"]:  # the names of columns, or LabelMe's name of no class
        lines = lines[1:]
    matches = [COLOUR.fullmatch(line) for line in lines]
    colours: list[tuple[int, int, int]] = []
    if lines and all(matches):
        colours = [(int(match[2]), int(match[3]), int(match[4])) for match in matches if match is not None]
        lines = [match[1] or match[5] or "" for match in matches if match is not None]
        if len(set(colours)) < len(colours) or any(max(colour) > 255 for colour in colours):
            raise DataError(f"{path}: the colours are not different numbers from 0 to 255; correct them")
    elif any(matches):
        raise DataError(f"{path}: some lines have a colour and others have none; give every class a colour, or none")
    numbered = [NUMBERED.fullmatch(line) for line in lines]
    if all(numbered):
        lines = [match[2] for match in numbered if match is not None]
        if (numbers := [int(match[1]) for match in numbered if match is not None]) != list(range(len(lines))):
            raise DataError(
                f"{path}: the numbers of the classes, {listed(list(map(str, numbers)))}, are not 0, 1, 2 and so on; "
                "write a line for each value in the masks, from 0"
            )
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
            packed = image.info.get("compression")  # of TIFF
            if image.format in (*JPEGS, "WEBP") or packed in ("jpeg", "tiff_jpeg", "webp"):
                raise UndecodableImage(
                    f"mask {path} is compressed as JPEG or WebP, which does not keep numbers exactly; save it as PNG "
                    "from its source"
                )
            levels = GREY_LEVELS.get(layout_of(image), 256)
            image.load()
            if colours or image.mode in ("LA", "RGB", "RGBA"):
                pixels = np.asarray(image.convert("RGBA"))
                is_opaque = bool((pixels[..., 3] == 255).all())
                if colours and not is_opaque:
                    raise UndecodableImage(f"mask {path} has transparent pixels, which have no colour; fill them")
                if colours:
                    return _from_colours(path, pixels[..., :3], colours)
                if is_opaque and (pixels[..., :3] == pixels[..., :1]).all():  # numbers in equal channels
                    return pixels[..., 0].copy()
            if image.mode not in ("L", "P", "1", "I", "I;16", "I;16B"):
                raise UndecodableImage(
                    f"mask {path} is in colour, partly transparent or of decimals ({image.mode}), and numbers of "
                    "classes are expected; write whole numbers, or add the colour of each class to classes.txt, such "
                    "as: road 128 64 128"
                )
            values = np.asarray(image) // (255 // (levels - 1))  # Pillow scales numbers of 2 and of 4 bits
    except UndecodableImage:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UndecodableImage(f"cannot read mask {path}: {error}") from error
    if values.max(initial=0) > IGNORED:
        raise UndecodableImage(f"mask {path} holds the value {values.max()}; the largest is {IGNORED}")
    return values.astype(np.uint8)


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
