"""RandAugment: kernels, which apply operations with one magnitude to some images of a batch, as Pillow and as
big_vision compute them, and the choice of operations for each image.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float32, Float64, UInt8
from torch import Tensor

from vitrail.data.augment import operations
from vitrail.data.augment.operations import GREY, blend, on_device

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


REFERENCE_SIDE = 224
"""Image side in pixels for which shifts and box sizes are defined. For images of another size, shifts and box sizes are
scaled in proportion."""


def _matrices(
    images: Images, names: Sequence[str], draws: Draws, magnitude: float, *, is_original: bool
) -> Float64[np.ndarray, "n 6"]:
    """Return the affine matrix of each operation, in one of both directions with equal probability."""
    signs = np.where(draws[:, 1] < 0.5, 1, -1).tolist()
    levels = zip(names, (magnitude / 10 * sign for sign in signs), strict=True)
    height, width = images.shape[2:]
    return np.array([_matrix(name, level, height, width, is_original=is_original) for name, level in levels])


def _matrix(
    name: str, level: float, height: int, width: int, *, is_original: bool
) -> tuple[float, float, float, float, float, float]:
    """Return the affine matrix that maps a pixel of the result to the image. `level` is the signed magnitude / 10.

    With `is_original`, the matrix maps indices of pixels as in big_vision: shears are rounded to float32, and keep the
    first row or column, and translations are in pixels at any image size.
    """
    if name == "Rotate":
        angle = math.radians(30 * level)
        cosine, sine, x, y = math.cos(angle), math.sin(angle), (width - is_original) / 2, (height - is_original) / 2
        return (cosine, -sine, x - cosine * x + sine * y, sine, cosine, y - sine * x - cosine * y)
    shear = float(np.float32(0.3 * level)) if is_original else 0.3 * level
    across, down = (100 * level if is_original else 100 * level * side / REFERENCE_SIDE for side in (width, height))
    return {
        "ShearX": (1.0, shear, 0.0, 0.0, 1.0, 0.0),
        "ShearY": (1.0, 0.0, 0.0, shear, 1.0, 0.0),
        "TranslateX": (1.0, 0.0, across, 0.0, 1.0, 0.0),
        "TranslateY": (1.0, 0.0, 0.0, 0.0, 1.0, down),
    }[name]


def _pillow_transform(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
    return operations.transform(images, _matrices(images, names, draws, magnitude, is_original=False))


_pillow_by_table = table_kernel(lambda name, magnitude: changed_levels(name, magnitude, int(magnitude / 10 * 256)))

PILLOW: dict[str, Kernel] = {
    "AutoContrast": plain_kernel(operations.autocontrast),
    "Equalize": plain_kernel(operations.equalize),
    "Invert": _pillow_by_table,
    "Rotate": _pillow_transform,
    "Posterize": _pillow_by_table,
    "Solarize": _pillow_by_table,
    "Color": factor_kernel(operations.saturation),
    "Contrast": factor_kernel(operations.contrast),
    "Brightness": factor_kernel(operations.brightness),
    "Sharpness": factor_kernel(operations.sharpness),
    "ShearX": _pillow_transform,
    "ShearY": _pillow_transform,
    "TranslateX": _pillow_transform,
    "TranslateY": _pillow_transform,
    "Cutout": box_kernel(lambda magnitude, side: int(magnitude / 10 * 40 * side / REFERENCE_SIDE)),
    "SolarizeAdd": _pillow_by_table,
}
"""Kernels by the name of the operation. A random number chooses an operation by its position in this order."""


LUMA = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in TensorFlow's grey."""


def _big_vision_color(images: Images, factors: Float32[Tensor, " n"]) -> Images:
    """Change the saturation: factor 0 makes the image grey, and factor 1 does not change it. Images with one channel
    are not changed."""
    if images.shape[1] == 1:
        return images
    levels = images.float()
    red, green, blue = (levels * (1 / 255)).tensor_split(3, dim=1)
    grey = red.mul_(LUMA[0]).add_(green.mul_(LUMA[1])).add_(blue.mul_(LUMA[2])).mul_(255.5).floor_()
    return blend(grey, levels, factors[:, None, None, None])


def _big_vision_contrast(images: Images, factors: Float32[Tensor, " n"]) -> Images:
    """Change the contrast. At factor 0, every value is the number of pixels / 256, at most 255, instead of the mean
    grey level."""
    pixels = images.shape[2] * images.shape[3]
    grey = torch.tensor(float(min(255, pixels // 256)))
    values = torch.arange(256, dtype=torch.float32, device=images.device)
    return operations.by_table(images, blend(grey.expand(256), values, factors[:, None, None]))


def _big_vision_transform(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
    """Apply an affine map to the indices of pixels. Positions are rounded to float32, and then to the nearest index,
    halves away from zero. A pixel of the result is grey if its position is outside the image."""
    _, channels, height, width = images.shape
    matrices = _matrices(images, names, draws, magnitude, is_original=True)
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


# big_vision compares the threshold as a uint8, so that 256 becomes 0.
_big_vision_by_table = table_kernel(
    lambda name, magnitude: changed_levels(name, magnitude, int(magnitude / 10 * 256) % 256)
)

BIG_VISION: dict[str, Kernel] = {
    "AutoContrast": plain_kernel(functools.partial(operations.autocontrast, dtype=torch.float32)),
    "Equalize": plain_kernel(operations.equalize),
    "Invert": _big_vision_by_table,
    "Rotate": _big_vision_transform,
    "Posterize": _big_vision_by_table,
    "Solarize": _big_vision_by_table,
    "Color": factor_kernel(_big_vision_color),
    "Contrast": factor_kernel(_big_vision_contrast),
    "Brightness": factor_kernel(operations.brightness),
    "Sharpness": factor_kernel(functools.partial(operations.sharpness, is_truncated=True)),
    "ShearX": _big_vision_transform,
    "ShearY": _big_vision_transform,
    "TranslateX": _big_vision_transform,
    "TranslateY": _big_vision_transform,
    "Cutout": box_kernel(lambda magnitude, side: int(magnitude / 10 * 40)),
    "SolarizeAdd": _big_vision_by_table,
}
"""Kernels by the name of the operation, in the order in which big_vision lists them."""


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
