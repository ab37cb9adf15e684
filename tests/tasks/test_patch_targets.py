"""Tests of the targets of masked patch prediction: patches, bins of colours, and cells of patches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.tokens import PatchEmbedding, cut_patches
from vitrail.tasks.masked_patches import colour_classes, colours


@pytest.mark.parametrize(
    ("colour", "expected"),
    [
        ((0, 0, 0), 0), ((31, 31, 31), 0), ((32, 0, 0), 64), ((0, 32, 0), 8), ((0, 0, 32), 1),
        ((255, 255, 255), 511), ((255, 0, 127), 7 * 64 + 3), ((100, 200, 60), 3 * 64 + 6 * 8 + 1),
    ],
)  # fmt: skip
def test_a_colour_has_three_bits_per_channel(colour: tuple[int, int, int], expected: int) -> None:
    patches = torch.tensor(colour).view(1, 1, 3, 1, 1).expand(1, 1, 3, 5, 7)
    assert colour_classes(patches, 1).tolist() == [[[expected]]]
    assert colour_classes(patches, 4).tolist() == [[[expected] * 16]]
    assert colours(3) == 512


@pytest.mark.parametrize(("level", "expected"), [(0, 0), (31, 0), (32, 1), (128, 4), (223, 6), (224, 7), (255, 7)])
def test_a_grey_level_has_three_bits(level: int, expected: int) -> None:
    assert colour_classes(torch.full((1, 1, 1, 3, 3), level), 1).item() == expected
    assert colours(1) == 8


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
