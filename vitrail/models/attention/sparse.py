"""Attention of groups of patches: the layer, context and cost that all mechanisms with groups share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitrail.models.attention.full import FullAttention, SelfAttention
from vitrail.models.attention.groups import Group, GroupSize, grouped
from vitrail.models.attention.kernels import attend
from vitrail.models.attention.kind import (
    AttentionContext,
    AttentionLayer,
    AttentionOperands,
    AttentionPositions,
    as_numbers,
)
from vitrail.models.cost.footprint import FootprintPrecision, bytes_each


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
        return found

    def sizes(self) -> tuple[GroupSize, ...]:
        """Return the sizes of the groups for the config's grid, by formula."""
        raise NotImplementedError

    def groups(self, grid: tuple[int, int]) -> tuple[Group, ...]:
        """Return the tables for a grid. Raise `ConfigError` if the grid does not fit. A pair of patches is seen in one
        group only, and only the first group has class token and registers as keys."""
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
        return GroupContext(self.config.attention, self.tables)

    def tables(self, grid: tuple[int, int]) -> list[tuple[Group, ...]]:
        """Return the groups of each block until they repeat."""
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


class GroupContext(AttentionContext):
    """The tables of the groups of each block, which repeat after some blocks."""

    def for_blocks(self, grid: tuple[int, int], blocks: int, device: torch.device) -> Sequence[tuple[Group, ...]]:
        tables = self.tables(as_numbers(grid), device)
        return [tables[block % len(tables)] for block in range(blocks)]


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

    def weights(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None
    ) -> Float[Tensor, "b heads n n"]:
        q, k, _, bias = self.operands(tokens, positions)
        assert bias is not None
        return ((q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-1, -2) + bias).softmax(dim=-1)

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
        queries, keys, values = grouped(q, group.queries), grouped(k, group.keys), grouped(v, group.keys)
        if bias is None or bias.ndim == 3:  # the fused kernels need four dimensions
            mixed = attend(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), bias)
        else:
            mixed = attend(queries, keys, values, bias)
        return mixed.reshape(*q.shape[:2], group.queries.numel(), q.shape[3])[:, :, group.places]
    logits = []
    for group, bias in zip(groups, biases, strict=True):
        found = (grouped(q, group.queries) * q.shape[-1] ** -0.5) @ grouped(k, group.keys).transpose(-1, -2)
        found = found if bias is None else found + bias.to(found.dtype)
        logits.append(found.flatten(2, 3)[:, :, group.places])
    weights = torch.cat(logits, dim=-1).softmax(dim=-1)
    result, done = torch.zeros((), dtype=v.dtype, device=v.device), 0
    for group, own in zip(groups, logits, strict=True):
        part = grouped(weights[..., done : done + own.shape[-1]], group.queries - prefix)
        result = result + (part @ grouped(v, group.keys)).flatten(2, 3)[:, :, group.places]
        done += own.shape[-1]
    return result


def _logit_bias(group: Group, table: Float[Tensor, "heads down across"] | None) -> Float[Tensor, "*heads g m c"] | None:
    """Return the bias of the logits of a group: mask and positions."""
    if table is None or group.offsets is None:
        return group.mask
    found = F.embedding(group.offsets, table.flatten(1).T).movedim(-1, 0)  # heads g m c
    found = F.pad(found, (group.keys.shape[1] - found.shape[-1], 0))
    return found if group.mask is None else found + group.mask
