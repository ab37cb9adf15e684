"""Tests of text towers and pairs: masks, pooling, shapes and costs. `tests/weights` compares them with transformers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.models.text import Pair, PairConfig, TextConfig, TextTower
from vitrail.models.vit_config import Activation, ViTConfig

IMAGE = ViTConfig(
    image_size=(24, 16), patch_size=(8, 8), width=24, depth=2, heads=2, mlp_width=40, num_classes=0, projection=20,
    pre_norm=True, patch_bias=False, activation="quick-gelu",
)  # fmt: skip
TEXT = TextConfig(
    vocabulary=30, context=7, width=16, depth=2, heads=2, mlp_width=24, end_token=29, outputs=20,
    activation="quick-gelu",
)  # fmt: skip


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.tensor([[1, 5, 29, 7, 8, 9, 2], [1, 5, 29, 0, 0, 0, 0], [1, 29, 29, 29, 29, 29, 29]])


def test_a_causal_tower_reads_nothing_after_the_end_of_a_text(tokens: torch.Tensor) -> None:
    tower = TextTower(TEXT).eval()
    found = tower(tokens)
    assert found.shape == (3, 20) and torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2])
    assert torch.allclose(tower(tokens[:, :4]), found, atol=1e-6), "padding can be left out"


@pytest.mark.parametrize("pool", ["eot", "last", "map"])
def test_a_tower_without_a_causal_mask_reads_all_tokens(tokens: torch.Tensor, pool: str) -> None:
    config = replace(TEXT, is_causal=False, pool=pool, output_bias=True)
    tower = TextTower(config).eval()
    found = tower(tokens)
    assert not torch.allclose(found[0], found[1], atol=1e-4)
    assert config.parameters() == sum(weight.numel() for weight in tower.parameters())
    layers = [weight for modules in tower.layers() for module in modules for weight in module.parameters()]
    assert len({*map(id, layers)} | {id(tower.positions)}) == len([*tower.parameters()])


def test_no_token_attends_to_padding(tokens: torch.Tensor) -> None:
    config = replace(TEXT, is_causal=False, pool="cls", end_token=None, padding=0, post_norm=True)
    tower = TextTower(config).eval()
    found = tower(tokens)
    assert torch.allclose(tower(tokens[1:2, :3]), found[1:2], atol=1e-6)
    assert not torch.allclose(TextTower(replace(config, padding=None)).eval()(tokens[1:2]), found[1:2], atol=1e-4)
    assert tower(torch.zeros_like(tokens)).isfinite().all(), "a row without a text has no NaN"
    assert config.parameters() == sum(weight.numel() for weight in tower.parameters())
    embedding = tower.layers().embedding
    assert embedding[0] is tower.embedding and embedding[1] is tower.norm and not tower.layers().summary


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_every_bias_of_a_new_tower_is_small(activation: Activation) -> None:
    tower = TextTower(replace(TEXT, activation=activation))
    biases = [value for name, value in tower.named_parameters() if name.endswith("bias")]
    assert biases and all(value.abs().max() < 1e-4 for value in biases)


def test_texts_must_fit_the_context() -> None:
    with pytest.raises(ConfigError, match="8 tokens"):
        TextTower(TEXT)(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ConfigError, match="6 tokens"):
        TextTower(replace(TEXT, pool="last"))(torch.zeros(1, 6, dtype=torch.long))
    with pytest.raises(ConfigError, match="end_token=30"):
        replace(TEXT, end_token=30)
    with pytest.raises(ConfigError, match="padding=30"):
        replace(TEXT, padding=30, pool="cls")
    with pytest.raises(ConfigError, match="padding=0 needs pool='cls'"):
        replace(TEXT, padding=0)
    with pytest.raises(ConfigError, match="end_token=None"):
        replace(TEXT, end_token=None)
    with pytest.raises(ConfigError, match="heads=3"):
        replace(TEXT, heads=3)


@pytest.mark.parametrize("bias", [None, -10.0])
def test_a_pair_has_two_towers_a_scale_and_a_bias(bias: float | None) -> None:
    pair = Pair(PairConfig(image=IMAGE, text=TEXT, scale=math.log(10), bias=bias)).eval()
    images = torch.randn(2, 3, 24, 16)
    assert pair.scale.item() == pytest.approx(math.log(10))
    assert (None if pair.bias is None else pair.bias.item()) == bias
    assert pair.config.parameters() == sum(weight.numel() for weight in pair.parameters())
    assert torch.equal(pair.image(images), pair.image.embed(images))


def test_towers_embed_in_vectors_of_one_length() -> None:
    with pytest.raises(ConfigError, match="20 numbers"):
        PairConfig(image=IMAGE, text=replace(TEXT, outputs=0))
    with pytest.raises(ConfigError, match=r"num_classes=3"):
        PairConfig(image=IMAGE.with_head(3), text=TEXT)


def test_a_head_that_normalises_compares_directions() -> None:
    pair = Pair(PairConfig(image=replace(IMAGE, head_normalises=True), text=TEXT)).eval()
    network = pair.image.with_head(4)
    with torch.no_grad():
        network.head.weight.normal_()
    images = torch.randn(2, 3, 24, 16)
    directions = torch.nn.functional.normalize(pair.image.embed(images), dim=-1)
    assert torch.allclose(network.head_inputs(images), directions, atol=1e-6)
    assert torch.allclose(network(images), directions @ network.head.weight.T, atol=1e-5)
    assert torch.equal(network.embed(images), pair.image.embed(images))
