"""Closed forms of parameters, multiply-accumulates and bytes, against what the modules have, compute and keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail.bench.contenders import OURS, Entry, make_step
from vitrail.bench.workload import Workload
from vitrail.models import cost
from vitrail.models.pooling import pool
from vitrail.models.resnet import ResNetConfig, RootConfig
from vitrail.models.variants import AnyConfig, build, variant_config
from vitrail.models.vit import VisionTransformer, ViTConfig

Precision = Literal["float32", "bf16"]

GMACS = {
    "ViT-Ti/16": "1.25", "ViT-S/32": "1.14", "ViT-S/16": "4.60", "ViT-M/16": "7.99", "ViT-B/32": "4.41",
    "ViT-B/16": "17.56", "ViT-B/8": "78.15", "ViT-L/32": "15.38", "ViT-L/16": "61.55", "ViT-So400m/14": "109.9",
    "ViT-H/14": "167.3", "ViT-g/14": "267.0", "ViT-G/14": "483.7", "ViT-e/14": "990.7",
}  # fmt: skip
"""At 224 with 1000 classes. Of ViT-G/14 it is 483.7476, which tables that round 483.75 again give as 483.8."""


def counted(config: AnyConfig, device: str, batch: int = 1, size: tuple[int, int] | None = None) -> int:
    """Multiply-accumulates of one forward pass as torch's counter sees them, where all tokens go through all blocks."""
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
    """FLOPs of logits; by way of all features where asked, from which the head's part follows."""
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


def trained(config: AnyConfig, size: tuple[int, int] | None = None) -> int:
    """FLOPs of a forward and a backward pass of one image."""
    with torch.device("meta"):
        network, images = build(config).train(), torch.zeros(1, config.channels, *(size or config.image_size))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(images).sum().backward()
    return counter.get_total_flops()


def saved(network: nn.Module, images: Tensor, precision: Precision) -> int:
    """Bytes of all that autograd keeps of a forward pass, weights not counted; views of one storage count once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other gets its address
        return tensor

    bf16 = precision == "bf16"
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            result = network(images)
        del result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def saved_per_image(config: AnyConfig, size: tuple[int, int], precision: Precision) -> int:
    """By the difference of two batches, which leaves out what is kept once, however many images there are."""
    with torch.device("meta"):  # weights of zero take no time to draw
        network = build(config).to_empty(device="cpu").train()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    images = torch.zeros(3, config.channels, *size)
    return saved(network, images, precision) - saved(network, images[:2], precision)


@pytest.mark.parametrize("name", GMACS)
def test_published_gmacs(name: str) -> None:
    decimals = len(GMACS[name].partition(".")[2])
    assert f"{cost.macs(variant_config(name)) / 1e9:.{decimals}f}" == GMACS[name]


def test_published_gmacs_at_384() -> None:
    assert f"{cost.macs(variant_config('ViT-B/16', image_size=384)) / 1e9:.1f}" == "55.5"


@pytest.mark.parametrize("name", ["ViT-Ti/16", "ViT-B/32", "ViT-L/16", "ViT-G/14"])
def test_macs_of_published_networks_equal_the_modules(name: str) -> None:
    config = variant_config(name)
    assert counted(config, "meta") == cost.macs(config)
    assert executed(config, "meta") == cost.inference_flops(config)
    assert 2 * cost.macs(config) * 0.9 < cost.inference_flops(config) < 2 * cost.macs(config)


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
    assert counted(config, "cpu", batch=3) == 3 * cost.macs(config)
    assert executed(config, "cpu", batch=3) == 3 * cost.inference_flops(config)


HYBRIDS: dict[str, tuple[AnyConfig, list[tuple[int, int]]]] = {
    "no stage": (variant_config("R+ViT-Ti/16", depth=1), [(224, 160), (93, 61)]),
    "four stages": (variant_config("R26+ViT-S/32", depth=1), [(97, 65)]),
    "three stages": (variant_config("R26+ViT-S/16", depth=1), [(48, 80), (65, 50)]),
    "wide, in patches": (
        variant_config("R26+ViT-Ti/64", depth=1, image_size=64, root=RootConfig(depths=(1, 1, 1, 1), width=96)),
        [(64, 128)],
    ),
    "small images": (variant_config("Conv+ViT-Pico/8", depth=2, image_size=32), [(32, 32), (24, 40)]),
    "small images, odd": (
        variant_config(
            "Conv+ViT-Pico/2", image_size=(9, 12), channels=1, root=RootConfig(stem="3x3+3x3", depths=(1, 1), width=32)
        ),
        [(9, 12), (15, 22)],
    ),
    "BiT": (variant_config("BiT-R26x1"), [(97, 130)]),
    "BiT of one stage": (ResNetConfig(depths=(2,), width=32, channels=1, num_classes=0), [(31, 28), (64, 33)]),
    "BiT of two widths": (ResNetConfig(depths=(1, 2, 1), width=128, num_classes=7), [(65, 96)]),
}
"""Configs and image sizes."""


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_and_resnets_cost_what_the_modules_do(name: str) -> None:
    config, sizes = HYBRIDS[name]
    with torch.device("meta"):
        assert cost.parameters(config) == sum(parameter.numel() for parameter in build(config).parameters())
    for size in sizes:
        assert cost.macs(config, size) == counted(config, "meta", size=size)
        assert cost.inference_flops(config, size) == executed(config, "meta", size=size)
        assert cost.training_flops(config, size) == pytest.approx(trained(config, size), rel=0.01)


def test_macs_by_hand() -> None:
    config = ViTConfig(
        image_size=(2, 3), patch_size=(1, 1), channels=1, width=2, depth=1, heads=1, mlp_width=5, num_classes=3
    )
    stem, tokens = 6 * 1 * 2, 7
    qkv, scores, mixed, out, mlp = tokens * 2 * 6, tokens * tokens * 2, tokens * tokens * 2, tokens * 2 * 2, 7 * 2 * 10
    assert cost.macs(config) == stem + qkv + scores + mixed + out + mlp + 2 * 3
    keys_values, queries, scores, mixed, out, mlp = tokens * 2 * 4, 2 * 2, tokens * 2, tokens * 2, 2 * 2, 2 * 10
    assert cost.inference_flops(config) == 2 * (stem + keys_values + queries + scores + mixed + out + mlp + 2 * 3)


@settings(max_examples=25)
@given(data=st.data())
def test_parameters_macs_and_training_equal_the_modules(
    configs: st.SearchStrategy[dict[str, Any]], data: st.DataObject
) -> None:
    config = ViTConfig(**data.draw(configs))
    with torch.device("meta"):
        network = VisionTransformer(config)
    assert cost.parameters(config) == sum(parameter.numel() for parameter in network.parameters())
    assert cost.macs(config) == counted(config, "meta")
    assert cost.inference_flops(config) == executed(config, "meta")
    assert cost.training_flops(config) == pytest.approx(trained(config), rel=0.01)


@settings(max_examples=15)
@given(data=st.data(), scale=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_macs_of_another_size(
    configs: st.SearchStrategy[dict[str, Any]], data: st.DataObject, scale: tuple[int, int]
) -> None:
    config = ViTConfig(**data.draw(configs))
    size = config.patch_size[0] * scale[0], config.patch_size[1] * scale[1]
    assert cost.macs(config, size) == counted(config, "meta", size=size)
    assert cost.macs(config, size) == cost.macs(replace(config, image_size=size))
    assert cost.inference_flops(config, size) == executed(config, "meta", size=size)
    assert cost.inference_flops(config, size) == cost.inference_flops(replace(config, image_size=size))
    assert cost.training_flops(config, size) == cost.training_flops(replace(config, image_size=size))


@pytest.mark.parametrize("name", ["ViT-B/16", "R50+ViT-B/16", "BiT-R50x1"])
def test_training_is_three_forward_passes_but_for_the_image(name: str) -> None:
    config = variant_config(name)
    forward = cost.inference_flops(config)
    assert 0.97 * 3 * forward < cost.training_flops(config) < 3 * forward
    assert cost.training_flops(config) == pytest.approx(trained(config), rel=1e-9)


@pytest.mark.parametrize("pooled", ["gap", "map", "cls+gap"])
def test_the_last_block_is_whole_where_all_tokens_are_read(pooled: str) -> None:
    config = variant_config("ViT-Ti/16", pool=pooled)
    assert cost.inference_flops(config) == 2 * cost.macs(config)


def test_a_class_token_saves_seven_percent_of_twelve_blocks() -> None:
    config = variant_config("ViT-B/16")
    assert cost.inference_flops(config) / (2 * cost.macs(config)) == pytest.approx(0.93, abs=0.003)


DROPPED: dict[str, tuple[AnyConfig, list[tuple[int, int]]]] = {
    "half": (variant_config("ViT-Ti/16", depth=3, patch_dropout=0.5), [(224, 160), (64, 96), (16, 16)]),
    "most, all read": (variant_config("ViT-Ti/16", depth=2, pool="cls+gap", patch_dropout=0.9), [(224, 160)]),
    "some, map": (variant_config("ViT-Ti/16", depth=2, pool="map", registers=2, patch_dropout=0.3), [(96, 96)]),
    "rotary": (variant_config("ViT-Ti/16", depth=2, positions="rotary-2d", patch_dropout=0.3), [(96, 96)]),
    "relative": (variant_config("ViT-Ti/16", depth=2, positions="relative-bias", patch_dropout=0.3), [(96, 96)]),
    **{
        name: (replace(config, patch_dropout=0.4), sizes)
        for name, (config, sizes) in HYBRIDS.items()
        if isinstance(config, ViTConfig)
    },
}  # fmt: skip
"""Configs and image sizes."""


@pytest.mark.parametrize("name", DROPPED)
def test_dropped_patches_cost_nothing_in_training(name: str) -> None:
    config, sizes = DROPPED[name]
    assert isinstance(config, ViTConfig)
    whole = replace(config, patch_dropout=0.0)
    for size in sizes:
        exact = config.root is None  # a root's first convolutions are counted to within a percent, as above
        assert cost.training_flops(config, size) == pytest.approx(trained(config, size), rel=1e-9 if exact else 0.01)
        assert cost.training_flops(config, size) < cost.training_flops(whole, size) or size == (16, 16)
        assert (
            cost.inference_flops(config, size) == cost.inference_flops(whole, size) == executed(config, "meta", 1, size)
        )
        assert cost.macs(config, size) == cost.macs(whole, size)


# --- bytes

BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no head": {"num_classes": 0},
    "rotary-2d with qk_norm": {"positions": "rotary-2d", "qk_norm": True, "registers": 2},
    "gap": {"pool": "gap"},
    "gap with class token": {"pool": "gap", "class_token": True, "registers": 4},
    "cls+gap with registers": {"pool": "cls+gap", "registers": 3},
    "map": {"pool": "map"},
    "map, normed after": {"pool": "map", "final_norm": "pooled", "num_classes": 0},
    "gap, normed after": {"pool": "gap", "final_norm": "pooled", "head_hidden": 64},
    "cls, normed after": {"final_norm": "pooled"},
    "head_hidden": {"head_hidden": 192},
    "swiglu": {"activation": "swiglu"},
    "gelu-tanh": {"activation": "gelu-tanh"},
    "layer_scale": {"layer_scale": 0.1},
    "qk_norm": {"qk_norm": True},
    "dropout": {"dropout": 0.1},
    "stochastic_depth": {"stochastic_depth": 0.2},
    "no positions": {"positions": "none"},
    "learned-2d": {"positions": "learned-2d", "positions_at": "every-layer"},
    "learned, shared": {"positions_at": "shared"},
    "sincos-2d": {"positions": "sincos-2d", "pool": "gap"},
    "relative-bias": {"positions": "relative-bias"},
    "relative-bias, shared": {"positions": "relative-bias", "positions_at": "shared", "dropout": 0.1},
    "rotary-2d": {"positions": "rotary-2d"},
    "rotary-2d with registers": {"positions": "rotary-2d", "registers": 2, "layer_scale": 0.1},
    "no biases": {"qkv_bias": False, "dense_bias": False, "patch_bias": False},
    "all of it": {"activation": "swiglu", "layer_scale": 0.1, "qk_norm": True, "dropout": 0.1, "pool": "cls+gap"},
}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_that_a_transformer_keeps(name: str, precision: Precision) -> None:
    config = variant_config("ViT-Ti/16", image_size=(96, 64), depth=2, **BLOCKS[name])
    for size in ((96, 64), (48, 112)):
        for whole_or_dropped in (config, replace(config, patch_dropout=0.5)):
            assert cost.activation_bytes(whole_or_dropped, size, precision) == pytest.approx(
                saved_per_image(whole_or_dropped, size, precision), rel=0.01
            )


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", [*HYBRIDS, *(f"{name}, dropped" for name in HYBRIDS if "BiT" not in name)])
def test_bytes_that_hybrids_and_resnets_keep(name: str, precision: Precision) -> None:
    config, sizes = DROPPED[name.removesuffix(", dropped")] if name.endswith(", dropped") else HYBRIDS[name]
    for size in sizes:
        assert cost.activation_bytes(config, size, precision) == pytest.approx(
            saved_per_image(config, size, precision), rel=0.03
        )


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_bytes_that_a_wide_and_long_network_keeps(precision: Precision) -> None:
    config = variant_config("ViT-S/16", image_size=(224, 160), depth=2)
    kept = saved_per_image(config, (224, 160), precision)
    assert cost.activation_bytes(config, None, precision) == pytest.approx(kept, rel=0.01)


def test_bytes_grow_with_depth_by_the_same_for_each_block() -> None:
    for precision in get_args(Precision):
        sizes = [cost.activation_bytes(ViTConfig(depth=depth), None, precision) for depth in (3, 6, 9)]
        assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0


def held_at_once(config: AnyConfig, batch: int, precision: Precision) -> int:
    """Bytes of tensors at the peak of the second step, as torch's profiler counts them; what is there before the step
    (weights, moments, images) by hand."""
    step = make_step(Entry(OURS), Workload(name="any", config=config, batch=batch, precision=precision))
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))
    there = 3 * cost.parameters(config) + batch * config.channels * math.prod(config.image_size)
    return 4 * there + peak


HELD: dict[str, tuple[AnyConfig, int]] = {
    "class token": (variant_config("ViT-Ti/16", image_size=(96, 64), depth=3, num_classes=10), 8),
    "all tokens": (variant_config("ViT-Ti/16", image_size=(96, 64), depth=3, num_classes=10, pool="gap"), 8),
    "long": (variant_config("ViT-Ti/8", image_size=(160, 128), depth=2, num_classes=10, pool="gap"), 2),
    "swiglu": (variant_config("ViT-Ti/16", image_size=(96, 64), depth=3, num_classes=10, activation="swiglu"), 8),
    "one image": (variant_config("ViT-S/16", image_size=(96, 64), depth=3, num_classes=10), 1),
    "stem": (variant_config("R+ViT-Ti/16", image_size=(96, 64), depth=2, num_classes=10), 16),
    "convolutions": (variant_config("Conv+ViT-Pico/8", image_size=32, depth=2, num_classes=10), 32),
}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", HELD)
def test_tensors_of_a_training_step(name: str, precision: Precision) -> None:
    config, batch = HELD[name]
    held = held_at_once(config, batch, precision)
    assert cost.tensor_bytes(config, batch, precision=precision) == pytest.approx(held, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["BiT-R26x1", "R26+ViT-S/16", "R26+ViT-S/32"])
def test_tensors_of_a_step_of_resnets_and_hybrids(name: str, precision: Precision) -> None:
    config = variant_config(name, image_size=(96, 64))
    held = held_at_once(config, 4, precision)
    assert cost.tensor_bytes(config, 4, precision=precision) == pytest.approx(held, rel=0.07)


def test_a_step_holds_weights_moments_images_and_activations() -> None:
    config = variant_config("ViT-Ti/16", pool="gap")
    tokens, width, hidden, image = 197 - 1, 192, 768, 4 * 3 * 224 * 224
    cases: dict[Precision, tuple[int, int]] = {
        "float32": (12, 4 * tokens * (width + hidden)),
        "bf16": (14, tokens * (6 * width + 6 * hidden)),
    }
    for precision, (state, passing) in cases.items():
        count, kept = cost.parameters(config), cost.activation_bytes(config, None, precision)
        assert cost.tensor_bytes(config, 32, precision=precision) == state * count + 32 * (image + kept + passing)


@pytest.mark.parametrize("name", ["ViT-Ti/16", "BiT-R50x1", "R26+ViT-S/32"])
def test_a_process_needs_more_than_its_tensors(name: str) -> None:
    config = variant_config(name)
    for precision in get_args(Precision):
        tensors, needed = (f(config, 8, (96, 64), precision) for f in (cost.tensor_bytes, cost.training_bytes))
        kept = 8 * cost.activation_bytes(config, (96, 64), precision)
        assert 0.1 * kept < needed - tensors < 0.5 * kept
        assert cost.tensor_bytes(config, 0, precision=precision) >= 16 * cost.parameters(config)


# --- layers


@pytest.mark.parametrize(("tokens", "width", "kernel"), [(197, 768, 3), (10, 4, 5), (2, 8, 3), (1, 3, 3)])
def test_layer_costs_are_the_table_of_attention_is_all_you_need(tokens: int, width: int, kernel: int) -> None:
    attention, recurrence, convolution = cost.layer_costs(tokens, width, kernel)
    assert attention == ("self-attention", 2 * tokens**2 * width, 1, 1)
    assert recurrence == ("recurrence", tokens * width**2, tokens, tokens)
    layers = 0
    while layers * (kernel - 1) < tokens - 1:  # each layer lets a signal go (kernel - 1) / 2 further to both sides
        layers += 1
    assert convolution[:3] == ("convolution", kernel * tokens * width**2, 1)


def test_macs_of_layers_are_counted() -> None:
    tokens, width, kernel = 12, 8, 3
    attention, recurrence, convolution = cost.layer_costs(tokens, width, kernel)
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
