"""Tests of attention distances, entropies and receptive fields."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.networks import images_of, make
from vitrail.analysis.heads import (
    attention_distance,
    attention_entropy,
    effective_receptive_field,
    entropies,
    mean_distances,
)
from vitrail.models.resnet import ResNet
from vitrail.models.resnet_config import ResNetConfig


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


def test_values_are_finite_differences_and_the_distance_is_their_mean_from_the_centre() -> None:
    network = make(depth=1).double()
    image = torch.randn(1, 3, 12, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = effective_receptive_field(network, image, [0])

    def cell(pixels: Tensor) -> float:
        return network.features(pixels, [0])[0].patches[0, 1 * 4 + 2].sum().item()

    ratios = []
    for row, column in ((0, 0), (5, 11), (11, 19)):
        slope = 0.0
        for channel in range(3):
            step = torch.zeros_like(image)
            step[0, channel, row, column] = 1e-5
            slope += abs(cell(image + step) - cell(image - step)) / 2e-5
        ratios.append(found.values[0][row, column] / slope)
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-5)
    down, across = np.indices((12, 20)) + 0.5
    centre = (found.values[0] * down).sum(), (found.values[0] * across).sum()
    expected = (found.values[0] * np.hypot(down - centre[0], across - centre[1])).sum()
    assert found.distance[0] == pytest.approx(expected) and found.centre[0] == pytest.approx(centre)


def test_constructed_attention() -> None:
    grid, patch = (2, 3), (4, 5)
    identity = torch.eye(6)
    right = torch.zeros(6, 6)  # every patch attends to its right neighbour, and the last column to itself
    for row in range(2):
        for column in range(3):
            right[3 * row + column, 3 * row + min(column + 1, 2)] = 1.0
    uniform = torch.full((6, 6), 1 / 6)
    found = mean_distances(torch.stack([identity, right, uniform]), grid, patch, 0)
    # Columns are 5 apart. Of the 36 pairs, 6 are the same patch, 8 are 5 apart, 4 are 10 apart, 6 are 4 apart, 8 are
    # sqrt(41) apart and 4 are sqrt(116) apart.
    of_uniform = (8 * 5 + 4 * 10 + 6 * 4 + 8 * math.sqrt(41) + 4 * math.sqrt(116)) / 36
    np.testing.assert_allclose(found, [0.0, 4 * 5 / 6, of_uniform], rtol=1e-6)
    np.testing.assert_allclose(entropies(torch.stack([identity, uniform]), 0), [0.0, math.log(6)], atol=1e-6)


@pytest.mark.parametrize("fields", [{"registers": 2, "positions": "relative-bias"}, {"pool": "gap"}], ids=str)
def test_a_naive_version(fields: dict[str, object]) -> None:
    network, images = make(**fields), images_of(3)
    prefix, (rows, columns) = network.config.prefix, (3, 4)
    distance = attention_distance(network, images, layers=[2, 0], heads=[-1, 1], batch_size=2)
    entropy = attention_entropy(network, images, layers=[2, 0], heads=[-1, 1])
    with torch.no_grad():
        weights = network.double().attention_weights(images.double(), [2, 0])
    network.float()
    for row in (0, 1):
        for column, head in enumerate((3, 1)):
            distances, nats = [], []
            for image in range(3):
                map_ = weights[row][image, head].tolist()
                total = entropy_sum = 0.0
                for i in range(rows * columns):
                    for j in range(rows * columns):
                        down, across = i // columns - j // columns, i % columns - j % columns
                        total += map_[prefix + i][prefix + j] * math.sqrt((4 * down) ** 2 + (5 * across) ** 2)
                    entropy_sum -= sum(weight * math.log(weight) for weight in map_[prefix + i])
                distances.append(total / 12)
                nats.append(entropy_sum / 12)
            assert distance.mean[row, column] == pytest.approx(np.mean(distances), rel=1e-4)
            assert distance.spread[row, column] == pytest.approx(np.std(distances), rel=1e-3, abs=1e-6)
            assert entropy.mean[row, column] == pytest.approx(np.mean(nats), rel=1e-4)
    assert (distance.layers, distance.heads, distance.images) == ((2, 0), (3, 1), 3)
    assert (distance.unit, entropy.unit) == ("pixels", "nats")
