"""Networks, configs and checks that several tests of models share."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from vitrail.models.positions import PositionPlace
from vitrail.models.resnet_config import ResNetConfig, RootConfig
from vitrail.models.tokens import pool
from vitrail.models.variants import AnyConfig, create, variant_config
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig

PLACES: list[tuple[str, PositionPlace]] = [
    *((kind, place) for kind in ("none", "learned", "learned-2d", "sincos-2d")
      for place in ("stem", "every-layer", "shared")),
    *((kind, place) for kind in ("relative-bias", "relative-bias-class", "relative-keys")
      for place in ("every-layer", "shared")),
    ("rotary-2d", "every-layer"),
]  # fmt: skip
"""Kinds of positions, and the places where they are used."""

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
    "small stages": (variant_config("RPico+ViT-Pico/8", depth=2, image_size=32), [(32, 32), (24, 40)]),
    "small stages in patches": (
        variant_config("RPico+ViT-Pico/16", image_size=(16, 32), channels=1, depth=1),
        [(16, 32), (48, 16)],
    ),
    "BiT": (variant_config("BiT-R26x1"), [(97, 130)]),
    "BiT of one stage": (ResNetConfig(depths=(2,), width=32, channels=1, num_classes=0), [(31, 28), (64, 33)]),
    "BiT of two widths": (ResNetConfig(depths=(1, 2, 1), width=128, num_classes=7), [(65, 96)]),
    "BiT of basic units": (variant_config("BiT-Pico", image_size=32, num_classes=7), [(32, 32), (13, 22)]),
    "BiT of pools": (variant_config("BiT-Micro", image_size=32, num_classes=7), [(32, 32), (13, 22)]),
    "BiT of basic units, deeper": (
        ResNetConfig(depths=(1, 2), width=32, unit="basic", norm_groups=4, channels=1, num_classes=0),
        [(40, 33)],
    ),
    "BiT after a small stem": (ResNetConfig(depths=(1, 1), width=32, stem="3x3", num_classes=3), [(18, 25)]),
}
"""Configs of hybrids, with image sizes."""

DROPPED: dict[str, tuple[AnyConfig, list[tuple[int, int]]]] = {
    "half": (variant_config("ViT-Ti/16", depth=3, patch_dropout=0.5), [(224, 160), (64, 96), (16, 16)]),
    "most, all read": (variant_config("ViT-Ti/16", depth=2, pool="cls+gap", patch_dropout=0.9), [(224, 160)]),
    "some, map": (variant_config("ViT-Ti/16", depth=2, pool="map", registers=2, patch_dropout=0.3), [(96, 96)]),
    "rotary": (variant_config("ViT-Ti/16", depth=2, positions="rotary-2d", patch_dropout=0.3), [(96, 96)]),
    "relative": (variant_config("ViT-Ti/16", depth=2, positions="relative-bias", patch_dropout=0.3), [(96, 96)]),
    "offset keys": (variant_config("ViT-Ti/16", depth=2, positions="relative-keys", patch_dropout=0.3), [(96, 96)]),
    **{
        name: (replace(config, patch_dropout=0.4), sizes)
        for name, (config, sizes) in HYBRIDS.items()
        if isinstance(config, ViTConfig)
    },
}  # fmt: skip
"""Configs with patch dropout, with image sizes."""


def small_vit(*, std: float = 0.05, **fields: Any) -> Any:
    """Return a network for images of 35 x 21 and five classes. With random numbers added, every weight matters."""
    sizes = {"image_size": (35, 21), "num_classes": 5, "width": 48, "depth": 3, "heads": 4, "mlp_width": 80}
    torch.manual_seed(3)
    network = create("ViT-Pico/7", **{**sizes, **fields})
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    return network


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def assert_uniform(weight: Tensor, fan_in: int, fan_out: int) -> None:
    bound = math.sqrt(6 / (fan_in + fan_out))
    assert 0.99 * bound < weight.abs().max() <= bound
    assert weight.mean().abs() < 0.03 * bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def assert_lecun(weight: Tensor, noise: float = 0.01) -> None:
    """Assert a variance of 1 / fan-in, and a normal distribution cut at two of its own standard deviations."""
    std = math.prod(weight.shape[1:]) ** -0.5
    assert weight.std().item() == pytest.approx(std, rel=2 * noise)
    assert weight.mean().abs() < 2 * noise * std
    cut = 2 * std / 0.87962566103423978  # what a unit normal, cut at +-2, has left of its deviation
    assert (1 - noise) * cut < weight.abs().max() <= cut
    share = (weight.abs() < cut / 2).double().mean().item()  # one deviation of a normal, among those within two
    assert share == pytest.approx(math.erf(1 / math.sqrt(2)) / math.erf(2 / math.sqrt(2)), abs=noise)


def logits_of_features(network: VisionTransformer, images: Tensor) -> Tensor:
    """Return the logits, computed from all tokens of the last block."""
    x = pool(network.features(images), network.config.pool, network.attention_pool)
    x = network.norm(x) if network.config.final_norm == "pooled" else x
    x = x if network.head_hidden is None else torch.tanh(network.head_hidden(x))
    return x if network.head is None else network.head(x)


def with_slow(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Return the names as parameters, of which those in `slow` are marked as slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in names]


def in_turn(names: Iterable[str], choices: tuple[str, ...]) -> list[Any]:
    """Return each name with each choice as parameters. Each name has one choice in turn that is not marked as slow."""
    turns = zip(names, cycle(choices), strict=False)
    return [
        pytest.param(name, choice, marks=[] if choice == turn else [pytest.mark.slow])
        for name, turn in turns
        for choice in choices
    ]
