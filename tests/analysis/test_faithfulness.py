"""Tests of deletion and insertion curves and of the check with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from tests.analysis.networks import images_of, make
from vitrail.analysis.faithfulness import randomised_weights, rank_correlation, saliency_curves
from vitrail.analysis.saliency import SaliencyMaps, attention_rollout, class_relevance
from vitrail.errors import ConfigError
from vitrail.weights.answers import OutputKind


def maps_of(values: np.ndarray) -> SaliencyMaps:
    return SaliencyMaps(values.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("output", ["softmax", "sigmoid"])
def test_curves_hide_patches_in_the_order_of_the_map(output: OutputKind) -> None:
    network, images = make(cut_uneven=True), images_of(2, (14, 22))  # two rows and columns of pixels fill no patch
    values = np.random.default_rng(0).permutation(24).reshape(2, 3, 4)
    targets = torch.tensor([2, 0])
    found = saliency_curves(
        network, images, {"own": maps_of(values)}, targets, output=output, steps=3, fill=0.5, batch_size=1
    )
    assert found.methods == ("own", "random") and found.fractions.tolist() == [0, 1 / 3, 2 / 3, 1]
    for image in range(2):
        order = sorted(range(12), key=lambda place: -values[image].ravel()[place])
        for step, number in enumerate((0, 4, 8, 12)):
            deleted, inserted = images[image].clone(), torch.full((3, 14, 22), 0.5)
            for place in order[:number]:
                row, column = 4 * (place // 4), 5 * (place % 4)
                rows, columns = slice(row, row + 4 + 2 * (row == 8)), slice(column, column + 5 + 2 * (column == 15))
                deleted[:, rows, columns] = 0.5
                inserted[:, rows, columns] = images[image, :, rows, columns]
            for curve, picture in ((found.deletion, deleted), (found.insertion, inserted)):
                with torch.no_grad():
                    logits = network(picture[None])
                expected = (logits.softmax(dim=1) if output == "softmax" else logits.sigmoid())[0, targets[image]]
                assert curve[0, image, step] == pytest.approx(float(expected), rel=1e-4)
    for curve, auc in ((found.deletion, found.deletion_auc()), (found.insertion, found.insertion_auc())):
        np.testing.assert_allclose(auc, (curve[..., 0] / 2 + curve[..., 1:3].sum(axis=2) + curve[..., 3] / 2) / 3)


def test_the_best_order_beats_a_random_one() -> None:
    """A network that only sums one patch's pixels: its true saliency is that patch."""
    network = make(pool="gap", depth=1, positions="none")
    with torch.no_grad():
        for block in network.blocks:
            assert isinstance(block.attention, nn.Module)
            for parameter in block.parameters():
                parameter.zero_()
    images = torch.zeros(3, 3, 12, 20)
    images[:, :, 4:8, 5:10] = 3.0 * torch.randn(3, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    values = np.zeros((3, 3, 4))
    values[:, 1, 1] = 1.0
    found = saliency_curves(network, images, {"true": maps_of(values), "wrong": maps_of(-values)}, steps=12)
    changes = np.abs(np.diff(found.deletion, axis=2))
    assert np.argmax(changes[0], axis=1).tolist() == [0, 0, 0] and np.argmax(changes[1], axis=1).tolist() == [11] * 3
    assert not (changes[:2] > 1e-6).sum(axis=2).max() > 1


@pytest.mark.slow
def test_random_weights_change_the_maps() -> None:
    network, images = make(), images_of(2)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = randomised_weights(network, images, class_relevance)
    assert found.stages == ("head", "block 2", "block 1", "block 0", "embedding")
    assert found.correlation.shape == (5, 2) and (found.correlation < 0.999).all()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    rolled = randomised_weights(network, images, attention_rollout)
    np.testing.assert_allclose(rolled.correlation[0], 1.0)  # rollout does not read the head

    def blind(network: nn.Module, images: Tensor) -> SaliencyMaps:
        return maps_of(images.mean(dim=1)[:, ::4, ::5].numpy())

    np.testing.assert_allclose(randomised_weights(network, images, blind).correlation, 1.0)


def test_rank_correlation_is_scipys() -> None:
    random = np.random.default_rng(0)
    first, second = random.integers(0, 4, 30).astype(float), random.normal(size=30)
    assert rank_correlation(first, second) == pytest.approx(spearmanr(first, second).statistic)
    assert rank_correlation(first, -first) == pytest.approx(-1.0)
    assert rank_correlation(np.ones(3), second[:3]) == 0.0


def test_what_is_refused(types_unchecked: None) -> None:
    network, images = make(), images_of(2)
    own: Any = maps_of(np.ones((2, 3, 4)))
    with pytest.raises(ConfigError, match="maps has the name 'random', which stands for a random order"):
        saliency_curves(network, images, {"random": own})
    with pytest.raises(ConfigError, match=r"maps\['own'\] has the shape \(2, 4, 3\), but these images have patches"):
        saliency_curves(network, images, {"own": maps_of(np.ones((2, 4, 3)))})
    for targets, rule in ((torch.tensor([1]), "one whole number for each of 2"), (torch.tensor([0, 9]), "targets=9")):
        with pytest.raises(ConfigError, match=rule):
            saliency_curves(network, images, {}, targets)
    with pytest.raises(ConfigError, match="steps=0 is less than 1"):
        saliency_curves(network, images, {"own": own}, steps=0)
    with pytest.raises(ConfigError, match=r"^a model that predicts numbers cannot be measured by these curves"):
        saliency_curves(network, images, {"own": own}, output="numbers")
