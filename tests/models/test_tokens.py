"""Tests of patch embeddings and pooling."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.models.networks import assert_uniform
from vitrail.models.network import Features
from vitrail.models.tokens import AttentionPool, PatchEmbedding, PrefixTokens
from vitrail.models.vit_config import Activation


@given(
    patch=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    channels=st.integers(1, 3),
)
def test_each_token_is_one_patch_in_raster_order(patch: tuple[int, int], grid: tuple[int, int], channels: int) -> None:
    (ph, pw), (rows, columns) = patch, grid
    embedding = PatchEmbedding(patch, channels, channels * ph * pw)
    with torch.no_grad():  # each token is then the flattened patch itself
        embedding.projection.weight.copy_(torch.eye(channels * ph * pw))
        embedding.projection.bias.zero_()
    images = torch.arange(2 * channels * ph * rows * pw * columns).float().view(2, channels, ph * rows, pw * columns)
    tokens = embedding(images)
    assert tokens.shape == (2, rows * columns, channels * ph * pw)
    for row in range(rows):
        for column in range(columns):
            cut = images[:, :, row * ph : (row + 1) * ph, column * pw : (column + 1) * pw]
            assert torch.equal(tokens[:, row * columns + column], cut.flatten(1))


def test_class_token_starts_at_zero_and_registers_do_not() -> None:
    torch.manual_seed(0)
    layer = PrefixTokens(4096, registers=8)
    layer.initialise()
    assert layer.cls is not None and torch.equal(layer.cls, torch.zeros(1, 1, 4096))
    assert layer.registers.shape == (1, 8, 4096)
    assert layer.registers.std().item() == pytest.approx(0.02, rel=0.03)
    assert abs(layer.registers.mean().item()) < 0.001 and layer.registers.abs().max() > 0.06


def test_prefix_tokens_take_the_number_format_of_the_others() -> None:
    layer = PrefixTokens(4, registers=2)
    layer.initialise()
    result = layer(torch.randn(2, 5, 4).bfloat16())
    assert result.dtype == torch.bfloat16 and result.shape == (2, 8, 4)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float32}


def tokens_of(*, cls: bool = True, registers: int = 2, patches: int = 6, width: int = 8) -> Features:
    generator = torch.Generator().manual_seed(0)
    return Features(
        cls=torch.randn(3, width, generator=generator) if cls else None,
        registers=torch.randn(3, registers, width, generator=generator),
        patches=torch.randn(3, patches, width, generator=generator),
        grid=(1, patches),
    )


def attention_pool(activation: Activation = "gelu", width: int = 8, heads: int = 2) -> AttentionPool:
    layer = AttentionPool(width, heads, 12, activation, 1e-3).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def by_einsum(layer: AttentionPool, tokens: Tensor) -> Tensor:
    """Return MAPHead of big_vision's models/vit.py, in float64: attention of a probe, and x + mlp(norm(x))."""
    weights = {name: tensor.double() for name, tensor in layer.state_dict().items()}
    heads, width, z = layer.heads, tokens.shape[2], tokens.double()

    def split(matrix: Tensor) -> Tensor:
        return matrix.view(heads, width // heads, width)

    key, value = weights["key_value.weight"].split(width)
    key_bias, value_bias = weights["key_value.bias"].view(2, heads, 1, -1)
    q = torch.einsum("d,hed->he", weights["probe"][0, 0], split(weights["query.weight"]))
    q = q + weights["query.bias"].view(heads, -1)
    k = torch.einsum("bnd,hed->bhne", z, split(key)) + key_bias
    v = torch.einsum("bnd,hed->bhne", z, split(value)) + value_bias
    share = torch.exp(torch.einsum("he,bhne->bhn", q, k) / math.sqrt(width // heads))
    mixed = torch.einsum("bhn,bhne->bhe", share / share.sum(-1, keepdim=True), v)
    out = weights["out.weight"].view(width, heads, width // heads)
    x = torch.einsum("bhe,dhe->bd", mixed, out) + weights["out.bias"]
    centred = x - x.mean(1, keepdim=True)
    y = centred / (centred.square().mean(1, keepdim=True) + 1e-3).sqrt() * weights["norm.weight"] + weights["norm.bias"]
    h = y @ weights["mlp.up.weight"].T + weights["mlp.up.bias"]
    if layer.mlp.up.out_features == 24:
        h = h[:, :12] * torch.sigmoid(h[:, :12]) * h[:, 12:]
    else:
        h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
    return x + h @ weights["mlp.down.weight"].T + weights["mlp.down.bias"]


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_attention_pool_is_big_visions(activation: Activation, heads: int) -> None:
    layer, tokens = attention_pool(activation, heads=heads), tokens_of(patches=11).patches
    torch.testing.assert_close(layer(tokens), by_einsum(layer, tokens).float(), atol=2e-4, rtol=1e-4)


def test_attention_pool_starts_xavier_uniform() -> None:
    torch.manual_seed(0)
    layer = AttentionPool(256, 4, 300, "gelu", 1e-6).requires_grad_(False)
    layer.initialise()
    for weight in (layer.query.weight, *layer.key_value.weight.chunk(2), layer.out.weight):
        assert_uniform(weight, 256, 256)
    for bias in (layer.query.bias, layer.key_value.bias, layer.out.bias):
        assert not bias.any()
    assert layer.probe.std().item() == pytest.approx(math.sqrt(2 / 257), rel=0.1)
