"""Tests of every operation on pixels against Pillow. Results are equal for odd and even sizes, with one and three
channels.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from vitrail.data.augment import operations

SIZES = [(1, 1, 1), (3, 1, 9), (3, 2, 2), (1, 3, 3), (3, 17, 32), (1, 33, 20), (3, 41, 29)]


def to_pillow(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))


def from_pillow(picture: Image.Image) -> np.ndarray:
    array = np.asarray(picture)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def pictures(channels: int, height: int, width: int) -> Tensor:
    """Return images of noise, noise of few values, one value, two values, and a ramp."""
    random = np.random.default_rng(height * width)
    shape = (channels, height, width)
    noise = random.integers(0, 256, shape)
    ramp = np.arange(height * width).reshape(1, height, width).repeat(channels, 0) % 256
    images = [noise, 90 + noise // 16, np.full(shape, 77), np.where(noise < 30, 3, 250), ramp]
    return torch.from_numpy(np.stack(images).astype(np.uint8))


def check(found: Tensor, images: Tensor, pillow: Callable[[Image.Image, int], Image.Image]) -> None:
    assert found.dtype == torch.uint8 and found.shape == images.shape
    for number, (image, result) in enumerate(zip(images.numpy(), found.numpy(), strict=True)):
        np.testing.assert_array_equal(result, from_pillow(pillow(to_pillow(image), number)))


ENHANCEMENTS = {
    operations.brightness: ImageEnhance.Brightness, operations.contrast: ImageEnhance.Contrast,
    operations.saturation: ImageEnhance.Color, operations.sharpness: ImageEnhance.Sharpness,
}  # fmt: skip


@pytest.mark.parametrize("operation", ENHANCEMENTS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_enhancements_equal_pillows(operation: Callable, size: tuple[int, int, int]) -> None:
    images = pictures(*size)
    for factors in ([0.0, 0.1, 0.5, 0.9, 1.0], [1.1, 1.9, 2.8, 3.7, 0.3]):
        found = operation(images, torch.tensor(factors))
        check(found, images, lambda picture, n: ENHANCEMENTS[operation](picture).enhance(factors[n]))  # noqa: B023


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_autocontrast_and_equalize_equal_pillows(size: tuple[int, int, int]) -> None:
    images = pictures(*size)
    check(operations.autocontrast(images), images, lambda picture, _: ImageOps.autocontrast(picture))
    check(operations.equalize(images), images, lambda picture, _: ImageOps.equalize(picture))


@settings(max_examples=60)
@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 10**6))
def test_autocontrast_and_equalize_equal_pillows_for_any_range(one: int, other: int, seed: int) -> None:
    low, high = sorted((one, other))
    noise = np.random.default_rng(seed).beta(0.3, 0.6, (2, 3, 23, 31))
    images = torch.from_numpy((low + noise * (high - low)).astype(np.uint8))
    check(operations.autocontrast(images), images, lambda picture, _: ImageOps.autocontrast(picture))
    check(operations.equalize(images), images, lambda picture, _: ImageOps.equalize(picture))


numbers = st.floats(-2, 2, allow_nan=False)


@given(st.sampled_from(SIZES), st.lists(numbers, min_size=30, max_size=30), st.floats(0, 40))
def test_transforms_equal_pillows(size: tuple[int, int, int], values: list[float], far: float) -> None:
    images = pictures(*size)
    matrices = np.array(values).reshape(5, 6)
    matrices[:, [2, 5]] *= far
    fill = operations.GREY if size[0] == 1 else (operations.GREY,) * 3
    check(
        operations.transform(images, matrices),
        images,
        lambda picture, n: picture.transform(
            picture.size, Image.Transform.AFFINE, matrices[n].tolist(), Image.Resampling.NEAREST, fillcolor=fill
        ),
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tables_are_looked_up(size: tuple[int, int, int]) -> None:
    images = pictures(*size)
    random = np.random.default_rng(0)
    for channels in (1, size[0]):
        tables = random.integers(0, 256, (5, channels, 256), dtype=np.uint8)
        found = operations.by_table(images, torch.from_numpy(tables))
        check(
            found,
            images,
            lambda picture, n: picture.point(np.resize(tables[n], (size[0], 256)).flatten().tolist()),  # noqa: B023
        )


def test_a_box_is_filled_and_nothing_else() -> None:
    images = pictures(3, 17, 32)
    rows, columns = np.zeros((5, 17), bool), np.zeros((5, 32), bool)
    expected = images.clone()
    for number in range(1, 5):
        rows[number, number : 3 * number], columns[number, 2 : 9 - number] = True, True
        expected[number, :, number : 3 * number, 2 : 9 - number] = 128
    assert torch.equal(operations.fill(images, rows, columns), expected)


@pytest.mark.parametrize("turn", [-0.5, -0.31, 0.0, 0.05, 1 / 3, 0.5])
def test_hue_turns_as_colorsys_does(turn: float) -> None:
    images = pictures(3, 17, 32)
    turned = operations.hue(images, torch.full((5,), turn)).numpy()
    pixels = images.permute(0, 2, 3, 1).reshape(-1, 3).numpy() / 255
    expected = []
    for pixel in pixels.tolist():
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        expected.append(colorsys.hsv_to_rgb((h + turn) % 1, s, v))
    difference = turned.transpose(0, 2, 3, 1).reshape(-1, 3) - 255 * np.array(expected)
    assert np.abs(difference).max() < 0.501  # rounding
    if turn == 0:
        assert np.array_equal(turned, images)
    if turn == 1 / 3:
        assert np.array_equal(turned, images[:, [2, 0, 1]])


def test_grey_images_have_no_colour_to_change() -> None:
    images = pictures(1, 17, 32)
    assert torch.equal(operations.hue(images, torch.full((5,), 0.3)), images)
    assert torch.equal(operations.saturation(images, torch.full((5,), 1.9)), images)


def test_the_images_given_stay_as_they_are() -> None:
    images = pictures(3, 17, 32)
    before, amounts = images.clone(), torch.full((5,), 0.4)
    for operation in (*ENHANCEMENTS, operations.hue):
        assert not torch.equal(operation(images, amounts), before)
    for operation in (operations.autocontrast, operations.equalize):
        assert not torch.equal(operation(images), before)
    operations.transform(images, np.tile([1.0, 0.2, 3, 0, 1, 0], (5, 1)))
    assert torch.equal(images, before)
