"""Strided and fixed attention (Sparse Transformers, 1904.10509), in which patches also see those that come later.

Patches are numbered in row-major order. Their blocks have as many patches as a row of the grid, unless `block` is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

import torch
from jaxtyping import Int64
from torch import Tensor

from vitrail.models.attention.sparse import Group, GroupSize, SparseAttention, make_group


@dataclass(frozen=True)
class StridedSettings:
    """The settings of "strided"."""

    block: int = 0
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

    block: int = 0
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
    if block < 0:
        return [f"{name}: block={block} is negative; 0 is the number of columns of the grid"]
    if block > patches:
        return [f"{name}: block={block} is larger than the grid of {patches} patches; choose at most {patches}"]
    return []
