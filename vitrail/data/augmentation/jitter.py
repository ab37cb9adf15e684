"""Colour jitter: random changes of brightness, contrast, saturation and hue, in a random order for each image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, UInt8
from torch import Tensor

from vitrail.data.augmentation import operations
from vitrail.data.augmentation.operations import on_device

DRAWS = 8
"""Random numbers per image: four for the amounts by which brightness, contrast, saturation and hue change, and four for
the order of these changes."""


def colour_jitter(
    images: UInt8[Tensor, "b c h w"], draws: Float32[np.ndarray, "b 8"], strengths: Sequence[float]
) -> UInt8[Tensor, "b c h w"]:
    """Change brightness, contrast, saturation and hue at random, like torchvision's ColorJitter. A change with the
    strength 0 is skipped.

    Factors of brightness, contrast and saturation are uniform in [max(0, 1 - strength), 1 + strength]. The hue is
    rotated by a uniform fraction of the colour circle in [-strength, strength]. Images are rounded to whole values
    after each change.
    """
    kinds = [kind for kind, strength in enumerate(strengths) if strength]
    order = np.argsort(draws[:, [4 + kind for kind in kinds]], axis=1)
    for turn in range(len(kinds)):
        changed = images.new_empty(images.shape)
        for number, kind in enumerate(kinds):
            places = np.flatnonzero(order[:, turn] == number)
            if len(places):
                low = -strengths[kind] if kind == HUE else max(0.0, 1 - strengths[kind])
                high = strengths[kind] + (kind != HUE)
                amounts = (low + (high - low) * draws[places, kind]).astype(np.float32)
                index = on_device(places, images.device)
                part = CHANGES[kind](images.index_select(0, index), on_device(amounts, images.device))
                changed.index_copy_(0, index, part)
        images = changed
    return images


HUE = 3
CHANGES = (operations.brightness, operations.contrast, operations.saturation, operations.hue)
