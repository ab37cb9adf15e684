"""Tests of closed-form costs of networks: operations, bytes kept for the backward pass, and batches."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
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

from tests.make import vit_fields
from tests.models.networks import DROPPED, HYBRIDS, in_turn, logits_of_features
from vitrail.bench.step import OURS, Entry, make_step
from vitrail.bench.workload import Workload
from vitrail.models import cost
from vitrail.models.cost import (
    activation_bytes,
    layer_costs,
    prediction_batch,
    prediction_bytes,
    tensor_bytes,
    training_bytes,
)
from vitrail.models.linear.dense import ONEDNN
from vitrail.models.reduction import TokenReduction
from vitrail.models.variants import AnyConfig, build, create, variant_config
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig
from vitrail.training.config import StartConfig
from vitrail.training.start import choose_weights

DETECTOR: dict[str, Any] = {"head_kind": "detection-tokens", "registers": 5, "positions_cover": "all"}


def counted(config: AnyConfig, device: str, batch: int = 1, size: tuple[int, int] | None = None) -> int:
    """Return the multiply-accumulates of one forward pass by torch's counter, with all tokens in all blocks."""
    flops = executed(config, device, batch, size, through_features=True)
    assert flops % 2 == 0
    return flops // 2


def executed(
    config: AnyConfig, device: str, batch: int = 1, size: tuple[int, int] | None = None, through_features: bool = False
) -> int:
    """Return the FLOPs of the logits, which are computed from all tokens with `through_features`."""
    with torch.device(device):
        network = build(config).eval().requires_grad_(False)
        images = torch.zeros(batch, config.channels, *(size or config.image_size))
    # the counter has no formula for the CPU's fused attention
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        if through_features and isinstance(network, VisionTransformer):
            logits_of_features(network, images)
        else:
            network(images)
    return counter.get_total_flops()


def trained(config: AnyConfig, size: tuple[int, int] | None = None, blocks: int | None = None) -> int:
    """Return the FLOPs of a forward and a backward pass for one image. By default all blocks are trained."""
    with torch.device("meta"):
        network, images = build(config).train(), torch.zeros(1, config.channels, *(size or config.image_size))
    choose_weights(network, StartConfig(init="model", train_blocks=blocks))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(images).sum().backward()
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_and_resnets_cost_what_the_modules_do(name: str) -> None:
    config, sizes = HYBRIDS[name]
    with torch.device("meta"):
        assert config.parameters() == sum(parameter.numel() for parameter in build(config).parameters())
    for size in sizes:
        assert config.macs(size) == counted(config, "meta", size=size)
        assert config.inference_flops(size) == executed(config, "meta", size=size)
        assert config.training_flops(size) == pytest.approx(trained(config, size), rel=0.01)


@pytest.mark.slow
@settings(max_examples=5)
@given(data=st.data(), scale=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_parameters_macs_and_training_equal_the_modules_at_any_size(
    data: st.DataObject, scale: tuple[int, int]
) -> None:
    config = ViTConfig(**data.draw(vit_fields()))
    with torch.device("meta"):
        network = VisionTransformer(config)
    assert config.parameters() == sum(parameter.numel() for parameter in network.parameters())
    assert config.training_flops() == pytest.approx(trained(config), rel=0.01)
    for size in (config.image_size, (config.patch_size[0] * scale[0], config.patch_size[1] * scale[1])):
        resized = replace(config, image_size=size)
        assert config.macs(size) == resized.macs() == counted(config, "meta", size=size)
        assert config.inference_flops(size) == resized.inference_flops() == executed(config, "meta", size=size)
        assert config.training_flops(size) == resized.training_flops()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B/16", "R50+ViT-B/16", "BiT-R50x1"])
def test_training_is_three_forward_passes_but_for_the_image(name: str) -> None:
    config = variant_config(name)
    forward = config.inference_flops()
    assert 0.97 * 3 * forward < config.training_flops() < 3 * forward
    assert config.training_flops() == pytest.approx(trained(config), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "blocks"), [
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=3, num_classes=7), range(4)),
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=2, num_classes=7, pool="map"), (0, 1)),
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=2, num_classes=7, head_hidden=11), (0, 1)),
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=3, num_classes=7, patch_dropout=0.5), (1,)),
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=2, positions="relative-keys"), (0, 1, 2)),
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=2, positions="relative-keys", pool="gap"), (1, 2)),
    (variant_config("ViT-Ti/16", image_size=(64, 48), depth=2, num_classes=7, **DETECTOR), (0, 1)),
    (variant_config("BiT-R50x1", image_size=(48, 33), num_classes=7), (0, 3, 16)),
    (HYBRIDS["three stages"][0], (0, 1)),
], ids=[
    "class token", "map", "hidden layer", "dropped patches", "keys", "keys, mean", "detection tokens", "BiT", "hybrid",
])  # fmt: skip
def test_frozen_layers_have_no_backward_pass(config: AnyConfig, blocks: Sequence[int]) -> None:
    for count in blocks:
        exact = isinstance(config, ViTConfig) and config.root is None
        found = config.training_flops(trained_blocks=count)
        assert found == pytest.approx(trained(config, blocks=count), rel=1e-9 if exact else 0.01)
        assert found < config.training_flops()


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPPED)
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


@pytest.mark.slow
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


@pytest.mark.parametrize(("tokens", "width", "kernel"), [(12, 8, 3), (10, 4, 5), (2, 8, 3), (1, 3, 3)])
def test_layer_costs_are_the_table_of_attention_is_all_you_need(tokens: int, width: int, kernel: int) -> None:
    attention, recurrence, convolution = layer_costs(tokens, width, kernel)
    x = torch.zeros(1, tokens, width, device="meta")

    def products(function: Callable[[], object]) -> int:
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops() // 2

    weight = torch.zeros(width, width, device="meta")
    assert attention == ("self-attention", products(lambda: (x @ x.transpose(1, 2)) @ x), 1, 1)
    steps = products(lambda: [x[:, i] @ weight for i in range(tokens)])
    assert recurrence == ("recurrence", steps, tokens, tokens)
    layers = 0
    while layers * (kernel - 1) < tokens - 1:  # each layer lets a signal go (kernel - 1) / 2 further to both sides
        layers += 1
    kernels = torch.zeros(width, width, kernel, device="meta")
    sums = products(lambda: F.conv1d(x.transpose(1, 2), kernels, padding=kernel // 2))
    assert convolution == ("convolution", sums, 1, layers)


Precision = Literal["float32", "bf16"]


def saved(network: nn.Module, images: Tensor, precision: Precision) -> int:
    """Return the bytes that autograd keeps of a forward pass, without weights. Views of one storage count once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # referenced, so that no other tensor gets its address
        return tensor

    bf16 = precision == "bf16"
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            result = network(images)
        del result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def saved_per_image(config: AnyConfig, size: tuple[int, int], precision: Precision) -> int:
    """Return the bytes per image, from the difference of two batches. It excludes what is kept once per batch."""
    with torch.device("meta"):  # weights of zero take no time to draw
        network = build(config).to_empty(device="cpu").train()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    images = torch.zeros(3, config.channels, *size)
    return saved(network, images, precision) - saved(network, images[:2], precision)


BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no head": {"num_classes": 0},
    "rotary-2d with qk_norm": {"positions": "rotary-2d", "qk_norm": True, "registers": 2},
    "gap": {"pool": "gap"},
    "gap with class token": {"pool": "gap", "class_token": True, "registers": 4},
    "cls+gap with registers": {"pool": "cls+gap", "registers": 3},
    "cls+dist": {"pool": "cls+dist", "registers": 1},
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
    "relative-keys": {"positions": "relative-keys", "registers": 2},
    "relative-keys, shared": {"positions": "relative-keys", "positions_at": "shared", "pool": "gap", "qk_norm": True},
    "rotary-2d": {"positions": "rotary-2d"},
    "rotary-2d with registers": {"positions": "rotary-2d", "registers": 2, "layer_scale": 0.1},
    "no biases": {"qkv_bias": False, "dense_bias": False, "patch_bias": False},
    "all of it": {"activation": "swiglu", "layer_scale": 0.1, "qk_norm": True, "dropout": 0.1, "pool": "cls+gap"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), in_turn(BLOCKS, ("float32", "bf16")))
def test_bytes_that_a_transformer_keeps(name: str, precision: Precision) -> None:
    config = variant_config("ViT-Ti/16", image_size=(96, 64), depth=2, **BLOCKS[name])
    for size, dropped in (((96, 64), 0.0), ((48, 112), 0.5)):
        trained = replace(config, patch_dropout=dropped)
        kept = saved_per_image(trained, size, precision)
        assert activation_bytes(trained, size, precision) == pytest.approx(kept, rel=0.01)


FLOAT32_ALONE = "four stages", "wide, in patches", "BiT"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *in_turn([name for name in HYBRIDS if name not in FLOAT32_ALONE], ("bf16", "float32")),
        *((name, "float32") for name in ("no stage, dropped", "small images, odd, dropped")),
        *((name, "float32") for name in FLOAT32_ALONE),
    ],
)
def test_bytes_that_hybrids_and_resnets_keep(name: str, precision: Precision) -> None:
    config, sizes = DROPPED[name.removesuffix(", dropped")] if name.endswith(", dropped") else HYBRIDS[name]
    for size in sizes:
        assert activation_bytes(config, size, precision) == pytest.approx(
            saved_per_image(config, size, precision), rel=0.03
        )


def held_at_once(config: AnyConfig, batch: int, precision: Precision) -> int:
    """Return the bytes of tensors at the peak of the second step, as torch's profiler counts them.

    The bytes that exist before the step (weights, moments, images) are added by hand.
    """
    step = make_step(Entry(OURS), Workload(name="any", config=config, batch=batch, precision=precision))
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))
    there = 3 * config.parameters() + batch * config.channels * math.prod(config.image_size)
    return 4 * there + peak


HELD: dict[str, tuple[AnyConfig, int]] = {
    "class token": (variant_config("ViT-Ti/16", image_size=(96, 64), depth=3, num_classes=10), 8),
    "all tokens": (variant_config("ViT-Ti/16", image_size=(96, 64), depth=3, num_classes=10, pool="gap"), 8),
    "long": (variant_config("ViT-Ti/8", image_size=(160, 128), depth=2, num_classes=10, pool="gap"), 2),
    "swiglu": (variant_config("ViT-Ti/16", image_size=(96, 64), depth=3, num_classes=10, activation="swiglu"), 8),
    "offset keys": (
        variant_config("ViT-Ti/8", image_size=(96, 64), depth=2, num_classes=10, positions="relative-keys"),
        4,
    ),
    "reversible": (variant_config("ViT-Ti/16", image_size=(96, 64), depth=4, num_classes=10, reversible=True), 8),
    "one image": (variant_config("ViT-S/16", image_size=(96, 64), depth=3, num_classes=10), 1),
    "stem": (variant_config("R+ViT-Ti/16", image_size=(96, 64), depth=2, num_classes=10), 16),
    "convolutions": (variant_config("Conv+ViT-Pico/8", image_size=32, depth=2, num_classes=10), 32),
    "small stages": (variant_config("RPico+ViT-Pico/8", image_size=32, depth=2, num_classes=10), 32),
    "small stages in patches": (variant_config("RPico+ViT-Pico/16", image_size=(32, 48), depth=2, num_classes=10), 32),
    **{name: (variant_config(name, image_size=(96, 64)), 4) for name in ("BiT-R26x1", "R26+ViT-S/16", "R26+ViT-S/32")},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), in_turn(HELD, ("float32", "bf16")))
def test_tensors_of_a_training_step(name: str, precision: Precision) -> None:
    config, batch = HELD[name]
    held = held_at_once(config, batch, precision)
    assert tensor_bytes(config, batch, precision=precision) == pytest.approx(held, rel=0.07)


def test_a_step_holds_weights_moments_images_and_activations() -> None:
    config = variant_config("ViT-Ti/16", pool="gap")
    tokens, width, hidden, image = 197 - 1, 192, 768, 4 * 3 * 224 * 224
    cases: dict[Precision, tuple[int, int]] = {
        "float32": (12, 4 * tokens * (width + hidden)),
        "bf16": (14, tokens * (6 * width + (4 if ONEDNN else 2) * hidden)),
    }
    for precision, (state, passing) in cases.items():
        count, kept = config.parameters(), activation_bytes(config, None, precision)
        assert tensor_bytes(config, 32, precision=precision) == state * count + 32 * (image + kept + passing)


@pytest.mark.parametrize("name", ["ViT-Ti/16", "BiT-R50x1", "R26+ViT-S/32"])
def test_a_process_needs_more_than_its_tensors(name: str) -> None:
    config = variant_config(name)
    for precision in get_args(Precision):
        tensors, needed = (f(config, 8, (96, 64), precision) for f in (tensor_bytes, training_bytes))
        kept = 8 * activation_bytes(config, (96, 64), precision)
        assert 0.1 * kept < needed - tensors < 0.5 * kept
        assert tensor_bytes(config, 0, precision=precision) >= 16 * config.parameters()


CPU = torch.device("cpu")


@pytest.fixture
def dinov2() -> torch.nn.Module:
    """A network of the size of DINOv2 ViT-S/14, without memory for its weights."""
    with torch.device("meta"):
        return create("ViT-S/14", image_size=(518, 518), num_classes=0)


@pytest.mark.parametrize(("threads", "side", "expected"), [(1, 518, 1), (2, 518, 1), (1, 224, 4), (2, 224, 8)])
def test_the_arithmetic_of_a_batch_is_limited(
    threads: int, side: int, expected: int, dinov2: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cost, "total_memory", lambda: 2**35)
    assert prediction_batch(dinov2, (side, side), CPU) == expected


def test_the_memory_of_a_batch_is_limited(dinov2: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = dinov2.config
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    for size, limit in (((224, 224), 2**31), ((518, 518), 2**33), ((518, 518), 2**34)):
        monkeypatch.setattr(cost, "total_memory", lambda limit=limit: limit)
        found = prediction_batch(dinov2, size, CPU)
        assert prediction_bytes(config, found, size) <= limit / 8 < prediction_bytes(config, 2 * found, size)
    monkeypatch.setattr(cost, "total_memory", lambda: 2**20)
    assert prediction_batch(dinov2, (518, 518), CPU) == 1


def test_small_networks_and_those_of_the_user() -> None:
    assert prediction_batch(create("ViT-Pico/7", image_size=(14, 21), num_classes=2), (14, 21), CPU) == 64
    assert prediction_batch(torch.nn.Linear(2, 2), (14, 21), CPU) == 64


@pytest.mark.parametrize("name", ["ViT-S/14", "R50+ViT-S/32", "BiT-R50x1"])
def test_memory_grows_with_images_pixels_and_weights(name: str) -> None:
    config = variant_config(name, image_size=(224, 448), num_classes=0)
    zero, one, two = (prediction_bytes(config, count) for count in range(3))
    assert zero == 4 * config.parameters() and two - one == one - zero > 5 * 3 * 224 * 448
    assert prediction_bytes(config, 1, (448, 448)) > one
    assert prediction_bytes(config, 0, precision="bf16") == 6 * config.parameters()


MEASURE = """
import sys, torch
from vitrail.machine import keep_freed_memory, peak_memory
from vitrail.models.predictor import Predictor
from vitrail.models.variants import create
keep_freed_memory()
name, side, count, precision = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
predictor = Predictor(create(name, num_classes=0, image_size=(side, side)), precision)
predictor.embed(torch.zeros(1, 3, side, side))
before = peak_memory(torch.device("cpu"))
predictor.embed(torch.zeros(count, 3, side, side, dtype=torch.uint8).float())
print(peak_memory(torch.device("cpu")) - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side", "count", "precision"),
    [
        ("ViT-S/14", 224, 32, "float32"), ("ViT-S/14", 224, 32, "bf16"), ("ViT-S/14", 518, 8, "float32"),
        ("ViT-Ti/16", 160, 64, "float32"),
    ],
)  # fmt: skip
def test_the_formula_is_near_the_peak_of_a_process(name: str, side: int, count: int, precision: Any) -> None:
    command = [sys.executable, "-c", MEASURE, name, str(side), str(count), precision]
    config = variant_config(name, image_size=(side, side), num_classes=0)
    predicted = prediction_bytes(config, count, precision=precision) - prediction_bytes(config, 1, precision=precision)
    measured = []
    for _ in range(3):  # unused bytes between tensors differ from process to process by up to the tensors themselves
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        measured.append(int(run.stdout))
        if min(measured) / 1.6 < predicted < min(measured) * 2.5:
            return
    pytest.fail(f"predicted {predicted:,} bytes, measured {measured}")
