"""Tests of every operation on pixels, and of colour jitter, against Pillow. Results are equal for all sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from tests.make import from_pillow, to_pillow
from vitrail.data.augment import operations
from vitrail.data.augment.operations import colour_jitter

SIZES = [(1, 1, 1), (3, 1, 9), (3, 2, 2), (1, 3, 3), (3, 17, 32), (1, 33, 20), (3, 41, 29)]


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


@settings(max_examples=25)
@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 10**6))
def test_autocontrast_and_equalize_equal_pillows_for_any_range(one: int, other: int, seed: int) -> None:
    low, high = sorted((one, other))
    noise = np.random.default_rng(seed).beta(0.3, 0.6, (2, 3, 23, 31))
    images = torch.from_numpy((low + noise * (high - low)).astype(np.uint8))
    check(operations.autocontrast(images), images, lambda picture, _: ImageOps.autocontrast(picture))
    check(operations.equalize(images), images, lambda picture, _: ImageOps.equalize(picture))


numbers = st.floats(-2, 2, allow_nan=False)


@pytest.mark.slow
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


def turned(picture: Image.Image, turn: float) -> Image.Image:
    """Turn the hue as torchvision does with a picture of Pillow: by whole levels of 255, which wrap around at 256."""
    if picture.mode == "L":
        return picture
    hue, saturation, value = picture.convert("HSV").split()
    levels = np.array(hue).astype(int) + int(np.float32(turn) * np.float32(255))
    moved = Image.fromarray((levels % 256).astype(np.uint8))
    return Image.merge("HSV", (moved, saturation, value)).convert("RGB")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_hue_turns_as_on_pillows_images(size: tuple[int, int, int]) -> None:
    images = pictures(*size)
    for turn in (-0.5, 0.05, 1 / 3):
        check(operations.hue(images, torch.full((5,), turn)), images, lambda picture, n: turned(picture, turn))  # noqa: B023


def test_hue_of_every_fifth_level_of_each_colour_equals_pillows() -> None:
    levels = torch.arange(0, 256, 5, dtype=torch.uint8)
    images = torch.cartesian_prod(levels, levels, levels).T.reshape(1, 3, len(levels), -1)
    for turn in (0.0, 0.1, -0.37):
        check(operations.hue(images, torch.tensor([turn])), images, lambda picture, n: turned(picture, turn))  # noqa: B023


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_blur_grey_and_solarisation_equal_pillows(size: tuple[int, int, int]) -> None:
    images = pictures(*size)
    for largest in (2, 9):
        sigmas = np.random.default_rng(largest).uniform(0.1, largest, 5).astype(np.float32)
        check(
            operations.blur(images, sigmas),
            images,
            lambda picture, n: picture.filter(ImageFilter.GaussianBlur(float(sigmas[n]))),  # noqa: B023
        )
    check(operations.grey(images), images, lambda picture, n: picture.convert("L").convert(picture.mode))
    check(operations.solarise(images), images, lambda picture, n: ImageOps.solarize(picture))


ENHANCEMENTS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def draws_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, 8)).astype(np.float32)


def reference(image: np.ndarray, draws: np.ndarray, strengths: tuple[float, ...]) -> np.ndarray:
    for kind in np.argsort(draws[4:]):
        if not strengths[kind]:
            continue
        if kind == 3:
            turn = torch.tensor([strengths[3] * (2 * draws[3] - 1)], dtype=torch.float32)  # hue equals Pillow's
            image = operations.hue(torch.from_numpy(image.copy())[None], turn)[0].numpy()
            continue
        low, high = max(0, 1 - strengths[kind]), 1 + strengths[kind]
        factor = float(np.float32(low + (high - low) * draws[kind]))
        image = from_pillow(ENHANCEMENTS[kind](to_pillow(image)).enhance(factor))
    return image


strength = st.sampled_from([0.0, 0.1, 0.4, 0.8, 1.0])


@given(st.tuples(strength, strength, strength, st.sampled_from([0.0, 0.1, 0.5])), st.integers(0, 999))
def test_jitter_is_pillows_changes_in_the_order_drawn(strengths: tuple[float, ...], seed: int) -> None:
    images, draws = pictures(3, 13, 18), draws_of(5, seed)
    found = colour_jitter(images, draws, strengths)
    assert found.dtype == torch.uint8
    for image, draw, result in zip(images.numpy(), draws, found.numpy(), strict=True):
        np.testing.assert_array_equal(result, reference(image, draw, strengths))


def test_grey_images_keep_to_brightness_and_contrast() -> None:
    images, draws = pictures(1, 13, 18), draws_of(5)
    assert torch.equal(colour_jitter(images, draws, (0.0, 0.0, 1.0, 0.5)), images)
    assert not torch.equal(colour_jitter(images, draws, (0.4, 0.4, 0.0, 0.0)), images)
