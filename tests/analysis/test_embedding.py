"""Tests of filters and of the similarity of positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from vitrail.analysis.features import embedding_filters, position_similarity, principal_components
from vitrail.errors import ConfigError
from vitrail.models.resnet_config import RootConfig
from vitrail.models.variants import create
from vitrail.models.vit import VisionTransformer

Make = Callable[..., VisionTransformer]


def test_filters_are_the_directions_that_were_put_in(make: Make) -> None:
    network = make(width=32)
    random = np.random.default_rng(0)
    directions = np.linalg.qr(random.normal(size=(60, 2)))[0].T
    scores = np.linalg.qr(np.c_[np.ones(32), random.normal(size=(32, 2))])[0][:, 1:]  # each of mean 0 and length 1
    weight = 0.3 + scores * [3.0, 1.0] @ directions
    with torch.no_grad():
        network.patches.projection.weight.copy_(torch.from_numpy(weight))
    found = embedding_filters(network, 2)
    np.testing.assert_allclose(found.explained, [0.9, 0.1], atol=1e-5)
    for tile, direction in zip(found.values, directions, strict=True):
        assert tile.shape == (4, 5, 3)
        flat = tile.transpose(2, 0, 1).ravel()
        sign = np.sign(direction[np.abs(direction).argmax()])
        np.testing.assert_allclose(flat, sign * direction, atol=1e-4)
        assert flat[np.abs(flat).argmax()] > 0
    pictures = found.pictures()
    assert pictures.min() >= 0 and pictures.max() == 1
    assert len(embedding_filters(network).values) == 28 and len(embedding_filters(make(), 99).values) == 16


def test_components_are_those_of_an_eigenvalue_decomposition() -> None:
    samples = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    components, explained = principal_components(samples, 3)
    values, vectors = np.linalg.eigh(np.cov(samples.numpy().T))
    for row in range(3):
        direction = vectors[:, -1 - row]
        direction *= np.sign(direction[np.abs(direction).argmax()])
        np.testing.assert_allclose(components[row], direction, atol=1e-9)
    np.testing.assert_allclose(explained, values[::-1][:3] / values.sum())


def test_learned_positions(make: Make) -> None:
    network = make(registers=1)
    found = position_similarity(network)
    vectors = network.positions.get_parameter("embedding")[0, -12:].detach().double().numpy()
    for first in range(12):
        for second in range(12):
            one, two = vectors[first], vectors[second]
            expected = one @ two / np.sqrt(one @ one * (two @ two))
            assert found.values[first // 4, first % 4, second // 4, second % 4] == pytest.approx(expected, abs=1e-5)
    assert position_similarity(network, (2, 5)).values.shape == (2, 5, 2, 5)  # resized


def test_positions_of_two_dimensions_share_rows_and_columns(make: Make) -> None:
    for positions in ("learned-2d", "sincos-2d"):
        values = position_similarity(make(positions=positions), (3, 4)).values
        assert values[1, 2, 1, 2] == pytest.approx(1)
        if positions == "sincos-2d":  # the cosine depends only on the offset
            assert values[0, 0, 1, 1] == pytest.approx(values[1, 2, 2, 3], abs=1e-5)
            assert values[0, 0, 0, 1] > values[0, 0, 0, 3]


def test_positions_of_every_layer(make: Make) -> None:
    network = make(positions_at="every-layer")
    first, second = (position_similarity(network, layer=layer).values for layer in (0, 1))
    assert not np.allclose(first, second)
    with pytest.raises(ConfigError, match="layer=3 does not exist; choose from 0 to 2"):
        position_similarity(network, layer=3)


def test_what_is_refused(make: Make) -> None:
    for positions in ("none", "relative-bias", "relative-keys", "rotary-2d"):
        with pytest.raises(ConfigError, match=f"positions='{positions}' adds no vectors in layer 0"):
            position_similarity(make(positions=positions))
    with pytest.raises(ConfigError, match="positions='learned' adds no vectors in layer 1"):
        position_similarity(make(), layer=1)
    hybrid = make(root=RootConfig(stem="3x3+3x3", width=32), patch_size=(1, 1), image_size=(5, 8))
    with pytest.raises(ConfigError, match="the patch embedding of a hybrid reads a feature map"):
        embedding_filters(hybrid)
    with pytest.raises(ConfigError, match="architecture 'BiT' has no attention"):
        position_similarity(create("BiT-R26x1", image_size=32))
    with pytest.raises(ConfigError, match="count=0 is less than 1"):
        embedding_filters(make(), 0)
