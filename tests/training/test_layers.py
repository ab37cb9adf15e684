"""Tests of numbered layers and frozen weights: every weight occurs once, and frozen weights cost only a forward
pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models.networks import with_slow
from vitrail.models.blocks import StochasticDepth
from vitrail.models.linear.lora import LowRank
from vitrail.models.variants import AnyNetwork, create
from vitrail.training.config import StartConfig
from vitrail.training.start import choose_weights

KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "class token": ("ViT-Pico/7", {"image_size": (14, 21), "width": 12, "depth": 4, "heads": 3, "mlp_width": 10}, 4),
    "pooling": ("ViT-Pico/7", {"image_size": (14, 21), "width": 12, "depth": 2, "heads": 3, "mlp_width": 10,
                               "pool": "map", "head_hidden": 5, "registers": 2, "positions": "relative-bias"}, 2),
    "hybrid": ("R+ViT-Ti/16", {"image_size": (32, 64), "width": 12, "depth": 3, "heads": 3, "mlp_width": 10}, 3),
    "BiT": ("BiT-R26x1", {"image_size": (33, 40), "width": 32}, 8),
}  # fmt: skip


def network_of(kind: str, **fields: Any) -> AnyNetwork:
    name, sizes, _ = KINDS[kind]
    torch.manual_seed(0)
    network = create(name, num_classes=3, **{**sizes, **fields})
    assert network.head is not None
    nn.init.normal_(network.head.weight)  # a head of zeros lets no gradient through
    return network


def moving(network: nn.Module) -> set[str]:
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_has_one_layer(kind: str) -> None:
    network = network_of(kind)
    layers = network.layers()
    numbers = layers.numbers()
    assert set(numbers) == {id(parameter) for parameter in network.parameters()}
    parts = [*layers.embedding, *layers.blocks, *layers.summary, *layers.head]
    assert sum(len(list(part.parameters())) for part in parts) == len(numbers)
    assert len(layers.blocks) == network.config.num_blocks == KINDS[kind][2]


@pytest.mark.slow
def test_layers_are_those_of_beit() -> None:
    for kind, expected in (
        ("pooling", {"positions.bias": 0, "prefix.registers": 0, "attention_pool.probe": 3, "head_hidden.weight": 3}),
        ("hybrid", {"root.stem.weight": 0, "root.norm.weight": 0, "blocks.2.norm2.weight": 3, "head.weight": 4}),
        ("BiT", {"stem.weight": 0, "stages.0.0.conv1.weight": 1, "stages.1.1.conv3.weight": 4,
                 "stages.3.1.conv1.weight": 8, "norm.weight": 9, "head.weight": 9}),
    ):  # fmt: skip
        network = network_of(kind)
        numbers, named = network.layers().numbers(), dict(network.named_parameters())
        assert {name: numbers[id(named[name])] for name in expected} == expected


@pytest.mark.parametrize("kind", with_slow(KINDS, {"BiT"}))
@given(data=st.data())
def test_the_last_blocks_are_trained_and_what_is_above_them(kind: str, data: st.DataObject) -> None:
    network, depth = network_of(kind), KINDS[kind][2]
    count = data.draw(st.integers(0, depth))
    choose_weights(network, StartConfig(init="m", train_blocks=count))
    layers, numbers = network.layers(), network.layers().numbers()
    head = {id(parameter) for module in layers.head for parameter in module.parameters()}
    for name, parameter in network.named_parameters():
        wanted = id(parameter) in head if count == 0 else numbers[id(parameter)] > depth - count
        assert parameter.requires_grad == wanted, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1])
def test_what_is_not_trained_keeps_nothing_for_backward(kind: str, count: int) -> None:
    network = network_of(kind).train()
    choose_weights(network, StartConfig(init="m", train_blocks=count))
    layers, seen = network.layers(), []
    below = layers.blocks[: len(layers.blocks) - count]
    for block in below:
        block.register_forward_hook(lambda module, given, result: seen.append(result.requires_grad))
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += 1
        return tensor

    trunk: list[int] = []
    below[-1].register_forward_hook(lambda *given: trunk.append(kept))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = network(torch.randn(2, 3, *network.config.image_size))
    assert seen == [False] * len(below) and trunk == [0] and kept > 0
    logits.square().sum().backward()
    assert {name for name, p in network.named_parameters() if p.grad is not None} == moving(network)


def test_what_is_not_trained_is_not_random_either() -> None:
    network = network_of("class token", dropout=0.5, stochastic_depth=0.9).train()
    choose_weights(network, StartConfig(init="m", train_blocks=2))
    images, outputs = torch.randn(5, 3, 14, 21), []
    network.blocks[1].register_forward_hook(lambda module, given, result: outputs.append(result))
    logits = [network(images) for _ in range(3)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert not torch.equal(logits[0], logits[1]), "above, dropout goes on"
    network.eval()
    with torch.no_grad():
        network(images)
    assert torch.allclose(outputs[0], outputs[3], atol=1e-6)
    rates = [part.rate for part in network.modules() if isinstance(part, StochasticDepth)]
    assert rates == pytest.approx([0, 0, 0.6, 0.9])


def test_with_adapters_only_they_and_the_head_are_trained() -> None:
    network = network_of("pooling", dropout=0.2).train()
    choose_weights(network, StartConfig(init="m", lora_rank=3, lora_on=("out", "key")))
    parts = [f"blocks.{block}.attention.{name}.adapter.{factor}" for block in (0, 1) for name in ("qkv", "out")
             for factor in "ab"]  # fmt: skip
    assert moving(network) == {*parts, "head.weight", "head.bias", "head_hidden.weight", "head_hidden.bias"}
    scales = {part.scale for part in network.modules() if isinstance(part, LowRank)}
    assert scales == {1.0} and network.blocks[0].dropout.p == 0.2
    halved = network_of("pooling")
    choose_weights(halved, StartConfig(init="m", lora_rank=4, lora_alpha=2.0))
    assert {part.scale for part in halved.modules() if isinstance(part, LowRank)} == {0.5}
