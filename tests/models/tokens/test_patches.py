"""Tests of cutting images into patches, and of the tokens before them (equation 1)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vitrail.models.tokens import PatchEmbedding, PrefixTokens


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
