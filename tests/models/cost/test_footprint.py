"""Tests of the formulas for the bytes of a training step, against autograd and the profiler."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.models.networks import DROPPED, HYBRIDS, in_turn
from vitrail.bench.step import OURS, Entry, make_step
from vitrail.bench.workload import Workload
from vitrail.models.cost import activation_bytes, tensor_bytes, training_bytes
from vitrail.models.linear.dense import ONEDNN
from vitrail.models.variants import AnyConfig, build, variant_config
from vitrail.models.vit_config import ViTConfig

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


@pytest.mark.parametrize(("name", "precision"), in_turn(BLOCKS, ("float32", "bf16")))
def test_bytes_that_a_transformer_keeps(name: str, precision: Precision) -> None:
    config = variant_config("ViT-Ti/16", image_size=(96, 64), depth=2, **BLOCKS[name])
    for size, dropped in (((96, 64), 0.0), ((48, 112), 0.0), ((48, 112), 0.5)):
        trained = replace(config, patch_dropout=dropped)
        kept = saved_per_image(trained, size, precision)
        assert activation_bytes(trained, size, precision) == pytest.approx(kept, rel=0.01)


FLOAT32_ALONE = "four stages", "wide, in patches", "BiT"


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *in_turn([name for name in HYBRIDS if name not in FLOAT32_ALONE], ("bf16", "float32")),
        *((name, "float32") for name in ("no stage, dropped", "small images, odd, dropped")),
        *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in FLOAT32_ALONE),
    ],
)
def test_bytes_that_hybrids_and_resnets_keep(name: str, precision: Precision) -> None:
    config, sizes = DROPPED[name.removesuffix(", dropped")] if name.endswith(", dropped") else HYBRIDS[name]
    for size in sizes:
        assert activation_bytes(config, size, precision) == pytest.approx(
            saved_per_image(config, size, precision), rel=0.03
        )


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_bytes_that_a_wide_and_long_network_keeps(precision: Precision) -> None:
    config = variant_config("ViT-S/16", image_size=(224, 160), depth=2)
    kept = saved_per_image(config, (224, 160), precision)
    assert activation_bytes(config, None, precision) == pytest.approx(kept, rel=0.01)


def test_bytes_grow_with_depth_by_the_same_for_each_block() -> None:
    for precision in get_args(Precision):
        sizes = [activation_bytes(ViTConfig(depth=depth), None, precision) for depth in (3, 6, 9)]
        assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0


def held_at_once(config: AnyConfig, batch: int, precision: Precision) -> int:
    """Return the bytes of tensors at the peak of the second step, as torch's profiler counts them.

    The bytes that exist before the step (weights, moments, images) are added by hand.
    """
    step = make_step(Entry(OURS), Workload(name="any", config=config, batch=batch, precision=precision))
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
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
    "reversible": (
        variant_config("ViT-Ti/16", image_size=(96, 64), depth=4, num_classes=10, reversible=True),
        8,
    ),
    "one image": (variant_config("ViT-S/16", image_size=(96, 64), depth=3, num_classes=10), 1),
    "stem": (variant_config("R+ViT-Ti/16", image_size=(96, 64), depth=2, num_classes=10), 16),
    "convolutions": (variant_config("Conv+ViT-Pico/8", image_size=32, depth=2, num_classes=10), 32),
}


@pytest.mark.parametrize(("name", "precision"), in_turn(HELD, ("float32", "bf16")))
def test_tensors_of_a_training_step(name: str, precision: Precision) -> None:
    config, batch = HELD[name]
    held = held_at_once(config, batch, precision)
    assert tensor_bytes(config, batch, precision=precision) == pytest.approx(held, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["BiT-R26x1", "R26+ViT-S/16", "R26+ViT-S/32"])
def test_tensors_of_a_step_of_resnets_and_hybrids(name: str, precision: Precision) -> None:
    config = variant_config(name, image_size=(96, 64))
    held = held_at_once(config, 4, precision)
    assert tensor_bytes(config, 4, precision=precision) == pytest.approx(held, rel=0.07)


def test_a_step_holds_weights_moments_images_and_activations() -> None:
    config = variant_config("ViT-Ti/16", pool="gap")
    tokens, width, hidden, image = 197 - 1, 192, 768, 4 * 3 * 224 * 224
    cases: dict[Precision, tuple[int, int]] = {
        "float32": (12, 4 * tokens * (width + hidden)),
        "bf16": (14, tokens * (6 * width + (6 if ONEDNN else 2) * hidden)),  # oneDNN's layer computes GELU again
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
