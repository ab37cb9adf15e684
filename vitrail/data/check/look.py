"""What a check keeps of each image: a few numbers, a hash of its pixels, and a thumbnail of 64 bytes."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TypeVar

import numpy as np
from jaxtyping import Int, Integer, UInt8
from PIL import Image

from vitrail.data.pipeline import default_threads
from vitrail.data.pixels.decode import FORMATS, to_pil
from vitrail.data.source import Source
from vitrail.errors import DataError, UndecodableImage

__all__ = ["Looks", "Oddity", "Progress", "Seen", "State", "examine", "in_threads", "look", "look_at_all"]

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with the number of images looked at so far, and of all that will be."""

SIDE = 8
"""Of the thumbnails that near duplicates are searched with."""

CHUNK = 64
"""Images that a thread takes at a time: few enough to show progress, many enough to cost no time."""

FLAT = 4
"""Levels between the darkest and the brightest pixel up to which an image is blank."""

REASONS = 1000
"""Images whose reasons are kept, of those that cannot be read; the others are only counted."""

ORIENTATION = 0x0112
"""The EXIF tag that says how to turn a picture upright."""

LEVELS = np.arange(256, dtype=np.float64)


class State(IntEnum):
    """Whether an image could be looked at."""

    OK = 0
    UNDECODABLE = 1
    UNREADABLE = 2
    """The source itself could not give it: a file without permission, or one that is gone."""


class Oddity(IntFlag):
    """What training converts, or leaves out, of an image that it can decode."""

    TRANSPARENT = 1
    CMYK = 2
    DEEP = 4
    """16 bits a channel."""
    TURNED = 8
    """By its EXIF tag."""
    ANIMATED = 16
    BLANK = 32
    """One colour all over."""


@dataclass(frozen=True)
class Seen:
    """One decoded image."""

    kind: str
    """Format and mode: "JPEG RGB"; for an array "array L"."""
    width: int
    height: int
    oddities: int
    pixels: int
    """64 bits of a hash of size and pixels. A grey picture has the same in one channel as in three."""
    mean: float
    """Of the grey levels, 0 to 255."""
    contrast: float
    """Their standard deviation."""
    thumbnails: UInt8[np.ndarray, "8 8"]


class Looks:
    """What was seen of many images, a row each: about 110 bytes an image, whatever its size."""

    def __init__(self, split: Integer[np.ndarray, " n"], index: Int[np.ndarray, " n"]) -> None:
        count = len(index)
        self.split = split
        """Number of the split that the image is of."""
        self.index = index
        """The image's place in its split's source."""
        self.state = np.zeros(count, np.uint8)
        self.kind = np.zeros(count, np.uint8)
        self.width = np.zeros(count, np.int32)
        self.height = np.zeros(count, np.int32)
        self.oddities = np.zeros(count, np.uint8)
        self.pixels = np.zeros(count, np.uint64)
        self.mean = np.zeros(count, np.float32)
        self.contrast = np.zeros(count, np.float32)
        self.thumbnails = np.zeros((count, SIDE, SIDE), np.uint8)
        self.kinds: list[str] = []
        """What the numbers in `kind` stand for."""
        self.reasons: dict[int, str] = {}
        """Why a row's state is not OK; of the first thousand such rows."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ok(self) -> Int[np.ndarray, " ok"]:
        """Rows of the images that were decoded."""
        return np.flatnonzero(self.state == State.OK)

    def put(self, row: int, result: Seen | tuple[State, str]) -> None:
        if isinstance(result, tuple):
            self.state[row], reason = result
            if len(self.reasons) < REASONS:
                self.reasons[row] = reason
            return
        if result.kind not in self.kinds:
            self.kinds.append(result.kind)
        self.kind[row] = self.kinds.index(result.kind)
        for name in ("width", "height", "oddities", "pixels", "mean", "contrast", "thumbnails"):
            getattr(self, name)[row] = getattr(result, name)


def look_at_all(
    sources: Sequence[Source],
    rows: Sequence[Int[np.ndarray, " _"]],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Looks:
    """Decodes `rows[i]` of `sources[i]` in threads. What cannot be read or decoded is a state of its row, no error."""
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
    """What `work` returns for each place, in order. Left early, by Ctrl-C or an error, it does not do the rest."""
    pool = ThreadPoolExecutor(threads or default_threads())
    try:
        yield pool.map(work, places)
    finally:
        pool.shutdown(cancel_futures=True)


def examine(source: Source, index: int) -> Seen | tuple[State, str]:
    """What is seen of a source's image, or why nothing is."""
    try:
        return look(source[index].image)
    except UndecodableImage as error:
        return State.UNDECODABLE, str(error)
    except DataError as error:
        return State.UNREADABLE, str(error)


def look(image: bytes | np.ndarray) -> Seen:
    """Decodes an image as training does, and measures it. Raises `UndecodableImage`."""
    one_channel = isinstance(image, np.ndarray) and image.shape[2:] in ((), (1,))
    picture = to_pil(image, 1 if one_channel else 3)
    kind, oddities = _header(image) if isinstance(image, bytes) else (f"array {picture.mode}", Oddity(0))
    grey = picture.convert("L")
    counts = np.array(grey.histogram(), np.float64)
    mean = float(counts @ LEVELS) / counts.sum()
    variance = float(counts @ (LEVELS - mean) ** 2) / counts.sum()
    if all(high - low <= FLAT for low, high in _extrema(picture)):
        oddities |= Oddity.BLANK
    plain = grey if _is_grey(picture, grey) else picture
    digest = hashlib.blake2b(f"{picture.size} {plain.mode} ".encode(), digest_size=8)
    digest.update(plain.tobytes())
    return Seen(
        kind=kind,
        width=picture.width,
        height=picture.height,
        oddities=int(oddities),
        pixels=int.from_bytes(digest.digest(), "big"),
        mean=mean,
        contrast=math.sqrt(variance),
        thumbnails=np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC)),
    )


def _extrema(picture: Image.Image) -> list[tuple[int, int]]:
    extrema = picture.getextrema()
    return [extrema] if picture.mode == "L" else list(extrema)  # type: ignore[list-item,arg-type]


def _is_grey(picture: Image.Image, grey: Image.Image) -> bool:
    if picture.mode == "L":
        return True
    red, green, blue = picture.resize((SIDE, SIDE), Image.Resampling.NEAREST).split()
    if red.tobytes() != green.tobytes() or green.tobytes() != blue.tobytes():  # which spares most the whole comparison
        return False
    return bool((np.asarray(picture) == np.asarray(grey)[..., None]).all())


def _header(data: bytes) -> tuple[str, Oddity]:
    """Format and mode of an encoded image that is known to decode, and what is odd about it."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
        odd = Oddity(0)
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            odd |= Oddity.TRANSPARENT
        if picture.mode == "CMYK":
            odd |= Oddity.CMYK
        if picture.mode.startswith("I;16"):
            odd |= Oddity.DEEP
        tagged = "exif" in picture.info or picture.format == "TIFF"  # of others Pillow would decode the pixels to look
        if tagged and _says(lambda: picture.getexif().get(ORIENTATION, 1) != 1):
            odd |= Oddity.TURNED
        if _says(lambda: picture.format != "JPEG" and getattr(picture, "is_animated", False)):
            odd |= Oddity.ANIMATED
        return f"{picture.format} {picture.mode}", odd


def _says(question: Callable[[], bool]) -> bool:
    """The answer of a header; no, where it is broken there, which does not keep its image from being decoded."""
    try:
        return question()
    except Exception:  # as in decoding, a hostile file can make Pillow raise anything at all
        return False
