"""Tests of the formulas for parameters, multiply-accumulates and bytes, against the modules themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.networks import DROPPED, HYBRIDS, with_slow
from vitrail.models.cost import layer_costs
from vitrail.models.reduction import TokenReduction
from vitrail.models.tokens import pool
from vitrail.models.variants import AnyConfig, build, variant_config
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig
from vitrail.training.config import StartConfig
from vitrail.training.start import choose_weights

GMACS = {
    "ViT-Ti/16": "1.25", "ViT-S/32": "1.14", "ViT-S/16": "4.60", "ViT-M/16": "7.99", "ViT-B/32": "4.41",
    "ViT-B/16": "17.56", "ViT-B/8": "78.15", "ViT-L/32": "15.38", "ViT-L/16": "61.55", "ViT-So400m/14": "109.9",
    "ViT-H/14": "167.3", "ViT-g/14": "267.0", "ViT-G/14": "483.7", "ViT-e/14": "990.7",
}  # fmt: skip
"""Published GMACs at 224 pixels with 1000 classes. ViT-G/14 has 483.7476. Tables that round 483.75 again have 483.8."""


def counted(config: AnyConfig, device: str, batch: int = 1, size: tuple[int, int] | None = None) -> int:
    """Return the multiply-accumulates of one forward pass by torch's counter, with all tokens in all blocks."""
    flops = executed(config, device, batch, size, through_features=True)
    assert flops % 2 == 0
    return flops // 2


def executed(
    config: AnyConfig,
    device: str,
    batch: int = 1,
    size: tuple[int, int] | None = None,
    *,
    through_features: bool = False,
) -> int:
    """Return the FLOPs of the logits. With `features`, they are computed from all features."""
    with torch.device(device):
        network, images = build(config).eval(), torch.zeros(batch, config.channels, *(size or config.image_size))
    # the counter has no formula for the CPU's fused attention
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        if through_features and isinstance(network, VisionTransformer):
            logits_of_features(network, images)
        else:
            network(images)
    return counter.get_total_flops()


def logits_of_features(network: VisionTransformer, images: Tensor) -> None:
    config = network.config
    x = pool(network.features(images), config.pool, network.attention_pool)
    for layer in (network.head_hidden, network.head):
        x = x if layer is None else layer(x)


def trained(config: AnyConfig, size: tuple[int, int] | None = None, blocks: int | None = None) -> int:
    """Return the FLOPs of a forward and a backward pass for one image. By default all blocks are trained."""
    with torch.device("meta"):
        network, images = build(config).train(), torch.zeros(1, config.channels, *(size or config.image_size))
    choose_weights(network, StartConfig(init="model", train_blocks=blocks))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(images).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", GMACS)
def test_published_gmacs(name: str) -> None:
    decimals = len(GMACS[name].partition(".")[2])
    assert f"{variant_config(name).macs() / 1e9:.{decimals}f}" == GMACS[name]


def test_published_gmacs_at_384() -> None:
    assert f"{variant_config('ViT-B/16', image_size=384).macs() / 1e9:.1f}" == "55.5"


@pytest.mark.parametrize(("name", "depth"), [("ViT-Ti/16", 12), ("ViT-B/32", 3), ("ViT-L/16", 2), ("ViT-G/14", 2)])
def test_macs_of_published_networks_equal_the_modules(name: str, depth: int) -> None:
    config = variant_config(name, depth=depth)
    assert counted(config, "meta") == config.macs()
    assert executed(config, "meta") == config.inference_flops()
    config = variant_config(name)
    assert 2 * config.macs() * 0.9 < config.inference_flops() < 2 * config.macs()


@pytest.mark.parametrize(
    "fields",
    [
        {"image_size": (21, 35), "patch_size": (3, 7), "channels": 1, "width": 33, "heads": 3, "mlp_width": 17},
        {"pool": "gap", "head_hidden": 11, "num_classes": 13},
        {"num_classes": 0},
        {"num_classes": 0, "head_hidden": 6, "depth": 1},
    ],
)
def test_macs_of_a_forward_pass_on_the_cpu(small: Callable[..., ViTConfig], fields: dict[str, object]) -> None:
    config = small(**fields)
    assert counted(config, "cpu", batch=3) == 3 * config.macs()
    assert executed(config, "cpu", batch=3) == 3 * config.inference_flops()


LARGE = "four stages", "three stages", "small images, odd", "BiT"
"""Networks whose modules take long to run."""


@pytest.mark.parametrize("name", with_slow(HYBRIDS, LARGE))
def test_hybrids_and_resnets_cost_what_the_modules_do(name: str) -> None:
    config, sizes = HYBRIDS[name]
    with torch.device("meta"):
        assert config.parameters() == sum(parameter.numel() for parameter in build(config).parameters())
    for size in sizes:
        assert config.macs(size) == counted(config, "meta", size=size)
        assert config.inference_flops(size) == executed(config, "meta", size=size)
        assert config.training_flops(size) == pytest.approx(trained(config, size), rel=0.01)


def test_macs_by_hand() -> None:
    config = ViTConfig(
        image_size=(2, 3), patch_size=(1, 1), channels=1, width=2, depth=1, heads=1, mlp_width=5, num_classes=3
    )
    stem, tokens = 6 * 1 * 2, 7
    qkv, scores, mixed, out, mlp = tokens * 2 * 6, tokens * tokens * 2, tokens * tokens * 2, tokens * 2 * 2, 7 * 2 * 10
    assert config.macs() == stem + qkv + scores + mixed + out + mlp + 2 * 3
    keys_values, queries, scores, mixed, out, mlp = tokens * 2 * 4, 2 * 2, tokens * 2, tokens * 2, 2 * 2, 2 * 10
    assert config.inference_flops() == 2 * (stem + keys_values + queries + scores + mixed + out + mlp + 2 * 3)


@settings(max_examples=5)
@given(data=st.data())
def test_parameters_macs_and_training_equal_the_modules(
    configs: st.SearchStrategy[dict[str, Any]], data: st.DataObject
) -> None:
    config = ViTConfig(**data.draw(configs))
    with torch.device("meta"):
        network = VisionTransformer(config)
    assert config.parameters() == sum(parameter.numel() for parameter in network.parameters())
    assert config.macs() == counted(config, "meta")
    assert config.inference_flops() == executed(config, "meta")
    assert config.training_flops() == pytest.approx(trained(config), rel=0.01)


@settings(max_examples=4)
@given(data=st.data(), scale=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_macs_of_another_size(
    configs: st.SearchStrategy[dict[str, Any]], data: st.DataObject, scale: tuple[int, int]
) -> None:
    config = ViTConfig(**data.draw(configs))
    size = config.patch_size[0] * scale[0], config.patch_size[1] * scale[1]
    assert config.macs(size) == counted(config, "meta", size=size)
    assert config.macs(size) == replace(config, image_size=size).macs()
    assert config.inference_flops(size) == executed(config, "meta", size=size)
    assert config.inference_flops(size) == replace(config, image_size=size).inference_flops()
    assert config.training_flops(size) == replace(config, image_size=size).training_flops()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B/16", "R50+ViT-B/16", "BiT-R50x1"])
def test_training_is_three_forward_passes_but_for_the_image(name: str) -> None:
    config = variant_config(name)
    forward = config.inference_flops()
    assert 0.97 * 3 * forward < config.training_flops() < 3 * forward
    assert config.training_flops() == pytest.approx(trained(config), rel=1e-9)


@pytest.mark.parametrize(("config", "blocks"), [
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=3, num_classes=7), range(4)),
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=2, num_classes=7, pool="map"), (0, 1)),
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=2, num_classes=7, head_hidden=11), (0, 1)),
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=3, num_classes=7, patch_dropout=0.5), (1,)),
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=2, positions="relative-keys"), (0, 1, 2)),
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=2, positions="relative-keys", pool="gap"), (1, 2)),
    pytest.param(variant_config("BiT-R50x1", image_size=(48, 33), num_classes=7), (0, 3, 16), marks=pytest.mark.slow),
    pytest.param(HYBRIDS["three stages"][0], (0, 1), marks=pytest.mark.slow),
], ids=["class token", "map", "hidden layer", "dropped patches", "keys", "keys, mean", "BiT", "hybrid"])  # fmt: skip
def test_frozen_layers_have_no_backward_pass(config: AnyConfig, blocks: Sequence[int]) -> None:
    for count in blocks:
        exact = isinstance(config, ViTConfig) and config.root is None
        found = config.training_flops(trained_blocks=count)
        assert found == pytest.approx(trained(config, blocks=count), rel=1e-9 if exact else 0.01)
        assert found < config.training_flops()


@pytest.mark.parametrize("pooled", ["gap", "map", "cls+gap", "cls+dist"])
def test_the_last_block_is_whole_where_all_tokens_are_read(pooled: str) -> None:
    config = variant_config("ViT-Ti/16", pool=pooled, registers=1)
    assert config.inference_flops() == 2 * config.macs()


def test_a_class_token_saves_seven_percent_of_twelve_blocks() -> None:
    config = variant_config("ViT-B/16")
    assert config.inference_flops() / (2 * config.macs()) == pytest.approx(0.93, abs=0.003)


@pytest.mark.parametrize("name", with_slow(DROPPED, LARGE))
def test_dropped_patches_cost_nothing_in_training(name: str) -> None:
    config, sizes = DROPPED[name]
    assert isinstance(config, ViTConfig)
    whole = replace(config, patch_dropout=0.0)
    for size in sizes[-2:]:
        exact = config.root is None  # a root's first convolutions are counted to within a percent, as above
        assert config.training_flops(size) == pytest.approx(trained(config, size), rel=1e-9 if exact else 0.01)
        assert config.training_flops(size) < whole.training_flops(size) or size == (16, 16)
        assert config.inference_flops(size) == whole.inference_flops(size) == executed(config, "meta", 1, size)
        assert config.macs(size) == whole.macs(size)


@pytest.mark.parametrize(
    ("fields", "reduction"),
    [
        ({"depth": 4}, {"tokens": 20}),
        ({"depth": 3, "pool": "gap", "registers": 2}, {"tokens": 30, "schedule": "decreasing"}),
        ({"depth": 3, "pool": "map"}, {"tokens": 60}),
        ({"depth": 3}, {"tokens": 25, "by": "prune"}),
        ({"depth": 2, "pool": "cls+gap"}, {"tokens": 25, "by": "prune", "schedule": "decreasing"}),
    ],
)
def test_reduced_tokens_cost_what_the_modules_do(fields: dict[str, Any], reduction: dict[str, Any]) -> None:
    config = variant_config("ViT-Ti/16", **fields, reduction=TokenReduction(**reduction))
    assert isinstance(config, ViTConfig)
    whole = replace(config, reduction=None)
    for size in ((224, 160), (96, 96)):
        assert config.inference_flops(size) == executed(config, "meta", size=size) < whole.inference_flops(size)
        assert (config.macs(size), config.training_flops(size)) == (whole.macs(size), whole.training_flops(size))


# --- layers


@pytest.mark.parametrize(("tokens", "width", "kernel"), [(197, 768, 3), (10, 4, 5), (2, 8, 3), (1, 3, 3)])
def test_layer_costs_are_the_table_of_attention_is_all_you_need(tokens: int, width: int, kernel: int) -> None:
    attention, recurrence, convolution = layer_costs(tokens, width, kernel)
    assert attention == ("self-attention", 2 * tokens**2 * width, 1, 1)
    assert recurrence == ("recurrence", tokens * width**2, tokens, tokens)
    layers = 0
    while layers * (kernel - 1) < tokens - 1:  # each layer lets a signal go (kernel - 1) / 2 further to both sides
        layers += 1
    assert convolution[:3] == ("convolution", kernel * tokens * width**2, 1)


def test_macs_of_layers_are_counted() -> None:
    tokens, width, kernel = 12, 8, 3
    attention, recurrence, convolution = layer_costs(tokens, width, kernel)
    x = torch.zeros(1, tokens, width, device="meta")

    def products(function: Callable[[], object]) -> int:
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops() // 2

    weight = torch.zeros(width, width, device="meta")
    assert products(lambda: (x @ x.transpose(1, 2)) @ x) == attention.macs
    assert products(lambda: [x[:, i] @ weight for i in range(tokens)]) == recurrence.macs
    kernels = torch.zeros(width, width, kernel, device="meta")
    assert products(lambda: F.conv1d(x.transpose(1, 2), kernels, padding=1)) == convolution.macs
