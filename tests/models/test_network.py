"""Tests of the properties and methods that every config has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vitrail.errors import ConfigError
from vitrail.models.network import NetworkConfig
from vitrail.models.variants import ARCHITECTURES, create, variant_config


@pytest.mark.parametrize(
    ("name", "architecture", "blocks", "stream", "tokens"),
    [
        ("ViT-Ti/16", "ViT", 12, 192, 4 * 6 + 1),
        ("R26+ViT-S/32", "ViT", 12, 384, 2 * 3 + 1),
        ("BiT-R26x1", "BiT", 8, 2048, 2 * 3),
    ],
)
def test_every_config_answers(name: str, architecture: str, blocks: int, stream: int, tokens: int) -> None:
    config: NetworkConfig = variant_config(name, image_size=(64, 96), num_classes=5)
    assert (config.architecture, config.num_blocks, config.stream_width) == (architecture, blocks, stream)
    assert (config.tokens, config.head_inputs) == (tokens, config.embed_width)
    assert type(config) is ARCHITECTURES[architecture][0]
    resized = config.with_image_size((96, 32))
    assert resized.image_size == (96, 32) and resized.with_image_size((64, 96)) == config
    assert config.with_head(7).num_classes == 7 and config.with_head(7).with_head(5) == config
    assert config.grid_of(*config.nearest_size(60, 94)) == config.grid_of(64, 96)


def test_a_hidden_layer_is_kept_unless_it_is_dropped() -> None:
    config = variant_config("ViT-Ti/16", head_hidden=11)
    assert (config.with_head(3).head_inputs, config.with_head(3, drop_hidden=True).head_inputs) == (11, 192)
    with pytest.raises(ConfigError, match=r"image_size=\(30, 32\) is not a multiple of patch_size=\(16, 16\)"):
        config.with_image_size((30, 32))


@pytest.mark.parametrize("name", ["ViT-Pico/8", "BiT-Pico"])
def test_changes_have_the_types_of_their_settings(name: str, types_unchecked: None) -> None:
    network: Any = create(name, image_size=(24, 40), num_classes=2)
    resized = network.with_image_size([np.int64(32), 24])
    assert resized.config == create(name, image_size=(32, 24), num_classes=2).config and resized.config.macs() > 0
    for wrong in (None, True, 2.5, "3"):
        with pytest.raises(ConfigError, match=rf"^num_classes={wrong!r} is not "):
            network.with_head(wrong)
    assert network.with_image_size(32).config.image_size == (32, 32)
    for wrong in (None, 32.0, "32"):
        with pytest.raises(ConfigError, match=rf"^image_size={wrong!r} is not "):
            network.with_image_size(wrong)


@pytest.mark.parametrize("name", ["ViT-Ti/16", "BiT-Pico"])
@pytest.mark.parametrize("where", [{"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"device": "meta"}], ids=str)
def test_a_new_head_has_the_device_and_the_number_format_of_the_network(name: str, where: dict[str, Any]) -> None:
    network: nn.Module = create(name, image_size=32, num_classes=2, head_bias=-3.0).to(**where)
    headed = network.with_head(5)
    weights = list(headed.parameters())
    assert {(one.device, one.dtype) for one in weights} == {(one.device, one.dtype) for one in network.parameters()}
    assert weights[-1].shape == (5,) and (weights[-1].is_meta or bool((weights[-1] == -3).all()))


@pytest.mark.parametrize("name", ["ViT-Pico/8", "BiT-Pico"])
@pytest.mark.parametrize("change", ["with_head", "with_image_size"])
def test_what_a_user_changed_is_kept(name: str, change: str) -> None:
    seen: list[nn.Module] = []
    network: Any = create(name, image_size=(24, 40), num_classes=2)
    layers = network.layers()
    layers.blocks[0].register_forward_hook(lambda block, given, result: seen.append(block))
    layers.blocks[0].requires_grad_(False).eval()
    network.own = 3
    activation = "mlp.activation" if name.startswith("ViT") else "norm1"
    layers.blocks[1].set_submodule(activation, nn.ReLU())
    network.checkpoints_activations = True

    made = getattr(network, change)(*{"with_head": (3,), "with_image_size": ((48, 24),)}[change])
    kept = made.layers().blocks
    assert type(kept[1].get_submodule(activation)) is nn.ReLU
    assert made.checkpoints_activations and made.own == 3 and made.training and not kept[0].training
    trained = {weight for weight, one in network.named_parameters() if one.requires_grad}
    assert {weight for weight, one in made.named_parameters() if one.requires_grad} == trained
    made(torch.randn(2, 3, *made.config.image_size))
    assert seen == [kept[0]] and kept[0] is not layers.blocks[0]

    original = dict(network.named_parameters())
    for weight, one in made.named_parameters():
        same = one.data_ptr() == original[weight].data_ptr()
        assert same or weight.startswith("head" if change == "with_head" else "positions"), weight
    made.requires_grad_(False).double()
    assert all(one.dtype == torch.float32 for one in original.values()), "the network itself stays as it is"
    assert {weight for weight, one in original.items() if one.requires_grad} == trained


def test_what_cannot_be_kept_is_refused() -> None:
    network = create("ViT-Pico/8", image_size=(24, 40), num_classes=2)
    handle = network.get_submodule("positions").register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"^positions is made anew .*\(48, 24\), but it .* has hooks"):
        network.with_image_size((48, 24))
    handle.remove()
    before = network.forward
    network.forward = lambda images: 2 * before(images)
    for change, given in (("with_head", 3), ("with_image_size", (48, 24))):
        with pytest.raises(ConfigError, match="forward is a function that uses a module of the network"):
            getattr(network, change)(given)
