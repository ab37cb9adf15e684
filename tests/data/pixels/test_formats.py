"""Tests of AVIF and HEIC, whose decoders can be missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from tests.make import encode, orientation
from vitrail.data.check.images import look
from vitrail.data.formats.pack import pack
from vitrail.data.pixels import decode as decode_module
from vitrail.data.pixels.decode import decode, format_of, image_size_of
from vitrail.data.sources import open_data
from vitrail.errors import UndecodableImage

UPRIGHT = np.random.default_rng(6).integers(30, 220, (2, 3, 3), dtype=np.uint8).repeat(16, 0).repeat(16, 1)

QUALITY = {"AVIF": {"quality": 95, "subsampling": "4:4:4"}, "HEIF": {"quality": 95, "chroma": 444}}


@pytest.fixture(params=["AVIF", "HEIF"])
def kind(request: pytest.FixtureRequest) -> str:
    """Pillow's name of a format whose decoder and encoder this machine has."""
    if request.param == "AVIF":
        if not features.check("avif"):
            pytest.skip("this Pillow cannot write AVIF")
    else:
        pytest.importorskip("pillow_heif").register_heif_opener()
    return str(request.param)


@pytest.fixture
def without_decoders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process behave like one in which Pillow cannot read AVIF and pillow-heif is not installed."""
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> object:
        if name == "pillow_heif":
            raise ModuleNotFoundError(name)
        return real(name, package)

    for function in (decode_module._has_avif, decode_module._has_heic):
        function.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", absent)
        patch.setattr(features, "check", lambda name: False)
        yield
    for function in (decode_module._has_avif, decode_module._has_heic):
        function.cache_clear()


def encoded(pixels: np.ndarray | Image.Image, kind: str, **options: object) -> bytes:
    return encode(pixels, kind, **{**QUALITY[kind], **options})


def distance(found: np.ndarray, expected: np.ndarray) -> int:
    assert found.shape == expected.shape and found.dtype == np.uint8
    return int(np.abs(found.astype(int) - expected).max())


@pytest.mark.parametrize("size", [(32, 48), (13, 21), (1, 1), (7, 64)])
def test_pixels_are_decoded_at_odd_sizes(kind: str, size: tuple[int, int]) -> None:
    pixels = np.full((*size, 3), (200, 60, 90), np.uint8)
    data = encoded(pixels, kind)
    assert image_size_of(data) == size
    assert distance(decode(data, 3), pixels) <= 6


def test_colours_and_grey_are_those_of_the_picture(kind: str) -> None:
    data = encoded(UPRIGHT, kind)
    middle = np.s_[4:12, 4:12]
    assert distance(decode(data, 3)[middle], UPRIGHT[middle]) <= 8
    grey = encoded(Image.fromarray(UPRIGHT).convert("L"), kind)
    assert distance(decode(grey, 1)[middle], np.asarray(Image.fromarray(UPRIGHT).convert("L"))[..., None][middle]) <= 8
    assert len(np.unique(np.ptp(decode(grey, 3).astype(int), axis=2))) == 1


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_alpha_is_laid_on_white_and_palettes_are_looked_up(kind: str, mode: str) -> None:
    picture = Image.fromarray(UPRIGHT).convert("L").convert(mode)
    if mode != "P":
        picture.putalpha(0)
    found = decode(encoded(picture, kind), 3)
    expected = UPRIGHT * 0 + 255 if mode != "P" else np.asarray(picture.convert("RGB"))
    assert distance(found[4:12, 4:12], expected[4:12, 4:12]) <= 8


@pytest.mark.parametrize("number", [1, 4, 5, 6])
def test_orientation_turns_pictures_upright(kind: str, number: int) -> None:
    stored = Image.fromarray(UPRIGHT)
    found = decode(data := encoded(stored, kind, exif=orientation(number).tobytes()), 3)
    turn = decode_module.UPRIGHT.get(number)
    expected = np.asarray(stored if turn is None else stored.transpose(turn))
    assert image_size_of(data) == expected.shape[:2]
    assert distance(found[4:12, 4:12], expected[4:12, 4:12]) <= 8


def test_damaged_files_are_refused(kind: str) -> None:
    data = encoded(UPRIGHT, kind)
    for length in (20, 60, len(data) // 2, len(data) - 5):
        with pytest.raises(UndecodableImage):
            decode(data[:length], 3)


def test_a_header_with_another_size_than_the_pixels_is_refused(kind: str) -> None:
    data = bytearray(encoded(np.ascontiguousarray(np.tile(UPRIGHT, (2, 2, 1))), kind))
    start = 0
    while (start := data.find(b"ispe", start) + 8) > 8:
        data[start : start + 4] = (90).to_bytes(4, "big")
    if kind == "HEIF":
        with pytest.raises(UndecodableImage):
            decode(bytes(data), 3)
    else:  # the stream decides
        assert decode(bytes(data), 3).shape == (*image_size_of(bytes(data)), 3)


def test_the_limit_of_pixels_holds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "MAX_PIXELS", 32 * 48 - 1)
    with pytest.raises(UndecodableImage, match=r"^claims 48 x 32 pixels \(width x height\), more than .* 1,535 "):
        decode(encoded(UPRIGHT, kind), 3)


@pytest.mark.parametrize(("brands", "name"), [
    (b"heic\0\0\0\0mif1heic", "HEIC"), (b"mif1\0\0\0\0mif1avif", "AVIF"), (b"mif1\0\0\0\0mif1heic", "HEIC"),
    (b"msf1\0\0\0\0hevc", "HEIC"), (b"avis\0\0\0\0msf1", "AVIF"), (b"isom\0\0\2\0mp41", "a video"),
    (b"isomheic", "a video"), (b"", "a video"),
])  # fmt: skip
def test_the_format_follows_from_all_brands(brands: bytes, name: str) -> None:
    assert format_of((8 + len(brands)).to_bytes(4, "big") + b"ftyp" + brands + b"heicheic") == name


def test_without_a_decoder_the_format_and_the_remedy_are_named(without_decoders: None) -> None:
    heic, avif = (b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0mif1" + brand for brand in (b"heic", b"avif"))
    with pytest.raises(UndecodableImage, match=r"is a HEIC image, .* pip install 'vitrail\[heic\]'"):
        decode(heic, 3)
    with pytest.raises(UndecodableImage, match=r"is an AVIF image, .* pip install --upgrade pillow"):
        image_size_of(avif)


def test_files_count_as_images_in_every_room(kind: str, tmp_path: Path) -> None:
    suffix = {"AVIF": "avif", "HEIF": "HEIC"}[kind]
    for name in ("rose", "tulip"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / f"1.{suffix}").write_bytes(encoded(UPRIGHT, kind))
    splits = open_data(str(tmp_path / "data"), validation_share=0.0)
    assert [splits.train.key(index) for index in range(2)] == [f"rose/1.{suffix}", f"tulip/1.{suffix}"]
    seen = look(splits.train[0].image)
    assert (seen.kind, seen.width, seen.height) == (f"{kind} RGB", 48, 32)
    pack(splits, tmp_path / "shards")
    packed = open_data(str(tmp_path / "shards"), validation_share=0.0).train
    assert (len(packed) == 2 and packed.key(0).endswith(f"rose/1.{suffix.lower()}")) or packed[0].image
    np.testing.assert_array_equal(decode(packed[0].image, 3), decode(splits.train[0].image, 3))


@pytest.mark.slow
def test_pillow_heif_is_loaded_for_a_heic_file_only() -> None:
    code = """
import io, sys
from PIL import Image
from vitrail.data.pixels.decode import decode
file = io.BytesIO(); Image.new("RGB", (4, 4)).save(file, "PNG")
decode(file.getvalue(), 3)
print("pillow_heif" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
