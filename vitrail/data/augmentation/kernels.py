"""Kernels of RandAugment: functions that apply operations with one magnitude to some images of a batch.

The modules `pillow_kernels` and `big_vision_kernels` define the kernels of two implementations. This module defines the
functions that both modules use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32, UInt8
from torch import Tensor

from vitrail.data.augmentation import operations
from vitrail.data.augmentation.operations import on_device

Images = UInt8[Tensor, "n c h w"]
Draws = Float32[np.ndarray, "n 4"]
"""Random numbers of an operation: one for the operation, one for its direction, and two for the centre of a box (y,
x)."""

Kernel = Callable[[Tensor, Sequence[str], np.ndarray, float], Tensor]
"""A function that returns the changed images. Its arguments are the images, the name of the operation for each image,
the random numbers and the magnitude."""


def plain_kernel(operation: Callable[[Images], Images]) -> Kernel:
    """Return the kernel of an operation without a magnitude."""
    return lambda images, names, draws, magnitude: operation(images)


def factor_kernel(operation: Callable[[Images, Float32[Tensor, " n"]], Images]) -> Kernel:
    """Return the kernel of an operation that takes a factor. The factor is 0.1 at magnitude 0, 1 (no change) at
    magnitude 5, and 1.9 at magnitude 10."""

    def enhance(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
        factors = np.full(len(names), magnitude / 10 * 1.8 + 0.1, np.float32)
        return operation(images, on_device(factors, images.device))

    return enhance


def changed_levels(name: str, magnitude: float, threshold: int) -> UInt8[np.ndarray, " 256"]:
    """Return the new value of each value from 0 to 255 for Posterize, Invert, Solarize or SolarizeAdd.

    Posterize keeps the upper int(0.4 magnitude) bits, but at least 1 and at most 8. Solarize inverts the values from
    `threshold` on.
    """
    values = np.arange(256)
    if name == "Posterize":
        bits = min(8, max(1, int(magnitude / 10 * 4)))
        changed = values & (256 - (1 << (8 - bits)))
    elif name == "Invert":
        changed = 255 - values
    elif name == "Solarize":
        changed = np.where(values < threshold, values, 255 - values)
    else:
        changed = np.where(values < 128, np.minimum(255, values + int(magnitude / 10 * 110)), values)
    return changed.astype(np.uint8)


def table_kernel(table: Callable[[str, float], UInt8[np.ndarray, " 256"]]) -> Kernel:
    """Return the kernel of operations that replace each value by another one. `table` returns the new values for the
    name of an operation and a magnitude."""

    def by_table(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
        tables = {name: table(name, magnitude) for name in set(names)}
        stacked = np.stack([tables[name] for name in names])[:, None]
        return operations.by_table(images, on_device(stacked, images.device))

    return by_table


def box_kernel(half_side: Callable[[float, int], int]) -> Kernel:
    """Return the kernel that turns a box around a random pixel grey. `half_side` computes half of the box's side in
    pixels. Its arguments are the magnitude and the shorter side of the image."""

    def cutout(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
        sides = images.shape[2:]
        half = half_side(magnitude, min(sides))
        inside = []
        for draw, side in zip(draws[:, 2:].T, sides, strict=True):
            centre = (draw * side).astype(int)[:, None]
            inside.append((np.arange(side) >= centre - half) & (np.arange(side) < centre + half))
        return operations.fill(images, *inside)

    return cutout


def signs(draws: Draws) -> list[int]:
    """Return the direction of each operation: 1 or -1, with equal probability."""
    return [1 if draw < 0.5 else -1 for draw in draws[:, 1].tolist()]
