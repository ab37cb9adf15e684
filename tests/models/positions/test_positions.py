"""Tests of every kind of positions: its formula, the tokens that it acts on, and resizing to another grid."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.make import randomised, small_config
from tests.models.networks import PLACES
from vitrail.models.attention.full import SelfAttention
from vitrail.models.positions import PositionPlace, PositionResize, resize_grid
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig

RESIZES = get_args(PositionResize)
CPU = torch.device("cpu")


def made(kind: str, place: PositionPlace | None = None, *, grid: tuple[int, int] = (3, 4), **fields: Any) -> Any:
    """Return positions for 5 blocks of width 16 with 2 heads, and 3 tokens before the patches, one of them covered."""
    settings: dict[str, Any] = {"width": 16, "heads": 2, "depth": 5, "mlp_width": 8, "registers": 2, **fields}
    config = ViTConfig(image_size=grid, patch_size=(1, 1), positions=kind, positions_at=place, **settings)
    positions = config.position_embedding(config)
    torch.manual_seed(0)
    positions.initialise(1.0)
    return positions


@pytest.mark.parametrize("grid", [(3, 4), (5, 7)])
@pytest.mark.parametrize(("at", "resize"), [*zip(PLACES, cycle(RESIZES), strict=False)])
def test_gradients_reach_every_number(
    at: tuple[str, PositionPlace], resize: PositionResize, grid: tuple[int, int]
) -> None:
    positions, generator = made(*at, position_resize=resize), torch.Generator().manual_seed(0)
    tokens = torch.zeros(2, 3 + math.prod(grid), 16)
    total = torch.zeros((), requires_grad=True)
    for layer in range(5):
        total = total + (positions(tokens, grid, layer) * torch.randn(tokens.shape, generator=generator)).sum()
    for inside in positions.for_attention(grid, 5, CPU):
        if inside is not None and inside.bias is not None:
            total = total + (inside.bias * torch.randn(inside.bias.shape, generator=generator)).sum()
        if inside is not None and inside.offset_keys is not None:
            queries = torch.randn(2, 2, tokens.shape[1], 8, generator=generator)
            bias = inside.offset_keys.bias(queries, 3)
            total = total + (bias * torch.randn(bias.shape, generator=generator)).sum()
    total.backward()
    for name, parameter in positions.named_parameters():
        assert parameter.grad is not None and parameter.grad.all(), name


@pytest.mark.parametrize("kind", ["learned", "learned-2d", "relative-bias", "relative-keys"])
def test_positions_start_with_the_deviation_asked_for(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"image_size": (56, 70), "width": 64, "heads": 8, "depth": 5}
    for std in (0.02, 0.125):
        config = small_config(positions=kind, positions_at="every-layer", position_std=std, **sizes)
        for name, parameter in VisionTransformer(config).positions.named_parameters():
            if name != "first":
                assert parameter.std().item() == pytest.approx(std, rel=0.05), name
                assert abs(parameter.mean().item()) < 0.05 * std and parameter.abs().max() > 3 * std


@settings(max_examples=20)
@given(
    kind=st.sampled_from(["sincos-2d", "sincos-2d-mae"]),
    grid=st.tuples(st.integers(1, 20), st.integers(1, 20)), quarter=st.integers(2, 24),
)  # fmt: skip
def test_sincos_is_that_of_big_vision_and_of_mae(kind: str, grid: tuple[int, int], quarter: int) -> None:
    """The formulas of big_vision's models/vit.py and of MAE, in float64, which have other frequencies."""
    y, x = (each.flatten()[:, None] for each in np.mgrid[: grid[0], : grid[1]].astype(np.float64))
    omega = 1 / 10_000 ** (np.arange(quarter) / (quarter - (kind == "sincos-2d")))
    expected = np.concatenate([np.sin(x * omega), np.cos(x * omega), np.sin(y * omega), np.cos(y * omega)], axis=1)
    found = made(kind, grid=grid, width=4 * quarter, heads=1)(torch.zeros(1, 3 + len(x), 4 * quarter), grid)
    torch.testing.assert_close(found[0, 3:], torch.from_numpy(expected).float(), atol=2e-5, rtol=0)
    assert not found[:, :3].any()


@pytest.mark.parametrize(("grid", "prefix"), [((3, 4), 2), ((5, 1), 0), ((1, 1), 1), ((2, 7), 3)])
def test_queries_see_the_keys_of_their_offsets(grid: tuple[int, int], prefix: int) -> None:
    """Attention in float64 is the softmax of q (k + r) / sqrt(d), computed pair by pair, as are its gradients."""
    torch.manual_seed(0)
    count, heads, d = math.prod(grid), 2, 3
    positions = made("relative-keys", "shared", grid=grid, width=heads * d).double()
    layer = SelfAttention(heads * d, heads, prefix=prefix).double()
    n = prefix + count
    tokens = torch.randn(2, n, heads * d, dtype=torch.float64, requires_grad=True)
    (inside,) = positions.for_attention(grid, 1, CPU)
    q, k, v = layer.qkv(tokens).view(2, n, 3, heads, d).unbind(2)
    rows = []
    for i in range(n):
        logits = []
        for j in range(n):
            key = k[:, j]
            if i >= prefix and j >= prefix:
                key = key + positions.keys[0, (i - prefix) - (j - prefix) + count - 1].view(heads, d)
            logits.append((q[:, i] * key).sum(-1) / math.sqrt(d))
        weights = torch.stack(logits, dim=-1).softmax(-1)  # b heads n
        rows.append(torch.einsum("bhn,bnhd->bhd", weights, v).flatten(1))
    expected = layer.out(torch.stack(rows, dim=1))
    ours = layer(tokens, inside)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)
    sources = [tokens, positions.keys, *layer.parameters()]
    mine, theirs = (torch.autograd.grad(one.sin().sum(), sources) for one in (ours, expected))
    torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)
    for read in range(1, n + 1):
        torch.testing.assert_close(layer(tokens, inside, read), ours[:, :read], atol=1e-12, rtol=1e-12)


def test_keys_of_another_grid_are_means_of_interpolated_ones() -> None:
    layer = made("relative-keys", "shared", width=6)
    spread = torch.stack([layer.keys[0, 4 * down + across + 11] for down in range(-2, 3) for across in range(-3, 4)])
    wide = resize_grid(spread[None], (5, 7), (3, 9), "linear-corners").view(3, 9, 6)
    (inside,) = layer.for_attention((2, 5), 1, CPU)
    found = inside.offset_keys.keys.transpose(0, 1).flatten(1).flip(0)
    for offset in range(-9, 10):
        pairs = [(i, j) for i in range(10) for j in range(10) if i - j == offset]
        each = [wide[i // 5 - j // 5 + 1, i % 5 - j % 5 + 4] for i, j in pairs]
        torch.testing.assert_close(found[offset + 9], torch.stack(each).mean(0))
    assert torch.equal(layer.resized((2, 5))["keys"][0], found)


def corners_aligned(image: Tensor, new: tuple[int, int]) -> Tensor:
    """Return `scipy.ndimage.zoom` of order 1: corners stay, and other values are means of their four neighbours."""
    height, width = image.shape[:2]
    result = image.new_zeros(*new, *image.shape[2:])
    for i in range(new[0]):
        for j in range(new[1]):
            y = i * (height - 1) / (new[0] - 1) if new[0] > 1 else 0.0
            x = j * (width - 1) / (new[1] - 1) if new[1] > 1 else 0.0
            for row in (math.floor(y), math.floor(y) + 1):
                for column in (math.floor(x), math.floor(x) + 1):
                    share = (1 - abs(y - row)) * (1 - abs(x - column))
                    if share > 0:
                        result[i, j] += share * image[min(row, height - 1), min(column, width - 1)]
    return result


@pytest.mark.parametrize("how", RESIZES)
def test_equal_grids_change_nothing(how: PositionResize) -> None:
    table = torch.randn(1, 15, 4)
    assert torch.equal(resize_grid(table, (3, 5), (3, 5), how), table)


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("linear-corners", {"mode": "bilinear", "align_corners": True}),
        ("bilinear", {"mode": "bilinear", "align_corners": False}),
        ("bicubic", {"mode": "bicubic", "align_corners": False}),
        ("bicubic-corners", {"mode": "bicubic", "align_corners": True}),
        ("bicubic-antialias", {"mode": "bicubic", "align_corners": False, "antialias": True}),
    ],
)
@pytest.mark.parametrize(("old", "new"), [((3, 5), (6, 4)), ((7, 4), (3, 3)), ((4, 4), (9, 11)), ((2, 3), (3, 2))])
def test_each_way_is_torchs(
    how: PositionResize, options: dict[str, Any], old: tuple[int, int], new: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    table = torch.randn(1, math.prod(old), 6)
    image = table.view(*old, 6).permute(2, 0, 1)[None]
    expected = F.interpolate(image, size=new, **options)[0].permute(1, 2, 0).reshape(1, -1, 6)
    torch.testing.assert_close(resize_grid(table, old, new, how), expected)


def test_resizing_keeps_the_number_format() -> None:
    table = torch.randn(1, 6, 2, dtype=torch.bfloat16)
    assert resize_grid(table, (2, 3), (4, 5), "bicubic").dtype == torch.bfloat16


@pytest.mark.parametrize("size", [(8, 20), (4, 5)])
@pytest.mark.parametrize(("at", "cover"), [*zip(PLACES, cycle(["all", "patches", "class", "all"]), strict=False)])
def test_a_network_takes_another_size(at: tuple[str, PositionPlace], cover: str, size: tuple[int, int]) -> None:
    """The result equals that of a network for this size whose positions were resized by hand."""
    kind, place = at
    fields = {"positions": kind, "positions_at": place, "positions_cover": cover, "registers": 2}
    config = small_config(**fields)
    network = randomised(config)
    other = VisionTransformer(replace(config, image_size=size)).eval()
    old, new = config.grid, other.config.grid
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}

    def stretched(table: Tensor, new: tuple[int, int]) -> Tensor:
        return torch.stack([corners_aligned(layer.double(), new).float() for layer in table])

    if kind == "learned":
        covered = {"all": 3, "class": 1, "patches": 0}[cover]
        table = weights["positions.embedding"]
        patches = stretched(table[:, covered:].unflatten(1, old), new).flatten(1, 2)
        weights["positions.embedding"] = torch.cat([table[:, :covered], patches], 1)
    if kind == "learned-2d":
        for name, length in (("rows", new[0]), ("columns", new[1])):
            axis = weights[f"positions.{name}"]
            weights[f"positions.{name}"] = stretched(axis[:, :, None], (length, 1))[:, :, 0]
    if kind.startswith("relative-bias"):
        table = weights["positions.bias"].permute(0, 2, 3, 1)
        weights["positions.bias"] = stretched(table, (2 * new[0] - 1, 2 * new[1] - 1)).permute(0, 3, 1, 2)
    if kind == "relative-keys":
        weights["positions.keys"] = network.positions.resized(new).get("keys", weights["positions.keys"])
    other.load_state_dict(weights)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(network(images), other(images), atol=2e-5, rtol=1e-4)
        assert network.features(images).grid == new
