"""Tests of colour jitter against Pillow, with the drawn order and amounts."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import ImageEnhance
from torch import Tensor

from tests.make import from_pillow, to_pillow
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
        factor = float(np.float32(low + (high - low) * draws[kind]))
        image = from_pillow(ENHANCEMENTS[kind](to_pillow(image)).enhance(factor))
    return image


strength = st.sampled_from([0.0, 0.1, 0.4, 0.8, 1.0])


@given(st.tuples(strength, strength, strength, st.sampled_from([0.0, 0.1, 0.5])), st.integers(0, 999))
def test_jitter_is_pillows_changes_in_the_order_drawn(strengths: tuple[float, ...], seed: int) -> None:
    images, draws = pictures(7), draws_of(7, seed)
    found = colour_jitter(images, draws, strengths)
    assert found.dtype == torch.uint8
    for image, draw, result in zip(images.numpy(), draws, found.numpy(), strict=True):
        np.testing.assert_array_equal(result, reference(image, draw, strengths))


def test_grey_images_keep_to_brightness_and_contrast() -> None:
    images, draws = pictures(9, 1), draws_of(9)
    assert torch.equal(colour_jitter(images, draws, (0.0, 0.0, 1.0, 0.5)), images)
    assert not torch.equal(colour_jitter(images, draws, (0.4, 0.4, 0.0, 0.0)), images)
