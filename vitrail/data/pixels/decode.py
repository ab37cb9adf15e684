"""The image formats that are decoded, and the decoders of AVIF and HEIC, which not every machine has."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import io
import itertools
import logging
import os
import re
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError, features
from PIL.ImageFile import ImageFile

from vitrail.errors import ConfigError, UndecodableImage

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "HEIC")
"""Formats that may be opened. Pillow also supports formats that start programs (EPS) or read other files."""

SUFFIXES = frozenset({
    ".jpg", ".jpeg", ".jfif", ".jpe", ".jif", ".jfi", ".mpo", ".png", ".apng", ".webp", ".bmp", ".dib", ".gif", ".tif",
    ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".heic", ".heif", ".hif",
})  # fmt: skip
"""Suffixes, in lower case, of files that count as images, also on a machine without a decoder for their format."""


def without_suffix(key: str) -> str:
    """Return the key of an image without the suffix of an image format, as a name that every system accepts. The image
    7 of a Parquet file, "train.parquet:7", is called "train.parquet_7"."""
    stem, suffix = os.path.splitext(key)  # noqa: PTH122 (a key is not a path of this machine)
    return (stem if suffix.lower() in SUFFIXES else key).replace(":", "_")


ALWAYS = FORMATS[:7]
"""Formats that every Pillow decodes."""

OF_DECODERS = {"AVIF": ("AVIF",), "HEIC": ("HEIF",)}
"""Pillow's names of the formats that not every machine can decode (`missing_decoder`)."""

REGISTERING = threading.Lock()


def missing_decoder(found: str) -> str | None:
    """Return the reason why this machine cannot decode the format `found`, with advice. Return None if it can.

    A HEIC file loads pillow-heif if it is installed. Nothing else does, because loading takes time.
    """
    if found == "AVIF" and not _has_avif():
        return "is an AVIF image, which the installed Pillow cannot decode: pip install --upgrade pillow"
    if found == "HEIC" and not _has_heic():
        return "is a HEIC image, and decoding it needs pillow-heif: pip install 'vitrail[heic]'"
    return None


@functools.cache
def _has_avif() -> bool:
    return bool(features.check("avif")) if "avif" in features.features or "avif" in features.modules else False


@functools.cache
def _has_heic() -> bool:
    """Register the decoder of HEIC with Pillow. Return False if it is not installed."""
    with REGISTERING:
        try:
            importlib.import_module("pillow_heif").register_heif_opener()
        except ImportError:
            return False
        return "HEIF" in Image.OPEN


HEAD = 1000
"""Number of bytes at the beginning of a file that determine its format."""

SIGNATURES = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"GIF8", "GIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (8, b"WEBP", "WEBP"),
    *((0, b"P%c%c" % (kind, space), "PPM") for kind, space in itertools.product(b"123456", b" \t\r\n#")),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"8BPS", "a Photoshop file"),
    (128, b"DICM", "DICOM"),
    (0, b"\x76\x2f\x31\x01", "OpenEXR"),
    (0, b"#?RADIANCE", "Radiance HDR"),
    (0, b"DDS ", "DDS"),
    (0, b"SIMPLE  =", "FITS"),
    (0, b"P7\n", "PAM"),
    (0, b"Pf\n", "PFM"),
    (0, b"PF\n", "PFM"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"version https://git-lfs", "a Git LFS pointer, whose file was not fetched"),
)
"""Position of the signature, its bytes, and the name of the format."""

OTHER_IMAGES = frozenset({
    "JPEG XL", "JPEG 2000", "a Photoshop file", "DICOM", "OpenEXR", "Radiance HDR", "DDS", "FITS", "PAM", "PFM", "ICO",
    "SVG",
})  # fmt: skip
"""Formats of images that are not decoded."""

BRANDS = (
    (b"avif", "AVIF"),
    (b"avis", "AVIF"),
    (b"hei", "HEIC"),
    (b"hev", "HEIC"),
    (b"mif1", "HEIC"),
    (b"msf1", "HEIC"),
)
"""Beginnings of the four-letter brands of image files in the container of MPEG-4, and the names of the formats. AVIF
files also have the brand mif1, so it decides last."""

MARKUP = ((b"<svg", "SVG"), (b"<html", "an HTML page"), (b"<!doctype html", "an HTML page"), (b"<?xml", "XML"))
"""Lower-case markers of text formats and the names of the formats. The first marker that occurs in the first bytes of
the file (`HEAD`) decides."""


def format_of(data: bytes) -> str:
    """Return the name of a file's format, in Pillow's spelling, or "" if the format is unknown."""
    if data[4:8] == b"ftyp":
        # the container of MPEG-4: a major brand, a version, and other brands
        brands = data[8 : min(int.from_bytes(data[:4]), 256)]
        found = {brands[:4], *(brands[start : start + 4] for start in range(8, len(brands), 4))}
        return next((name for mark, name in BRANDS if any(brand.startswith(mark) for brand in found)), "a video")
    for place, mark, name in SIGNATURES:
        if data.startswith(mark, place):
            return name
    text = data[:HEAD].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return next((name for mark, name in MARKUP if text.startswith(b"<") and mark in text), "")


def is_image(data: bytes) -> bool:
    """Return True if a file begins like an image, even of a format that is not decoded."""
    return format_of(data) in {*FORMATS, *OTHER_IMAGES}


PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

TRANSPARENCY = b"tRNS"
"""The only ancillary chunk that changes the pixels which `decode` returns."""

PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Numbers of channels by the colour type of a PNG file."""

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column, first row, and the distances of columns and of rows of each pass of an interlaced PNG file."""

INFLATED = 1 << 20
"""Largest number of bytes that are decompressed at a time."""

EXIF = b"eXIf"
"""The chunk that holds the orientation, if it is not in a text."""

TEXTS = {b"tEXt", b"zTXt", b"iTXt"}
OF_ORIENTATION = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
"""Keywords of texts that can hold the orientation."""

START = b"\xff\xd8"
SCAN = b"\xff\xda"
END = b"\xff\xd9"

AFTER_SCAN = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
"""The first marker after the compressed data of a scan. Stuffed zero bytes and restart markers belong to the data."""

RESTART = re.compile(rb"\xff[\xd0-\xd7]")

FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC9, 0xCA})
"""Markers of the frame header of a JPEG that Pillow decodes."""

APPLICATION = range(0xE0, 0xF0)
COMMENT = 0xFE
"""Markers of segments without influence on the pixels, with the exceptions in `NEEDED`."""

NEEDED = {0xE0: b"JFIF\0", 0xE1: b"Exif\0", 0xEE: b"Adobe"}
"""Beginnings of the application segments that determine colours or the orientation, by their markers."""

SHORTEST = {0xE0: 16, 0xEE: 14}
"""Least lengths of such segments, which include the two bytes of the length."""

FILLS = (b"", b"\xb5\x6a\x93\x2d" * 16, b"\x4a\x95\x6c\xd2" * 16)
"""Bytes that take the place of missing compressed data. If some data is missing, they become different pixels."""

Chunk = tuple[bytes, bytes, bool]
"""Type of a chunk, the whole chunk, and True if its checksum is right."""


def png_of_pixels(data: bytes, *, keep_texts: bool) -> bytes | None:
    """Return a PNG file with only those chunks of `data` that determine its pixels, and EXIF. Return None if `data` is
    not a PNG file, or if one of the chunks of pixels has a wrong checksum or is cut short.

    With `keep_texts`, texts that can hold the orientation are kept, too. EXIF and texts with a wrong checksum are
    dropped. A missing final chunk (IEND) is no fault. Source: PNG (Third Edition), W3C, sections 5.4, 11.2 and 13.1.
    """
    if not data.startswith(PNG_SIGNATURE):
        return None
    kept = [PNG_SIGNATURE]
    for name, chunk, is_right in _chunks(data):
        is_critical = not name[0] & 0x20
        if is_critical or name == TRANSPARENCY:
            if not is_right:
                return None
            kept.append(chunk)
        elif is_right and (name == EXIF or (keep_texts and name in TEXTS and chunk[8:].startswith(OF_ORIENTATION))):
            kept.append(chunk)
    return b"".join(kept)


def has_all_rows(png: bytes) -> bool:
    """Return True if the compressed data of a PNG file has all the pixels that its header states. Source: PNG (Third
    Edition), W3C, sections 7 and 8."""
    width, height = int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
    bits = png[24] * PNG_CHANNELS.get(png[25], 1)
    passes = ADAM7 if png[28] else ((0, 0, 1, 1),)
    missing = 0
    for left, top, right, down in passes:
        columns, rows = -(-(width - left) // right), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            missing += rows * (1 + (columns * bits + 7) // 8)  # each row begins with the number of its filter
    inflater = zlib.decompressobj()
    for name, chunk, _ in _chunks(png):
        data = chunk[8:-4] if name == b"IDAT" else b""
        while data and missing > 0 and not inflater.eof:
            missing -= len(inflater.decompress(data, INFLATED))
            data = inflater.unconsumed_tail
    return missing <= 0


def _chunks(png: bytes) -> Iterator[Chunk]:
    """Yield the chunks of a PNG file up to its end. A last chunk that is cut short counts as one with a wrong
    checksum."""
    start = len(PNG_SIGNATURE)
    while start + 8 <= len(png):
        end = start + 12 + int.from_bytes(png[start : start + 4])
        name, chunk = png[start + 4 : start + 8], png[start:end]
        yield name, chunk, end <= len(png) and zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:])
        if name == b"IEND":
            return
        start = end


def jpeg_of_pixels(data: bytes) -> bytes | None:
    """Return a JPEG file without comments and application segments. Those of JFIF, EXIF and Adobe stay if they have
    their full length, because they can determine colours and orientation. Return None if `data` is not a JPEG file, or
    if nothing is left out. Source: ITU-T T.81, annex B; T.872, section 6.5.
    """
    if not data.startswith(START):
        return None
    kept, start = [START], len(START)
    while (marker := _marker(data, start)) is not None and marker[0] != SCAN[1]:
        kind, length, end = marker
        is_needed = data.startswith(NEEDED.get(kind, ()), length + 2)
        is_other = kind == COMMENT or (kind in APPLICATION and not is_needed)
        if not is_other and end - length >= SHORTEST.get(kind, 0):
            kept.append(data[start:end])
        start = end
    found = b"".join(kept) + data[start:]
    return found if len(found) < len(data) else None


def with_end_marker(data: bytes) -> bytes | None:
    """Return a JPEG file with the end marker that `data` lacks. Return None unless the rest of the file is complete.

    libjpeg fills missing compressed data with grey and does not report it,
    so the file is decoded with different bytes in the place of missing data. Only if the pixels are the same each time,
    nothing is missing. Source: ITU-T T.81, annexes B and G.
    """
    data = data.removesuffix(END[:1])
    last = _last_scan(data)
    if last is None:
        return None
    marks = RESTART.findall(last)
    following = bytes([0xFF, 0xD0 + (marks[-1][1] + 1) % 8 if marks else 0xD0])
    # If the data ends with a complete restart interval, only the data after the next restart marker changes pixels.
    ends = [fill and fill + following + fill for fill in FILLS]
    first, *others = (np.asarray(open_file(data + end + END)) for end in ends)
    return data + END if all(np.array_equal(first, other) for other in others) else None


def _last_scan(jpeg: bytes) -> bytes | None:
    """Return the compressed data of the last scan of a JPEG file that ends in it. Return None if the file ends
    elsewhere, or if coefficients of a component are in none of its scans."""
    missing: dict[int, set[int]] = {}
    start = 2
    while (marker := _marker(jpeg, start)) is not None:
        kind, start, end = marker
        segment = jpeg[start + 2 : end]
        if kind in FRAMES and len(segment) >= 6:
            missing = {component: set(range(64)) for component in segment[6::3]}
        elif kind == SCAN[1]:
            if len(segment) < 4 or len(segment) < 4 + 2 * segment[0]:
                return None
            first, last, precision = segment[-3:]
            if not precision & 0x0F:  # the lowest bit of the coefficients
                for component in segment[1:-3:2]:
                    missing.get(component, set()).difference_update(range(first, last + 1))
            after = AFTER_SCAN.search(jpeg, end)
            if after is None:
                return None if any(missing.values()) or not missing else jpeg[end:]
            end = after.start()
        start = end
    return None


def _marker(jpeg: bytes, start: int) -> tuple[int, int, int] | None:
    """Return the kind of the segment whose marker begins at `start`, and the positions of its length and of its end.
    Return None if the file has no complete segment there."""
    while jpeg[start : start + 2] == b"\xff\xff":  # fill bytes
        start += 1
    length = int.from_bytes(jpeg[start + 2 : start + 4])
    end = start + 2 + length
    if length < 2 or end > len(jpeg) or jpeg[start] != END[0] or jpeg[start + 1] == END[1]:
        return None
    return jpeg[start + 1], start + 2, end


MAX_PIXELS = 89_478_485
"""Default of the largest number of pixels of an image: 256 MiB in RGB. Pillow warns about larger images. Here they are
refused before memory is allocated."""

LIMIT_VARIABLE = "VITRAIL_MAX_PIXELS"
"""The environment variable that sets another limit. Worker processes inherit it."""

BACKGROUND = (255, 255, 255)
"""Background colour of transparent pixels."""

JPEGS = ("JPEG", "MPO")
"""Pillow's names of JPEG files. An MPO file has several pictures, of which the first is decoded."""

LAYOUTS = {("RGB", 3): "RGB", ("L", 1): "GRAY"}
"""simplejpeg's name of the layout of pixels, by Pillow's name of a file's layout and the number of channels."""

WIDTH, HEIGHT, PHOTOMETRIC, ORIENTATION, TILE_WIDTH, TILE_HEIGHT = 256, 257, 262, 274, 322, 323
"""Tags of EXIF and TIFF."""

BITS, PLANES = 258, 284
"""Tags of TIFF: bits of each channel, and the arrangement of the channels."""

WHITE_IS_ZERO = 0
"""A value of PHOTOMETRIC."""

SEPARATE = 2
"""A value of PLANES: each channel is a plane of its own."""

GREY_LEVELS = {"L;2": 4, "L;4": 16}
"""Numbers of grey levels by Pillow's name of the layout of pixels."""

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transpositions that turn a picture upright, by EXIF orientation."""

TURNED = frozenset({5, 6, 7, 8})
"""Orientations that swap height and width."""

FROM_BELOW, FROM_RIGHT = frozenset({3, 4, 7, 8}), frozenset({2, 3, 6, 7})
"""Orientations for which turning the picture upright reverses the order of the rows (`FROM_BELOW`) or of the columns
(`FROM_RIGHT`)."""

PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Types of PNG chunks that can hold the orientation. If such a chunk follows the pixels, Pillow has to decode the file
to find it."""

# Pillow's warnings are disabled, because this module decodes or refuses every image that causes one.
QUIET: Any = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


def shrink_for(most: float) -> int:
    """Return the largest of the factors 8, 4, 2 and 1 by which decoding can shrink each side of a JPEG, at most
    `most`."""
    return next((shrink for shrink in (8, 4, 2) if shrink <= most), 1)


@dataclass(frozen=True)
class Opened:
    """An image whose header was read. The size is known, but the pixels are not decoded yet."""

    picture: Image.Image
    size: tuple[int, int]
    """Height and width of the upright image at full size."""
    orientation: int = 1
    """EXIF orientation, 1 to 8."""
    file: bytes = b""
    """The encoded file, or nothing for a picture that the caller opened."""

    def shrink_for(self, most: float) -> int:
        """Return the factor of `shrink_for` that is at most `most`, or 1 if the image is not a JPEG. The decoder of a
        Pillow image from the caller may not be changed, either."""
        is_jpeg = bool(self.file) and self.picture.format in JPEGS
        return shrink_for(float(min(most, *self.size))) if is_jpeg else 1

    def begin(self, shrink: int) -> tuple[float, float]:
        """Return the row and the column at which the content of the shrunk upright picture begins, in its pixels.

        If the size is not a multiple of `shrink`, the decoder pads the picture at the right and the bottom. After the
        picture is turned upright, the padding can be at the left or the top.
        """
        height, width = (-size % shrink / shrink for size in self.size)
        return height * (self.orientation in FROM_BELOW), width * (self.orientation in FROM_RIGHT)

    def pixels(self, channels: int, shrink: int = 1) -> UInt8[np.ndarray, "h w c"]:
        """Return the pixels of `load` as an array. simplejpeg decodes a JPEG file if this gives the same pixels."""
        found = self._by_simplejpeg(channels, shrink)
        if found is None:
            picture = self.load(channels, shrink)
            found = np.asarray(picture).reshape(picture.height, picture.width, channels)
        return found

    def _by_simplejpeg(self, channels: int, shrink: int) -> UInt8[np.ndarray, "h w c"] | None:
        """Return the upright pixels of an undamaged JPEG file, or None for a file that Pillow has to decode."""
        layout = LAYOUTS.get((self.picture.mode, channels))
        if not self.file or self.picture.format not in JPEGS or layout is None or (decoder := _simplejpeg()) is None:
            return None
        size = -(-self.size[0] // shrink), -(-self.size[1] // shrink)
        least = {}
        if shrink > 1:
            # simplejpeg takes the smallest of eight factors that gives these sides. In tiny images, several do.
            if max(self.size) < 8:
                return None
            least = dict(
                zip(("min_height", "min_width"), size[:: -1 if self.orientation in TURNED else 1], strict=True)
            )
        try:
            found = decoder(self.file, layout, **least)
        except ValueError:  # Pillow tolerates some faults
            return None
        found = found.transpose(1, 0, 2) if self.orientation in TURNED else found
        found = found[:: -1 if self.orientation in FROM_BELOW else 1, :: -1 if self.orientation in FROM_RIGHT else 1]
        return np.ascontiguousarray(found) if found.shape[:2] == size else None

    def load(self, channels: int, shrink: int = 1) -> Image.Image:
        """Return the upright pixels in mode L (`channels` 1) or RGB (3). `shrink` comes from `shrink_for`.

        Raise `UndecodableImage`.
        """
        with _refusing():
            loaded = _loaded(self.picture, self.file, shrink)
            picture = _as_grey_of_16_bits(loaded)
            # The orientation is read after loading, because Pillow turns a TIFF upright when it loads the pixels.
            turn = UPRIGHT.get(orientation_of(loaded))
            if turn is None:
                return _plain(picture, channels)
            upright = _plain(picture.transpose(turn), channels)
            upright.info = {}  # it would say that the picture has to be turned
            return upright


@functools.cache
def _simplejpeg() -> Callable[..., np.ndarray] | None:
    """Return the decoder of simplejpeg, which takes a quarter less time because Pillow stores a fourth byte for each
    pixel. Return None if it is not installed, or if noise in any sampling of the colours gives other pixels: each has
    a libjpeg-turbo of its own."""
    try:
        decoder: Callable[..., np.ndarray] = importlib.import_module("simplejpeg").decode_jpeg
    except ImportError:
        return None
    noise = np.random.default_rng(0).integers(256, size=(37, 45, 3), dtype=np.uint8)
    for picture, sampling in ((noise, 0), (noise, 1), (noise, 2), (noise[..., 0], 0)):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", subsampling=sampling)
        expected = Image.open(file)
        found = decoder(file.getvalue(), LAYOUTS[expected.mode, picture[0, 0].size])
        if not np.array_equal(found.reshape(picture.shape), np.asarray(expected)):
            return None
    return decoder


def pixel_limit() -> int:
    """Return the largest number of pixels of an image that is decoded. By default it is at most the limit that the
    program has set for Pillow. Raise `ConfigError` if the environment variable is not a positive whole number."""
    text = os.environ.get(LIMIT_VARIABLE)
    if not text:
        return min(MAX_PIXELS, Image.MAX_IMAGE_PIXELS or MAX_PIXELS)
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{LIMIT_VARIABLE}={text!r} in the environment is not a whole number above 0; correct it")
    return int(text)


def allow_pixels(limit: int) -> None:
    """Set the largest number of pixels of an image that is decoded, for this process and those that it starts."""
    os.environ[LIMIT_VARIABLE] = str(limit)


def decode(image: bytes | np.ndarray | Image.Image, channels: int) -> UInt8[np.ndarray, "h w c"]:
    """Return the pixels of an image with 1 (grey) or 3 (RGB) channels. The EXIF orientation is applied, and transparent
    pixels are blended with white.

    The image is an encoded file, a uint8 array (h w, h w 1 or h w 3) or a Pillow image. Only the first frame or page is
    decoded. If the image has 16 bits per channel, the upper 8 bits are kept. ICC colour profiles are ignored, because
    the models of torchvision and timm were trained without them. Raise `UndecodableImage` if the image cannot be
    decoded; the message gives the reason.
    """
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (channels,) and image.size:
        return image
    return open_image(image).pixels(channels)


def to_pil(image: bytes | np.ndarray | Image.Image, channels: int) -> Image.Image:
    """Return the pixels of `decode` as a Pillow image in mode L or RGB."""
    return open_image(image).load(channels)


def small_picture(image: bytes | np.ndarray | Image.Image, side: int) -> Image.Image:
    """Return the pixels of `decode` as a Pillow image in mode RGB, reduced to at most `side` pixels on each side."""
    picture = to_pil(image, 3)
    picture.thumbnail((side, side))
    return picture


def image_size_of(image: bytes | np.ndarray | Image.Image) -> tuple[int, int]:
    """Return the height and width that `decode` would return. Only the header is read. Raise `UndecodableImage`."""
    return open_image(image).size


def open_image(image: bytes | np.ndarray | Image.Image) -> Opened:
    """Open an image and read its header only. Raise `UndecodableImage`."""
    if isinstance(image, np.ndarray):
        picture = _from_array(image)
        return Opened(picture, (picture.height, picture.width))
    with _refusing():
        if isinstance(image, bytes):
            picture, orientation = open_file(image), 1
            if picture.format != "PNG":
                orientation = orientation_of(picture)
            elif any(mark in image for mark in PNG_ORIENTATION):
                picture = _loaded(picture, image)
                orientation = orientation_of(picture)
        else:
            picture, orientation = image, orientation_of(image)
        width, height = picture.size
        if min(width, height) < 1:
            raise UndecodableImage(f"has no pixels: its header states a size of {width} x {height} (width x height)")
        stored = _tags(picture).get(WIDTH, width), _tags(picture).get(HEIGHT, height)
        if orientation in TURNED and picture.size == stored:  # newer versions of Pillow give the upright size of a TIFF
            width, height = height, width
        return Opened(picture, (height, width), orientation, image if isinstance(image, bytes) else b"")


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn every exception of a decoder into `UndecodableImage`."""
    _hush()
    # `catch_warnings` is not safe in threads. It can remove our filter, so the filter is set again.
    if not warnings.filters or warnings.filters[0] != QUIET:
        warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        yield
    except (UndecodableImage, ConfigError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UndecodableImage(f"claims more than {_limit_in_words()}") from None
    except Exception as error:  # a hostile or broken file can make a decoder raise anything at all
        raise UndecodableImage(f"cannot be decoded: {str(error) or type(error).__name__}") from error


def open_file(data: bytes) -> ImageFile:
    """Open an encoded image with Pillow and read its header only. A PNG or JPEG file that Pillow refuses for a part
    without influence on the pixels is opened without this part.

    Raise `UndecodableImage` for a file of another kind, and any exception of Pillow for a damaged header.
    """
    if not data:
        raise UndecodableImage("is empty (0 bytes)")
    found = format_of(data)
    if (missing := missing_decoder(found)) is not None:
        raise UndecodableImage(missing)
    try:
        picture = _opened(data, found)
    except UnidentifiedImageError:
        if found in FORMATS:
            raise UndecodableImage(
                f"begins as {found}, but its header is damaged or cut short, or describes pixels of an unsupported kind"
            ) from None
        hint = f": it looks like {found}" if found else ""
        raise UndecodableImage(f"is not an image in a format of {', '.join(FORMATS)}{hint}") from None
    _check_size(*picture.size)
    if picture.format == "TIFF":
        tags = _tags(picture)  # Memory is allocated for whole tiles, even if the picture is small.
        _check_size(tags.get(TILE_WIDTH, 1), tags.get(TILE_HEIGHT, 1), "tiles of ")
        bits = tags.get(BITS, (8,))
        if tags.get(PLANES) == SEPARATE and len(bits) > 1 and max(bits) > 8:
            raise UndecodableImage(
                "is a TIFF file with a separate plane of 16 bits for each channel, which Pillow reads wrongly; save it "
                "with the channels of each pixel together"
            )
    return picture


def _opened(data: bytes, found: str) -> ImageFile:
    """Open a file that begins like the format `found`. Raise any exception of Pillow."""
    if Image.MAX_IMAGE_PIXELS is not None:  # by default, Pillow refuses images of twice its own limit
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, pixel_limit())
    try:
        return Image.open(io.BytesIO(data), formats=OF_DECODERS.get(found, ALWAYS))
    except Image.DecompressionBombError:
        raise
    except Exception:  # a broken file can make Pillow raise any exception
        if (repaired := _repaired(data)) is None:
            raise
        return repaired


def _loaded(picture: Image.Image, file: bytes, shrink: int = 1) -> Image.Image:
    """Return the picture with its pixels, which are loaded from `file` after a repair if Pillow cannot load them
    otherwise. Raise `UndecodableImage` or any exception of Pillow."""
    width, height = picture.size
    if shrink > 1:
        picture.draft(None, (width // shrink, height // shrink))
    stated, layout = picture.size, layout_of(picture)
    try:
        picture.load()
    except Exception:  # as above
        if picture.format == "PNG":
            repaired: Image.Image | None = _repaired(file)
        else:
            whole = with_end_marker(file) if picture.format in JPEGS else None
            repaired = None if whole is None else _loaded(open_file(whole), b"", shrink)
        if repaired is None:
            raise
        return repaired
    if picture.format == "HEIF" and picture.size != stated:  # no other decoder continues then
        raise UndecodableImage("has another size than its header states")
    return _corrected(picture, layout, file)


def layout_of(picture: Image.Image) -> str:
    """Return Pillow's name of the layout of the pixels in a file that is not loaded yet, such as "RGB;16B", or an empty
    text."""
    tiles = getattr(picture, "tile", None)
    arguments = tiles[0][3] if tiles else ""
    return str(arguments[0] if isinstance(arguments, tuple) and arguments else arguments)


def _corrected(picture: Image.Image, layout: str, file: bytes) -> Image.Image:
    """Return a picture that was loaded from `file`, with what Pillow misunderstands corrected. Raise `UndecodableImage`
    for a PNG file with missing rows, which Pillow fills with zeros."""
    if picture.format == "PNG" and file and _ends_with_zeros(picture) and not has_all_rows(file):
        raise UndecodableImage("cannot be decoded: it has fewer rows of pixels than its header states")
    transparent = picture.info.get("transparency")
    if picture.format == "PNG" and isinstance(transparent, int) and layout in GREY_LEVELS:
        # Pillow scales grey to 8 bits, but not the level that is transparent.
        picture.info["transparency"] = transparent * 255 // (GREY_LEVELS[layout] - 1)
    elif picture.format == "PNG" and isinstance(transparent, tuple) and layout.startswith("RGB;16"):
        picture.info["transparency"] = tuple(level >> 8 for level in transparent)
    elif picture.format == "BMP" and picture.mode == "RGBA" and not picture.getchannel("A").getbbox():
        return picture.convert("RGB")  # many programs leave the fourth byte of each pixel 0
    elif picture.format == "TIFF" and layout.startswith("I;12"):
        return Image.fromarray(np.asarray(picture).astype(np.uint16) << 4)
    return picture


def _ends_with_zeros(picture: Image.Image) -> bool:
    """Return True if one of the last two rows has only zeros. In an interlaced file, these two are in two passes."""
    width, height = picture.size
    rows = range(max(height - 2, 0), height)
    corners = [picture.getpixel((width - 1, row)) for row in rows]
    if all(any(corner) if isinstance(corner, tuple) else corner for corner in corners):  # decides most images fast
        return False
    return not all(np.asarray(picture.crop((0, row, width, row + 1))).any() for row in rows)


def _repaired(file: bytes) -> ImageFile | None:
    """Return the picture of a PNG or JPEG file from the parts of the file that determine its pixels. Return None for
    another file, or if its pixels are damaged or too many. A PNG picture is loaded."""
    parts = (png_of_pixels(file, keep_texts=True), png_of_pixels(file, keep_texts=False), jpeg_of_pixels(file))
    for data in filter(None, parts):
        with contextlib.suppress(Exception):
            picture = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
            _check_size(*picture.size)
            if picture.format == "PNG":
                layout = layout_of(picture)
                picture.load()
                _corrected(picture, layout, data)
            return picture
    return None


def _check_size(width: int, height: int, of: str = "") -> None:
    if width * height > pixel_limit():
        raise UndecodableImage(f"claims {of}{width} x {height} pixels (width x height), more than {_limit_in_words()}")


def _limit_in_words() -> str:
    return f"the limit of {pixel_limit():,} pixels; a higher --max-pixels (or {LIMIT_VARIABLE}) allows it"


@functools.cache
def _hush() -> None:
    """Keep the standard error stream clean: Pillow logs there, and libtiff writes its errors before Pillow raises."""
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    with contextlib.suppress(OSError, AttributeError):  # the libtiff in some builds of Pillow hides its names
        ctypes.CDLL(importlib.import_module("PIL._imaging").__file__).TIFFSetErrorHandler(None)


def orientation_of(picture: Image.Image) -> int:
    """Return the EXIF orientation of a picture, 1 to 8."""
    try:
        return int(picture.getexif().get(ORIENTATION, 1))
    except Exception:  # broken EXIF is no reason to refuse the pixels
        return 1


def _tags(picture: Image.Image) -> Any:
    """Return the tags of a TIFF file by number, or an empty mapping for other files."""
    return getattr(picture, "tag_v2", {})


def _as_grey_of_16_bits(picture: Image.Image) -> Image.Image:
    """Return grey of 16 bits with 0 as black. Other pictures are returned as they are.

    In some TIFF files 0 is white, and Pillow inverts only other depths itself. Pillow stores grey of 16 bits of a PPM
    file in 32 bits.
    """
    is_ppm = picture.format == "PPM" and picture.mode == "I"
    is_inverted = picture.mode.startswith("I;16") and _tags(picture).get(PHOTOMETRIC) == WHITE_IS_ZERO
    if not is_ppm and not is_inverted:
        return picture
    grey = np.asarray(picture).astype(np.uint16)
    return Image.fromarray(0xFFFF - grey if is_inverted else grey)


def _from_array(array: np.ndarray) -> Image.Image:
    plane = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if array.dtype != np.uint8 or not (plane.ndim == 2 or (plane.ndim == 3 and plane.shape[2] == 3)) or not array.size:
        raise UndecodableImage(
            f"is an array of {array.dtype} {array.shape}; an image is uint8 of (h, w), (h, w, 1) or (h, w, 3)"
        )
    return Image.fromarray(np.ascontiguousarray(plane))


def _plain(picture: Image.Image, channels: int) -> Image.Image:
    """Convert a picture of any Pillow mode to mode L (1 channel) or RGB (3 channels), with 8 bits per channel."""
    mode = "L" if channels == 1 else "RGB"
    if picture.mode == mode and "transparency" not in picture.info:
        return picture
    if picture.mode.startswith("I;16"):  # Pillow would clip 16-bit grey at 255 instead of scaling it
        grey = np.asarray(picture).astype(np.uint16)
        visible = grey != picture.info.get("transparency", -1)
        picture = Image.fromarray(np.where(visible, grey >> 8, BACKGROUND[0]).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        raise UndecodableImage(
            f"has 32-bit pixels (mode {picture.mode}), whose range is unknown; save it with 8 or 16 bits per channel"
        )
    elif picture.mode == "LAB":  # Pillow cannot convert LAB to grey directly
        picture = picture.convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (*BACKGROUND, 255)), picture)
    return picture if picture.mode == mode else picture.convert(mode)
