"""RandAugment's operations as Pillow computes them, with lengths in proportion to the image.

The arguments at each magnitude are those of google-research/big_vision at 224 pixels. See docs/augmentation.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from vitrail.data.augmentation import operations
from vitrail.data.augmentation.kernels import (
    Draws,
    Images,
    Kernel,
    box_kernel,
    changed_levels,
    factor_kernel,
    plain_kernel,
    signs,
    table_kernel,
)

REFERENCE_SIDE = 224
"""Image side in pixels for which shifts and box sizes are defined. For images of another size, shifts and box sizes are
scaled in proportion."""


def _table(name: str, magnitude: float) -> UInt8[np.ndarray, " 256"]:
    return changed_levels(name, magnitude, int(magnitude / 10 * 256))


def _transform(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
    height, width = images.shape[2:]
    matrices = [
        _matrix(name, magnitude / 10 * sign, height, width) for name, sign in zip(names, signs(draws), strict=True)
    ]
    return operations.transform(images, np.array(matrices))


def _matrix(name: str, level: float, height: int, width: int) -> tuple[float, float, float, float, float, float]:
    """Return the affine matrix that maps a pixel of the result to the image. `level` is the signed magnitude / 10."""
    if name == "Rotate":
        angle = math.radians(30 * level)
        cosine, sine, x, y = math.cos(angle), math.sin(angle), width / 2, height / 2
        return (cosine, -sine, x - cosine * x + sine * y, sine, cosine, y - sine * x - cosine * y)
    if name == "ShearX":
        return (1.0, 0.3 * level, 0.0, 0.0, 1.0, 0.0)
    if name == "ShearY":
        return (1.0, 0.0, 0.0, 0.3 * level, 1.0, 0.0)
    if name == "TranslateX":
        return (1.0, 0.0, 100 * level * width / REFERENCE_SIDE, 0.0, 1.0, 0.0)
    return (1.0, 0.0, 0.0, 0.0, 1.0, 100 * level * height / REFERENCE_SIDE)


_by_table = table_kernel(_table)

PILLOW: dict[str, Kernel] = {
    "AutoContrast": plain_kernel(operations.autocontrast),
    "Equalize": plain_kernel(operations.equalize),
    "Invert": _by_table,
    "Rotate": _transform,
    "Posterize": _by_table,
    "Solarize": _by_table,
    "Color": factor_kernel(operations.saturation),
    "Contrast": factor_kernel(operations.contrast),
    "Brightness": factor_kernel(operations.brightness),
    "Sharpness": factor_kernel(operations.sharpness),
    "ShearX": _transform,
    "ShearY": _transform,
    "TranslateX": _transform,
    "TranslateY": _transform,
    "Cutout": box_kernel(lambda magnitude, side: int(magnitude / 10 * 40 * side / REFERENCE_SIDE)),
    "SolarizeAdd": _by_table,
}
"""Kernels by the name of the operation. A random number chooses an operation by its position in this order."""
