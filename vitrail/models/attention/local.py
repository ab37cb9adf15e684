"""Local attention: each patch sees a window of patches around it.

With `padding=inside`, the window of a patch near an edge moves inward, so that every patch sees equally many patches
(NATTEN, 2204.07143). With `padding=zero`, the window stays centred, and places outside the grid have a key and a value
of zeros (1906.05909).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from vitrail.errors import ConfigError
from vitrail.models.attention.full import SelfAttention
from vitrail.models.attention.groups import Axis, Group, GroupSize, axis_of, windows
from vitrail.models.attention.sparse import PaddedSelfAttention, SparseAttention, SparseSelfAttention


@dataclass(frozen=True)
class LocalSettings:
    """The settings of "local"."""

    window: int = 7
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
        if self.settings.window < 1:
            return [*found, f"attention={self.config.attention!r}: window={self.settings.window} is less than 1"]
        if self.takes_zeros and self.is_relative:
            found.append(
                f"positions={self.config.positions!r} has no offset for a place outside the grid, which "
                f"attention={self.config.attention!r} sees; choose padding=inside, or other positions"
            )
        try:
            self._check(self.config.grid)
        except ConfigError as error:
            found.append(str(error))
        return found

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
        self._check(grid)
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

    def _check(self, grid: tuple[int, int]) -> None:
        if not self.takes_zeros and self.settings.window > min(grid):
            raise ConfigError(
                f"attention={self.config.attention!r}: window={self.settings.window} is larger than the grid of "
                f"{grid[0]} x {grid[1]} patches; choose a window of at most {min(grid)}, or padding=zero"
            )
