"""Tests of decoding all kinds of files to grey and RGB pixels: valid, broken, and intact though Pillow refuses them."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import resource
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from tests.make import encode, make_png, orientation, png_chunk
from vitrail.data.pixels.decode import MAX_PIXELS, allow_pixels, decode, image_size_of, open_image, pixel_limit, to_pil
from vitrail.errors import ConfigError, UndecodableImage

LOSSLESS = [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("WEBP", {"lossless": True})]

RED, GREEN, BLUE, BLACK, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 0, 0), (255, 255, 255)


def picture(height: int = 13, width: int = 21, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (height, width, channels), dtype=np.uint8)


def blocks(rows: int = 2, columns: int = 3) -> np.ndarray:
    """Return an image of 16 x 16 squares of one colour each, which JPEG hardly changes."""
    colours = np.random.default_rng(6).integers(30, 220, (rows, columns, 3), dtype=np.uint8)
    return colours.repeat(16, axis=0).repeat(16, axis=1)


def grey_of(colours: np.ndarray) -> np.ndarray:
    """Return the luma of ITU-R 601 with Pillow's integers: (19595 R + 38470 G + 7471 B + 2^15) / 2^16."""
    red, green, blue = np.moveaxis(colours.astype(np.int64), -1, 0)
    return ((19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16).astype(np.uint8)[..., None]


def on_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return colours * share + 255 * (1 - share)


@pytest.mark.parametrize(("file_format", "options"), LOSSLESS)
def test_lossless_formats_give_the_pixels(file_format: str, options: dict[str, object]) -> None:
    expected = picture()
    data = encode(expected, file_format, **options)
    found = decode(data, 3)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(decode(data, 1), grey_of(expected))


def test_multi_picture_jpeg_of_cameras_gives_its_first_picture() -> None:
    first, second = Image.new("RGB", (32, 16), RED), Image.new("RGB", (32, 16), BLUE)
    found = decode(encode(first, "MPO", save_all=True, append_images=[second], quality=95), 3)
    assert found.shape == (16, 32, 3) and np.abs(found.astype(int) - RED).max() <= 4


@pytest.mark.parametrize("is_bitmap", [False, True])
@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "BMP", "GIF"])
def test_grey_files_and_bitmaps_give_grey_or_equal_channels(file_format: str, is_bitmap: bool) -> None:
    grey = picture(channels=1)
    data = encode(grey[..., 0] > 127 if is_bitmap else grey[..., 0], file_format)
    expected = np.where(grey > 127, 255, 0) if is_bitmap else grey
    np.testing.assert_array_equal(decode(data, 1), expected)
    np.testing.assert_array_equal(decode(data, 3), expected.repeat(3, axis=2))


@pytest.mark.parametrize(
    ("file_format", "transparent"),
    [("PNG", None), ("TIFF", None), ("BMP", None), ("GIF", None), ("PNG", 2), ("GIF", 2)],
)
def test_palettes_are_looked_up_and_a_transparent_colour_is_white(file_format: str, transparent: int | None) -> None:
    indices = picture(channels=1)[..., 0] % 4
    palette = np.array([RED, GREEN, BLACK, (7, 80, 200)], np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(palette.tobytes())
    data = encode(image, file_format, **({} if transparent is None else {"transparency": transparent}))
    if transparent is not None:
        palette[transparent] = WHITE
    np.testing.assert_array_equal(decode(data, 3), palette[indices])
    np.testing.assert_array_equal(decode(data, 1), grey_of(palette[indices]))


def test_a_palette_with_an_alpha_for_each_colour_is_laid_on_white() -> None:
    indices = np.arange(4, dtype=np.uint8)[None]
    palette = np.array([BLACK, BLACK, RED, BLUE], np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(palette.tobytes())
    found = decode(encode(image, "PNG", transparency=bytes([0, 102, 51, 255])), 3)
    np.testing.assert_array_equal(found[0], [WHITE, (153, 153, 153), (255, 204, 204), BLUE])


@pytest.mark.parametrize(
    ("mode", "file_format", "options"),
    [("RGBA", "PNG", {}), ("RGBA", "TIFF", {}), ("RGBA", "WEBP", {"lossless": True, "exact": True}),
     ("LA", "PNG", {}), ("LA", "TIFF", {})],
)  # fmt: skip
def test_alpha_is_laid_on_white(mode: str, file_format: str, options: dict[str, object]) -> None:
    pixels = picture(channels=len(mode))
    pixels[0, :3, -1] = 0, 255, 128
    planes = [Image.fromarray(plane) for plane in np.moveaxis(pixels, 2, 0)]
    data = encode(Image.merge(mode, planes), file_format, **options)
    found = decode(data, 3)
    assert np.abs(found - on_white(pixels[..., :-1], pixels[..., -1])).max() <= 1
    np.testing.assert_array_equal(found[0, 0], WHITE)
    np.testing.assert_array_equal(found[0, 1], np.broadcast_to(pixels[0, 1, :-1], 3))
    grey = grey_of(found) if mode == "RGBA" else found[..., :1]
    np.testing.assert_array_equal(decode(data, 1), grey)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_one_transparent_colour_is_white(mode: str) -> None:
    black = (0, 0, 0) if mode == "RGB" else 0
    image = Image.new(mode, (3, 1), black)
    image.putpixel((1, 0), (9, 9, 9) if mode == "RGB" else 9)
    found = decode(encode(image, "PNG", transparency=black), 3)
    np.testing.assert_array_equal(found[0], [WHITE, (9, 9, 9), WHITE])


@pytest.mark.parametrize(("file_format", "tolerance"), [("TIFF", 0), ("JPEG", 5)])
def test_inks_of_cmyk_become_their_colours(file_format: str, tolerance: int) -> None:
    inks = [(0, 0, 0, 0), (255, 0, 0, 0), (0, 255, 0, 0), (0, 0, 255, 0), (0, 0, 0, 255), (0, 0, 0, 100)]
    colours = [WHITE, (0, 255, 255), (255, 0, 255), (255, 255, 0), BLACK, (155, 155, 155)]
    plane = np.array(inks, np.uint8)[None].repeat(16, axis=0).repeat(16, axis=1)
    options = {"quality": 98, "subsampling": 0} if file_format == "JPEG" else {}
    found = decode(encode(Image.frombytes("CMYK", (96, 16), plane.tobytes()), file_format, **options), 3)
    assert np.abs(found[8, 8::16].astype(int) - colours).max() <= tolerance


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_16_bits_are_scaled_not_clipped(file_format: str) -> None:
    values = np.array([[0, 255, 256, 1000], [0x7FFF, 0x8000, 0xFF00, 0xFFFF]], np.uint16)
    data = encode(values, file_format)
    np.testing.assert_array_equal(decode(data, 1)[..., 0], values // 256)
    np.testing.assert_array_equal(decode(data, 3), (values // 256)[..., None].repeat(3, axis=2))
    colours = make_png(2, 1, depth=16, kind=2, rows=b"\0" + struct.pack(">6H", 0, 255, 256, 0x8000, 0xFF00, 0xFFFF))
    np.testing.assert_array_equal(decode(colours, 3), [[[0, 0, 1], [128, 255, 255]]])


def test_floating_point_pixels_are_refused() -> None:
    grey, pfm = encode(np.ones((2, 2), np.float32), "TIFF"), b"Pf\n3 2\n-1.0\n" + bytes(24)
    colour = tiff(2, 1, {258: 32, 259: 1, 262: 2, 277: 3, 339: 3}, bytes(24))
    for data, message in ((grey, "has 32-bit pixels .mode F."), (pfm, "32-bit"), (colour, "TIFF.*unsupported kind")):
        with pytest.raises(UndecodableImage, match=message):
            decode(data, 3)


@pytest.mark.parametrize(
    ("file_format", "options"), [("GIF", {"disposal": 2}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})]
)
def test_of_an_animation_the_first_frame_counts(file_format: str, options: dict[str, object]) -> None:
    frames = [Image.new("RGB", (5, 4), colour) for colour in (RED, GREEN, BLUE)]
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    np.testing.assert_array_equal(decode(data, 3), np.full((4, 5, 3), RED))


STORED = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.swapaxes(0, 1),
    6: lambda upright: np.rot90(upright, 1),
    7: lambda upright: upright[::-1, ::-1].swapaxes(0, 1),
    8: lambda upright: np.rot90(upright, -1),
}
"""Functions that store an upright picture with each EXIF orientation."""


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize(("file_format", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})])
def test_exif_turns_pictures_upright(number: int, file_format: str, options: dict[str, object]) -> None:
    upright = picture()
    data = encode(np.ascontiguousarray(STORED[number](upright)), file_format, exif=orientation(number), **options)
    np.testing.assert_array_equal(decode(data, 3), upright)
    np.testing.assert_array_equal(decode(data, 1), grey_of(upright))
    with Image.open(io.BytesIO(data)) as opened:
        assert image_size_of(data) == image_size_of(opened) == (13, 21)
        np.testing.assert_array_equal(decode(opened, 3), upright)
        assert image_size_of(opened) == (13, 21), "its pixels are loaded now"
    np.testing.assert_array_equal(decode(to_pil(data, 3), 3), upright)  # an upright picture is not turned again


@pytest.mark.parametrize("number", range(1, 9))
def test_exif_turns_jpeg_upright(number: int) -> None:
    upright = blocks()
    turned = np.ascontiguousarray(STORED[number](upright))
    stored = encode(turned, "JPEG", quality=98, subsampling=0)
    data = encode(turned, "JPEG", quality=98, subsampling=0, exif=orientation(number))
    found = decode(data, 3)
    assert found.shape == upright.shape == (*image_size_of(data), 3) and np.abs(found.astype(int) - upright).max() <= 3
    np.testing.assert_array_equal(np.ascontiguousarray(STORED[number](found)), decode(stored, 3))


def outcome(read: Callable[[], Any]) -> Any:
    try:
        return np.asarray(read())
    except UndecodableImage as error:
        return str(error)


CODED = st.fixed_dictionaries({
    "quality": st.integers(1, 100), "subsampling": st.integers(0, 2), "progressive": st.booleans(),
    "restart_marker_blocks": st.integers(0, 3),
})  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from([1, 3]),
    CODED,
    st.integers(1, 8),
    st.none() | st.tuples(st.floats(0.1, 1), st.integers(0, 255)),
    st.sampled_from([1, 3]),
    st.sampled_from([1.0, 2.0, 4.0, 8.0]),
)
def test_both_decoders_of_jpeg_give_the_same_pixels_and_errors(
    size: tuple[int, int], channels: int, options: dict[str, Any], number: int, damage: tuple[float, int] | None,
    wanted: int, most: float,
) -> None:  # fmt: skip
    def read(method: str) -> Any:
        opened = open_image(data)
        return getattr(opened, method)(wanted, opened.shrink_for(most))

    pixels = np.random.default_rng(sum(size)).integers(256, size=(*size, channels), dtype=np.uint8)
    stored = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    options |= {"keep_rgb": True} if options["subsampling"] == 0 else {}
    data = encode(stored, "JPEG", exif=orientation(number), **options)
    if damage is not None:
        place = min(int(damage[0] * len(data)), len(data) - 1)
        data = data[:place] + (bytes([damage[1]]) + data[place + 1 :] if damage[1] % 2 else b"")
    by_pillow, found = outcome(lambda: read("load")), outcome(lambda: read("pixels"))
    if isinstance(found, str):
        assert found == by_pillow
    else:
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found.reshape(by_pillow.shape), by_pillow)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_undamaged_jpeg_is_not_decoded_by_pillow(channels: int) -> None:
    pytest.importorskip("simplejpeg")
    opened = open_image(encode(picture(channels=channels).squeeze(), "JPEG", exif=orientation(6)))
    assert opened.pixels(channels).shape == (21, 13, channels)
    assert opened.picture.tile, "Pillow empties the list of parts when it decodes them"


@pytest.mark.parametrize(
    "options",
    [
        *({"exif": exif} for exif in (b"Exif\0\0garbage", b"Exif\0\0", b"Exif\0\0II*\0\x08\0\0\0\0\0")),
        {"icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()},
    ],
)
def test_senseless_exif_is_no_reason_to_refuse_and_colour_profiles_are_ignored(options: dict[str, bytes]) -> None:
    found = decode(encode(blocks(), "JPEG", **options), 3)
    np.testing.assert_array_equal(found, decode(encode(blocks(), "JPEG"), 3))


@pytest.mark.parametrize(
    ("data", "name"),
    [
        *((data, "") for data in (b"", b"x", b"\0" * 100, b"\xff\xd8", b"plain text of <html> and <svg>")),
        (b"<!DOCTYPE html><html><body>404</body></html>", "an HTML page"), (b" \n<HTML lang=en>", "an HTML page"),
        (b"<?xml version='1.0'?>\n<svg xmlns='x'>", "SVG"), (b"\0\0\0\x1cftypisom\0\0\2\0isomavc1mp41", "a video"),
        (b"%PDF-1.7", "PDF"), (b"\xff\x0a\0", "JPEG XL"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, whose file was not fetched"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused_with_the_formats_and_what_it_looks_like(data: bytes, name: str) -> None:
    expected = "is not an image in a format of JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM, AVIF, HEIC"
    with pytest.raises(UndecodableImage) as caught:
        decode(data, 3)
    assert str(caught.value) == (f"{expected}{name and f': it looks like {name}'}" if data else "is empty (0 bytes)")


@pytest.mark.parametrize("file_format", ["EPS", "ICO", "PCX", "TGA", "SGI", "PDF"])
def test_formats_beyond_the_list_are_refused(file_format: str) -> None:
    data = encode(picture(16, 16), file_format)
    with pytest.raises(UndecodableImage, match=r"is not an image in a format of JPEG"):
        decode(data, 3)


@pytest.mark.parametrize(("binary", "text", "channels"), [(b"P6", b"P3", 3), (b"P5", b"P2", 1)])
@pytest.mark.parametrize("most", [15, 255, 4095, 65535])
def test_levels_of_ppm_pgm_and_pbm_are_scaled_to_8_bits(binary: bytes, text: bytes, channels: int, most: int) -> None:
    values = np.random.default_rng(4).integers(0, most + 1, (7, 5, channels))
    raw = values.astype(">u2" if most > 255 else np.uint8).tobytes()
    written = b" ".join(b"%d" % value for value in values.reshape(-1))
    for data in (binary + b" 5 7 %d\n" % most + raw, text + b"\n# comment\n5 7\n%d\n" % most + written):
        assert np.abs(decode(data, channels) - values / most * 255).max() <= 1
    assert decode(b"P4\n5 2\n\xa8\x50", 1)[..., 0].tolist() == [[0, 255, 0, 255, 0], [255, 0, 255, 0, 255]]


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_half_a_file_is_refused_whatever_warnings_are(file_format: str) -> None:
    data = encode(picture(40, 40), file_format)
    for action in ("error", "ignore"):
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            with pytest.raises(UndecodableImage):
                decode(data[: len(data) // 2], 3)


def check_pixels_or_refusal(data: bytes, channels: int) -> None:
    try:
        pixels = decode(data, channels)
    except UndecodableImage as error:
        assert str(error)
    else:
        assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == channels and pixels.size


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


@pytest.mark.parametrize(
    ("side", "kind", "action"),
    [(65_000, 0, "error"), (12_000, 2, "ignore"), (10_000, 0, "ignore"), (10_000, 2, "error")],
)
def test_a_header_that_claims_too_much_is_refused_before_memory_is_taken(side: int, kind: int, action: str) -> None:
    data = make_png(side, side, kind=kind, rows=b"\0" * 100)
    with warnings.catch_warnings(), little_memory():
        warnings.simplefilter(action)
        with pytest.raises(UndecodableImage, match=r"claims .*more than .* 89,478,485 pixels"):
            decode(data, 3)


@pytest.mark.parametrize("limit", [None, 10**12])
def test_the_limit_holds_whatever_pillows_own_is(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(UndecodableImage, match=r"^claims 65000 x 65000 pixels .* 89,478,485"):
        decode(make_png(65_000, 65_000), 3)
    assert MAX_PIXELS == 89_478_485


def test_a_lower_limit_of_pillow_holds_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5_000)
    decode(encode(picture(50, 100), "PNG"), 3)
    with pytest.raises(UndecodableImage, match=r"claims .*more than the limit of 5,000 pixels"):
        decode(encode(picture(61, 83), "PNG"), 3)
    assert Image.MAX_IMAGE_PIXELS == 5_000


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Pillow a low limit of its own."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "TIFF", "GIF", "PPM"])
def test_a_higher_limit_allows_larger_images(file_format: str) -> None:
    data = encode(picture(61, 83), file_format)
    allow_pixels(61 * 83 - 1)
    with pytest.raises(UndecodableImage, match=r"5,062 pixels; a higher --max-pixels \(or VITRAIL_MAX_PIXELS\)"):
        decode(data, 3)
    allow_pixels(61 * 83)
    assert decode(data, 3).shape == (61, 83, 3) and pixel_limit() == 61 * 83


@pytest.mark.slow
@pytest.mark.usefixtures("limit")
def test_other_processes_inherit_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode(picture(), "PNG"))
    allow_pixels(12)
    program = "import sys; from vitrail.data.pixels.decode import decode; decode(open(sys.argv[1], 'rb').read(), 3)"
    found = subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.png")], capture_output=True, text=True)
    assert "limit of 12 pixels" in found.stderr


@pytest.mark.parametrize("value", ["0", "-5", "many", "1e8"])
def test_a_wrong_limit_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("VITRAIL_MAX_PIXELS", value)
    with pytest.raises(ConfigError, match=f"VITRAIL_MAX_PIXELS='{value}'"):
        decode(encode(picture(), "PNG"), 3)


def test_arrays_and_their_views_are_taken_as_they_are() -> None:
    grey = picture(channels=1)
    for colour in (picture(), picture(20, 30)[::-2, 3::3]):
        assert image_size_of(colour) == colour.shape[:2]
        np.testing.assert_array_equal(decode(colour, 3), colour)
        np.testing.assert_array_equal(decode(colour, 1), grey_of(colour))
    for array in (grey, grey[..., 0]):
        np.testing.assert_array_equal(decode(array, 1), grey)
        np.testing.assert_array_equal(decode(array, 3), grey.repeat(3, axis=2))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4, 3), np.float32), np.zeros((4, 4), np.int64), np.zeros((4, 4, 3), bool),
        np.zeros((4, 4), np.uint16), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 2), np.uint8),
        np.zeros((3, 4, 4), np.uint8), np.zeros(4, np.uint8), np.zeros((1, 4, 4, 3), np.uint8),
        np.zeros((), np.uint8), np.zeros((0, 4), np.uint8), np.zeros((4, 4, 0), np.uint8),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)  # fmt: skip
@pytest.mark.parametrize("channels", [1, 3])
def test_other_arrays_are_refused_with_their_type_and_shape(array: np.ndarray, channels: int) -> None:
    with pytest.raises(UndecodableImage, match=re.escape(f"is an array of {array.dtype} {array.shape}; an image is")):
        decode(array, channels)


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr", "HSV", "LAB", "I;16", "I;16B", "RGBa"]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_pillow_images_of_any_mode_give_pixels(mode: str, channels: int) -> None:
    found = to_pil(Image.new(mode, (4, 3)), channels)
    assert found.size == (4, 3) and found.mode == ("L" if channels == 1 else "RGB")


def test_a_closed_pillow_image_is_refused_with_a_reason() -> None:
    with Image.open(io.BytesIO(encode(picture(), "PNG"))) as image:
        pass
    with pytest.raises(UndecodableImage, match=r"^cannot be decoded: \w"):
        decode(image, 3)


def test_a_pillow_image_is_left_as_it_is() -> None:
    image = Image.open(io.BytesIO(encode(picture(channels=4), "PNG", exif=orientation(6))))
    before = image.copy()
    decode(image, 1)
    assert image.mode == "RGBA" and image.getexif()[0x0112] == 6
    np.testing.assert_array_equal(np.asarray(image), np.asarray(before))


def tiff(width: int, height: int, tags: dict[int, int], data: bytes, *, tiles: bool = False) -> bytes:
    """Return a hand-made TIFF file with one strip or tile."""
    places = {324: 8, 325: len(data)} if tiles else {273: 8, 278: height, 279: len(data)}
    entries = sorted({256: width, 257: height, 277: 1, 258: 8, 262: 1, 259: 1, **tags, **places}.items())
    data += b"\0" * (len(data) % 2)
    listed = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(entries)) + listed + b"\0" * 4


def test_grey_of_12_and_16_bits_in_tiff_is_scaled_to_8_and_turned_round_if_white_is_zero() -> None:
    for black, expected in ((1, [0, 0, 128, 255]), (0, [255, 255, 127, 0])):
        data = tiff(4, 1, {258: 16, 262: black}, struct.pack("<4H", 0, 255, 0x8000, 0xFFFF))
        assert decode(data, 1).flatten().tolist() == expected
    values = np.random.default_rng(2).integers(0, 4096, (4, 6))
    pairs = values.reshape(-1, 2)
    packed = np.stack([pairs[:, 0] >> 4, (pairs[:, 0] & 15) << 4 | pairs[:, 1] >> 8, pairs[:, 1] & 255], 1)
    file = tiff(6, 4, {258: 12, 259: 1, 262: 1, 277: 1}, packed.astype(np.uint8).tobytes())
    np.testing.assert_array_equal(decode(file, 1)[..., 0], values >> 4)


@pytest.mark.parametrize("mode", ["YCbCr", "LAB"])
def test_other_colour_spaces_of_tiff_become_rgb(mode: str) -> None:
    soft = Image.fromarray(blocks() // 2 + 64)
    if mode == "LAB":
        spaces = [ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")]
        stored = ImageCms.applyTransform(soft, ImageCms.buildTransform(*spaces, "RGB", "LAB"))
    else:
        stored = soft.convert(mode)
    data = encode(stored, "TIFF")
    assert np.abs(decode(data, 3).astype(int) - np.asarray(soft)).max() <= 4
    assert np.abs(decode(data, 1).astype(int) - grey_of(np.asarray(soft))).max() <= 4


@pytest.mark.parametrize("compression", [1, 5, 8])
def test_a_tile_that_claims_too_much_is_refused_before_memory_is_taken(compression: int) -> None:
    data = tiff(2, 2, {259: compression, 322: 1 << 15, 323: 60_000}, zlib.compress(bytes(100)), tiles=True)
    with little_memory(), pytest.raises(UndecodableImage, match=r"^claims tiles of 32768 x 60000 pixels .* 89,478,485"):
        decode(data, 1)


@functools.cache
def zeros() -> bytes:
    """Return 64 MB of zeros, compressed a little at a time."""
    packer = zlib.compressobj(1)
    return b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(64)), packer.flush()])


@pytest.mark.parametrize(
    ("name", "head"), [(b"zTXt", b"k\0\0"), (b"iTXt", b"k\0\1\0\0\0"), (b"iCCP", b"k\0\0"), (b"IDAT", b"")]
)
def test_chunks_that_unpack_to_64_megabytes_are_not_unpacked(name: bytes, head: bytes) -> None:
    data = make_png(2, 2, png_chunk(name, head + zeros()), rows=b"\0\1\2\0\3\4")
    with little_memory():
        check_pixels_or_refusal(data, 1)


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "TIFF", "WEBP", "GIF"])
def test_a_header_cut_short_is_said_to_be_one(file_format: str) -> None:
    data = encode(picture(), file_format)[:12]
    with pytest.raises(UndecodableImage, match=f"^begins as {file_format}, but its header is damaged or cut short"):
        decode(data, 3)


def test_what_has_no_pixels_has_no_size() -> None:
    for data in (b"", b"<html>", make_png(65_000, 65_000), make_png(0, 5)):
        with pytest.raises(UndecodableImage):
            image_size_of(data)
    with pytest.raises(UndecodableImage, match=r"^has no pixels: .* a size of 0 x 3 "):
        decode(Image.new("RGB", (0, 3)), 3)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "BMP", "TIFF", "GIF"])
def test_the_size_needs_the_header_alone(file_format: str) -> None:
    data = encode(picture(70, 90), file_format)
    with pytest.raises(UndecodableImage):
        decode(data[: len(data) * 3 // 4], 3)
    if file_format == "TIFF":  # in some files the header is at the end, and counts the bytes after it
        data = data[:200] + bytes(len(data) - 200)
    assert image_size_of(data if file_format == "TIFF" else data[: len(data) * 3 // 4]) == (70, 90)


@pytest.mark.parametrize("shrink", [2, 4, 8])
@pytest.mark.parametrize("size", [(80, 96), (81, 97), (87, 103), (8, 9)])
def test_jpeg_files_shrink_to_the_size_rounded_up(shrink: int, size: tuple[int, int]) -> None:
    opened = open_image(encode(picture(*size), "JPEG", exif=orientation(6)))
    assert opened.shrink_for(shrink + 0.9) == shrink and opened.size == size[::-1]
    assert opened.load(3, shrink).size == (-(-size[0] // shrink), -(-size[1] // shrink))


def test_only_jpeg_files_shrink() -> None:
    jpeg = encode(picture(64, 64), "JPEG")
    assert open_image(jpeg).shrink_for(100.0) == 8 and open_image(jpeg).shrink_for(1.9) == 1
    assert open_image(encode(picture(3, 64), "JPEG")).shrink_for(100.0) == 2
    with Image.open(io.BytesIO(jpeg)) as opened:
        assert open_image(opened).shrink_for(100.0) == 1
    others = (encode(picture(64, 64), name) for name in ("PNG", "BMP", "WEBP", "GIF", "TIFF"))
    for other in (*others, picture(64, 64)):
        assert open_image(other).shrink_for(100.0) == 1


def test_shrunk_jpeg_files_cut_short_are_refused_unless_only_their_end_marker_is_missing() -> None:
    data = encode(picture(64, 64), "JPEG")
    for length in range(700, len(data) - 2, 97):
        with pytest.raises(UndecodableImage, match="truncated"):
            open_image(data[:length]).load(3, 4)
    whole, cut = (np.asarray(open_image(one).load(3, 4)) for one in (data, data[:-2]))
    np.testing.assert_array_equal(cut, whole)


def test_broken_tiff_files_write_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    data = encode(picture(), "TIFF", compression="tiff_lzw")
    for length in range(0, len(data), 41):
        check_pixels_or_refusal(data[:length], 3)
    assert capfd.readouterr() == ("", "")


def test_what_pillow_warns_of_is_no_warning_here() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Image.open(io.BytesIO(encode(picture(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\0"))).getexif()
        assert caught
        caught.clear()
        decode(encode(picture(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\0"), 3)
        warnings.warn("of somebody else", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["of somebody else"]


@pytest.mark.parametrize(
    ("depth", "row", "transparent", "expected"),
    [
        (1, 0b00001111, 0, [255] * 8),
        (2, 0b00011011, 1, [0, 255, 170, 255]),
        (4, 0x2F, 2, [255, 255]),
        (4, 0x28, 8, [34, 255]),
        (8, 7, 7, [255]),
    ],
)
def test_transparent_levels_are_white_at_any_depth(depth: int, row: int, transparent: int, expected: list[int]) -> None:
    level = png_chunk(b"tRNS", struct.pack(">H", transparent))
    data = make_png(8 // depth, 1, level, depth=depth, rows=bytes([0, row]))
    assert decode(data, 1)[0, :, 0].tolist() == expected
    pixels = np.array([[0x1234, 0x2345, 0x3456], [1, 2, 3]], ">u2")
    colour = png_chunk(b"tRNS", pixels[0].tobytes())
    data = make_png(2, 1, colour, depth=16, kind=2, rows=b"\0" + pixels.tobytes())
    assert decode(data, 3).tolist() == [[[255, 255, 255], [0, 0, 0]]]


@pytest.mark.parametrize("alpha", [0, 255])
def test_a_fourth_byte_of_bmp_that_is_0_everywhere_is_no_transparency(alpha: int) -> None:
    colours = picture()
    height, width = colours.shape[:2]
    pixels = np.dstack([colours[..., ::-1], np.full((height, width), alpha, np.uint8)]).tobytes()
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII", 108, width, -height, 1, 32, 3, len(pixels), 0, 0, 0, 0) + masks + bytes(52)
    file = b"BM" + struct.pack("<IHHI", 122 + len(pixels), 0, 0, 122) + header + pixels
    np.testing.assert_array_equal(decode(file, 3), colours)


@pytest.mark.parametrize(("bits", "arrangement", "is_refused"), [(16, 2, True), (16, 1, False), (8, 2, False)])
def test_planes_of_16_bits_in_tiff_are_refused(bits: int, arrangement: int, is_refused: bool) -> None:
    pixels = bytes(2 * 3 * bits // 8)
    file = tiff(2, 1, {258: bits, 262: 2, 277: 3, 284: arrangement}, pixels + struct.pack("<HHH", bits, bits, bits))
    one, three = struct.pack("<HHII", 258, 4, 1, bits), struct.pack("<HHII", 258, 3, 3, 8 + len(pixels))
    file = file.replace(one, three)
    if is_refused:
        with pytest.raises(UndecodableImage, match="plane of 16 bits"):
            image_size_of(file)
    else:
        assert image_size_of(file) == (1, 2)


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


def test_pixels_that_are_cut_short_or_beyond_the_limit_are_refused_beside_a_damaged_chunk() -> None:
    data = png(HARMLESS["a short gAMA"])
    header = png_chunk(b"IHDR", struct.pack(">II", 65_000, 65_000) + data[24:29])
    with pytest.raises(UndecodableImage):
        decode(data[:8] + header + data[33:], 3)
    for end in range(len(data) - 60, 60, -211):
        with pytest.raises(UndecodableImage):
            decode(data[:end], 3)


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
def test_a_jpeg_cut_anywhere_gives_all_its_pixels_or_is_refused(mode: str, options: dict[str, Any]) -> None:
    data = jpeg(mode, **options)
    whole, refused = decode(data, 3), 0
    for missing in (1, 2):  # of the end marker alone
        np.testing.assert_array_equal(decode(data[:-missing], 3), whole)
    for missing in [*range(3, 90), *range(90, len(data), 13)]:
        try:
            decoded = decode(data[:-missing], 3)
        except UndecodableImage:
            refused += 1
        else:
            np.testing.assert_array_equal(decoded, whole)
    assert refused > 60


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
