"""Tests of colour jitter against Pillow, with the drawn order and amounts."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance
from torch import Tensor

from vitrail.data.augment import operations
from vitrail.data.augment.operations import colour_jitter

ENHANCEMENTS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def pictures(count: int, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randint(0, 256, (count, channels, 13, 18), dtype=torch.uint8, generator=generator)


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
        picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
        factor = float(np.float32(low + (high - low) * draws[kind]))
        image = np.array(ENHANCEMENTS[kind](picture).enhance(factor)).transpose(2, 0, 1)
    return image


strength = st.sampled_from([0.0, 0.1, 0.4, 0.8, 1.0])


@pytest.mark.slow
@given(st.tuples(strength, strength, strength, st.sampled_from([0.0, 0.1, 0.5])), st.integers(0, 999))
def test_jitter_is_pillows_changes_in_the_order_drawn(strengths: tuple[float, ...], seed: int) -> None:
    images, draws = pictures(7), draws_of(7, seed)
    found = colour_jitter(images, draws, strengths)
    assert found.dtype == torch.uint8
    for image, draw, result in zip(images.numpy(), draws, found.numpy(), strict=True):
        np.testing.assert_array_equal(result, reference(image, draw, strengths))


def test_all_orders_occur_equally_often() -> None:
    draws = draws_of(4800)[:, 4:]
    orders = {tuple(order): 0 for order in permutations(range(4))}
    for order in np.argsort(draws, axis=1):
        orders[tuple(order.tolist())] += 1
    assert min(orders.values()) > 200 - 4 * 200**0.5 and max(orders.values()) < 200 + 4 * 200**0.5


@pytest.mark.parametrize("kind", range(3))
def test_factors_are_uniform_around_1(kind: int) -> None:
    images = torch.full((2000, 3, 2, 2), 100, dtype=torch.uint8)
    images[:, 0, 0] = 60
    strengths = tuple(0.5 if number == kind else 0.0 for number in range(4))
    draws = draws_of(2000)
    found = colour_jitter(images, draws, strengths)
    expected = (operations.brightness, operations.contrast, operations.saturation)[kind](
        images, torch.from_numpy((0.5 + draws[:, kind]).astype(np.float32))
    )
    assert torch.equal(found, expected)


def test_grey_images_keep_to_brightness_and_contrast() -> None:
    images, draws = pictures(9, 1), draws_of(9)
    assert torch.equal(colour_jitter(images, draws, (0.0, 0.0, 1.0, 0.5)), images)
    assert not torch.equal(colour_jitter(images, draws, (0.4, 0.4, 0.0, 0.0)), images)


def test_the_others_of_a_batch_have_no_say() -> None:
    images, draws, strengths = pictures(12), draws_of(12), (0.4, 0.4, 0.4, 0.1)
    together = colour_jitter(images, draws, strengths)
    alone = [colour_jitter(images[[n]], draws[[n]], strengths) for n in range(12)]
    assert torch.equal(torch.cat(alone), together)
