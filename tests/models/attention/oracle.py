"""Dense attention with a mask, in which a pair of tokens is computed if a rule in plain Python says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitrail.models.attention import AttentionPositions
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig

Place = tuple[int, int]
Rule = Callable[[Place, Place, Place, int], bool]
"""A function of (query, key, grid, block) that says if the patch `query` sees the patch `key`."""


def starts(place: int, side: int, window: int) -> int:
    return max(0, min(place - window // 2, side - window))


def in_window(query: Place, key: Place, grid: Place, block: int, window: int) -> bool:
    firsts = [starts(place, side, window) for place, side in zip(query, grid, strict=True)]
    return all(first <= k < first + window for first, k in zip(firsts, key, strict=True))


def in_block(
    query: Place, key: Place, grid: Place, block: int, sizes: tuple[int, ...], shift: int = 0, halo: int = 0
) -> bool:
    size, moved = sizes[block % len(sizes)], shift if block % 2 else 0
    firsts = [(q + moved) // size * size - moved for q in query]
    return all(first - halo <= k < first + size + halo for first, k in zip(firsts, key, strict=True))


def along_axis(query: Place, key: Place, grid: Place, block: int) -> bool:
    return query[block % 2] == key[block % 2]


def number(place: Place, grid: Place) -> int:
    return place[0] * grid[1] + place[1]


def strided(query: Place, key: Place, grid: Place, block: int, stride: int = 0) -> bool:
    away, stride = abs(number(query, grid) - number(key, grid)), stride or grid[1]
    return away <= stride or away % stride == 0


def fixed(query: Place, key: Place, grid: Place, block: int, length: int = 0, summary: int = 1) -> bool:
    i, j, length = number(query, grid), number(key, grid), length or grid[1]
    return i // length == j // length or j % length >= length - summary


SEEN: dict[str, Rule] = {
    "local:window=3": partial(in_window, window=3),
    "local:window=4": partial(in_window, window=4),
    "local:window=1": partial(in_window, window=1),
    "blocks:size=2": partial(in_block, sizes=(2,)),
    "blocks:size=3/2:shift=1": partial(in_block, sizes=(3, 2), shift=1),
    "blocks:size=2:halo=1": partial(in_block, sizes=(2,), halo=1),
    "blocks:size=3:shift=2:halo=2": partial(in_block, sizes=(3,), shift=2, halo=2),
    "axial": along_axis,
    "strided": strided,
    "strided:block=3": partial(strided, stride=3),
    "fixed": fixed,
    "fixed:block=3:summary=2": partial(fixed, length=3, summary=2),
}
"""Rules of mechanisms with one softmax for each patch, by `ViTConfig.attention`. A grid has at least 4 x 4 patches."""


def config_of(attention: str, **fields: Any) -> ViTConfig:
    """Return the config of a small network with a grid of 5 x 7 patches, of which no window divides all sides."""
    defaults: dict[str, Any] = {
        "image_size": (10, 14), "patch_size": (2, 2), "channels": 1, "width": 16, "depth": 2, "heads": 2,
        "mlp_width": 12, "num_classes": 3, "registers": 2, "attention": attention,
    }  # fmt: skip
    return ViTConfig(**defaults | fields)


def made_network(config: ViTConfig, dtype: torch.dtype = torch.float64) -> VisionTransformer:
    """Return a network in which every weight matters."""
    torch.manual_seed(0)
    network = VisionTransformer(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return network


def insides(network: VisionTransformer, grid: Place | None = None) -> list[AttentionPositions]:
    """Return the positions and tables of every block, as the network makes them."""
    grid = grid or network.config.grid
    found = network.positions.for_attention(grid, len(network.blocks), torch.device("cpu"))
    return network.context.join(found, grid, torch.device("cpu"), None)


def dense(layer: Any, tokens: Tensor, inside: AttentionPositions, seen: Tensor) -> Tensor:
    """Return attention with the weights of `layer` over the pairs `seen`, computed with all pairs of tokens."""
    b, n, width = tokens.shape
    q, k, v, _ = layer._operands(tokens, inside, None)
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if inside.offset_bias is not None:
        logits = logits + offsets(inside.offset_bias, n)
    weights = logits.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return layer.out((weights @ v).transpose(1, 2).reshape(b, n, width))


def offsets(table: Tensor, n: int) -> Tensor:
    """Return the bias of every pair of tokens, for a table of (heads, 2 rows - 1, 2 columns - 1)."""
    rows, columns = (table.shape[1] + 1) // 2, (table.shape[2] + 1) // 2
    prefix = n - rows * columns
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    away = places[:, None] - places[None] + torch.tensor([rows - 1, columns - 1])
    bias = table[:, away[..., 0], away[..., 1]]
    return torch.nn.functional.pad(bias, (prefix, 0, prefix, 0))


def pairs_seen(rule: Rule, grid: Place, prefix: int, block: int) -> Tensor:
    """Return the pairs of tokens that a rule allows. Class token and registers see all and are seen by all."""
    places = [(row, column) for row in range(grid[0]) for column in range(grid[1])]
    seen = torch.tensor([[rule(query, key, grid, block) for key in places] for query in places])
    return torch.nn.functional.pad(seen, (prefix, 0, prefix, 0), value=True)
