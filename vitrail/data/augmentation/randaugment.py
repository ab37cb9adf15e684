"""RandAugment (Cubuk et al., 1909.13719): operations drawn from sixteen, applied one after another with one magnitude.

The operations and the arguments for each magnitude come from google-research/big_vision, which AugReg (2106.10270) and
"Better plain ViT baselines" (2205.01580) used. See the table in docs/augmentation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32, UInt8
from torch import Tensor

from vitrail.data.augmentation import operations
from vitrail.data.augmentation.operations import on_device

__all__ = ["DRAWS", "OPERATIONS", "apply_operations", "randaugment"]

DRAWS = 4
"""Random numbers per operation: one for the operation, one for its direction, and two for the centre of a box (y,
x)."""

REFERENCE_SIDE = 224
"""Image side in pixels to which shifts and box sizes refer. For images of another size, they are scaled in
proportion."""

Images = UInt8[Tensor, "n c h w"]
Draws = Float32[np.ndarray, "n 4"]
Kernel = Callable[[Tensor, Sequence[str], np.ndarray, float], Tensor]
"""Function of the images, the name of the operation for each image, the random numbers and the magnitude. It returns
the changed images."""


def randaugment(images: Images, draws: Float32[np.ndarray, "n layers 4"], *, magnitude: float) -> Images:
    """Apply one random operation per layer to each image. `draws` holds the random numbers of each image and layer."""
    for layer in range(draws.shape[1]):
        chosen = (draws[:, layer, 0] * len(OPERATIONS)).astype(int)
        names = [NAMES[number] for number in chosen]
        images = apply_operations(images, names, draws[:, layer], magnitude=magnitude)
    return images


def apply_operations(images: Images, names: Sequence[str], draws: Draws, *, magnitude: float) -> Images:
    """Apply the operation in `names` to each image. Operations that share a kernel are applied together."""
    groups: dict[Kernel, list[int]] = {}
    for place, name in enumerate(names):
        groups.setdefault(OPERATIONS[name], []).append(place)
    changed = images.new_empty(images.shape)
    for kernel, members in groups.items():
        places = np.array(members)
        index = on_device(places, images.device)
        part = images.index_select(0, index)
        changed.index_copy_(0, index, kernel(part, [names[place] for place in members], draws[places], magnitude))
    return changed


def _plainly(operation: Callable[[Images], Images]) -> Kernel:
    """Return the kernel of an operation without a magnitude."""
    return lambda images, names, draws, magnitude: operation(images)


def _enhance(operation: Callable[[Images, Float32[Tensor, " n"]], Images]) -> Kernel:
    """Return the kernel of an operation that takes a factor. The factor is 0.1 at magnitude 0, 1 (no change) at
    magnitude 5, and 1.9 at magnitude 10."""

    def enhance(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
        factors = np.full(len(names), magnitude / 10 * 1.8 + 0.1, np.float32)
        return operation(images, on_device(factors, images.device))

    return enhance


def _by_table(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
    tables = {name: _table(name, magnitude) for name in set(names)}
    stacked = np.stack([tables[name] for name in names])[:, None]
    return operations.by_table(images, on_device(stacked, images.device))


def _table(name: str, magnitude: float) -> UInt8[np.ndarray, " 256"]:
    values = np.arange(256)
    if name == "Invert":
        changed = 255 - values
    elif name == "Posterize":
        bits = min(8, max(1, int(magnitude / 10 * 4)))
        changed = values & (256 - (1 << (8 - bits)))
    elif name == "Solarize":
        changed = np.where(values < int(magnitude / 10 * 256), values, 255 - values)
    else:
        changed = np.where(values < 128, np.minimum(255, values + int(magnitude / 10 * 110)), values)
    return changed.astype(np.uint8)


def _transform(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
    height, width = images.shape[2:]
    matrices = [
        _matrix(name, magnitude / 10 * (1 if draw < 0.5 else -1), height, width)
        for name, draw in zip(names, draws[:, 1], strict=True)
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


def _cutout(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
    sides = images.shape[2:]
    half = int(magnitude / 10 * 40 * min(sides) / REFERENCE_SIDE)
    inside = []
    for draw, side in zip(draws[:, 2:].T, sides, strict=True):
        centre = (draw * side).astype(int)[:, None]
        inside.append((np.arange(side) >= centre - half) & (np.arange(side) < centre + half))
    return operations.fill(images, *inside)


OPERATIONS: dict[str, Kernel] = {
    "AutoContrast": _plainly(operations.autocontrast),
    "Equalize": _plainly(operations.equalize),
    "Invert": _by_table,
    "Rotate": _transform,
    "Posterize": _by_table,
    "Solarize": _by_table,
    "Color": _enhance(operations.saturation),
    "Contrast": _enhance(operations.contrast),
    "Brightness": _enhance(operations.brightness),
    "Sharpness": _enhance(operations.sharpness),
    "ShearX": _transform,
    "ShearY": _transform,
    "TranslateX": _transform,
    "TranslateY": _transform,
    "Cutout": _cutout,
    "SolarizeAdd": _by_table,
}
NAMES = tuple(OPERATIONS)
