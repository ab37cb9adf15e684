"""Tests of geometry and normalisation against independent computations."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.make import encode, orientation
from vitrail.data.pixels.geometry import Resize
from vitrail.data.pixels.preprocess import FILTERS, WHOLE, Interpolation, Preprocess
from vitrail.errors import ConfigError, UndecodableImage
from vitrail.settings import from_plain, to_plain

side = st.integers(1, 70)


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def soft_noise(height: int, width: int) -> np.ndarray:
    """Return noise that a bicubic kernel does not push below 0 or above 255."""
    return np.random.default_rng(0).integers(60, 196, (height, width, 3), dtype=np.uint8)


def triangle(x: float) -> float:
    return max(0.0, 1 - abs(x))


def cubic(x: float) -> float:
    """Return Keys's cubic kernel with a = -1/2."""
    x = abs(x)
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


KERNELS = {"bilinear": (triangle, 1), "bicubic": (cubic, 2)}


def resampling(old: int, new: int, interpolation: str) -> np.ndarray:
    """Return the matrix that scales one axis. For shrinking, the kernel is widened by the scale. Each row sums to 1."""
    kernel, reach = KERNELS[interpolation]
    scale = old / new
    widened = max(scale, 1.0)
    matrix = np.zeros((new, old))
    for row in range(new):
        centre = (row + 0.5) * scale
        low, high = max(0, int(centre - reach * widened + 0.5)), min(old, int(centre + reach * widened + 0.5))
        for column in range(low, high):
            matrix[row, column] = kernel((column + 0.5 - centre) / widened)
    return matrix / matrix.sum(1, keepdims=True)


def reference_resize(image: np.ndarray, height: int, width: int, interpolation: str) -> np.ndarray:
    """Return an image (h, w, c) scaled to (height, width, c) without any rounding."""
    across = np.einsum("hwc,vw->hvc", image.astype(float), resampling(image.shape[1], width, interpolation))
    return np.einsum("hwc,vh->vwc", across, resampling(image.shape[0], height, interpolation)).clip(0, 255)


@settings(max_examples=25)
@given(old=st.tuples(side, side), new=st.tuples(side, side), interpolation=st.sampled_from(sorted(KERNELS)))
def test_squash_scales_both_sides(old: tuple[int, int], new: tuple[int, int], interpolation: Interpolation) -> None:
    image = soft_noise(*old)
    found = Preprocess(image_size=new, interpolation=interpolation).pixels(image)
    assert np.abs(found.transpose(1, 2, 0) - reference_resize(image, *new, interpolation)).max() < 1.3


@pytest.mark.parametrize(("factor", "size"), [((2, 3), (4, 5)), ((1, 7), (3, 2)), ((5, 1), (2, 6))])
def test_nearest_repeats_and_picks_pixels(factor: tuple[int, int], size: tuple[int, int]) -> None:
    small = noise(*size)
    large = small.repeat(factor[0], axis=0).repeat(factor[1], axis=1)
    up = Preprocess(image_size=large.shape[:2], interpolation="nearest").pixels(small)
    down = Preprocess(image_size=size, interpolation="nearest").pixels(large)
    np.testing.assert_array_equal(up, large.transpose(2, 0, 1))
    np.testing.assert_array_equal(down, small.transpose(2, 0, 1))


@given(
    old=st.tuples(side, side),
    new=st.tuples(side, side),
    channels=st.sampled_from([1, 3]),
    resize=st.sampled_from(["squash", "crop", "pad"]),
    share=st.floats(0.2, 1),
    interpolation=st.sampled_from(["nearest", "bilinear", "bicubic", "area"]),
    given_channels=st.sampled_from([1, 3]),
)
def test_files_arrays_and_pillow_images_give_the_same_pixels_of_the_size_asked_for(
    old: tuple[int, int], new: tuple[int, int], channels: int, resize: Resize, share: float,
    interpolation: Interpolation, given_channels: int,
) -> None:  # fmt: skip
    preprocess = Preprocess(
        image_size=new, channels=channels, resize=resize, crop_share=share, interpolation=interpolation
    )
    array = noise(*old, given_channels)
    picture = Image.fromarray(array[..., 0] if given_channels == 1 else array)
    expected = preprocess.pixels(array)
    assert expected.shape == (channels, *new) and expected.dtype == np.uint8 and expected.flags.c_contiguous
    for image in (encode(picture, "PNG"), picture, Image.open(io.BytesIO(encode(picture, "BMP")))):
        np.testing.assert_array_equal(preprocess.pixels(image), expected)


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
@pytest.mark.parametrize(("size", "channels"), [((7, 5), 3), ((1, 1), 3), ((28, 28), 1)])
def test_images_of_the_size_are_left_as_they_are(resize: Resize, size: tuple[int, int], channels: int) -> None:
    image = noise(*size, channels)
    for interpolation in ("nearest", "bilinear", "bicubic", "area"):
        preprocess = Preprocess(image_size=size, channels=channels, resize=resize, interpolation=interpolation)
        for form in (image, encode(image[..., 0] if channels == 1 else image, "PNG")):
            np.testing.assert_array_equal(preprocess.pixels(form), image.transpose(2, 0, 1))


def test_the_pixels_are_a_copy_of_their_own() -> None:
    image = noise(4, 4, 1)
    before = image.copy()
    image.setflags(write=False)
    found = Preprocess(image_size=(4, 4), channels=1).pixels(image)
    torch.from_numpy(np.stack([found])).zero_()
    np.testing.assert_array_equal(image, before)


def test_broken_images_are_undecodable() -> None:
    for image in (b"", b"<html>", noise(4, 4, 2)):
        with pytest.raises(UndecodableImage):
            Preprocess(image_size=(4, 4)).pixels(image)


@pytest.mark.parametrize(
    ("channels", "mean", "std"),
    [
        (3, (0.5,), (0.5,)), (1, (0.5,), (0.5,)), (3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        (3, (0.0,), (1.0,)), (3, (0.4, 0.5, 0.6), (0.25,)), (1, (0.286,), (0.353,)),
    ],
)  # fmt: skip
def test_normalise_is_the_formula_for_every_value(
    channels: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    values = torch.arange(256, dtype=torch.uint8)
    images = torch.stack([(values + channel).to(torch.uint8) for channel in range(channels)]).reshape(
        1, channels, 16, 16
    )
    images = torch.cat([images, 255 - images])
    found = Preprocess(image_size=(16, 16), channels=channels, mean=mean, std=std).normalise(images)
    assert found.dtype == torch.float32 and found.shape == images.shape
    for channel in range(channels):
        m, s = mean[channel % len(mean)], std[channel % len(std)]
        expected = (images[:, channel].double() / 255 - m) / s
        assert (found[:, channel].double() - expected).abs().max() < 1e-6


def test_gradients_pass_normalisation_after_a_first_call_in_inference_mode() -> None:
    preprocess = Preprocess(image_size=(2, 2), mean=(0.123,), std=(0.321,))
    with torch.inference_mode():
        preprocess.normalise(torch.zeros(1, 3, 2, 2))
    images = torch.zeros(1, 3, 2, 2, requires_grad=True)
    preprocess.normalise(images).sum().backward()
    torch.testing.assert_close(images.grad, torch.full((1, 3, 2, 2), 1 / (255 * 0.321)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": (0, 4)}, "image_size=(0, 4) is less than 1"),
        ({"channels": 4}, "channels=4 is not one of 1, 3; 1 is grey, and 3 is RGB"),
        ({"crop_share": 0.0}, "crop_share=0.0 is not in (0, 1]"),
        ({"crop_share": math.nan}, "crop_share=nan is not in (0, 1]"),
        ({"pad_value": (256,)}, "pad_value=256 is not in [0, 255]"),
        ({"pad_value": (0, -1, 0)}, "pad_value=-1 is not in [0, 255]"),
        ({"pad_value": (0, 0)}, "channels=3 does not fit pad_value=(0, 0)"),
        ({"interpolation": "area", "antialias": False}, "interpolation='area' averages pixels, which antialias=False"),
        ({"scaled_decode": True, "antialias": False}, "scaled_decode=True averages pixels, which interpolation="),
        ({"scaled_decode": True, "interpolation": "nearest"}, "scaled_decode=True averages pixels, which"),
        ({"resampler": "torch", "interpolation": "area"}, "resampler='torch' needs antialias=True and "),
        ({"mean": ()}, "channels=3 does not fit mean=()"),
        ({"channels": 1, "std": (0.1, 0.2, 0.3)}, "channels=1 does not fit std=(0.1, 0.2, 0.3)"),
        ({"std": (0.5, 0.0, 0.5)}, "mean=(0.5,) and std=(0.5, 0.0, 0.5) must be finite, and std above 0"),
        ({"mean": (123.7, 116.3, 103.5)}, "mean=(123.7, 116.3, 103.5) is above 1; pixels are from 0 to 1"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Preprocess(**{"image_size": (4, 4), **fields})


def test_an_image_too_thin_to_be_scaled_is_refused() -> None:
    thin = np.zeros((1, 2000, 3), np.uint8)
    with pytest.raises(UndecodableImage, match=r"2000 x 1 pixels .* would be scaled to 448000 x 224"):
        Preprocess(image_size=(224, 224), resize="crop").pixels(thin)
    assert Preprocess(image_size=(224, 224)).pixels(thin).shape == (3, 224, 224)


@pytest.mark.slow
@given(drawn=st.data(), old=st.tuples(side, side), new=st.tuples(side, side), interpolation=st.sampled_from([*FILTERS]))
def test_a_box_is_cut_out_and_then_scaled(
    drawn: st.DataObject, old: tuple[int, int], new: tuple[int, int], interpolation: Interpolation
) -> None:
    height, width = (drawn.draw(st.integers(1, whole)) for whole in old)
    top, left = (drawn.draw(st.integers(0, whole - part)) for whole, part in zip(old, (height, width), strict=True))
    image = noise(*old)
    part = Image.fromarray(image[top : top + height, left : left + width])
    expected = np.asarray(part.resize(new[::-1], FILTERS[interpolation])).transpose(2, 0, 1)
    for resize, share in (("squash", 1.0), ("crop", 0.5), ("pad", 0.8)):
        preprocess = Preprocess(image_size=new, resize=resize, crop_share=share, interpolation=interpolation)
        for form in (image, encode(image, "PNG"), Image.fromarray(image)):
            np.testing.assert_array_equal(preprocess.pixels(form, (top, left, height, width)), expected)


@given(old=st.tuples(side, side), new=st.tuples(side, side), channels=st.sampled_from([1, 3]))
def test_pytorch_scales_like_pillow_up_to_one_level(old: tuple[int, int], new: tuple[int, int], channels: int) -> None:
    image = noise(*old)[..., :channels]
    found, expected = (
        Preprocess(image_size=new, channels=channels, resampler=resampler).pixels(image).astype(int)
        for resampler in ("torch", "pillow")
    )
    assert found.shape == expected.shape and np.abs(found - expected).max() <= 1


@pytest.mark.parametrize("box", [(0, 0, 0, 3), (-1, 0, 3, 3), (0, 0, 8, 3), (5, 0, 3, 3), (0, 7, 3, 3), (0, 0, 3, -1)])
def test_a_box_that_the_image_does_not_hold_is_refused(box: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"is not a part of an image of 7 x 9 \(height, width\)$"):
        Preprocess(image_size=(7, 9)).pixels(noise(7, 9), box)


def slope(height: int, width: int) -> np.ndarray:
    """Return pixel values that rise by 2 to the right and downwards, so that a shift by half a pixel is visible."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([columns * 200 / width, rows * 200 / height, (rows + columns) * 200 / (height + width)], -1).astype(
        np.uint8
    )


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize(
    ("box", "resize", "share"),
    [(None, "squash", 1.0), ((9, 21, 64, 70), "squash", 1.0), (None, "crop", 0.8), (None, "pad", 1.0)],
)
def test_scaled_decoding_shows_the_same_part_whatever_way_the_file_is_turned(
    number: int, box: tuple[int, int, int, int] | None, resize: Resize, share: float
) -> None:
    data = encode(slope(91, 109), "JPEG", quality=98, subsampling=0, exif=orientation(number))
    preprocess = Preprocess(image_size=(7, 9), resize=resize, crop_share=share)
    expected = preprocess.pixels(data, box).astype(int)
    for resampler in WHOLE:
        scaled = replace(preprocess, scaled_decode=True, resampler=resampler)
        # PyTorch scales a part of the box, and its `placement` says which.
        taken = scaled.placement((91, 109) if number < 5 else (109, 91), box).box
        same = expected if box is None else preprocess.pixels(data, taken).astype(int)
        assert 0 < np.abs(scaled.pixels(data, box).astype(int) - same).max() <= 4
        assert box in (None, taken) or (resampler == "torch" and taken == (10, 22, 62, 68))


@pytest.mark.parametrize("size", [(17, 16), (16, 17), (33, 33), (64, 64)])
def test_scaled_decoding_keeps_twice_the_pixels_that_are_needed(size: tuple[int, int]) -> None:
    data = encode(noise(64, 64), "JPEG")
    plain = Preprocess(image_size=size)
    np.testing.assert_array_equal(replace(plain, scaled_decode=True).pixels(data), plain.pixels(data))
    smaller = Preprocess(image_size=(16, 16))
    assert (replace(smaller, scaled_decode=True).pixels(data) != smaller.pixels(data)).any()
    np.testing.assert_array_equal(
        replace(smaller, scaled_decode=True).pixels(data, (3, 3, 63 - 32, 40)), smaller.pixels(data, (3, 3, 31, 40))
    )


def plain_resampling(old: int, new: int, interpolation: str) -> np.ndarray:
    """Return the matrix of one axis from the nearest 2 or 4 pixels. Pixels outside the image repeat its edge."""

    def keys(x: float) -> float:
        x, a = abs(x), -0.75
        if x < 1:
            return (a + 2) * x**3 - (a + 3) * x**2 + 1
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0

    kernel, reach = (triangle, 1) if interpolation == "bilinear" else (keys, 2)
    matrix = np.zeros((new, old))
    for row in range(new):
        place = (row + 0.5) * old / new - 0.5
        for column in range(math.floor(place) - reach + 1, math.floor(place) + reach + 1):
            matrix[row, min(max(column, 0), old - 1)] += kernel(column - place)
    return matrix


@pytest.mark.slow
@settings(max_examples=25)
@given(
    old=st.tuples(side, side),
    new=st.tuples(side, side),
    channels=st.sampled_from([1, 3]),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
)
def test_without_antialiasing_the_nearest_pixels_alone_count(
    old: tuple[int, int], new: tuple[int, int], channels: int, interpolation: Interpolation
) -> None:
    image = noise(*old, channels)
    rows, columns = (plain_resampling(*sides, interpolation) for sides in zip(old, new, strict=True))
    expected = np.einsum("hwc,yh,xw->cyx", image.astype(float), rows, columns).clip(0, 255)
    preprocess = Preprocess(image_size=new, channels=channels, interpolation=interpolation, antialias=False)
    assert np.abs(preprocess.pixels(image) - expected).max() <= 0.502


def test_without_antialiasing_a_quarter_is_a_mean_of_four_pixels() -> None:
    image = noise(8, 12)
    found = Preprocess(image_size=(2, 3), antialias=False).pixels(image)
    inner = image.reshape(2, 4, 3, 4, 3)[:, 1:3, :, 1:3].astype(int).sum(axis=(1, 3))
    np.testing.assert_array_equal(found, np.round(inner / 4).transpose(2, 0, 1))


def test_area_is_the_mean_of_what_falls_together() -> None:
    image = noise(8, 12)
    found = Preprocess(image_size=(2, 3), interpolation="area").pixels(image)
    mean = image.reshape(2, 4, 3, 4, 3).astype(float).mean(axis=(1, 3))
    assert np.abs(found - mean.transpose(2, 0, 1)).max() <= 1


def test_what_older_files_do_not_say_is_as_it_was() -> None:
    older = {
        "image_size": [224, 224], "channels": 3, "resize": "crop", "crop_share": 0.9, "interpolation": "bicubic",
        "mean": [0.5], "std": [0.5],
    }  # fmt: skip
    read = from_plain(Preprocess, older)
    assert (read.antialias, read.scaled_decode, read.pad_value, read.resampler) == (True, False, (255,), "pillow")
    changed = replace(read, antialias=False, resize="pad", pad_value=(1, 2, 3))
    assert from_plain(Preprocess, to_plain(changed)) == changed
