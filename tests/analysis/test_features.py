"""Tests of token norms, principal components of patches, linear models by layer, filters and positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.analysis.networks import images_of, make
from vitrail.analysis.features import (
    TokenNorms,
    embedding_filters,
    patch_colours,
    position_similarity,
    probe_layers,
    token_norms,
)
from vitrail.errors import ConfigError
from vitrail.models.resnet import ResNet
from vitrail.models.resnet_config import ResNetConfig, RootConfig


@pytest.mark.parametrize("fields", [{}, {"registers": 2}, {"pool": "gap"}], ids=str)
def test_norms_by_layer(fields: dict[str, object]) -> None:
    network, images = make(**fields), images_of(3)
    found = token_norms(network, images, [-1, 0], batch_size=2)
    for place, one in enumerate(network.features(images, [-1, 0])):
        expected = np.sqrt((one.patches.detach().numpy() ** 2).sum(axis=2))
        np.testing.assert_allclose(found.patches[:, place], expected, rtol=1e-5)
        assert (found.cls is None) == (one.cls is None)
        if one.cls is not None and found.cls is not None:
            np.testing.assert_allclose(found.cls[:, place], one.cls.norm(dim=1).detach(), rtol=1e-5)
        np.testing.assert_allclose(found.registers[:, place], one.registers.norm(dim=2).detach(), rtol=1e-5)
    assert found.layers == (2, 0) and found.grid == (3, 4)


def test_outliers_exceed_three_medians() -> None:
    norms = np.ones((1, 2, 10), np.float32)
    norms[0, 1, :2] = (3.5, 2.9)
    found = TokenNorms("token norm", "Euclidean norm", (0, 1), (2, 5), None, norms[..., :0], norms)
    np.testing.assert_allclose(found.outliers(), [0.0, 0.1])
    np.testing.assert_allclose(found.outliers(2.0), [0.0, 0.2])


def test_colours_have_one_basis_and_certain_signs() -> None:
    network, images = make(), images_of(4)
    found = patch_colours(network, images, batch_size=3)
    tokens = network.features(images).patches.detach().double().numpy().reshape(-1, 16)
    values, vectors = np.linalg.eigh(np.cov(tokens.T))
    for component in range(3):
        direction = vectors[:, -1 - component]
        direction = direction * np.sign(direction[np.abs(direction).argmax()])
        expected = ((tokens - tokens.mean(axis=0)) @ direction).reshape(4, 3, 4)
        np.testing.assert_allclose(found.values[..., component], expected, atol=1e-3)
    np.testing.assert_allclose(found.explained, values[::-1][:3] / values.sum(), rtol=1e-4)
    pictures = found.pictures()
    assert pictures.shape == (4, 3, 4, 3) and pictures.min() == 0 and pictures.max() == 1
    flipped = patch_colours(network, images.flip(0))
    np.testing.assert_allclose(flipped.values[::-1], found.values, atol=1e-3)
    assert not np.allclose(patch_colours(network, images, 0).values, found.values)


RESNET = ResNet(ResNetConfig(depths=(1, 1), width=32, num_classes=3)).eval()


def test_a_resnet_has_colours_too() -> None:
    images = torch.randn(2, 3, 33, 40, generator=torch.Generator().manual_seed(0))
    assert patch_colours(RESNET, images, 0).values.shape == (2, 9, 10, 3)
    with pytest.raises(ConfigError, match="architecture 'BiT' has no attention to look into"):
        token_norms(RESNET, images)


@pytest.mark.slow
def test_a_linear_model_by_layer() -> None:
    network = make(pool="gap")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 2
    images = torch.randn(60, 3, 12, 20, generator=generator) + 2.0 * (labels[:, None, None, None] - 0.5)
    known, unknown = labels[:40].numpy(), labels[40:].numpy()
    found = probe_layers(network, images[:40], known, images[40:], unknown, [0, -1], batch_size=16)
    assert [one.layer for one in found] == [0, 2]
    for one in found:
        assert one.accuracy.low is not None and one.accuracy.low <= one.accuracy.value
        assert one.accuracy.value > 0.8


def test_filters_are_the_directions_that_were_put_in() -> None:
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


def test_learned_positions() -> None:
    network = make(registers=1)
    found = position_similarity(network)
    vectors = network.positions.get_parameter("embedding")[0, -12:].detach().double().numpy()
    for first in range(12):
        for second in range(12):
            one, two = vectors[first], vectors[second]
            expected = one @ two / np.sqrt(one @ one * (two @ two))
            assert found.values[first // 4, first % 4, second // 4, second % 4] == pytest.approx(expected, abs=1e-5)
    assert position_similarity(network, (2, 5)).values.shape == (2, 5, 2, 5)  # resized


def test_positions_of_two_dimensions_share_rows_and_columns() -> None:
    assert position_similarity(make(positions="learned-2d"), (3, 4)).values[1, 2, 1, 2] == pytest.approx(1)
    values = position_similarity(make(positions="sincos-2d"), (3, 4)).values
    assert values[1, 2, 1, 2] == pytest.approx(1)
    assert values[0, 0, 1, 1] == pytest.approx(values[1, 2, 2, 3], abs=1e-5), "it depends only on the offset"
    assert values[0, 0, 0, 1] > values[0, 0, 0, 3]


def test_positions_of_every_layer() -> None:
    network = make(positions_at="every-layer")
    first, second = (position_similarity(network, layer=layer).values for layer in (0, 1))
    assert not np.allclose(first, second)
    with pytest.raises(ConfigError, match=r"layer=\(3,\): block 3 does not exist; choose from 0 to 2"):
        position_similarity(network, layer=3)


def test_what_is_refused(types_unchecked: None) -> None:
    with pytest.raises(ConfigError, match=r"layers=\(5,\): block 5 does not exist; choose from 0 to 2"):
        patch_colours(make(), images_of(), 5)
    with pytest.raises(ConfigError, match="components=0 is less than 1"):
        patch_colours(make(), images_of(), components=0)
    with pytest.raises(ConfigError, match=r"count=1\.5 is not a whole number"):
        embedding_filters(make(), 1.5)
    with pytest.raises(ConfigError, match="components=17 is more than 16, the number of directions of these tokens"):
        patch_colours(make(), images_of(), components=17)
    for positions in ("none", "relative-bias", "relative-keys", "rotary-2d"):
        with pytest.raises(ConfigError, match=f"positions='{positions}' adds no vectors in layer 0"):
            position_similarity(make(positions=positions))
    with pytest.raises(ConfigError, match="positions='learned' adds no vectors in layer 1"):
        position_similarity(make(), layer=1)
    hybrid = make(root=RootConfig(stem="3x3+3x3", width=32), patch_size=(1, 1), image_size=(5, 8))
    with pytest.raises(ConfigError, match="the patch embedding of a hybrid reads a feature map"):
        embedding_filters(hybrid)
    with pytest.raises(ConfigError, match="architecture 'BiT' has no attention"):
        position_similarity(RESNET)
    with pytest.raises(ConfigError, match="count=0 is less than 1"):
        embedding_filters(make(), 0)
