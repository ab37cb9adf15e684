"""Blocks of hidden patches: rectangles of random size, shape and place, as in BEiT (2106.08254, algorithm 1)."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Int64

from vitrail.data.augmentation.draws import Slot, keyed_uniform
from vitrail.data.batch import Batch
from vitrail.tasks.patch_task import batch_key, draw_order

__all__ = ["draw_block_order", "draw_blocks"]

SMALLEST = 16 / 196
"""Smallest area of a block, as a fraction of the patches: 16 of 14 x 14 patches in the published code."""

ASPECT = 0.3
"""Smallest ratio of the sides of a block. The largest one is its reciprocal."""

TRIES, FAILURES = 200, 10
"""Numbers of blocks that are tried for an image, and of those that may fail in a row."""


def draw_block_order(batch: Batch, grid: tuple[int, int], count: int, *, seed: int) -> Int64[np.ndarray, "b n"]:
    """Return an order of the patches of each image whose first `count` patches consist of blocks.

    If the blocks have fewer patches, random ones follow. All patches of blocks are in a random order. The order is a
    pure function of the seed and of the image's epoch, sample and view.
    """
    order = draw_order(batch, math.prod(grid), seed=seed)
    is_hidden = draw_blocks(batch, grid, count, seed=seed).reshape(len(order), -1)
    later = ~np.take_along_axis(is_hidden, order, axis=1)
    return np.take_along_axis(order, later.argsort(axis=1, kind="stable"), axis=1)


def draw_blocks(batch: Batch, grid: tuple[int, int], count: int, *, seed: int) -> Bool[np.ndarray, "b rows columns"]:
    """Return a mask of blocks of each image, which has at most `count` patches.

    The area of a block is uniform between the smallest one and the number of patches that are still missing, and the
    logarithm of its ratio of sides is uniform. A block that does not fit, that adds no patch, or that adds too many is
    not used. An image is complete after 10 such blocks in a row.
    """
    rows, columns = grid
    uniform = keyed_uniform(seed, *batch_key(batch), draws=4 * TRIES, first=Slot.PATCH_BLOCKS).astype(np.float64)
    hidden = np.zeros((len(uniform), rows, columns), bool)
    missing, failures = np.full(len(uniform), count), np.zeros(len(uniform), np.int64)
    smallest = SMALLEST * rows * columns
    for area, ratio, top, left in uniform.reshape(len(uniform), TRIES, 4).transpose(1, 2, 0):
        areas, ratios = smallest + area * (missing - smallest), ASPECT ** (1 - 2 * ratio)
        height, width = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
        top, left = np.floor(top * (rows - height + 1)), np.floor(left * (columns - width + 1))
        is_inside = _between(rows, top, height)[:, :, None] & _between(columns, left, width)[:, None, :]
        new = is_inside & ~hidden
        added = new.sum(axis=(1, 2))
        is_used = (height < rows) & (width < columns) & (added > 0) & (added <= missing) & (failures < FAILURES)
        hidden |= new & is_used[:, None, None]
        missing -= np.where(is_used, added, 0)
        failures = np.where(is_used, 0, failures + 1)
        if ((missing == 0) | (failures >= FAILURES)).all():
            break
    return hidden


def _between(size: int, first: np.ndarray, length: np.ndarray) -> Bool[np.ndarray, "b size"]:
    """Return a mask of the indices below `size` from `first` on, of this length."""
    places = np.arange(size)
    return (places >= first[:, None]) & (places < (first + length)[:, None])
