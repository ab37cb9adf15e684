"""Images cut into patches, the class token in front, and positions on top: the parts of equation 1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vitrail.models.patches import ClassToken, PatchEmbedding
from vitrail.models.positions import LearnedPositions


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


def test_class_token_is_the_first_of_every_image() -> None:
    layer = ClassToken(4)
    assert torch.equal(layer.token, torch.zeros(1, 1, 4))
    with torch.no_grad():
        layer.token.copy_(torch.arange(1.0, 5.0))
    tokens = torch.randn(3, 5, 4)
    result = layer(tokens)
    assert torch.equal(result[:, 1:], tokens)
    assert torch.equal(result[:, 0], torch.arange(1.0, 5.0).expand(3, 4))


def test_class_token_gathers_gradient_from_all_images() -> None:
    layer = ClassToken(4)
    layer(torch.randn(3, 5, 4)).sum().backward()
    assert torch.equal(layer.token.grad, torch.full((1, 1, 4), 3.0))


def test_positions_are_added_token_by_token() -> None:
    layer = LearnedPositions(5, 4)
    with torch.no_grad():
        layer.embedding.copy_(torch.arange(20.0).view(1, 5, 4))
    tokens = torch.randn(3, 5, 4)
    assert torch.equal(layer(tokens), tokens + torch.arange(20.0).view(1, 5, 4))
    layer(tokens).sum().backward()
    assert torch.equal(layer.embedding.grad, torch.full((1, 5, 4), 3.0))


def test_tokens_keep_their_number_format() -> None:
    torch.manual_seed(0)
    positions = LearnedPositions(6, 4)
    torch.nn.init.normal_(positions.embedding)
    tokens = torch.randn(2, 5, 4).bfloat16()
    result = positions(ClassToken(4)(tokens))
    assert result.dtype == torch.bfloat16 and result.shape == (2, 6, 4)
    assert positions.embedding.dtype == torch.float32
