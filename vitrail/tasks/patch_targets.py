"""Targets of masked patch prediction: the pixels of patches, their colours as classes, and their tokens.

The levels 0 to 255 of a channel are divided into 8 equal bins, which are 3 bits. The paper does not state its bins. A
colour of three channels is one of 512 classes: 64 times the bin of red, plus 8 times the bin of green, plus the bin of
blue. A grey image has one channel, so its levels are 8 classes. Grey images that are read as three equal channels use
the 8 of the 512 classes that are grey. Tokens are those of a trained tokenizer (`vitrail.tasks.tokens`).
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Int64
from torch import Tensor

__all__ = ["BINS", "CELLS", "PatchTarget", "colour_classes", "colour_levels", "colours"]

PatchTarget = Literal["mean-colour", "colours", "pixels", "tokens"]

CELLS: dict[PatchTarget, int] = {"mean-colour": 1, "colours": 4}
"""Rows and columns of cells of a patch whose mean colours are predicted."""

BINS = 8
"""Bins of the levels of a channel."""


def colours(channels: int) -> int:
    """Return the number of classes of a colour: 512 with three channels, 8 with one."""
    return BINS**channels


def colour_classes(patches: Int64[Tensor, "b n c ph pw"], cells: int) -> Int64[Tensor, "b n cells2"]:
    """Return the class of the mean colour of each of `cells` x `cells` cells of each patch, in row-major order.

    If the number of cells does not divide a side of the patch, neighbouring cells share pixels, as in adaptive average
    pooling. Means are computed in whole numbers, so a mean on the border of two bins belongs to the upper bin on every
    device.
    """
    height, width = patches.shape[3:]
    found = []
    for top, bottom in _windows(height, cells):
        for left, right in _windows(width, cells):
            sums = patches[:, :, :, top:bottom, left:right].sum(dim=(3, 4))
            bins = sums * BINS // (256 * (bottom - top) * (right - left))
            classes = torch.zeros_like(bins[:, :, 0])
            for channel in bins.unbind(dim=2):
                classes = classes * BINS + channel
            found.append(classes)
    return torch.stack(found, dim=2)


def colour_levels(
    classes: Int64[Tensor, "b n cells2"], cells: int, channels: int, patch_size: tuple[int, int]
) -> Int64[Tensor, "b n c ph pw"]:
    """Return patches whose cells have the middle levels of these colours. Pixels that cells share belong to the last
    one."""
    height, width = patch_size
    patches = classes.new_zeros(*classes.shape[:2], channels, height, width)
    places = [(rows, columns) for rows in _windows(height, cells) for columns in _windows(width, cells)]
    for number, ((top, bottom), (left, right)) in enumerate(places):
        for channel in range(channels):
            bins = classes[:, :, number] // BINS ** (channels - 1 - channel) % BINS
            levels = bins * (256 // BINS) + 128 // BINS
            patches[:, :, channel, top:bottom, left:right] = levels[:, :, None, None]
    return patches


def _windows(size: int, cells: int) -> list[tuple[int, int]]:
    """Return the first pixel of each cell along a side, and the pixel after the last one."""
    return [(number * size // cells, -(-(number + 1) * size // cells)) for number in range(cells)]
