"""Tests of centred kernel alignment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.networks import images_of, make
from vitrail.analysis.similarity import LayerSimilarity, MinibatchCka, layer_similarity, unbiased_hsic
from vitrail.errors import ConfigError
from vitrail.models.resnet import ResNet
from vitrail.models.resnet_config import ResNetConfig


def draw(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cka(first: Tensor, second: Tensor) -> float:
    total = MinibatchCka(1, 1)
    total.add([first], [second])
    return float(total.result()[0, 0])


def test_the_estimator_is_a_mean_over_quadruples() -> None:
    """The unbiased estimator is the mean of the kernel's U-statistic over all ordered quadruples of samples."""
    k, l = (draw(6, 3, seed) @ draw(6, 3, seed).T for seed in (0, 1))  # noqa: E741
    terms = [k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q]) for i, j, q, r in itertools.permutations(range(6), 4)]
    found = unbiased_hsic(k.clone().fill_diagonal_(0), l.clone().fill_diagonal_(0))
    assert float(found) == pytest.approx(float(torch.stack(terms).mean()))


def test_rotations_and_scales_change_nothing() -> None:
    x, y = draw(12, 5, 0), draw(12, 7, 1)
    rotation, _ = torch.linalg.qr(draw(5, 5, 2))
    assert cka(x, x) == pytest.approx(1.0)
    assert cka(x, 3 * x @ rotation) == pytest.approx(1.0)
    assert cka(x @ rotation, y) == pytest.approx(cka(x, y))
    assert cka(x + 4.0, y) == pytest.approx(cka(x, y))
    assert abs(cka(draw(200, 4, 3), draw(200, 4, 4))) < 0.05  # the biased estimator would be about 0.1 or more


def test_features_that_do_not_vary_have_no_similarity() -> None:
    total = MinibatchCka(2, 1)
    total.add([torch.ones(5, 3), draw(5, 3, 0)], [draw(5, 3, 0)])
    found = LayerSimilarity("centred kernel alignment", "CKA", (0, 1), (0,), total.result())
    assert np.isnan(found.values[0, 0]) and found.values[1, 0] == pytest.approx(1.0)
    assert found.as_lists() == [[None], [1.0]] and found.bounds == pytest.approx((0.0, 1.0))
    nothing = LayerSimilarity("centred kernel alignment", "CKA", (0,), (0,), np.full((1, 1), np.nan))
    assert nothing.bounds == (0.0, 1.0)


def test_layers_of_one_network() -> None:
    network, images = make(registers=1), images_of(10)
    found = layer_similarity(network, images.split(5), layers=[0, -1])
    assert found.rows == found.columns == (0, 2)
    np.testing.assert_allclose(np.diag(found.values), 1.0)
    np.testing.assert_allclose(found.values, found.values.T)
    sums = np.zeros(3)
    for batch in images.split(5):
        kernels = []
        for one in network.features(batch, [0, -1]):
            tokens = torch.cat([one.cls[:, None], one.registers, one.patches], dim=1).detach().double().flatten(1)
            kernels.append((tokens @ tokens.T).fill_diagonal_(0))
        pairs = ((kernels[0], kernels[1]), (kernels[0], kernels[0]), (kernels[1], kernels[1]))
        sums += [float(unbiased_hsic(*pair)) for pair in pairs]
    assert found.values[0, 1] == pytest.approx(sums[0] / np.sqrt(sums[1] * sums[2]), rel=1e-4)


def test_two_networks() -> None:
    images = torch.randn(8, 3, 32, 40, generator=torch.Generator().manual_seed(0))
    vit, resnet = make(image_size=(32, 40)), ResNet(ResNetConfig(depths=(1, 1), width=32, num_classes=3)).eval()
    found = layer_similarity(vit, [images], resnet, layers=[1])
    assert found.values.shape == (1, 2) and (found.values < 0.99).all(), "their features differ"


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="a batch of 3 images is too small for unbiased CKA; give at least 4"):
        layer_similarity(make(), [images_of(3)])
    with pytest.raises(ConfigError, match="there are no images"):
        layer_similarity(make(), [])
    with pytest.raises(ConfigError, match=r"layers=\(4,\): block 4 does not exist"):
        layer_similarity(make(), [images_of(4)], layers=[4])
