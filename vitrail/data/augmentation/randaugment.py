"""RandAugment (Cubuk et al., 1909.13719): operations drawn from sixteen, applied one after another with one magnitude.

Every layer draws one of the sixteen operations of google-research/big_vision with equal probability. There are two sets
of kernels. One uses Pillow's arithmetic, with lengths in proportion to the image. The other repeats big_vision's code
exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float32

from vitrail.data.augmentation.big_vision_kernels import BIG_VISION
from vitrail.data.augmentation.kernels import Draws, Images, Kernel
from vitrail.data.augmentation.operations import on_device
from vitrail.data.augmentation.pillow_kernels import PILLOW

DRAWS = 4
"""Random numbers per operation, as described for `Draws`."""

RandAugmentRule = Literal["pillow", "big-vision"]

KERNELS: dict[RandAugmentRule, dict[str, Kernel]] = {"pillow": PILLOW, "big-vision": BIG_VISION}
"""Kernels of each rule, by the name of the operation."""

OPERATIONS = tuple(PILLOW)
"""Names of the operations. A random number chooses an operation by its position in this tuple."""


def randaugment(
    images: Images, draws: Float32[np.ndarray, "n layers 4"], *, magnitude: float, rule: RandAugmentRule = "pillow"
) -> Images:
    """Apply one random operation per layer to each image. `draws` contains the random numbers for each image and
    layer."""
    for layer in range(draws.shape[1]):
        chosen = (draws[:, layer, 0] * len(OPERATIONS)).astype(int)
        names = [OPERATIONS[number] for number in chosen]
        images = apply_operations(images, names, draws[:, layer], magnitude=magnitude, rule=rule)
    return images


def apply_operations(
    images: Images, names: Sequence[str], draws: Draws, *, magnitude: float, rule: RandAugmentRule = "pillow"
) -> Images:
    """Apply to each image the operation that `names` states for the image. Operations with the same kernel are applied
    together."""
    groups: dict[Kernel, list[int]] = {}
    for place, name in enumerate(names):
        groups.setdefault(KERNELS[rule][name], []).append(place)
    changed = images.new_empty(images.shape)
    for kernel, members in groups.items():
        places = np.array(members)
        index = on_device(places, images.device)
        part = images.index_select(0, index)
        changed.index_copy_(0, index, kernel(part, [names[place] for place in members], draws[places], magnitude))
    return changed
