"""Tests of blocks of hidden patches: rectangles, their sizes and numbers, and the keys of their random numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tests.tasks.images import batch_of
from vitrail.tasks.masked_patches import MaskedPatches, draw_block_order, draw_blocks, draw_corruption
from vitrail.tasks.patches import draw_order

GRIDS = [((14, 14), 75), ((7, 7), 20), ((5, 12), 24), ((14, 14), 140), ((2, 3), 2)]


def largest_rectangle(mask: np.ndarray) -> tuple[int, int]:
    """Return the height and the width of the largest rectangle in a mask."""
    rows, columns = mask.shape
    found = (0, 0)
    for top, bottom in itertools.combinations(range(rows + 1), 2):
        full = mask[top:bottom].all(axis=0)
        for left, right in itertools.combinations(range(columns + 1), 2):
            if full[left:right].all() and (bottom - top) * (right - left) > math.prod(found):
                found = (bottom - top, right - left)
    return found


@pytest.mark.parametrize(("grid", "count"), GRIDS)
def test_the_first_patches_are_blocks_and_all_patches_occur_once(grid: tuple[int, int], count: int) -> None:
    batch = batch_of(torch.zeros(60, 1, 1, 1))
    blocks, order = (draw(batch, grid, count, seed=2) for draw in (draw_blocks, draw_block_order))
    sizes = blocks.sum(axis=(1, 2))
    assert sizes.max() <= count and order.shape == (60, math.prod(grid))
    for mask, size, places in zip(blocks, sizes, order.tolist(), strict=True):
        assert sorted(places) == list(range(math.prod(grid)))
        assert set(places[:size]) == set(mask.flatten().nonzero()[0].tolist())
    if math.prod(grid) == 196:
        assert sizes.mean() > 0.95 * count


def test_blocks_have_the_published_sizes() -> None:
    """With 16 patches, the first block has the smallest area of the published code."""
    found = [largest_rectangle(mask) for mask in draw_blocks(batch_of(torch.zeros(20, 1, 1, 1)), (14, 14), 16, seed=0)]
    assert all(12 <= height * width <= 16 and 0.2 < height / width < 5 for height, width in found)
    assert min(height / width for height, width in found) < 0.6 and max(height / width for height, width in found) > 1.6


def test_neighbours_are_hidden_together() -> None:
    batch, places = batch_of(torch.zeros(50, 1, 1, 1)), np.zeros((50, 196), bool)
    pairs = []
    for draw in (draw_block_order(batch, (14, 14), 75, seed=0), draw_order(batch, 196, seed=0)):
        places[:] = False
        np.put_along_axis(places, draw[:, :75], True, axis=1)
        grids = places.reshape(50, 14, 14)
        pairs.append((grids[:, :, 1:] & grids[:, :, :-1]).mean())
    assert pairs[0] > 2 * pairs[1]


def test_blocks_depend_on_seed_epoch_and_sample_alone() -> None:
    images = torch.zeros(6, 1, 1, 1)
    whole = draw_block_order(batch_of(images), (7, 8), 20, seed=5)
    assert np.array_equal(whole[3:5], draw_block_order(batch_of(images[:2], first=3), (7, 8), 20, seed=5))
    for other in (batch_of(images, epoch=1), batch_of(images, first=6)):
        assert not np.array_equal(whole, draw_block_order(other, (7, 8), 20, seed=5))
    assert not np.array_equal(whole, draw_block_order(batch_of(images), (7, 8), 20, seed=6))


def test_corruption_in_blocks_has_the_counts_of_the_fractions() -> None:
    task = MaskedPatches(corrupt_blocks=True, corrupt_fraction=75 / 196, mask_fraction=0.8, swap_fraction=0.1)
    found = draw_corruption(task, batch_of(torch.zeros(30, 1, 1, 1)), (14, 14), seed=0)
    assert (found.masked.shape, found.swapped.shape, found.kept.shape) == ((30, 60), (30, 8), (30, 7))
    assert all(len(set(row)) == 75 for row in found.patches.tolist())
