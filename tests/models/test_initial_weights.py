"""Tests of the initial weights of publications: bounds and standard deviations of each tensor in closed form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vitrail.models.initial_weights import INITIAL_WEIGHTS
from vitrail.models.variants import create
from vitrail.tasks.mae import Mae, MaeDecoder

WIDTH, MLP, PIXELS, CUT = 96, 160, 3 * 8 * 12, 0.02 * math.sqrt(1 - 2 * 0.24197072451914337 / 0.6826894921370859)
"""CUT is the standard deviation of a normal distribution of 0.02 that is cut at one standard deviation."""


def xavier(fan_in: int, fan_out: int) -> float:
    return math.sqrt(6 / (fan_in + fan_out))


CONV = PIXELS**-0.5
"""Bound of the weights and biases of a new convolution."""

TENSORS = (
    "patches.projection.weight", "patches.projection.bias", "prefix.cls", "prefix.registers",
    "blocks.2.attention.qkv.weight", "blocks.2.attention.out.weight", "blocks.2.mlp.up.weight",
    "blocks.2.mlp.down.weight", "blocks.2.mlp.up.bias", "head.weight",
)  # fmt: skip

UNIFORM: dict[str, tuple[float, ...]] = {
    "mae": (
        xavier(PIXELS, WIDTH), CONV, 0, 0, xavier(WIDTH, 3 * WIDTH), xavier(WIDTH, WIDTH), xavier(WIDTH, MLP),
        xavier(WIDTH, MLP), 0, xavier(WIDTH, 50),
    ),
    "moco": (
        xavier(PIXELS, WIDTH), 0, 0, 0, xavier(WIDTH, WIDTH), xavier(WIDTH, WIDTH), xavier(WIDTH, MLP),
        xavier(WIDTH, MLP), 0, xavier(WIDTH, 50),
    ),
    "timm": (CONV, CONV, *[0] * 8),
    "dinov2": (CONV, CONV, *[0] * 8),
    "beit": (0,) * 10,
}  # fmt: skip
"""Bounds of the uniform tensors, in the order of TENSORS. 0 for other distributions."""

DEVIATIONS: dict[str, tuple[float, ...]] = {
    "mae": (0, 0, 0.02, 0.02, *[0] * 6),
    "moco": (0, 0, 1e-6, 1e-6, *[0] * 6),
    "timm": (0, 0, *[0.02] * 6, 0, 0.02),
    "dinov2": (0, 0, 1e-6, 1e-6, *[0.02] * 4, 0, 0.02),
    "beit": (CUT, 0, CUT, CUT, CUT, CUT / math.sqrt(6), CUT, CUT / math.sqrt(6), 0, CUT),
}  # fmt: skip
"""Standard deviations of the tensors that are not uniform. Block 2 is the third, whose outputs BEiT divides by
sqrt(6)."""


@pytest.mark.parametrize("name", INITIAL_WEIGHTS)
def test_weights_start_as_published(name: Any) -> None:
    """The tensors of the networks of facebookresearch/mae efb2a80, dino 7c446df and microsoft/unilm 768a3c8 were
    measured too. The code of moco-v3 c349e6e, deit 7e160fe and dinov2 b8931f7 was read."""
    torch.manual_seed(0)
    network = create(
        "ViT-B/8x12", image_size=(24, 36), width=WIDTH, depth=3, heads=4, mlp_width=MLP, num_classes=50, registers=3,
        initial_weights=name, head_bias=-2.0, layer_scale=0.1,
    )  # fmt: skip
    weights = network.state_dict()
    for tensor, bound, deviation in zip(TENSORS, UNIFORM[name], DEVIATIONS[name], strict=True):
        found = weights[tensor].double()
        deviation = deviation or bound / math.sqrt(3)
        noise = 5 / math.sqrt(found.numel())  # of a normal distribution's measured mean and deviation
        assert found.square().mean().sqrt() == pytest.approx(deviation, rel=noise), tensor
        assert abs(found.mean()) <= noise * deviation, tensor
        if bound:
            assert (1 - 20 / found.numel()) * bound < found.abs().max() <= bound * (1 + 1e-6), tensor
        elif name == "beit" and deviation:
            largest = 0.02 * deviation / CUT
            assert 0.9 * largest < found.abs().max() <= largest * (1 + 1e-6), tensor
        elif deviation and found.numel() > 1000:
            assert found.abs().max() > 3 * deviation, tensor
    assert (weights["head.bias"] == -2).all() and (weights["blocks.0.scale1.gamma"] == 0.1).all()
    assert (weights["norm.weight"] == 1).all() and not weights["blocks.0.attention.qkv.bias"].any()


def test_the_decoder_of_mae_starts_as_published() -> None:
    torch.manual_seed(0)
    network = create("ViT-B/8x12", image_size=(24, 36), width=WIDTH, depth=1, heads=4, mlp_width=MLP, num_classes=0)
    decoder = MaeDecoder(Mae(decoder_width=64, decoder_depth=1).decoder_of(network.config), WIDTH)
    bounds = {"embedding": (WIDTH, 64), "blocks.0.attention.qkv": (64, 192), "head": (64, PIXELS)}
    for name, fans in bounds.items():
        layer: Any = decoder.get_submodule(name)
        assert 0.995 * xavier(*fans) < layer.weight.abs().max() <= xavier(*fans) and not layer.bias.any()
    assert decoder.mask_token.std().item() == pytest.approx(0.02, rel=0.4)
