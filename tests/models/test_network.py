"""Tests of the properties and methods that every config has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vitrail.errors import ConfigError
from vitrail.models.network import NetworkConfig
from vitrail.models.variants import ARCHITECTURES, build, create, variant_config


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


@pytest.mark.parametrize("name", ["ViT-Ti/16", "BiT-R26x1"])
def test_a_network_is_built_by_its_architecture(name: str) -> None:
    network = build(variant_config(name, image_size=32, num_classes=2))
    assert type(network) is ARCHITECTURES[network.config.architecture][1]


@pytest.mark.parametrize("name", ["ViT-Ti/16", "BiT-Pico"])
@pytest.mark.parametrize("where", [{"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"device": "meta"}], ids=str)
def test_a_new_head_has_the_device_and_the_number_format_of_the_network(name: str, where: dict[str, Any]) -> None:
    network: nn.Module = create(name, image_size=32, num_classes=2, head_bias=-3.0).to(**where)
    headed = network.with_head(5)  # type: ignore[operator]
    weights = list(headed.parameters())
    assert {(one.device, one.dtype) for one in weights} == {(one.device, one.dtype) for one in network.parameters()}
    assert weights[-1].shape == (5,) and (weights[-1].is_meta or bool((weights[-1] == -3).all()))
