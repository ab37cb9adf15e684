"""Encoded bytes to RGB or grey pixels, with every way a file can be broken turned into one exception."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from vitrail.data.pixels.signature import format_of
from vitrail.errors import UndecodableImage

__all__ = ["FORMATS", "MAX_PIXELS", "SUFFIXES", "Opened", "decode", "image_size_of", "open_image", "to_pil"]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""What may be opened. Pillow knows formats that start other programs (EPS) or read other files; these do not."""

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""File names, lower case, that count as images in a folder."""

MAX_PIXELS = 89_478_485
"""A header that claims more is refused before memory is taken; Pillow itself warns from here on (256 MiB of RGB)."""

BACKGROUND = (255, 255, 255)
"""What lies behind transparent pixels."""

SHRINKS = (8, 4, 2)
"""By how much the inverse DCT of a JPEG can shrink each side at a gain in speed."""

WIDTH, HEIGHT, PHOTOMETRIC, ORIENTATION, TILE_WIDTH, TILE_HEIGHT = 256, 257, 262, 274, 322, 323
"""Tags of EXIF and TIFF."""

WHITE_IS_ZERO = 0
"""A value of PHOTOMETRIC."""

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns a picture upright, by its orientation in EXIF."""

TURNED = frozenset({5, 6, 7, 8})
"""Orientations whose height and width change places."""

FROM_BELOW, FROM_RIGHT = frozenset({3, 4, 7, 8}), frozenset({2, 3, 6, 7})
"""Orientations whose upright rows (columns) run against the stored ones."""

PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Where a PNG file can hold its orientation. Pillow decodes the whole file to look for it behind the pixels."""

# What Pillow warns of is decoded or refused here: nothing is left to say.
QUIET: Any = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


@dataclass(frozen=True)
class Opened:
    """An image whose header was read: its size is known, its pixels are not decoded yet."""

    picture: Image.Image
    size: tuple[int, int]
    """Height and width, upright and in full."""
    orientation: int = 1
    """1 to 8, as EXIF numbers them."""
    shrinks: bool = False
    """Whether it is a JPEG file that was opened here. One that a caller opened is left as it is."""

    def shrink_for(self, most: float) -> int:
        """By how much the sides can shrink while a JPEG is decoded: 8, 4 or 2, at most `most`; 1 for other files."""
        most = min(most, *self.size) if self.shrinks else 1
        return next((shrink for shrink in SHRINKS if shrink <= most), 1)

    def begin(self, shrink: int) -> tuple[float, float]:
        """Row and column, in pixels of the shrunk picture, at which the upright picture begins.

        A block at the right or at the bottom is filled up where the size is no multiple of `shrink`. Turning the
        picture can bring that edge to the left or the top.
        """
        height, width = (-size % shrink / shrink for size in self.size)
        return height * (self.orientation in FROM_BELOW), width * (self.orientation in FROM_RIGHT)

    def load(self, channels: int, shrink: int = 1) -> Image.Image:
        """The pixels, upright, of mode L (`channels` 1) or RGB (3); `shrink` is what `shrink_for` gave.

        Raises `UndecodableImage`.
        """
        with _refusing():
            if shrink > 1:
                width, height = self.picture.size
                self.picture.draft(None, (width // shrink, height // shrink))
            self.picture.load()
            picture = _black_is_zero(self.picture)
            turn = UPRIGHT.get(_orientation(self.picture))  # asked now, because Pillow turns TIFF as it loads it
            return _plain(picture if turn is None else picture.transpose(turn), channels)


def decode(image: bytes | np.ndarray | Image.Image, channels: int) -> UInt8[np.ndarray, "h w c"]:
    """Pixels of an image with `channels` of 1 (grey) or 3 (RGB), upright by its EXIF tag, alpha laid on white.

    Takes an encoded file, an array (uint8; h w, h w 1 or h w 3) or a Pillow image. Of an animation or of a file of
    several pages, the first. Of 16 bits a channel, the upper 8. Colour profiles (ICC) are ignored, as torchvision and
    timm do: what was trained on numbers without them is measured on numbers without them.
    Raises `UndecodableImage`, which says what is wrong with the image.
    """
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (channels,) and image.size:
        return image
    pixels = np.asarray(to_pil(image, channels))
    return pixels.reshape(*pixels.shape[:2], channels)


def to_pil(image: bytes | np.ndarray | Image.Image, channels: int) -> Image.Image:
    """The same as a Pillow image of mode L or RGB."""
    return open_image(image).load(channels)


def image_size_of(image: bytes | np.ndarray | Image.Image) -> tuple[int, int]:
    """Height and width of what `decode` gives, from the header alone. Raises `UndecodableImage`."""
    return open_image(image).size


def open_image(image: bytes | np.ndarray | Image.Image) -> Opened:
    """Reads the header, which takes no memory to speak of. Raises `UndecodableImage`."""
    if isinstance(image, np.ndarray):
        picture = _from_array(image)
        return Opened(picture, (picture.height, picture.width))
    with _refusing():
        if isinstance(image, bytes):
            picture = _open(image)
            has_none = picture.format == "PNG" and not any(mark in image for mark in PNG_ORIENTATION)
            orientation = 1 if has_none else _orientation(picture)
        else:
            picture, orientation = image, _orientation(image)
        width, height = picture.size
        if min(width, height) < 1:
            raise UndecodableImage(f"claims {width} x {height} pixels, which is none")
        stored = _tags(picture).get(WIDTH, width), _tags(picture).get(HEIGHT, height)
        if orientation in TURNED and picture.size == stored:  # of TIFF, newer versions of Pillow give the upright size
            width, height = height, width
        shrinks = isinstance(image, bytes) and picture.format in ("JPEG", "MPO")
        return Opened(picture, (height, width), orientation, shrinks)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Whatever goes wrong in a decoder becomes `UndecodableImage`."""
    _hush()
    # `catch_warnings` would do this for a while, but not in threads; whoever uses it around this takes ours away.
    if not warnings.filters or warnings.filters[0] != QUIET:
        warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        yield
    except UndecodableImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UndecodableImage(f"claims more than {MAX_PIXELS:,} pixels") from None
    except Exception as error:  # a hostile or broken file can make a decoder raise anything at all
        raise UndecodableImage(f"cannot be decoded: {error}") from error


def _open(data: bytes) -> Image.Image:
    if not data:
        raise UndecodableImage("is empty (0 bytes)")
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        found = format_of(data)
        if found in FORMATS:
            raise UndecodableImage(f"begins as {found}, but its header is damaged or cut short") from None
        hint = f": it looks like {found}" if found else ""
        raise UndecodableImage(f"is not an image in a format of {', '.join(FORMATS)}{hint}") from None
    _check_size(*picture.size)
    if picture.format == "TIFF":
        tags = _tags(picture)  # A tile is taken whole, however small the picture is.
        _check_size(tags.get(TILE_WIDTH, 1), tags.get(TILE_HEIGHT, 1), "tiles of ")
    return picture


def _check_size(width: int, height: int, of: str = "") -> None:
    if width * height > MAX_PIXELS:
        raise UndecodableImage(f"claims {of}{width} x {height} pixels; at most {MAX_PIXELS:,} are allowed")


@functools.cache
def _hush() -> None:
    """Keeps the standard error stream clean. Pillow logs what nobody asked for; libtiff writes its errors before
    Pillow raises its own."""
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    with contextlib.suppress(OSError, AttributeError):  # a libtiff that is a part of Pillow hides its names
        ctypes.CDLL(importlib.import_module("PIL._imaging").__file__).TIFFSetErrorHandler(None)


def _orientation(picture: Image.Image) -> int:
    try:
        return int(picture.getexif().get(ORIENTATION, 1))
    except Exception:  # senseless EXIF is no reason to refuse the pixels
        return 1


def _tags(picture: Image.Image) -> Any:
    """Those of a TIFF file, by number; nothing for others."""
    return getattr(picture, "tag_v2", {})


def _black_is_zero(picture: Image.Image) -> Image.Image:
    """Pillow turns the grey of TIFF round where 0 is white, but not that of 16 bits."""
    if not picture.mode.startswith("I;16") or _tags(picture).get(PHOTOMETRIC) != WHITE_IS_ZERO:
        return picture
    return Image.fromarray(0xFFFF - np.asarray(picture).astype(np.uint16))


def _from_array(array: np.ndarray) -> Image.Image:
    plane = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if array.dtype != np.uint8 or not (plane.ndim == 2 or (plane.ndim == 3 and plane.shape[2] == 3)) or not array.size:
        raise UndecodableImage(
            f"is an array of {array.dtype} {array.shape}; an image is uint8 of (h, w), (h, w, 1) or (h, w, 3)"
        )
    return Image.fromarray(np.ascontiguousarray(plane))


def _plain(picture: Image.Image, channels: int) -> Image.Image:
    """Of any of Pillow's modes, the same picture in L or RGB, 8 bits a channel."""
    mode = "L" if channels == 1 else "RGB"
    if picture.mode == mode and "transparency" not in picture.info:
        return picture
    if picture.mode.startswith("I;16"):  # 16-bit grey, which Pillow would clip at 255 rather than scale
        grey = np.asarray(picture).astype(np.uint16)
        visible = grey != picture.info.get("transparency", -1)
        picture = Image.fromarray(np.where(visible, grey >> 8, BACKGROUND[0]).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        raise UndecodableImage(f"has 32-bit pixels (mode {picture.mode}), whose range is unknown; save it with 8 or 16")
    elif picture.mode == "LAB":  # Pillow has no way from here to grey
        picture = picture.convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (*BACKGROUND, 255)), picture)
    return picture if picture.mode == mode else picture.convert(mode)
