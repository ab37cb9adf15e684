"""Groups of queries and keys, into which the pairs of a sparse attention mechanism are divided.

A mechanism such as "local" computes only some pairs of patches. To compute them as dense matrix products, it divides
the patches into groups: a tile of queries with all keys that any of them sees. A mask excludes the pairs of a group
that the mechanism does not have. Class token and registers are keys of every group.

An `Axis` divides one axis of the grid into tiles, and `windows` combines an axis of rows and an axis of columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


class GroupSize(NamedTuple):
    """The numbers of groups, of queries in each group, and of keys in each group without class token and registers."""

    groups: int
    queries: int
    keys: int

    @property
    def pairs(self) -> int:
        """Number of pairs of patches whose logits are computed."""
        return self.groups * self.queries * self.keys


class Group(NamedTuple):
    """The tables of groups of the same size. Tokens are numbered along the sequence, with class token and registers."""

    queries: Int64[Tensor, "g m"]
    """Token of each query. A group with fewer queries repeats one of them."""
    keys: Int64[Tensor, "g c"]
    """Token of each key, of which the first are class token and registers. The number behind the last token is a key of
    zeros."""
    places: Int64[Tensor, " n"]
    """Place of each patch among the queries of all groups."""
    mask: Float[Tensor, "g m c"] | None
    """0 for the pairs that are computed, and minus infinity for the others. None if all pairs are computed."""
    offsets: Int64[Tensor, "g m c_patches"] | None
    """Index of each pair's offset in a table of (2 rows - 1) x (2 columns - 1) offsets, if positions are such a
    table."""


class Axis(NamedTuple):
    """Tiles along one axis of the grid. Numbers outside the axis stand for places that do not exist."""

    queries: Sequence[Sequence[int]]
    """Places of the queries of each tile."""
    keys: Sequence[Sequence[int]]
    """Places of the keys of each tile."""
    seen: Sequence[Sequence[Sequence[bool]]]
    """True for each query and key of a tile if the query sees the key."""


def axis_of(queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], seen: Callable[[int, int], bool]) -> Axis:
    """Return the tiles with these queries and keys. `seen(query, key)` is True if the query sees the key."""
    pairs = [[[seen(i, j) for j in near] for i in tile] for tile, near in zip(queries, keys, strict=True)]
    return Axis(queries, keys, pairs)


def whole_axis(side: int, *, alone: bool = False) -> Axis:
    """Return the axis as one tile in which all see all, or with `alone` as tiles of one place."""
    tiles = [[place] for place in range(side)] if alone else [list(range(side))]
    return axis_of(tiles, tiles, lambda query, key: True)


def windows(
    rows: Axis, columns: Axis, grid: tuple[int, int], *, prefix: int, relative: bool = False, zeros: bool = False
) -> Group:
    """Return the groups of the tiles of a grid, each a tile of rows and a tile of columns.

    `prefix` is the number of class token and registers. With `relative`, the group has offsets. With `zeros`, keys
    outside the grid are keys of zeros; otherwise they are not seen.
    """

    def both(down: Sequence[Sequence[int]], across: Sequence[Sequence[int]]) -> Int64[Tensor, "g m"]:
        """Return the patch at each place of each tile, or -1 if the place does not exist."""
        i, j = torch.tensor(down), torch.tensor(across)
        outside = ((i < 0) | (i >= grid[0]))[:, None, :, None] | ((j < 0) | (j >= grid[1]))[None, :, None, :]
        patches = (i[:, None, :, None] * grid[1] + j[None, :, None, :]).masked_fill(outside, -1)
        return patches.reshape(len(i) * len(j), i.shape[1] * j.shape[1])

    queries, keys = both(rows.queries, columns.queries), both(rows.keys, columns.keys)
    down, across = torch.tensor(rows.seen), torch.tensor(columns.seen)
    seen = down[:, None, :, None, :, None] & across[None, :, None, :, None, :]
    return make_group(queries, keys, seen.reshape(*queries.shape, -1), grid, prefix, relative=relative, zeros=zeros)


def make_group(
    queries: Int64[Tensor, "g m"],
    keys: Int64[Tensor, "g c"],
    seen: Bool[Tensor, "g m c"],
    grid: tuple[int, int],
    prefix: int,
    *,
    relative: bool = False,
    zeros: bool = False,
    sees_prefix: bool = True,
) -> Group:
    """Return the tables of groups whose queries and keys are numbers of patches, or -1 for none.

    `prefix` is the number of class token and registers. With `sees_prefix`, they are keys of each group.
    """
    count, real = math.prod(grid), queries >= 0
    places = torch.empty(count, dtype=torch.int64)
    places[queries[real]] = real.flatten().nonzero()[:, 0]
    first = real.int().argmax(dim=1, keepdim=True)  # stands in for the queries that do not exist
    stand_in = torch.where(real, torch.arange(queries.shape[1]), first)
    queries = queries.gather(1, stand_in)
    seen = seen.gather(1, stand_in[:, :, None].expand_as(seen))
    if not zeros:
        seen = seen & (keys >= 0)[:, None]
    always = prefix if sees_prefix else 0
    seen = torch.nn.functional.pad(seen, (always, 0), value=True)
    mask = None if seen.all() else torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
    outside = prefix + count if zeros else prefix
    tokens = torch.where(keys >= 0, prefix + keys, outside)
    tokens = torch.cat([torch.arange(always).expand(len(keys), -1), tokens], dim=1)
    return Group(
        prefix + queries, tokens, places, mask, _offsets(queries, keys.clamp_min(0), grid) if relative else None
    )


def _offsets(
    queries: Int64[Tensor, "g m"], keys: Int64[Tensor, "g c"], grid: tuple[int, int]
) -> Int64[Tensor, "g m c"]:
    """Return the index of each pair's offset in a table of (2 rows - 1) x (2 columns - 1) offsets."""
    down = (queries // grid[1])[:, :, None] - (keys // grid[1])[:, None] + grid[0] - 1
    across = (queries % grid[1])[:, :, None] - (keys % grid[1])[:, None] + grid[1] - 1
    return down * (2 * grid[1] - 1) + across


def grouped(x: Float[Tensor, "b heads n d"], table: Int64[Tensor, "g m"]) -> Float[Tensor, "b heads g m d"]:
    """Return the vectors of the tokens in a table."""
    return x[:, :, table]
