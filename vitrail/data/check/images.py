"""Examination of single images. A check keeps a few numbers, a hash and a thumbnail of 64 bytes per image."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int, Integer, UInt8
from PIL import Image

from vitrail.data.objects import Mask, Objects
from vitrail.data.pipeline import default_threads
from vitrail.data.pixels.decode import open_file, open_image, orientation_of, to_pil
from vitrail.data.source import Source, decodable
from vitrail.data.targets import Target
from vitrail.errors import DataError, UndecodableImage, plural

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""A function that is called with the number of images examined so far and the total number."""

SIDE = 8
"""Side in pixels of the thumbnails for the search for near duplicates."""

DETAIL_SIDE = 32
"""Side in pixels of the pictures for the comparison of shifted images."""

MOST_DETAILED = 100_000
"""Largest number of images for which pictures of this size are kept. Each picture takes 1 kB."""

CHUNK = 64
"""Number of images that a thread examines at a time. It is small enough to show progress and large enough to be
fast."""

FLAT = 4
"""Largest difference between the darkest and the brightest pixel of a blank image, in grey levels."""

REASONS = 1000
"""Largest number of broken images for which the reason is kept. Further broken images are only counted."""

AREAS = (32**2, 96**2)
"""Areas in pixels from which COCO counts objects as medium and as large."""

LEVELS = np.arange(256, dtype=np.float64)


class State(IntEnum):
    """The outcome of examining an image."""

    OK = 0
    UNDECODABLE = 1
    UNREADABLE = 2
    """The source failed to read the image, for example because a file with many images is damaged."""


class Oddity(IntFlag):
    """Properties of an image that training converts or ignores."""

    TRANSPARENT = 1
    CMYK = 2
    DEEP = 4
    """16 bits per channel."""
    TURNED = 8
    """Rotated or mirrored by an EXIF tag."""
    ANIMATED = 16
    BLANK = 32
    """A single colour."""


MODES = {
    "1": "black and white", "L": "grey", "LA": "grey with transparency", "P": "with a palette",
    "RGBA": "RGB with transparency", "I;16": "grey of 16 bits", "I;16B": "grey of 16 bits",
}  # fmt: skip
"""Words for Pillow's names of modes. RGB and CMYK, for example, have no other name."""


@dataclass(frozen=True)
class Seen:
    """The result of examining one decoded image."""

    kind: str
    """Format and mode, such as "JPEG RGB", or "grey array" for an array."""
    width: int
    height: int
    oddities: int
    pixels: int
    """64-bit hash of size and pixels. A grey picture has the same hash with one channel as with three."""
    mean: float
    """Mean of the grey levels, 0 to 255."""
    contrast: float
    """Standard deviation of the grey levels."""
    thumbnails: UInt8[np.ndarray, "8 8"]
    details: UInt8[np.ndarray, "32 32"]
    amounts: Int[np.ndarray, " k"] | None = None
    """With boxes, the number of small, medium and large objects. With masks, the number of pixels of each class, and of
    those without a class."""
    misfit: str = ""
    """The reason why the boxes or the mask cannot be those of this image, or an empty text."""


class Looks:
    """The results of examining many images, one row each. Each image takes about 110 bytes, and another 1 kB if
    `details` are kept."""

    def __init__(self, split: Integer[np.ndarray, " n"], index: Int[np.ndarray, " n"]) -> None:
        count = len(index)
        self.split = split
        """Index of each image's split."""
        self.index = index
        """Index of each image in the source of its split."""
        self.state = np.zeros(count, np.uint8)
        self.width = np.zeros(count, np.int32)
        self.height = np.zeros(count, np.int32)
        self.oddities = np.zeros(count, np.uint8)
        self.pixels = np.zeros(count, np.uint64)
        self.mean = np.zeros(count, np.float32)
        self.contrast = np.zeros(count, np.float32)
        self.thumbnails = np.zeros((count, SIDE, SIDE), np.uint8)
        self.details = np.zeros((count, DETAIL_SIDE, DETAIL_SIDE), np.uint8) if count <= MOST_DETAILED else None
        """Small grey pictures, or None if there are too many images."""
        self.kinds: Counter[str] = Counter()
        """Number of decoded images of each format and mode."""
        self.reasons: dict[int, str] = {}
        """Reasons why images could not be read or decoded, by row, for the first thousand broken images."""
        self.amounts: dict[int, Int[np.ndarray, " k"]] = {}
        """The numbers of objects by size, or of pixels by class, by row."""
        self.misfits: dict[int, str] = {}
        """Reasons why boxes or masks cannot be those of their images, by row."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ok(self) -> Int[np.ndarray, " ok"]:
        """The rows of the images that were decoded."""
        return np.flatnonzero(self.state == State.OK)

    def put(self, row: int, result: Seen | tuple[State, str]) -> None:
        if isinstance(result, tuple):
            self.state[row], reason = result
            if len(self.reasons) < REASONS:
                self.reasons[row] = reason
            return
        self.kinds[result.kind] += 1
        for name in ("width", "height", "oddities", "pixels", "mean", "contrast", "thumbnails"):
            getattr(self, name)[row] = getattr(result, name)
        if self.details is not None:
            self.details[row] = result.details
        if result.amounts is not None:
            self.amounts[row] = result.amounts
        if result.misfit:
            self.misfits[row] = result.misfit


def look_at_all(
    sources: Sequence[Source],
    rows: Sequence[Int[np.ndarray, " _"]],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Looks:
    """Examine the samples `rows[i]` of `sources[i]` in threads. An image that cannot be decoded is not an error. The
    failure is recorded in the image's state."""
    split = np.repeat(np.arange(len(rows), dtype=np.uint8), [len(part) for part in rows])
    index = np.concatenate(rows).astype(np.int64)
    looks = Looks(split, index)

    def read(start: int) -> list[Seen | tuple[State, str]]:
        places = zip(split[start : start + CHUNK].tolist(), index[start : start + CHUNK].tolist(), strict=True)
        return [examine(sources[number], place) for number, place in places]

    starts = range(0, len(looks), CHUNK)
    with in_threads(read, starts, threads) as parts:
        for start, results in zip(starts, parts, strict=True):
            for row, result in enumerate(results, start):
                looks.put(row, result)
            if progress is not None:
                progress(start + len(results), len(looks))
    return looks


@contextmanager
def in_threads(work: Callable[[int], T], places: Sequence[int], threads: int | None) -> Iterator[Iterator[T]]:
    """Yield the results of `work` in order. After Ctrl-C or an error, the remaining work is cancelled."""
    pool = ThreadPoolExecutor(threads or default_threads())
    try:
        yield pool.map(work, places)
    finally:
        pool.shutdown(cancel_futures=True)


def examine(source: Source, index: int) -> Seen | tuple[State, str]:
    """Return the result of examining an image of a source, or the reason why it failed."""
    try:
        sample = source[index]
        return _with_target(look(sample.image), sample.target, len(source.classes))
    except UndecodableImage as error:
        return State.UNDECODABLE, str(error)
    except DataError as error:
        return State.UNREADABLE, str(error)


def _with_target(seen: Seen, target: Target, classes: int) -> Seen:
    """Return the result with what the image's boxes or mask add to it."""
    size = seen.height, seen.width
    try:
        if isinstance(target, Mask):
            pixels = np.bincount(target.indices(size).ravel(), minlength=256)
            seen = replace(seen, amounts=pixels[[*range(classes), -1]])
        elif isinstance(target, Objects):
            sizes = np.searchsorted(AREAS, target.all_areas(size)[~target.crowd], side="right")
            seen = replace(seen, amounts=np.bincount(sizes, minlength=len(AREAS) + 1))
            target.check_size(size)
    except UndecodableImage as error:
        return replace(seen, misfit=str(error))
    return seen


def look(image: bytes | np.ndarray) -> Seen:
    """Decode an image as training does, and measure it. Raises `UndecodableImage`."""
    one_channel = isinstance(image, np.ndarray) and image.shape[2:] in ((), (1,))
    picture = to_pil(image, 1 if one_channel else 3)
    kind, oddities = (
        _header(image) if isinstance(image, bytes) else (f"{MODES.get(picture.mode, picture.mode)} array", Oddity(0))
    )
    grey = picture.convert("L")
    counts = np.array(grey.histogram(), np.float64)
    mean = float(counts @ LEVELS) / counts.sum()
    variance = float(counts @ (LEVELS - mean) ** 2) / counts.sum()
    levels: Any = picture.getextrema()
    if all(high - low <= FLAT for low, high in ([levels] if picture.mode == "L" else levels)):
        oddities |= Oddity.BLANK
    plain = grey if _is_grey(picture, grey) else picture
    digest = hashlib.blake2b(f"{picture.size} {plain.mode} ".encode(), digest_size=8)
    digest.update(plain.tobytes())
    small = grey.resize((DETAIL_SIDE, DETAIL_SIDE), Image.Resampling.BICUBIC)
    return Seen(
        kind=kind,
        width=picture.width,
        height=picture.height,
        oddities=int(oddities),
        pixels=int.from_bytes(digest.digest(), "big"),
        mean=mean,
        contrast=math.sqrt(variance),
        thumbnails=np.asarray(small.resize((SIDE, SIDE), Image.Resampling.BICUBIC)),
        details=np.asarray(small),
    )


def _is_grey(picture: Image.Image, grey: Image.Image) -> bool:
    if picture.mode == "L":
        return True
    red, green, blue = picture.resize((SIDE, SIDE), Image.Resampling.NEAREST).split()
    if red.tobytes() != green.tobytes() or green.tobytes() != blue.tobytes():  # this cheap test decides most images
        return False
    return bool((np.asarray(picture) == np.asarray(grey)[..., None]).all())


def _header(data: bytes) -> tuple[str, Oddity]:
    """Return the format and mode of an encoded image that can be decoded, and its oddities."""
    with open_file(data) as picture:
        odd = Oddity(0)
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            odd |= Oddity.TRANSPARENT
        if picture.mode == "CMYK":
            odd |= Oddity.CMYK
        # Pillow opens colours of 16 bits per channel in the mode RGB, so the raw mode of the file decides.
        if picture.format in ("PNG", "TIFF") and any(";16" in str(tile[3]) for tile in picture.tile):
            odd |= Oddity.DEEP
        tagged = "exif" in picture.info or picture.format == "TIFF"  # for other files, Pillow would decode the pixels
        if tagged and orientation_of(picture) != 1:
            odd |= Oddity.TURNED
        with suppress(Exception):  # Pillow can raise anything for a damaged file, which can still be decoded
            if picture.format != "JPEG" and getattr(picture, "is_animated", False):
                odd |= Oddity.ANIMATED
        return f"{picture.format} {MODES.get(picture.mode, picture.mode)}", odd


MAX_LOOKS = 32
"""Maximum number of images that are decoded."""

COLOUR_SIDE = 64
"""Side in pixels to which an image is shrunk before its colours are compared."""

MIN_DIFFERENCE = 24
"""Difference between the highest and the lowest of red, green and blue from which a pixel counts as coloured, in levels
from 0 to 255. Compression and scanning leave smaller differences in grey pictures."""

MIN_PIXELS = 0.01
"""Fraction of coloured pixels from which an image counts as coloured."""

MIN_IMAGES = 0.1
"""Smallest fraction of coloured images for which a note is printed."""


def has_colour(image: bytes | np.ndarray | Image.Image) -> bool:
    """Return True if an image has colours, and False if it is grey. Raise `UndecodableImage`."""
    opened = open_image(image)
    if opened.picture.mode in ("1", "L", "LA", "I;16", "I", "F"):
        return False
    picture = opened.load(3, opened.shrink_for(max(opened.size) / COLOUR_SIDE))
    picture.thumbnail((COLOUR_SIDE, COLOUR_SIDE))
    levels = np.asarray(picture).astype(np.int16)
    differences = levels.max(axis=2) - levels.min(axis=2)
    return float((differences >= MIN_DIFFERENCE).mean()) >= MIN_PIXELS


def images_of(source: Source) -> Iterator[bytes | np.ndarray]:
    """Return up to 32 evenly spaced images of a source. Images that cannot be read are skipped."""
    places = np.unique(np.linspace(0, len(source) - 1, min(MAX_LOOKS, len(source))).astype(np.int64)).tolist()
    return decodable(lambda index: source[index].image, places)


def colour_note(images: Iterable[bytes | np.ndarray | Image.Image], channels: int) -> str:
    """Return a sentence about colours that a network of `channels` channels drops, or an empty text if it drops none.

    Images that cannot be decoded are skipped.
    """
    if channels != 1:
        return ""
    found = list(decodable(has_colour, images))
    if not found or sum(found) < MIN_IMAGES * len(found):
        return ""
    many = f"{sum(found):,} of {plural(len(found), 'image')} looked at" if len(found) > 1 else "the image"
    has = "has" if len(found) == 1 else "have"
    return f"the model takes grey images, so colours are dropped; {many} {has} colours"
