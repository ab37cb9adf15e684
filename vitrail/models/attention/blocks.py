"""Block attention: patches see the patches of their own block (1802.05751, 1906.02634).

The blocks of a layer do not overlap. Layers can have blocks of different sizes, and a shift moves the edges of the
blocks of every second layer, so that patches of neighbouring blocks meet there. With a halo, a block also sees the
patches around it. Blocks at the edges of the grid are smaller if the size does not divide the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm

from vitrail.errors import ConfigError
from vitrail.models.attention.groups import Axis, Group, GroupSize, axis_of, windows
from vitrail.models.attention.sparse import SparseAttention


@dataclass(frozen=True)
class BlockSettings:
    """The settings of "blocks"."""

    size: tuple[int, ...] = (7,)
    """Side of the blocks in patches. Several numbers are the sizes of successive network blocks, in turn."""
    shift: int = 0
    """Number of patches by which the edges of blocks are shifted in every second network block."""
    halo: int = 0
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
        if min(settings.size) < 1:
            found.append(f"{name}: size={min(settings.size)} is less than 1")
        elif not 0 <= settings.shift < min(settings.size):
            found.append(f"{name}: shift={settings.shift} is not from 0 to {min(settings.size) - 1}, less than a block")
        if settings.halo < 0:
            found.append(f"{name}: halo={settings.halo} is negative; 0 means none")
        if not found:
            try:
                self._check(self.config.grid)
            except ConfigError as error:
                found.append(str(error))
        return found

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
        self._check(grid)
        rows, columns = (self._axis(side) for side in grid)
        return (windows(rows, columns, grid, prefix=self.config.prefix, relative=self.is_relative),)

    def _axis(self, side: int) -> Axis:
        size, halo = self.size, self.settings.halo
        firsts = range(-self.shift, side, size)
        queries = [range(first, first + size) for first in firsts]
        keys = [range(first - halo, first + size + halo) for first in firsts]
        return axis_of(queries, keys, lambda query, key: 0 <= key < side)

    def _check(self, grid: tuple[int, int]) -> None:
        largest = max(self.settings.size)
        if largest > min(grid):
            raise ConfigError(
                f"attention={self.config.attention!r}: size={largest} is larger than the grid of {grid[0]} x {grid[1]} "
                f"patches; choose a size of at most {min(grid)}"
            )
