"""Encoded bytes to RGB or grey pixels, with every way a file can be broken turned into one exception."""

from __future__ import annotations

import io

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from vitrail.errors import UndecodableImage

__all__ = ["FORMATS", "MAX_PIXELS", "SUFFIXES", "decode", "to_pil"]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""What may be opened. Pillow knows formats that start other programs (EPS) or read other files; these do not."""

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""File names, lower case, that count as images in a folder."""

MAX_PIXELS = 89_478_485
"""A header that claims more is refused before memory is taken; Pillow itself warns from here on (256 MiB of RGB)."""

BACKGROUND = (255, 255, 255)
"""What lies behind transparent pixels."""


def decode(image: bytes | np.ndarray | Image.Image, channels: int) -> UInt8[np.ndarray, "h w c"]:
    """Pixels of an image with `channels` of 1 (grey) or 3 (RGB), upright by its EXIF tag, alpha laid on white.

    Takes an encoded file, an array (uint8; h w, h w 1 or h w 3) or a Pillow image. Of an animation, the first frame.
    Raises `UndecodableImage`, which says what is wrong with the image.
    """
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (channels,) and image.size:
        return image
    pixels = np.asarray(to_pil(image, channels))
    return pixels.reshape(*pixels.shape[:2], channels)


def to_pil(image: bytes | np.ndarray | Image.Image, channels: int) -> Image.Image:
    """The same as a Pillow image of mode L or RGB."""
    mode = "L" if channels == 1 else "RGB"
    if isinstance(image, np.ndarray):
        return _plain(_from_array(image), mode)
    try:
        picture = _open(image) if isinstance(image, bytes) else image
        picture.load()
        return _plain(ImageOps.exif_transpose(picture), mode)
    except UndecodableImage:
        raise
    except UnidentifiedImageError:
        raise UndecodableImage(f"is not an image in a format of {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UndecodableImage(f"claims more than {MAX_PIXELS:,} pixels") from None
    except Exception as error:  # a hostile or broken file can make a decoder raise anything at all
        raise UndecodableImage(f"cannot be decoded: {error}") from error


def _open(data: bytes) -> Image.Image:
    if not data:
        raise UndecodableImage("is empty (0 bytes)")
    picture = Image.open(io.BytesIO(data), formats=FORMATS)
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise UndecodableImage(f"claims {width} x {height} pixels; at most {MAX_PIXELS:,} are allowed")
    return picture


def _from_array(array: np.ndarray) -> Image.Image:
    plane = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if array.dtype != np.uint8 or not (plane.ndim == 2 or (plane.ndim == 3 and plane.shape[2] == 3)) or not array.size:
        raise UndecodableImage(
            f"is an array of {array.dtype} {array.shape}; an image is uint8 of (h, w), (h, w, 1) or (h, w, 3)"
        )
    return Image.fromarray(np.ascontiguousarray(plane))


def _plain(picture: Image.Image, mode: str) -> Image.Image:
    """Of any of Pillow's modes, the same picture in L or RGB, 8 bits a channel."""
    if picture.mode.startswith("I;16"):  # 16-bit grey, which Pillow would clip at 255 rather than scale
        grey = np.asarray(picture).astype(np.uint16)
        visible = grey != picture.info.get("transparency", -1)
        picture = Image.fromarray(np.where(visible, grey >> 8, BACKGROUND[0]).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        raise UndecodableImage(f"has 32-bit pixels (mode {picture.mode}), whose range is unknown; save it with 8 or 16")
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (*BACKGROUND, 255)), picture)
    return picture if picture.mode == mode else picture.convert(mode)
