"""Tests of files whose pixels are intact and which Pillow refuses: PNG with damaged chunks, JPEG without end marker."""

from __future__ import annotations

import os
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.make import encode, make_png, orientation, png_chunk
from vitrail.data.pixels.decode import decode, image_size_of, open_image
from vitrail.errors import UndecodableImage

PIXELS = np.random.default_rng(3).integers(0, 256, (21, 34, 3), dtype=np.uint8)

LARGE = zlib.compress(b"z" * 2_000_000)


def png(*more: bytes, at: bytes = b"IDAT", **options: Any) -> bytes:
    """Return a PNG file of the pixels with more chunks in front of the first chunk of type `at`."""
    data = encode(PIXELS, "PNG", **options)
    place = data.index(at) - 4
    return data[:place] + b"".join(more) + data[place:]


HARMLESS = {
    "a large zTXt": png_chunk(b"zTXt", b"a\0\0" + LARGE),
    "a large iTXt": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + LARGE),
    "a large iCCP": png_chunk(b"iCCP", b"icc\0\0" + zlib.compress(os.urandom(1000) * 1500)),
    "a wrong checksum": png_chunk(b"tEXt", b"a\0b", is_damaged=True),
    "a zTXt of no known method": png_chunk(b"zTXt", b"a\0\1abc"),
    "a zTXt that is not compressed": png_chunk(b"zTXt", b"a\0\0abc"),
    **{
        f"a short {name.decode()}": png_chunk(name, b"\0")
        for name in (b"gAMA", b"pHYs", b"cHRM", b"sRGB", b"iCCP", b"tIME")
    },
}


@pytest.mark.parametrize("more", HARMLESS.values(), ids=HARMLESS)
@pytest.mark.parametrize(("at", "number"), [(b"IDAT", 1), (b"IDAT", 6), (b"IEND", 8)])
def test_chunks_without_influence_on_the_pixels_are_no_reason_to_refuse(more: bytes, at: bytes, number: int) -> None:
    exif = orientation(number)
    turned = decode(png(exif=exif), 3)
    assert turned.shape == ((21, 34, 3) if number == 1 else (34, 21, 3))
    data = png(more, at=at, exif=exif)
    np.testing.assert_array_equal(decode(data, 3), turned)
    assert image_size_of(data) == turned.shape[:2]


def test_transparency_stays_if_another_chunk_is_dropped() -> None:
    data = encode(Image.fromarray(PIXELS).quantize(7), "PNG", transparency=2)
    place = data.index(b"IDAT") - 4
    damaged = data[:place] + HARMLESS["a short gAMA"] + data[place:]
    np.testing.assert_array_equal(decode(damaged, 3), decode(data, 3))


@pytest.mark.parametrize("name", [b"IDAT", b"IHDR", b"PLTE", b"tRNS"])
def test_damaged_chunks_with_influence_on_the_pixels_are_refused(name: bytes) -> None:
    data = bytearray(encode(Image.fromarray(PIXELS).quantize(7), "PNG", transparency=2))
    data[data.index(name) + 5] ^= 1
    with pytest.raises(UndecodableImage):
        decode(bytes(data[:33]) + HARMLESS["a short gAMA"] + bytes(data[33:]), 3)


def test_pixels_that_are_cut_short_are_refused_beside_a_damaged_chunk() -> None:
    data = png(HARMLESS["a short gAMA"])
    for end in range(len(data) - 60, 60, -211):
        with pytest.raises(UndecodableImage):
            decode(data[:end], 3)


def test_a_size_beyond_the_limit_is_refused_beside_a_damaged_chunk() -> None:
    data = png(HARMLESS["a short gAMA"])
    header = png_chunk(b"IHDR", struct.pack(">II", 65_000, 65_000) + data[24:29])
    with pytest.raises(UndecodableImage):
        decode(data[:8] + header + data[33:], 3)


JPEGS: list[tuple[str, dict[str, Any]]] = [
    ("RGB", {}), ("L", {}), ("CMYK", {}), ("RGB", {"progressive": True}), ("RGB", {"restart_marker_rows": 1}),
    ("L", {"restart_marker_blocks": 1}), ("RGB", {"quality": 100, "subsampling": 0}),
]  # fmt: skip


def jpeg(mode: str, **options: Any) -> bytes:
    """Return a JPEG file whose lower half is nearly grey, as libjpeg fills missing data."""
    pixels = PIXELS.copy()
    pixels[11:] = 128
    return encode(Image.fromarray(pixels).convert(mode), "JPEG", **options)


@pytest.mark.parametrize(("mode", "options"), JPEGS)
@pytest.mark.parametrize("missing", [1, 2])
def test_a_jpeg_that_lacks_only_its_end_marker_decodes(mode: str, options: dict[str, Any], missing: int) -> None:
    data = jpeg(mode, **options)
    np.testing.assert_array_equal(decode(data[:-missing], 3), decode(data, 3))


@pytest.mark.parametrize(("mode", "options"), JPEGS)
def test_a_jpeg_cut_anywhere_gives_all_its_pixels_or_is_refused(mode: str, options: dict[str, Any]) -> None:
    data = jpeg(mode, **options)
    whole, refused = decode(data, 3), 0
    for missing in [*range(3, 90), *range(90, len(data), 13)]:
        try:
            decoded = decode(data[:-missing], 3)
        except UndecodableImage:
            refused += 1
        else:
            np.testing.assert_array_equal(decoded, whole)
    assert refused > 60


def test_a_jpeg_without_end_marker_shrinks_like_others() -> None:
    data = encode(PIXELS.repeat(4, 0).repeat(4, 1), "JPEG")
    np.testing.assert_array_equal(np.asarray(open_image(data[:-2]).load(3, 2)), np.asarray(open_image(data).load(3, 2)))


SEGMENTS = {
    "a short Photoshop segment": b"\xff\xed\x00\x16Photoshop 3.0\x008BIM\x04\x00",
    "a short Adobe segment": b"\xff\xee\x00\x07Adobe",
    "a short colour profile": b"\xff\xe2\x00\x0fICC_PROFILE\x00\x01",
    "a broken index of pictures": b"\xff\xe2\x00\x08MPF\x00II",
    "a comment": b"\xff\xfe\x00\x05a\xff\xd8",
}


@pytest.mark.parametrize("segment", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize(("mode", "number"), [("RGB", 6), ("L", 1), ("CMYK", 6)])
def test_damaged_segments_of_jpeg_are_no_reason_to_refuse(segment: bytes, mode: str, number: int) -> None:
    data = jpeg(mode, exif=orientation(number))
    damaged = data[:2] + segment + data[2:]
    np.testing.assert_array_equal(decode(damaged, 3), decode(data, 3))
    assert image_size_of(damaged) == ((21, 34) if number == 1 else (34, 21))
    with pytest.raises(UndecodableImage):
        decode(damaged[: len(damaged) // 2], 3)


def interlaced(pixels: np.ndarray) -> bytes:
    """Return the rows of grey pixels in the seven passes of an interlaced PNG file."""
    starts = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    passes = (pixels[top::down, left::right] for left, top, right, down in starts)
    return b"".join(b"\0" + row.tobytes() for one in passes if one.size for row in one)


@pytest.mark.parametrize("is_interlaced", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (9, 13), (16, 16), (2, 21)])
@pytest.mark.parametrize("level", [0, 77])
def test_png_files_with_missing_rows_are_refused(is_interlaced: bool, shape: tuple[int, int], level: int) -> None:
    pixels = np.full(shape, level, np.uint8)
    rows = interlaced(pixels) if is_interlaced else b"".join(b"\0" + row.tobytes() for row in pixels)
    whole = make_png(shape[1], shape[0], rows=rows, is_interlaced=is_interlaced)
    np.testing.assert_array_equal(decode(whole, 1)[..., 0], pixels)
    with pytest.raises(UndecodableImage):
        decode(make_png(shape[1], shape[0], rows=rows[: -shape[1] - 1], is_interlaced=is_interlaced), 1)
