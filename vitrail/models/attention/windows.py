"""Attention of patches to those of a window, a block, a row and a column of the grid, or a stride.

Local attention: each patch sees a window of patches around it.

With `padding=inside`, the window of a patch near an edge moves inward, so that every patch sees equally many patches
(NATTEN, 2204.07143). With `padding=zero`, the window stays centred, and places outside the grid have a key and a value
of zeros (1906.05909).

Block attention: patches see the patches of their own block (1802.05751, 1906.02634).

The blocks of a layer do not overlap. Layers can have blocks of different sizes, and a shift moves the edges of the
blocks of every second layer, so that patches of neighbouring blocks meet there. With a halo, a block also sees the
patches around it. Blocks at the edges of the grid are smaller if the size does not divide the grid.

Axial attention (1912.12180): patches see the patches of their row, then those of their column.

As in Appendix D.6 of the paper, each layer of the network is two blocks: attention along rows and an MLP, then
attention along columns and an MLP. With `sum=on`, each layer is one block, whose attention is the sum of an attention
along rows and an attention along columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, lcm, prod
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitrail.models.attention.base import AttentionLayer
from vitrail.models.attention.full import SelfAttention
from vitrail.models.attention.sparse import (
    Axis,
    Group,
    GroupSize,
    PaddedSelfAttention,
    SparseAttention,
    SparseSelfAttention,
    axis_of,
    make_group,
    whole_axis,
    windows,
)
from vitrail.models.linear.dense import Linear
from vitrail.models.network import FootprintPrecision, bytes_each
from vitrail.models.positions.embedding import AttentionPositions
from vitrail.settings import setting


@dataclass(frozen=True)
class LocalSettings:
    """The settings of "local"."""

    window: int = setting(7, least=1)
    """Side of the window in patches."""
    padding: Literal["inside", "zero"] = "inside"
    """Windows at the edges: moved inward ("inside"), or filled with zeros ("zero")."""


class LocalAttention(SparseAttention):
    """Each patch sees the patches in a window around it.

    The queries of a tile of `window` x `window` patches are computed together, with all keys that one of them sees.
    """

    Settings = LocalSettings
    settings: LocalSettings

    @property
    def takes_zeros(self) -> bool:
        return self.settings.padding == "zero"

    def problems(self) -> list[str]:
        found = super().problems()
        if self.takes_zeros and self.is_relative:
            found.append(
                f"positions={self.config.positions!r} has no offset for a place outside the grid, which "
                f"attention={self.config.attention!r} sees; choose padding=inside, or other positions"
            )
        return found

    def misfit(self, grid: tuple[int, int]) -> str:
        if self.takes_zeros or self.settings.window <= min(grid):
            return ""
        return (
            f"attention={self.config.attention!r}: window={self.settings.window} is larger than the grid of "
            f"{grid[0]} x {grid[1]} patches; choose a window of at most {min(grid)}, or padding=zero"
        )

    def layer_class(self) -> type[SelfAttention]:
        return PaddedSelfAttention if self.takes_zeros else SparseSelfAttention

    def sizes(self) -> tuple[GroupSize, ...]:
        window = self.settings.window
        groups = queries = keys = 1
        for side in self.config.grid:
            tile = min(window, side)
            groups *= ceil(side / tile)
            queries *= tile
            keys *= tile + window - 1 if self.takes_zeros else min(tile + window - 1, side)
        return (GroupSize(groups, queries, keys),)

    def groups(self, grid: tuple[int, int]) -> tuple[Group, ...]:
        rows, columns = (self._axis(side) for side in grid)
        return (
            windows(rows, columns, grid, prefix=self.config.prefix, relative=self.is_relative, zeros=self.takes_zeros),
        )

    def _axis(self, side: int) -> Axis:
        window = self.settings.window
        tile = min(window, side)
        tiles = [list(range(first, first + tile)) for first in range(0, side, tile)]

        def start(place: int) -> int:
            """Return the first place that a query sees."""
            centred = place - window // 2
            return centred if self.takes_zeros else max(0, min(centred, side - window))

        width = tile + window - 1 if self.takes_zeros else min(tile + window - 1, side)
        firsts = [start(places[0]) if self.takes_zeros else min(start(places[0]), side - width) for places in tiles]
        keys = [list(range(first, first + width)) for first in firsts]
        return axis_of(tiles, keys, lambda query, key: start(query) <= key < start(query) + window)


@dataclass(frozen=True)
class BlockSettings:
    """The settings of "blocks"."""

    size: tuple[int, ...] = setting((7,), least=1)
    """Side of the blocks in patches. Several numbers are the sizes of successive network blocks, in turn."""
    shift: int = setting(0, least=0)
    """Number of patches by which the edges of blocks are shifted in every second network block."""
    halo: int = setting(0, least=0, advice="0 means none")
    """Width in patches of the border around a block that its patches also see."""


class BlockAttention(SparseAttention):
    """Each patch sees the patches of its block, and with a halo those around the block."""

    Settings = BlockSettings
    settings: BlockSettings

    @property
    def size(self) -> int:
        """Side of the blocks in this network block."""
        return self.settings.size[self.block % len(self.settings.size)]

    @property
    def shift(self) -> int:
        """Shift in this network block."""
        return self.settings.shift if self.block % 2 else 0

    @property
    def period(self) -> int:
        return lcm(len(self.settings.size), 2 if self.settings.shift else 1)

    def problems(self) -> list[str]:
        found, settings, name = super().problems(), self.settings, f"attention={self.config.attention!r}"
        if settings.shift >= min(settings.size):
            found.append(f"{name}: shift={settings.shift} is not from 0 to {min(settings.size) - 1}, less than a block")
        return found

    def misfit(self, grid: tuple[int, int]) -> str:
        if (largest := max(self.settings.size)) <= min(grid):
            return ""
        return (
            f"attention={self.config.attention!r}: size={largest} is larger than the grid of {grid[0]} x {grid[1]} "
            f"patches; choose a size of at most {min(grid)}"
        )

    def note(self) -> str:
        rows, columns = self.config.grid
        sizes = [f"{size} x {size}" for size in dict.fromkeys(self.settings.size) if rows % size or columns % size]
        if not sizes:
            return ""
        return (
            f"attention={self.config.attention!r}: blocks of {' and '.join(sizes)} patches do not divide the grid of "
            f"{rows} x {columns}, so blocks at its edges are smaller"
        )

    def sizes(self) -> tuple[GroupSize, ...]:
        rows, columns = (ceil((side + self.shift) / self.size) for side in self.config.grid)
        return (GroupSize(rows * columns, self.size**2, (self.size + 2 * self.settings.halo) ** 2),)

    def groups(self, grid: tuple[int, int]) -> tuple[Group, ...]:
        rows, columns = (self._axis(side) for side in grid)
        return (windows(rows, columns, grid, prefix=self.config.prefix, relative=self.is_relative),)

    def _axis(self, side: int) -> Axis:
        size, halo = self.size, self.settings.halo
        firsts = range(-self.shift, side, size)
        queries = [range(first, first + size) for first in firsts]
        keys = [range(first - halo, first + size + halo) for first in firsts]
        return axis_of(queries, keys, lambda query, key: 0 <= key < side)


@dataclass(frozen=True)
class AxialSettings:
    """The settings of "axial"."""

    sum: bool = False
    """True to add attention along rows and attention along columns in one block."""


class AxialAttention(SparseAttention):
    """Each patch sees the patches of its row in even blocks, and those of its column in odd blocks."""

    Settings = AxialSettings
    settings: AxialSettings

    @property
    def blocks_per_layer(self) -> int:
        return 1 if self.settings.sum else 2

    @property
    def period(self) -> int:
        return 1 if self.settings.sum else 2

    def build(self) -> AttentionLayer:
        if self.settings.sum:
            return SummedAttention(super().build(), super().build())
        return super().build()

    def sizes(self) -> tuple[GroupSize, ...]:
        height, width = self.config.grid
        sizes = GroupSize(height, width, width), GroupSize(width, height, height)
        return sizes if self.settings.sum else sizes[self.block % 2 :][:1]

    def groups(self, grid: tuple[int, int]) -> tuple[Group, ...]:
        height, width = grid
        rows = whole_axis(height, alone=True), whole_axis(width)
        columns = whole_axis(height), whole_axis(width, alone=True)
        axes = (rows, columns) if self.settings.sum else (rows, columns)[self.block % 2 :][:1]
        prefix, relative = self.config.prefix, self.is_relative
        return tuple(windows(down, across, grid, prefix=prefix, relative=relative) for down, across in axes)

    def macs(self, tokens: int, read: int) -> int:
        return sum(super(AxialAttention, part).macs(tokens, read) for part in self._parts())

    def kept_bytes(self, tokens: int, read: int, precision: FootprintPrecision) -> int:
        parts = self._parts()
        copies = (len(parts) - 1) * (precision == "bf16") * bytes_each("bf16") * tokens * self.config.width
        return copies + sum(super(AxialAttention, part).kept_bytes(tokens, read, precision) for part in parts)

    def _parts(self) -> tuple[AxialAttention, ...]:
        """Return the attentions that the layer adds, each along one axis."""
        if not self.settings.sum:
            return (self,)
        return tuple(AxialAttention(self.config, block, AxialSettings()) for block in range(2))


class SummedAttention(AttentionLayer):
    """The sum of an attention along rows and an attention along columns, each with its own weights.

    A token has two softmaxes, so there is no map of weights between tokens.
    """

    def __init__(self, rows: AttentionLayer, columns: AttentionLayer) -> None:
        super().__init__()
        self.rows = rows
        self.columns = columns

    def forward(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        assert positions is not None
        rows, columns = (positions._replace(context=(group,)) for group in positions.context)
        return self.rows(tokens, rows, read) + self.columns(tokens, columns, read)

    def projections(self) -> Iterator[tuple[Linear, tuple[str, ...]]]:
        yield from self.rows.projections()
        yield from self.columns.projections()

    def initialise(self) -> None:
        """Leave the weights to the two layers, which the network initialises too."""


# --- strided and fixed attention (Sparse Transformers, 1904.10509), in which patches also see those that come later.
# Patches are numbered in row-major order. Their blocks have as many patches as a row of the grid, unless `block` is
# set.


@dataclass(frozen=True)
class StridedSettings:
    """The settings of "strided"."""

    block: int = setting(0, least=0, advice="0 is the number of columns of the grid")
    """Distance l to the farthest neighbour, and stride. 0 is the number of columns of the grid."""


class StridedAttention(SparseAttention):
    """Each patch sees the patches that are at most l numbers away, and every l-th patch before and after it.

    The first groups are blocks of l queries with the keys of three blocks. The second groups are the patches that are a
    multiple of l apart.
    """

    Settings = StridedSettings
    settings: StridedSettings

    def problems(self) -> list[str]:
        return [*super().problems(), *_block_problems(self, self.settings.block)]

    def sizes(self) -> tuple[GroupSize, ...]:
        block = self.settings.block or self.config.grid[1]
        groups = ceil(prod(self.config.grid) / block)
        return GroupSize(groups, block, 3 * block), GroupSize(block, groups, groups)

    def groups(self, grid: tuple[int, int]) -> tuple[Group, ...]:
        block, prefix = self.settings.block or grid[1], self.config.prefix
        count = ceil(prod(grid) / block)
        tiles = torch.arange(count * block).view(count, block)
        near = tiles[:, :1] + torch.arange(-block, 2 * block)
        neighbours = (tiles[:, :, None] - near[:, None]).abs() <= block
        strides = tiles.T
        others = (strides[:, :, None] - strides[:, None]).abs() > block  # neighbours are in the first groups
        tiles, near, strides = (_real(numbers, grid) for numbers in (tiles, near, strides))
        relative = self.is_relative
        return (
            make_group(tiles, near, neighbours, grid, prefix, relative=relative),
            make_group(strides, strides, others, grid, prefix, relative=relative, sees_prefix=False),
        )


@dataclass(frozen=True)
class FixedSettings:
    """The settings of "fixed"."""

    block: int = setting(0, least=0, advice="0 is the number of columns of the grid")
    """Number l of patches in a block. 0 is the number of columns of the grid."""
    summary: int = 1
    """Number c of patches at the end of each block that all patches see."""


class FixedAttention(SparseAttention):
    """Each patch sees the patches of its block, and the last c patches of every block.

    The first groups are the blocks. The second group is all patches with the last patches of all blocks.
    """

    Settings = FixedSettings
    settings: FixedSettings

    def problems(self) -> list[str]:
        found, settings = [*super().problems(), *_block_problems(self, self.settings.block)], self.settings
        block = settings.block or self.config.grid[1]
        if not 1 <= settings.summary <= block:
            found.append(
                f"attention={self.config.attention!r}: summary={settings.summary} is not from 1 to {block}, the number "
                "of patches in a block"
            )
        return found

    def sizes(self) -> tuple[GroupSize, ...]:
        patches, block = prod(self.config.grid), self.settings.block or self.config.grid[1]
        whole, left = divmod(patches, block)
        summaries = whole * self.settings.summary + max(0, left - block + self.settings.summary)
        return GroupSize(ceil(patches / block), block, block), GroupSize(1, patches, summaries)

    def groups(self, grid: tuple[int, int]) -> tuple[Group, ...]:
        block, prefix, patches = self.settings.block or grid[1], self.config.prefix, prod(grid)
        tiles = torch.arange(ceil(patches / block) * block).view(-1, block)
        own = torch.ones(len(tiles), block, block, dtype=torch.bool)
        every = torch.arange(patches)
        summaries = every[every % block >= block - self.settings.summary]
        others = every[:, None] // block != summaries[None] // block  # those of the own block are in the first groups
        relative = self.is_relative
        real = _real(tiles, grid)
        return (
            make_group(real, real, own, grid, prefix, relative=relative),
            make_group(every[None], summaries[None], others[None], grid, prefix, relative=relative, sees_prefix=False),
        )


def _real(numbers: Int64[Tensor, "g m"], grid: tuple[int, int]) -> Int64[Tensor, "g m"]:
    """Return the numbers of patches, with -1 for those that do not exist."""
    return numbers.masked_fill((numbers < 0) | (numbers >= prod(grid)), -1)


def _block_problems(kind: SparseAttention, block: int) -> list[str]:
    """Return a message if there is no block of this many patches."""
    name, patches = f"attention={kind.config.attention!r}", prod(kind.config.grid)
    if block > patches:
        return [f"{name}: block={block} is larger than the grid of {patches} patches; choose at most {patches}"]
    return []
