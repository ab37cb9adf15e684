"""Tests of operations on pixels, of colour jitter and of RandAugment, against Pillow at all sizes and strengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from tests.golden import images as goldens
from tests.make import from_pillow, to_pillow
from vitrail.data.augment import operations
from vitrail.data.augment.operations import OPERATIONS, apply_operations, colour_jitter, randaugment

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
    check(operations.transform(images, matrices), images, lambda picture, n: affine(picture, *matrices[n].tolist()))


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
        blurs = [ImageFilter.GaussianBlur(float(sigma)) for sigma in sigmas]
        check(operations.blur(images, sigmas), images, lambda picture, n: picture.filter(blurs[n]))  # noqa: B023
    check(operations.grey(images), images, lambda picture, n: picture.convert("L").convert(picture.mode))
    check(operations.solarise(images), images, lambda picture, n: ImageOps.solarize(picture))


ENHANCEMENTS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def draws_of(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).random(shape).astype(np.float32)


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
    images, draws = pictures(3, 13, 18), draws_of(5, 8, seed=seed)
    found = colour_jitter(images, draws, strengths)
    assert found.dtype == torch.uint8
    for image, draw, result in zip(images.numpy(), draws, found.numpy(), strict=True):
        np.testing.assert_array_equal(result, reference(image, draw, strengths))


def test_grey_images_keep_to_brightness_and_contrast() -> None:
    images, draws = pictures(1, 13, 18), draws_of(5, 8)
    assert torch.equal(colour_jitter(images, draws, (0.0, 0.0, 1.0, 0.5)), images)
    assert not torch.equal(colour_jitter(images, draws, (0.4, 0.4, 0.0, 0.0)), images)


GREY = 128
MAGNITUDES = [0.0, 3.0, 5.0, 10.0, 15.0, 20.0, 30.0]


def affine(picture: Image.Image, *matrix: float) -> Image.Image:
    fill = GREY if picture.mode == "L" else (GREY,) * 3
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=fill)


def rotate(picture: Image.Image, level: float) -> Image.Image:
    return picture.rotate(30 * level, Image.Resampling.NEAREST, fillcolor=GREY if picture.mode == "L" else (GREY,) * 3)


def cutout(picture: Image.Image, level: float, y: float, x: float) -> Image.Image:
    half = int(level * 40 * min(picture.size) / 224)
    if half:
        top, left = int(y * picture.height) - half, int(x * picture.width) - half
        box = (left, top, left + 2 * half - 1, top + 2 * half - 1)
        ImageDraw.Draw(picture).rectangle(box, fill=GREY if picture.mode == "L" else (GREY,) * 3)
    return picture


Reference = Callable[[Image.Image, float, float, np.ndarray], Image.Image]

# Of a picture, the magnitude over 10, the same with its sign, and the two draws of a place.
PILLOW: dict[str, Reference] = {
    "AutoContrast": lambda picture, level, signed, place: ImageOps.autocontrast(picture),
    "Equalize": lambda picture, level, signed, place: ImageOps.equalize(picture),
    "Invert": lambda picture, level, signed, place: ImageOps.invert(picture),
    "Rotate": lambda picture, level, signed, place: rotate(picture, signed),
    "Posterize": lambda picture, level, signed, place: ImageOps.posterize(picture, min(8, max(1, int(4 * level)))),
    "Solarize": lambda picture, level, signed, place: ImageOps.solarize(picture, int(256 * level)),
    "Color": lambda picture, level, signed, place: ImageEnhance.Color(picture).enhance(1.8 * level + 0.1),
    "Contrast": lambda picture, level, signed, place: ImageEnhance.Contrast(picture).enhance(1.8 * level + 0.1),
    "Brightness": lambda picture, level, signed, place: ImageEnhance.Brightness(picture).enhance(1.8 * level + 0.1),
    "Sharpness": lambda picture, level, signed, place: ImageEnhance.Sharpness(picture).enhance(1.8 * level + 0.1),
    "ShearX": lambda picture, level, signed, place: affine(picture, 1, 0.3 * signed, 0, 0, 1, 0),
    "ShearY": lambda picture, level, signed, place: affine(picture, 1, 0, 0, 0.3 * signed, 1, 0),
    "TranslateX": lambda picture, level, signed, _: affine(picture, 1, 0, signed * picture.width * 100 / 224, 0, 1, 0),
    "TranslateY": lambda picture, level, signed, _: affine(picture, 1, 0, 0, 0, 1, signed * picture.height * 100 / 224),
    "Cutout": lambda picture, level, signed, place: cutout(picture, level, *place),
    "SolarizeAdd": lambda picture, level, signed, place: picture.point(
        [min(255, value + int(110 * level)) if value < 128 else value for value in range(256)] * len(picture.getbands())
    ),
}


def waves(count: int, channels: int, height: int, width: int) -> Tensor:
    """Return images of waves with noise. Neighbouring pixels are similar, and all values occur."""
    random = np.random.default_rng(9)
    y, x = np.mgrid[:height, :width]
    phase = random.uniform(0, 6, (count, channels, 1, 1))
    waves = 127 + 110 * np.sin(x / 7 + phase) * np.cos(y / 9 + 2 * phase)
    return torch.from_numpy((waves + random.uniform(-18, 18, waves.shape)).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", [*SIZES[:4], (3, 96, 112), (3, 37, 52), (1, 52, 37), (1, 5, 224)], ids=str)
def test_an_operation_equals_pillows(name: str, size: tuple[int, int, int]) -> None:
    images = waves(6, *size)
    draws = draws_of(6, 4)
    assert {*(draws[:, 1] < 0.5)} == {True, False}, "both directions are drawn"
    for magnitude in MAGNITUDES:
        found = apply_operations(images, [name] * 6, draws, magnitude=magnitude)
        assert found.dtype == torch.uint8
        for image, draw, result in zip(images.numpy(), draws, found.numpy(), strict=True):
            level = magnitude / 10
            expected = PILLOW[name](to_pillow(image), level, level if draw[1] < 0.5 else -level, draw[2:])
            np.testing.assert_array_equal(result, from_pillow(expected), err_msg=f"{name} at {magnitude}")


def test_the_first_draw_chooses_the_operation() -> None:
    assert list(OPERATIONS) == list(PILLOW) and len(OPERATIONS) == 16
    images, draws = waves(16, 1, 24, 24), draws_of(16, 1, 4)
    draws[:, 0, 0] = (np.arange(16) + 0.5) / 16
    expected = apply_operations(images, list(OPERATIONS), draws[:, 0], magnitude=10.0)
    assert torch.equal(randaugment(images, draws, magnitude=10.0), expected)


def test_layers_follow_one_another() -> None:
    images, draws = waves(20, 3, 19, 22), draws_of(20, 2, 4)
    first = randaugment(images, draws[:, :1], magnitude=10.0)
    assert torch.equal(randaugment(images, draws, magnitude=10.0), randaugment(first, draws[:, 1:], magnitude=10.0))
    assert torch.equal(randaugment(images, draws[:, :0], magnitude=10.0), images)


def original(image: np.ndarray, case: dict[str, Any]) -> np.ndarray:
    """Return an image (h, w, 3) after big_vision's operation, with the magnitude, direction and position of a golden
    case.
    """
    draws = np.zeros((1, 4), np.float32)
    draws[0, 1] = 0.75 if case.get("sign") == -1 else 0.25
    if centre := case.get("cutout_centre_y_x"):
        draws[0, 2:] = (np.array(centre) + 0.5) / image.shape[:2]
    batch = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]
    found = apply_operations(batch, [case["op"]], draws, magnitude=float(case["magnitude"]), rule="big-vision")
    return found[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize("name", ["randaugment_colour", "randaugment_geometry_0", "randaugment_geometry_1"])
def test_the_exact_operations_equal_big_visions(name: str) -> None:
    golden = goldens.read(name)
    assert tuple(golden["ops_in_draw_order"]) == OPERATIONS
    images = [goldens.image(spec) for spec in golden["images"]]
    for case in golden["cases"]:
        image = images[case["image"]]
        apart = np.abs(original(image, case).astype(int) - goldens.pixels(case["output"], image.shape))
        worst, share = (2, 0.01) if case["op"] == "Sharpness" else (0, 0)
        assert apart.max() <= worst and (apart > 0).mean() <= share, case["op"]
    for case in golden.get("big", []):
        apart, moments = goldens.compare(original(goldens.image(golden["big_image"]), case), case["output"])
        worst, share = (2, 0.01) if case["op"] == "Sharpness" else (0, 0)
        assert apart.max() <= worst and (apart > 0).mean() <= share and moments < 0.02, case["op"]


def test_the_exact_operations_take_images_of_few_levels() -> None:
    flat, split = np.full((16, 16, 3), 77, np.uint8), np.zeros((16, 16, 3), np.uint8)
    split[:, 8:], split[0, 0] = 200, 255
    for case in goldens.read("randaugment_colour")["degenerate"]:
        image = flat if case["image"].startswith("np.full") else split
        assert np.array_equal(original(image, {**case, "magnitude": 5}), goldens.pixels(case["output"], image.shape))


@pytest.mark.parametrize("size", [(1, 37, 52), (3, 2, 5), (1, 1, 1), (3, 52, 37)])
def test_the_exact_operations_take_every_size(size: tuple[int, int, int]) -> None:
    images = waves(32, *size)
    for magnitude in (0.0, 10.0, 30.0):
        found = randaugment(images, draws_of(32, 2, 4), magnitude=magnitude, rule="big-vision")
        assert found.dtype == torch.uint8 and found.shape == images.shape
