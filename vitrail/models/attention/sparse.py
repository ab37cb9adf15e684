"""Sparse attention: the groups of queries and keys into which the pairs of a mechanism are divided, and their layer.

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
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.models.attention.base import AttentionContext, AttentionLayer, AttentionOperands
from vitrail.models.attention.full import FullAttention, SelfAttention, attend
from vitrail.models.network import FootprintPrecision, bytes_each
from vitrail.models.positions.embedding import AttentionPositions


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


class SparseAttention(FullAttention):
    """An `AttentionKind` in which each patch sees some patches, and class token and registers see all tokens and are
    seen by all. A subclass has `sizes` and `groups`."""

    can_reduce = False
    needs_grid = True
    takes_offsets = True

    def problems(self) -> list[str]:
        found, config = super().problems(), self.config
        if config.position_embedding.inside_attention == "keys":
            found.append(
                f"positions={config.positions!r} multiplies each query with the keys of all offsets, which costs more "
                f"than the pairs that attention={config.attention!r} leaves out; choose 'relative-bias', or "
                "attention='full'"
            )
        return [*found, *filter(None, [self.misfit(config.grid)])]

    def misfit(self, grid: tuple[int, int]) -> str:
        """Return a message if the groups do not fit a grid, or an empty text."""
        return ""

    def sizes(self) -> tuple[GroupSize, ...]:
        """Return the sizes of the groups for the config's grid, by formula."""
        raise NotImplementedError

    def groups(self, grid: tuple[int, int]) -> tuple[Group, ...]:
        """Return the tables for a grid. A pair of patches is seen in one group only, and only the first group has class
        token and registers as keys."""
        raise NotImplementedError

    @property
    def is_relative(self) -> bool:
        """True if positions are a bias for each offset between two patches."""
        return self.config.position_embedding.inside_attention == "bias"

    @property
    def period(self) -> int:
        """Number of blocks after which the groups repeat."""
        return 1

    def context(self) -> AttentionContext:
        return AttentionContext(self.config.attention, self.tables)

    def tables(self, grid: tuple[int, int]) -> list[tuple[Group, ...]]:
        """Return the groups of each block until they repeat. Raise `ConfigError` if the grid does not fit."""
        if text := self.misfit(grid):
            raise ConfigError(text)
        return [type(self)(self.config, block).groups(grid) for block in range(self.period)]

    def layer_class(self) -> type[SelfAttention]:
        return SparseSelfAttention

    def macs(self, tokens: int, read: int) -> int:
        prefix = self.config.prefix
        if read <= prefix:
            return super().macs(tokens, read)  # only class token and registers, which see all tokens
        projections = (3 * tokens + read) * self.config.width**2
        return projections + 2 * (prefix * tokens + self._pairs()) * self.config.width

    def kept_bytes(self, tokens: int, read: int, precision: FootprintPrecision) -> int:
        config, bf16 = self.config, precision == "bf16"
        if read <= config.prefix:
            return super().kept_bytes(tokens, read, precision)
        prefix, sizes, heads = config.prefix, self.sizes(), config.heads
        queries = sum(size.groups * size.queries for size in sizes)
        keys = sum(size.groups * size.keys for size in sizes) + sizes[0].groups * prefix
        kept = (queries + 2 * keys + tokens) * config.width
        if prefix and bf16:
            kept += (2 * tokens + prefix) * config.width + prefix * tokens * heads
        elif prefix:  # queries, keys and values are one tensor
            kept += (3 * tokens + prefix) * config.width + prefix * heads
        if bf16 or self.is_relative or len(sizes) > 1:  # plain products keep weights, and for several groups a copy
            kept += min(2, len(sizes)) * self._pairs() * heads
        else:
            kept += queries * (config.width + heads)
        return bytes_each(precision) * kept

    def backward_bytes(self, tokens: int, precision: FootprintPrecision) -> int:
        gathered = sum(size.groups * (size.queries + 2 * size.keys) for size in self.sizes())
        return bytes_each(precision) * (gathered * self.config.width + 2 * self._pairs() * self.config.heads)

    def _pairs(self) -> int:
        """Return the number of pairs whose logits the groups compute, with class token and registers as keys."""
        sizes = self.sizes()
        return sum(size.pairs for size in sizes) + sizes[0].groups * sizes[0].queries * self.config.prefix


class SparseSelfAttention(SelfAttention):
    """Multi-head self-attention in which a patch sees the patches of its groups, class token and registers."""

    def forward(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        assert positions is not None
        if read is not None and read <= self.prefix:
            return super().forward(tokens, positions, read)
        q, k, v, _ = self._operands(tokens, positions, None)
        patches = _attend_groups(
            q, self._with_zeros(k), self._with_zeros(v), positions.context, positions.offset_bias, self.prefix
        )
        mixed = torch.cat([attend(q[:, :, : self.prefix], k, v), patches], dim=2) if self.prefix else patches
        return self.combine(mixed[:, :, :read])

    def _with_zeros(self, keys: Float[Tensor, "b heads n d"]) -> Float[Tensor, "b heads m d"]:
        """Return keys or values, and those behind the last token that the tables of the groups name."""
        return keys

    def operands(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None
    ) -> AttentionOperands:
        """Return queries, keys and values, and a bias of minus infinity for the pairs that are not computed."""
        assert positions is not None
        q, k, v, _ = self._operands(tokens, positions, None)
        n, groups, table = tokens.shape[1], positions.context, positions.offset_bias
        bias = torch.full((self.heads, n, n), -math.inf, device=tokens.device)
        bias[:, : self.prefix] = 0
        for group in groups:
            values = _logit_bias(group, table)
            values = torch.zeros((), device=tokens.device) if values is None else values
            shape = self.heads, *group.queries.shape, group.keys.shape[1]
            rows, columns = group.queries[:, :, None].expand(shape[1:]), group.keys[:, None].expand(shape[1:])
            seen = torch.ones_like(rows, dtype=torch.bool) if group.mask is None else group.mask == 0
            bias[:, rows[seen], columns[seen]] = values.detach().float().expand(shape)[:, seen]
        return AttentionOperands(q, k, v, bias)


class PaddedSelfAttention(SparseSelfAttention):
    """The same attention with keys and values of zeros outside the grid. A part of each row of weights belongs to them,
    so there is no map of weights between tokens."""

    weights = AttentionLayer.weights
    operands = AttentionLayer.operands

    def _with_zeros(self, keys: Float[Tensor, "b heads n d"]) -> Float[Tensor, "b heads m d"]:
        return F.pad(keys, (0, 0, 0, 1))


def _attend_groups(
    q: Float[Tensor, "b heads n d"],
    k: Float[Tensor, "b heads keys d"],
    v: Float[Tensor, "b heads keys d"],
    groups: Sequence[Group],
    table: Float[Tensor, "heads down across"] | None,
    prefix: int,
) -> Float[Tensor, "b heads patches d"]:
    """Return the mixed values of the patches. Each patch has one softmax over the keys of all its groups."""
    biases = [_logit_bias(group, table) for group in groups]
    if len(groups) == 1:
        group, bias = groups[0], biases[0]
        queries, keys, values = q[:, :, group.queries], k[:, :, group.keys], v[:, :, group.keys]
        if bias is None or bias.ndim == 3:  # the fused kernels need four dimensions
            mixed = attend(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), bias)
        else:
            mixed = attend(queries, keys, values, bias)
        return mixed.reshape(*q.shape[:2], group.queries.numel(), q.shape[3])[:, :, group.places]
    logits = []
    for group, bias in zip(groups, biases, strict=True):
        found = (q[:, :, group.queries] * q.shape[-1] ** -0.5) @ k[:, :, group.keys].transpose(-1, -2)
        found = found if bias is None else found + bias.to(found.dtype)
        logits.append(found.flatten(2, 3)[:, :, group.places])
    weights = torch.cat(logits, dim=-1).softmax(dim=-1)
    result, done = torch.zeros((), dtype=v.dtype, device=v.device), 0
    for group, own in zip(groups, logits, strict=True):
        part = weights[..., done : done + own.shape[-1]][:, :, group.queries - prefix]
        result = result + (part @ v[:, :, group.keys]).flatten(2, 3)[:, :, group.places]
        done += own.shape[-1]
    return result


def _logit_bias(group: Group, table: Float[Tensor, "heads down across"] | None) -> Float[Tensor, "*heads g m c"] | None:
    """Return the bias of the logits of a group: mask and positions."""
    if table is None or group.offsets is None:
        return group.mask
    found = F.embedding(group.offsets, table.flatten(1).T).movedim(-1, 0)  # heads g m c
    found = F.pad(found, (group.keys.shape[1] - found.shape[-1], 0))
    return found if group.mask is None else found + group.mask
