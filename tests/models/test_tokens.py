"""Tests of patch embeddings and pooling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitrail.models.network import Features
from vitrail.models.tokens import AttentionPool, PatchEmbedding, PrefixTokens, pool
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import Activation, Pool, ViTConfig


@pytest.mark.parametrize(
    ("patch", "grid", "channels"), [((4, 4), (3, 3), 3), ((2, 5), (4, 3), 1), ((1, 1), (2, 3), 2), ((6, 4), (1, 1), 3)]
)
def test_projection_is_a_strided_convolution(patch: tuple[int, int], grid: tuple[int, int], channels: int) -> None:
    torch.manual_seed(0)
    embedding = PatchEmbedding(patch, channels, 7)
    images = torch.randn(2, channels, patch[0] * grid[0], patch[1] * grid[1])
    kernel = embedding.projection.weight.view(7, channels, *patch)
    expected = F.conv2d(images, kernel, embedding.projection.bias, stride=patch)
    assert expected.shape[2:] == grid
    torch.testing.assert_close(embedding(images), expected.flatten(2).transpose(1, 2), atol=1e-5, rtol=1e-5)


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


def test_kept_patches_are_those_of_the_whole_image() -> None:
    torch.manual_seed(0)
    embedding, images = PatchEmbedding((2, 5), 3, 7), torch.randn(2, 3, 6, 20)
    kept = torch.tensor([[0, 5, 11], [1, 2, 10]])
    whole = embedding(images)
    expected = torch.stack([whole[0, [0, 5, 11]], whole[1, [1, 2, 10]]])
    torch.testing.assert_close(embedding(images, kept), expected, atol=1e-6, rtol=1e-6)


def test_no_bias_is_no_bias() -> None:
    embedding = PatchEmbedding((2, 3), 1, 7, bias=False)
    assert [name for name, _ in embedding.named_parameters()] == ["projection.weight"]
    assert not embedding(torch.zeros(1, 1, 4, 6)).any()


@pytest.mark.parametrize("registers", [0, 1, 3])
@pytest.mark.parametrize("class_token", [False, True])
def test_prefix_is_the_class_token_and_then_registers(class_token: bool, registers: int) -> None:
    layer = PrefixTokens(4, class_token=class_token, registers=registers)
    length = class_token + registers
    values = torch.arange(4.0 * length).view(length, 4)
    with torch.no_grad():
        for parameter, part in ((layer.cls, values[:class_token]), (layer.registers, values[class_token:])):
            assert (parameter is None) == (len(part) == 0)
            if parameter is not None:
                parameter.copy_(part)
    tokens = torch.randn(3, 5, 4)
    result = layer(tokens)
    assert torch.equal(result[:, length:], tokens)
    assert torch.equal(result[:, :length], values.expand(3, length, 4))
    if length:
        result.sum().backward()
        for parameter in layer.parameters():
            assert torch.equal(parameter.grad, torch.full(parameter.shape, 3.0))


def test_class_token_starts_at_zero_and_registers_do_not() -> None:
    torch.manual_seed(0)
    layer = PrefixTokens(4096, registers=8)
    layer.initialise()
    assert layer.cls is not None and torch.equal(layer.cls, torch.zeros(1, 1, 4096))
    assert layer.registers is not None and layer.registers.shape == (1, 8, 4096)
    assert layer.registers.std().item() == pytest.approx(0.02, rel=0.03)
    assert abs(layer.registers.mean().item()) < 0.001 and layer.registers.abs().max() > 0.06


def test_tokens_keep_their_number_format() -> None:
    layer = PrefixTokens(4, registers=2)
    layer.initialise()
    result = layer(torch.randn(2, 5, 4).bfloat16())
    assert result.dtype == torch.bfloat16 and result.shape == (2, 8, 4)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float32}


Small = Callable[..., ViTConfig]
Randomised = Callable[[ViTConfig], VisionTransformer]


def tokens_of(*, cls: bool = True, registers: int = 2, patches: int = 6, width: int = 8) -> Features:
    generator = torch.Generator().manual_seed(0)
    return Features(
        cls=torch.randn(3, width, generator=generator) if cls else None,
        registers=torch.randn(3, registers, width, generator=generator),
        patches=torch.randn(3, patches, width, generator=generator),
        grid=(1, patches),
    )


def test_pools_without_weights() -> None:
    features = tokens_of()
    mean = sum(features.patches.unbind(1)) / 6
    assert features.cls is not None and isinstance(mean, Tensor)
    assert pool(features, "cls", None) is features.cls
    torch.testing.assert_close(pool(features, "gap", None), mean)
    torch.testing.assert_close(pool(features, "cls+gap", None), torch.cat([features.cls, mean], 1))
    halves = pool(features, "cls+dist", None).chunk(2, dim=1)
    assert torch.equal(halves[0], features.cls / 2) and torch.equal(halves[1], features.registers[:, 0] / 2)
    torch.testing.assert_close(pool(tokens_of(cls=False), "gap", None), tokens_of(cls=False).patches.mean(1))


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


def test_attention_pool_sees_all_tokens() -> None:
    layer, features = attention_pool(), tokens_of()
    assert features.cls is not None
    expected = layer(torch.cat([features.cls[:, None], features.registers, features.patches], 1))
    assert torch.equal(pool(features, "map", layer), expected)
    features = tokens_of(cls=False, registers=0)
    assert torch.equal(pool(features, "map", layer), layer(features.patches))


def test_attention_pool_does_not_know_the_order_of_tokens() -> None:
    layer, tokens = attention_pool(), tokens_of().patches
    torch.testing.assert_close(layer(tokens.flip(1)), layer(tokens), atol=1e-5, rtol=1e-5)


def test_attention_pool_in_bfloat16_stays_close() -> None:
    layer = AttentionPool(32, 4, 48, "gelu", 1e-6)
    torch.manual_seed(0)
    layer.initialise()
    tokens = torch.randn(2, 9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = layer(tokens).float()
    torch.testing.assert_close(coarse, layer(tokens), atol=0.05, rtol=0.05)


def test_attention_pool_starts_xavier_uniform() -> None:
    torch.manual_seed(0)
    layer = AttentionPool(256, 4, 300, "gelu", 1e-6).requires_grad_(False)
    layer.initialise()
    bound = math.sqrt(6 / 512)
    for weight in (layer.query.weight, *layer.key_value.weight.chunk(2), layer.out.weight):
        assert 0.99 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    for bias in (layer.query.bias, layer.key_value.bias, layer.out.bias):
        assert not bias.any()
    assert layer.probe.std().item() == pytest.approx(math.sqrt(2 / 257), rel=0.1)


@pytest.mark.parametrize("final_norm", ["tokens", "pooled"])
@pytest.mark.parametrize("how", ["cls", "gap", "map", "cls+gap", "cls+dist"])
def test_the_last_norm_is_before_or_after_the_pool(
    small: Small, randomised: Randomised, how: Pool, final_norm: str
) -> None:
    network = randomised(small(pool=how, registers=2, final_norm=final_norm))
    images = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(1))
    raw: list[Tensor] = []
    network.blocks[-1].register_forward_hook(lambda _, given, result: raw.append(result))
    features = network.features(images)
    first = int(how.startswith("cls"))
    normed = network.norm(raw[0]) if final_norm == "tokens" else raw[0]
    assert torch.equal(features.patches, normed[:, first + 2 :])
    assert torch.equal(features.registers, normed[:, first : first + 2])
    pooled = pool(features, how, network.attention_pool)
    expected = network.norm(pooled) if final_norm == "pooled" else pooled
    embedded = network.embed(images)
    if how == "cls":  # the same by products of other shapes, whose sums round differently
        torch.testing.assert_close(embedded, expected, atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(embedded, expected)
    assert expected.shape == (2, network.config.embed_width) == (2, 24 if "+" in how else 12)
    assert network.norm.normalized_shape == (expected.shape[1] if final_norm == "pooled" else 12,)


@pytest.mark.parametrize("fields", [{}, {"class_token": True}])
def test_the_mean_is_of_patches_alone(small: Small, randomised: Randomised, fields: dict[str, Any]) -> None:
    """Registers and the class token influence the mean only through attention."""
    network = randomised(small(pool="gap", registers=3, **fields))
    with torch.no_grad():
        for block in network.blocks:
            for layer in (block.attention.out, block.mlp.down):
                layer.weight.zero_()
    images = torch.randn(2, 3, 12, 10)
    before = network.embed(images)
    with torch.no_grad():
        for parameter in network.prefix.parameters():
            parameter.add_(1)
    assert torch.equal(network.embed(images), before)
    features = network.features(images)
    assert (features.cls is not None) == bool(fields) and features.registers.shape == (2, 3, 12)
    assert features.patches.shape == (2, 6, 12)
    torch.testing.assert_close(before, features.patches.mean(1))


def test_map_without_and_with_a_class_token(small: Small) -> None:
    assert small(pool="map").prefix == 0 and small(pool="map", class_token=True).prefix == 1
    assert small(pool="cls+gap").embed_width == 24 and small(pool="map").embed_width == 12
    assert VisionTransformer(small(pool="gap")).attention_pool is None
