"""Tests of the sixteen operations at every strength against Pillow, and of the choice of operations for each image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from tests.golden import images as goldens
from tests.make import from_pillow, to_pillow
from vitrail.data.augment.operations import OPERATIONS, apply_operations, randaugment

GREY = 128
SIZES = [(3, 96, 112), (3, 37, 52), (1, 52, 37), (1, 5, 224), (1, 1, 1), (3, 1, 9), (3, 2, 2), (1, 3, 3)]
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
    "TranslateX": lambda picture, level, signed, place: affine(
        picture, 1, 0, signed * picture.width * 100 / 224, 0, 1, 0
    ),
    "TranslateY": lambda picture, level, signed, place: affine(
        picture, 1, 0, 0, 0, 1, signed * picture.height * 100 / 224
    ),
    "Cutout": lambda picture, level, signed, place: cutout(picture, level, *place),
    "SolarizeAdd": lambda picture, level, signed, place: picture.point(
        [min(255, value + int(110 * level)) if value < 128 else value for value in range(256)] * len(picture.getbands())
    ),
}


def pictures(count: int, channels: int, height: int, width: int) -> Tensor:
    """Return images of waves with noise. Neighbouring pixels are similar, and all values occur."""
    random = np.random.default_rng(9)
    y, x = np.mgrid[:height, :width]
    phase = random.uniform(0, 6, (count, channels, 1, 1))
    waves = 127 + 110 * np.sin(x / 7 + phase) * np.cos(y / 9 + 2 * phase)
    return torch.from_numpy((waves + random.uniform(-18, 18, waves.shape)).clip(0, 255).astype(np.uint8))


def draws_of(count: int, layers: int = 1, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).random((count, layers, 4)).astype(np.float32)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_operation_equals_pillows(name: str, size: tuple[int, int, int]) -> None:
    images = pictures(6, *size)
    draws = draws_of(6)[:, 0]
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
    images, draws = pictures(16, 1, 24, 24), draws_of(16)
    draws[:, 0, 0] = (np.arange(16) + 0.5) / 16
    expected = apply_operations(images, list(OPERATIONS), draws[:, 0], magnitude=10.0)
    assert torch.equal(randaugment(images, draws, magnitude=10.0), expected)


def test_layers_follow_one_another() -> None:
    images, draws = pictures(20, 3, 19, 22), draws_of(20, layers=2)
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
    images = pictures(32, *size)
    for magnitude in (0.0, 10.0, 30.0):
        found = randaugment(images, draws_of(32, layers=2), magnitude=magnitude, rule="big-vision")
        assert found.dtype == torch.uint8 and found.shape == images.shape
