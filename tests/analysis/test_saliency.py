"""Tests of rollout and relevance, against numbers worked out by hand and versions in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.networks import images_of, make
from tests.make import dense_bundle
from vitrail.analysis.faithfulness import randomised_weights, saliency_curves
from vitrail.analysis.features import token_norms
from vitrail.analysis.heads import effective_receptive_field
from vitrail.analysis.saliency import attention_rollout, class_relevance, relevance, rollout
from vitrail.analysis.tracing import trace
from vitrail.errors import ConfigError
from vitrail.models.variants import create
from vitrail.models.vit import VisionTransformer

POOLS: dict[str, dict[str, Any]] = {
    "class token": {},
    "registers": {"registers": 2, "qk_norm": True},
    "mean": {"pool": "gap"},
    "both": {"pool": "cls+gap"},
    "distilled": {"pool": "cls+dist", "registers": 2},
    "attention": {"pool": "map", "registers": 1},
}


def test_rollout_by_hand() -> None:
    shift = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    layers = torch.stack([shift, shift])[None, :, None]
    expected = (shift + torch.eye(3)) / 2 @ (shift + torch.eye(3)) / 2
    torch.testing.assert_close(rollout(layers)[0], expected)
    torch.testing.assert_close(rollout(layers, identity=False)[0], shift @ shift)
    uniform = torch.full((1, 3, 2, 3, 3), 1 / 3)
    torch.testing.assert_close(rollout(uniform, identity=False)[0], torch.full((3, 3), 1 / 3))
    torch.testing.assert_close(rollout(uniform)[0], (torch.full((3, 3), 1 / 3) + torch.eye(3)).matrix_power(3) / 8)


def test_heads_are_fused_and_small_weights_are_discarded() -> None:
    heads = torch.tensor([[[0.6, 0.4], [0.1, 0.9]], [[0.2, 0.8], [0.3, 0.7]]])[None, None]
    for fusion, fused in (
        ("mean", [[0.4, 0.6], [0.2, 0.8]]),
        ("max", [[0.6 / 1.4, 0.8 / 1.4], [0.3 / 1.2, 0.9 / 1.2]]),
        ("min", [[0.2 / 0.6, 0.4 / 0.6], [0.1 / 0.8, 0.7 / 0.8]]),
    ):
        found = rollout(heads, identity=False, fusion=fusion)
        torch.testing.assert_close(found[0], torch.tensor(fused))
    found = rollout(heads, identity=False, discard=0.5)  # 0.2 and 0.4 of 0.2, 0.4, 0.6 and 0.8 become 0
    torch.testing.assert_close(found[0], torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    found = rollout(torch.tensor([[0.3, 0.4], [0.1, 0.2]])[None, None, None], identity=False, discard=0.5)
    torch.testing.assert_close(found[0], torch.tensor([[3 / 7, 4 / 7], [0.0, 0.0]]))  # a row without weights


def test_relevance_by_hand() -> None:
    attention = torch.tensor([[[0.5, 0.5], [0.25, 0.75]], [[0.0, 1.0], [0.5, 0.5]]])[None, None]
    gradients = torch.tensor([[[2.0, -2.0], [4.0, 0.0]], [[3.0, 1.0], [-1.0, 2.0]]])[None, None]
    # The products are [[1, -1], [1, 0]] and [[0, 1], [-0.5, 1]]; the mean of their positive parts is added.
    one = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    torch.testing.assert_close(relevance(attention, gradients)[0], torch.eye(2) + one)
    twice = relevance(attention.repeat(1, 2, 1, 1, 1), gradients.repeat(1, 2, 1, 1, 1))
    torch.testing.assert_close(twice[0], (torch.eye(2) + one) @ (torch.eye(2) + one))
    alone = torch.tensor([[2.5, 0.5], [2.0, 1.0]])
    torch.testing.assert_close(relevance(attention, gradients, form="gradient")[0], torch.eye(2) + alone)


def naive_reading(network: VisionTransformer, images: Tensor) -> np.ndarray:
    """Return the fraction with which the head reads each token, from the parts of the network."""
    config = network.config
    prefix, patches = config.prefix, 12
    cls, mean = np.eye(prefix + patches)[0], np.r_[np.zeros(prefix), np.full(patches, 1 / patches)]
    if config.pool == "map":
        found = network.features(images)
        first = [] if found.cls is None else [found.cls[:, None]]
        tokens = torch.cat([*first, found.registers, found.patches], dim=1)
        part: Any = network.attention_pool
        query = part.query(part.probe[0, 0]).view(part.heads, -1)
        keys = part.key_value(tokens)[..., :16].unflatten(-1, (part.heads, -1))
        return torch.einsum("hd,bnhd->bhn", query, keys).div(query.shape[1] ** 0.5).softmax(-1).mean(1).numpy()
    token = np.eye(prefix + patches)[1]
    row = {"cls": cls, "gap": mean, "cls+gap": (cls + mean) / 2, "cls+dist": (cls + token) / 2}[config.pool]
    return np.tile(row, (len(images), 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLS)
def test_naive_versions(name: str) -> None:
    network, images = make(**POOLS[name]), images_of(3)
    targets = torch.tensor([1, 4, 0])
    rolled = attention_rollout(network, images, batch_size=2)
    relevant = class_relevance(network, images, targets, batch_size=2)
    by_gradient = class_relevance(network, images, targets, form="gradient")
    network.double()
    found = trace(network, images.double(), keep=("attention", "gradients"), targets=targets)
    with torch.no_grad():
        reading = naive_reading(network, images.double())
    network.float()
    attention, gradients = found.attention.numpy(), found.gradients.numpy()
    prefix = network.config.prefix
    unit = np.eye(prefix + 12)
    for image in range(3):
        joint, first, second = unit, unit, unit
        for layer in range(3):
            mean = attention[image, layer].mean(axis=0) + unit
            joint = (mean / mean.sum(axis=1, keepdims=True)) @ joint
            product = np.maximum(attention[image, layer] * gradients[image, layer], 0).mean(axis=0)
            first = first + product @ first
            second = second + np.maximum(gradients[image, layer], 0).mean(axis=0) @ second
        for values, matrix in ((rolled, joint), (relevant, first), (by_gradient, second)):
            expected = (reading[image] @ matrix)[prefix:].reshape(3, 4)
            np.testing.assert_allclose(values.values[image], expected, rtol=2e-3, atol=1e-5)
    assert relevant.targets.tolist() == [1, 4, 0] and rolled.targets is None
    assert rolled.values.dtype == np.float32


@pytest.mark.usefixtures("types_unchecked")
def test_what_is_refused() -> None:
    attention = torch.full((1, 1, 1, 2, 2), 0.5)
    with pytest.raises(ConfigError, match=r"discard=1\.0 is not in \[0, 1\)"):
        rollout(attention, discard=1.0)
    with pytest.raises(ConfigError, match="architecture 'BiT' has no attention to look into"):
        attention_rollout(create("BiT-Pico", image_size=32, num_classes=3), images_of(1))
    with pytest.raises(ConfigError, match="needs the logit of a class, but this network has no head"):
        class_relevance(make(num_classes=0), images_of(1))
    with pytest.raises(ConfigError, match="fusion='sum' is not one of 'mean', 'max', 'min'"):
        attention_rollout(make(), images_of(), fusion="sum")
    with pytest.raises(ConfigError, match="form='lrp' is not one of 'attention-gradient', 'gradient'"):
        class_relevance(make(), images_of(), form="lrp")


@pytest.mark.parametrize("name", ["boxes", "class token", "attention"])
def test_maps_are_the_same_in_inference_mode(name: str) -> None:
    network = dense_bundle("patches").network if name == "boxes" else make(**POOLS[name])
    size = network.config.image_size
    maps = class_relevance(network, images_of(size=size), torch.tensor([0, 1, 0]))
    reach = effective_receptive_field(network, images_of(size=size))
    assert reach.images == 3
    with torch.inference_mode():
        images, targets = images_of(size=size), torch.tensor([0, 1, 0])
        np.testing.assert_array_equal(class_relevance(network, images, targets).values, maps.values)
        np.testing.assert_array_equal(effective_receptive_field(network, images).values, reach.values)
        attention_rollout(network, images, targets)
        if name != "boxes":
            randomised_weights(network, images[:1], class_relevance)


@pytest.mark.usefixtures("types_unchecked")
def test_targets_and_batches_out_of_range_are_refused() -> None:
    network = dense_bundle("patches").network
    images = images_of(size=network.config.image_size)
    for target in (-1, 10**6):
        targets = torch.tensor([0, target, 0])
        for call in (class_relevance, attention_rollout):
            with pytest.raises(ConfigError, match=f"targets={target} is not a class of this network"):
                call(network, images, targets)
        with pytest.raises(ConfigError, match=f"targets={target} is not a class of this network"):
            saliency_curves(network, images, {}, targets)
    for size in (0, -1, 1.5):
        for refuse in (
            lambda size=size: token_norms(network, images, batch_size=size),
            lambda size=size: saliency_curves(network, images, {}, batch_size=size),
        ):
            with pytest.raises(ConfigError, match=f"batch_size={size} is"):
                refuse()
