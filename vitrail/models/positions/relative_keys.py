"""Relative positions of the paper (Appendix D.4): products of queries and an embedding for each offset of patches.

Patches are numbered in row-major order, and the offset of two patches is the difference of their numbers. So a grid of
n patches has 2 n - 1 offsets. The paper calls this 1-dimensional relative attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.attention.kind import AttentionPositions, OffsetKeys
from vitrail.models.cost.footprint import FootprintPrecision, bytes_each
from vitrail.models.positions.embedding import PositionEmbedding, PositionResize, Positions
from vitrail.models.tokens.grids import resize_grid


class RelativeKeys(PositionEmbedding):
    """The position embedding "relative-keys": an embedding for each offset, with which every query is multiplied."""

    inside_attention = "keys"
    default_place = "every-layer"
    depends_on_grid = True

    def problems(self) -> list[str]:
        return self.misplaced()

    def build(self) -> Positions:
        config = self.config
        return RelativeKeyPositions(
            config.grid, config.width, config.heads, layers=self.layers, resize=config.position_resize
        )

    def parameters(self) -> int:
        return self.layers * self._offsets * self.config.width

    def macs_in_attention(self, read: int) -> int:
        return max(0, read - self.config.prefix) * self._offsets * self.config.width

    def bytes_in_attention(self, read: int, precision: FootprintPrecision) -> int:
        """Return the bytes of the copy of the queries of patches, which is ordered by heads. If patches are dropped,
        the products with all keys and the offset of each pair are kept too."""
        config, patches = self.config, max(0, read - self.config.prefix)
        kept = patches * config.width
        if config.patch_dropout:
            kept += config.heads * patches * self._offsets
        return bytes_each(precision) * kept + (8 * patches**2 if config.patch_dropout else 0)

    def backward_bytes_in_attention(self, tokens: int, precision: FootprintPrecision) -> int:
        """Return the bytes of the gradient of the products with all keys, which is made in two steps."""
        return bytes_each(precision) * 2 * self.config.heads * (tokens - self.config.prefix) * self._offsets

    @property
    def _offsets(self) -> int:
        return 2 * math.prod(self.config.grid) - 1


class RelativeKeyPositions(Positions):
    """A learned embedding for each offset of two patches in row-major order.

    Each head uses its part of the embedding as a key. Pairs with a class or register token have no offset. For another
    grid, the embedding of every row and column offset is interpolated as in "relative-bias". The embedding of a
    row-major offset is then the mean over the pairs of patches that have this offset.
    """

    grid: tuple[int, int]

    def __init__(
        self,
        grid: tuple[int, int],
        width: int,
        heads: int,
        *,
        layers: int,
        resize: PositionResize = "linear-corners",
    ) -> None:
        super().__init__()
        self.grid = grid
        self.heads = heads
        self.resize = resize
        self.keys = nn.Parameter(torch.empty(layers, 2 * math.prod(grid) - 1, width))

    def for_attention(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[AttentionPositions | None]:
        """Return the keys of each layer. If the module has a single table of embeddings, all layers share it."""
        descending = self._for_grid(self.keys, grid).flip(1)
        of_heads = descending.view(*descending.shape[:2], self.heads, -1).transpose(1, 2)
        found = [AttentionPositions(offset_keys=OffsetKeys(keys, kept)) for keys in of_heads]
        return found * depth if len(found) == 1 else found

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        return {} if grid == self.grid else {"keys": self._for_grid(self.keys.detach(), grid)}

    def _for_grid(self, keys: Tensor, grid: tuple[int, int]) -> Float[Tensor, "layers offsets width"]:
        """Return the embeddings of the offsets of a grid."""
        if grid == self.grid:
            return keys
        old, _ = _rows_and_columns(self.grid, keys.device)
        new, pairs = _rows_and_columns(grid, keys.device)
        sizes = [(2 * rows - 1, 2 * columns - 1) for rows, columns in (self.grid, grid)]
        spread = resize_grid(keys[:, old], sizes[0], sizes[1], self.resize) * pairs[:, None].to(keys.dtype)
        count = 2 * math.prod(grid) - 1
        total = pairs.new_zeros(count).index_add(0, new, pairs)
        sums = spread.new_zeros(len(keys), count, keys.shape[2]).index_add(1, new, spread)
        return sums / total[:, None].to(keys.dtype)


def _rows_and_columns(grid: tuple[int, int], device: torch.device) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
    """Return for each offset in rows and columns its number among the row-major offsets, and its number of pairs of
    patches."""
    rows, columns = (torch.arange(1 - side, side, device=device) for side in grid)
    numbers = rows[:, None] * grid[1] + columns + math.prod(grid) - 1
    pairs = (grid[0] - rows.abs())[:, None] * (grid[1] - columns.abs())
    return numbers.flatten(), pairs.flatten()
