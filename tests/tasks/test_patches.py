"""Tests of masked blocks, of the pixels and codes of masked patches, and of the settings that their tasks share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.tasks.images import batch_of
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.models.tokens import PatchEmbedding, cut_patches
from vitrail.models.variants import variant_config
from vitrail.tasks.mae import Mae
from vitrail.tasks.masked_patches import (
    MaskedPatches,
    colour_classes,
    colours,
    draw_block_order,
    draw_blocks,
    draw_corruption,
)
from vitrail.tasks.unlabelled import PatchTask, draw_order

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


@pytest.mark.slow
def test_blocks_have_the_published_sizes() -> None:
    """With 16 patches, the first block has the smallest area of the published code."""
    found = [largest_rectangle(mask) for mask in draw_blocks(batch_of(torch.zeros(20, 1, 1, 1)), (14, 14), 16, seed=0)]
    assert all(12 <= height * width <= 16 and 0.2 < height / width < 5 for height, width in found)
    assert min(height / width for height, width in found) < 0.6 and max(height / width for height, width in found) > 1.6


def corrupted(batch: Batch, grid: tuple[int, int], count: int, *, seed: int) -> np.ndarray:
    found = draw_corruption(MaskedPatches(corrupt_fraction=count / math.prod(grid)), batch, grid, seed=seed)
    return torch.cat([found.patches, found.sources], dim=1).numpy()


def ordered(batch: Batch, grid: tuple[int, int], count: int, *, seed: int) -> np.ndarray:
    return draw_order(batch, math.prod(grid), seed=seed)


@pytest.mark.parametrize("draw", [ordered, draw_block_order, corrupted])
def test_hidden_patches_depend_on_seed_epoch_sample_and_view_alone(draw: Callable[..., np.ndarray]) -> None:
    images = torch.zeros(6, 1, 1, 1)
    whole = draw(batch_of(images), (7, 8), 20, seed=5)
    assert np.array_equal(whole[3:5], draw(batch_of(images[:2], first=3), (7, 8), 20, seed=5))
    view = replace(batch_of(images), views=torch.ones(6, dtype=torch.int64))
    for other in (batch_of(images, epoch=1), batch_of(images, first=6), view):
        assert not np.array_equal(whole, draw(other, (7, 8), 20, seed=5))
    assert not np.array_equal(whole, draw(batch_of(images), (7, 8), 20, seed=6))
    assert len({tuple(row) for row in whole.tolist()}) == 6


def test_corruption_in_blocks_has_the_counts_of_the_fractions() -> None:
    task = MaskedPatches(corrupt_blocks=True, corrupt_fraction=75 / 196, mask_fraction=0.8, swap_fraction=0.1)
    found = draw_corruption(task, batch_of(torch.zeros(30, 1, 1, 1)), (14, 14), seed=0)
    assert (found.masked.shape, found.swapped.shape, found.kept.shape) == ((30, 60), (30, 8), (30, 7))
    assert all(len(set(row)) == 75 for row in found.patches.tolist())


def test_a_colour_has_three_bits_per_channel() -> None:
    for colour, expected in (
        ((0, 0, 0), 0), ((31, 31, 31), 0), ((32, 0, 0), 64), ((0, 32, 0), 8), ((0, 0, 32), 1), ((255, 255, 255), 511),
        ((255, 0, 127), 7 * 64 + 3), ((100, 200, 60), 3 * 64 + 6 * 8 + 1),
    ):  # fmt: skip
        patches = torch.tensor(colour).view(1, 1, 3, 1, 1).expand(1, 1, 3, 5, 7)
        assert colour_classes(patches, 1).tolist() == [[[expected]]]
        assert colour_classes(patches, 4).tolist() == [[[expected] * 16]]
    for level, expected in ((0, 0), (31, 0), (32, 1), (128, 4), (223, 6), (224, 7), (255, 7)):
        assert colour_classes(torch.full((1, 1, 1, 3, 3), level), 1).item() == expected
    assert (colours(3), colours(1)) == (512, 8)


def test_the_mean_of_a_patch_is_binned_and_not_its_pixels() -> None:
    patch = torch.zeros(1, 1, 1, 7, 7, dtype=torch.int64)
    patch[..., :4, :4] = 98  # 16 of 49 pixels: the mean is exactly 32
    assert colour_classes(patch, 1).item() == 1
    patch[..., 0, 0] = 97
    assert colour_classes(patch, 1).item() == 0


@pytest.mark.parametrize(("height", "width"), [(4, 4), (8, 12), (7, 5), (3, 6), (2, 1), (16, 16)])
def test_cells_are_those_of_adaptive_average_pooling(height: int, width: int) -> None:
    torch.manual_seed(0)
    patches = torch.randint(0, 256, (2, 3, 3, height, width))
    means = F.adaptive_avg_pool2d(patches.flatten(0, 1).double(), 4).view(2, 3, 3, 4, 4)
    bins = (means / 32 + 1e-9).floor().long()
    expected = bins[:, :, 0] * 64 + bins[:, :, 1] * 8 + bins[:, :, 2]
    assert torch.equal(colour_classes(patches, 4), expected.flatten(2))


def test_patches_have_the_order_of_the_patch_embedding_and_leave_out_uneven_borders() -> None:
    images = torch.randn(2, 3, 11, 16)
    embedding = PatchEmbedding((3, 5), 3, 45, bias=False)
    torch.nn.init.eye_(embedding.projection.weight)
    patches = cut_patches(images, (3, 5))
    assert patches.shape == (2, 9, 3, 3, 5)
    torch.testing.assert_close(patches.flatten(2), embedding(images))
    expected = F.unfold(images, (3, 5), stride=(3, 5)).transpose(1, 2)  # windows that do not fit are left out
    assert torch.equal(patches.flatten(2), expected)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.5,)), ((0.1, 0.9, 0.286), (0.353, 0.01, 2.0))])
def test_levels_lead_back_from_normalised_images(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    preprocess = Preprocess(image_size=(16, 16), mean=mean, std=std)
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    assert torch.equal(preprocess.levels(preprocess.normalise(images)), images.long())


TASKS = (Mae(), MaskedPatches())


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_fractions_leave_hidden_and_visible_patches(task: PatchTask) -> None:
    for fraction in (0.0, 1.0, math.nan):
        with pytest.raises(ConfigError, match=f"{task.fraction}={fraction} is not between 0 and 1, so no patch would"):
            replace(task, **{task.fraction: fraction})
    network = variant_config("ViT-Pico/16", image_size=32)
    rounds_up = task.name == "mae"  # the number of removed patches, so that one always is
    for fraction, left in ((0.1, task.hidden), (0.9, "visible"))[rounds_up:]:
        with pytest.raises(ConfigError, match=rf"{task.fraction}={fraction} of 4 .* leaves no {left} patch; choose"):
            replace(task, **{task.fraction: fraction}).check_network(network)
