"""Tests of effective receptive fields."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.analysis.heads import effective_receptive_field
from vitrail.errors import ConfigError
from vitrail.models.resnet import ResNet
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit import VisionTransformer

Make = Callable[..., VisionTransformer]


def test_a_resnet_sees_more_with_depth_and_nothing_outside() -> None:
    torch.manual_seed(1)  # With 5 of 60 seeds, the second stage of these random weights sees no further than the first.
    network = ResNet(ResNetConfig(depths=(1, 1), width=32, num_classes=3))
    images = torch.randn(2, 3, 65, 80, generator=torch.Generator().manual_seed(0))
    found = effective_receptive_field(network, images)
    np.testing.assert_allclose(found.values.sum(axis=(1, 2)), 1.0)
    assert found.distance[0] < found.distance[1]
    down, across = np.abs(np.indices((65, 80)) + 0.5 - found.centre[0][:, None, None])
    # A unit of BiT has a 3 x 3 kernel behind a stem of 7 x 7, stride 2, and a pool of 3 x 3, stride 2: 19 pixels. Group
    # norm makes every pixel matter a little.
    near = (down <= 10) & (across <= 10)
    assert near.mean() < 0.1 and found.values[0][near].sum() > 0.6
    assert all(parameter.grad is None for parameter in network.parameters())


def test_values_are_finite_differences(make: Make) -> None:
    network = make(depth=1).double()
    image = torch.randn(1, 3, 12, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = effective_receptive_field(network, image, [0])

    def cell(pixels: Tensor) -> float:
        return network.features(pixels, [0])[0].patches[0, 1 * 4 + 2].sum().item()

    expected = np.zeros((12, 20))
    for row, column in ((0, 0), (5, 11), (11, 19)):
        for channel in range(3):
            step = torch.zeros_like(image)
            step[0, channel, row, column] = 1e-5
            expected[row, column] += abs(cell(image + step) - cell(image - step)) / 2e-5
    ratios = [found.values[0][place] / expected[place] for place in ((0, 0), (5, 11), (11, 19))]
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-5)


def test_distance_is_the_mean_from_the_centre(make: Make) -> None:
    found = effective_receptive_field(make(), torch.randn(1, 3, 12, 20), [-1])
    down, across = np.indices((12, 20)) + 0.5
    centre = (found.values[0] * down).sum(), (found.values[0] * across).sum()
    expected = (found.values[0] * np.hypot(down - centre[0], across - centre[1])).sum()
    assert found.distance[0] == pytest.approx(expected) and found.centre[0] == pytest.approx(centre)


def test_a_unit_that_does_not_exist(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"layers=\(9,\): block 9 does not exist; choose from 0 to 2"):
        effective_receptive_field(make(), torch.randn(1, 3, 12, 20), [9])
