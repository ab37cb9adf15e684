"""RandAugment's operations exactly as google-research/big_vision computes them (pp/archive/autoaugment.py).

AugReg (2106.10270) and "Better plain ViT baselines" (2205.01580) trained with these operations. They differ from
Pillow's in ways that their authors may not have intended, such as a contrast that depends on the size of the image.
docs/augmentation.md lists the differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

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
from vitrail.data.augmentation.operations import GREY, blend, on_device

LUMA = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in TensorFlow's grey."""


def _table(name: str, magnitude: float) -> UInt8[np.ndarray, " 256"]:
    # big_vision compares the threshold as a uint8, so that 256 becomes 0.
    return changed_levels(name, magnitude, int(magnitude / 10 * 256) % 256)


def _autocontrast(images: Images) -> Images:
    """Stretch the levels of each channel to the range 0 to 255, in float32."""
    return operations.autocontrast(images, torch.float32)


def _color(images: Images, factors: Float32[Tensor, " n"]) -> Images:
    """Change the saturation: factor 0 makes the image grey, and factor 1 does not change it. Images with one channel
    are not changed."""
    if images.shape[1] == 1:
        return images
    levels = images.float()
    red, green, blue = (levels * (1 / 255)).tensor_split(3, dim=1)
    grey = red.mul_(LUMA[0]).add_(green.mul_(LUMA[1])).add_(blue.mul_(LUMA[2])).mul_(255.5).floor_()
    return blend(grey, levels, factors[:, None, None, None])


def _contrast(images: Images, factors: Float32[Tensor, " n"]) -> Images:
    """Change the contrast. At factor 0, every value is the number of pixels / 256, at most 255, instead of the mean
    grey level."""
    pixels = images.shape[2] * images.shape[3]
    grey = torch.tensor(float(min(255, pixels // 256)))
    values = torch.arange(256, dtype=torch.float32, device=images.device)
    return operations.by_table(images, blend(grey.expand(256), values, factors[:, None, None]))


def _sharpness(images: Images, factors: Float32[Tensor, " n"]) -> Images:
    """Change the sharpness: factor 0 smooths the image and truncates it to whole levels, and factor 1 does not change
    it. Pixels at the border are not changed."""
    if min(images.shape[2:]) < 3:
        return images
    smooth = operations.smoothed_sum(images).div_(13, rounding_mode="floor")
    sharp = images.clone()
    inner = images[:, :, 1:-1, 1:-1].float()
    sharp[:, :, 1:-1, 1:-1] = blend(smooth.float(), inner, factors[:, None, None, None])
    return sharp


def _transform(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
    """Apply an affine map to the indices of pixels. Positions are rounded to float32, and then to the nearest index,
    halves away from zero. A pixel of the result is grey if its position is outside the image."""
    _, channels, height, width = images.shape
    matrices = np.array(
        [_matrix(name, magnitude / 10 * sign, height, width) for name, sign in zip(names, signs(draws), strict=True)]
    )
    across, along = (
        matrices[:, [first, first + 3], None] * np.arange(side) for first, side in ((0, width), (1, height))
    )
    turned = np.array([name == "Rotate" for name in names])[:, None, None]
    across, along = (np.where(turned, part, part.astype(np.float32)) for part in (across, along))
    along += matrices[:, [2, 5], None]
    exact = on_device(across, images.device)[:, :, None] + on_device(along, images.device)[..., None]  # n 2 h w
    column, row = exact.float().double().unbind(1)
    inside = (column > -0.5) & (column < width - 0.5) & (row > -0.5) & (row < height - 0.5)
    source = (row + 0.5).floor_().mul_(width).add_((column + 0.5).floor_())
    source = source.masked_fill_(~inside, 0).long().flatten(1)[:, None]
    moved = images.flatten(2).gather(2, source.expand(-1, channels, -1)).view(images.shape)
    return moved.masked_fill_(~inside[:, None], GREY)


def _matrix(name: str, level: float, height: int, width: int) -> tuple[float, float, float, float, float, float]:
    """Return the affine matrix that maps the index of a pixel of the result to an index of the image. `level` is the
    signed magnitude / 10. Shears keep the first row or column, and translations are in pixels at any image size."""
    if name == "Rotate":
        angle = math.radians(30 * level)
        cosine, sine, x, y = math.cos(angle), math.sin(angle), (width - 1) / 2, (height - 1) / 2
        return (cosine, -sine, x - cosine * x + sine * y, sine, cosine, y - sine * x - cosine * y)
    if name == "ShearX":
        return (1.0, float(np.float32(0.3 * level)), 0.0, 0.0, 1.0, 0.0)
    if name == "ShearY":
        return (1.0, 0.0, 0.0, float(np.float32(0.3 * level)), 1.0, 0.0)
    if name == "TranslateX":
        return (1.0, 0.0, 100 * level, 0.0, 1.0, 0.0)
    return (1.0, 0.0, 0.0, 0.0, 1.0, 100 * level)


_by_table = table_kernel(_table)

BIG_VISION: dict[str, Kernel] = {
    "AutoContrast": plain_kernel(_autocontrast),
    "Equalize": plain_kernel(operations.equalize),
    "Invert": _by_table,
    "Rotate": _transform,
    "Posterize": _by_table,
    "Solarize": _by_table,
    "Color": factor_kernel(_color),
    "Contrast": factor_kernel(_contrast),
    "Brightness": factor_kernel(operations.brightness),
    "Sharpness": factor_kernel(_sharpness),
    "ShearX": _transform,
    "ShearY": _transform,
    "TranslateX": _transform,
    "TranslateY": _transform,
    "Cutout": box_kernel(lambda magnitude, side: int(magnitude / 10 * 40)),
    "SolarizeAdd": _by_table,
}
"""Kernels by the name of the operation, in the order in which big_vision lists them."""
