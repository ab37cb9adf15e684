"""Positions that act inside attention: a bias for each offset between patches, and rotations of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.attention.kind import AttentionPositions
from vitrail.models.cost.footprint import FootprintPrecision
from vitrail.models.positions.embedding import PositionEmbedding, PositionResize, Positions, patch_places
from vitrail.models.tokens.grids import resize_grid


class Relative(PositionEmbedding):
    """The position embedding "relative-bias": a number for each head and each offset between two patches."""

    inside_attention = "bias"
    default_place = "every-layer"
    depends_on_grid = True

    def problems(self) -> list[str]:
        return self.misplaced()

    def build(self) -> Positions:
        config = self.config
        return RelativeBias(
            config.grid,
            config.heads,
            prefix=config.prefix,
            layers=self.layers,
            resize=config.position_resize,
            of_pairs=not config.attention_kind.takes_offsets,
        )

    def parameters(self) -> int:
        height, width = self.config.grid
        return self.layers * self.config.heads * (2 * height - 1) * (2 * width - 1)

    def bytes_of_kept(self, patches: int, precision: FootprintPrecision) -> int:
        return 8 * patches**2  # the offset of each pair of patches


class Rotary(PositionEmbedding):
    """The position embedding "rotary-2d": rotations of queries and keys by angles that grow with row and column."""

    inside_attention = "rotation"
    default_place = "every-layer"

    def problems(self) -> list[str]:
        config, found = self.config, []
        if config.heads >= 1 and config.width % config.heads == 0 and (config.width // config.heads) % 4:
            found.append(
                f"positions='rotary-2d' rotates channels in pairs for two directions: width / heads = "
                f"{config.width // config.heads} is not divisible by 4"
            )
        found += self.misplaced()
        if config.positions_at == "shared":
            found.append("positions='rotary-2d' has no weights to share: positions_at must be 'every-layer'")
        return found

    def build(self) -> Positions:
        return RotaryPositions(self.config.width // self.config.heads, prefix=self.config.prefix)

    def bytes_of_kept(self, patches: int, precision: FootprintPrecision) -> int:
        """Return the bytes of the rotation's cosines and sines for one image. In bf16, every block keeps a rounded copy
        of its own."""
        head_width, tokens = self.config.width // self.config.heads, patches + self.config.prefix
        return 2 * tokens * head_width * (4 if precision == "float32" else 2 * self.config.num_blocks)


class RelativeBias(Positions):
    """A learned number for each head and each offset between two patches, added to attention's logits.

    Pairs with a class or register token have no offset and no bias. If `of_pairs` is False, attention is given the
    table of offsets, and reads the bias of the pairs that it computes.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        heads: int,
        *,
        prefix: int,
        layers: int,
        resize: PositionResize = "linear-corners",
        of_pairs: bool = True,
    ) -> None:
        super().__init__()
        self.of_pairs = of_pairs
        self.grid = grid
        self.prefix = prefix
        self.resize = resize
        self.bias = nn.Parameter(torch.empty(layers, heads, 2 * grid[0] - 1, 2 * grid[1] - 1))

    def for_attention(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[AttentionPositions | None]:
        """Return the bias of each layer. If the module has a single table of biases, all layers share it. For another
        grid, the table is resized."""
        table = self._table(self.bias, grid)
        if not self.of_pairs:
            offsets_of_heads = table.transpose(1, 2).reshape(*self.bias.shape[:2], 2 * grid[0] - 1, 2 * grid[1] - 1)
            found = [AttentionPositions(offset_bias=one) for one in offsets_of_heads]
            return found * depth if len(found) == 1 else found
        offsets = _offsets(grid, device)
        if kept is not None:
            offsets = offsets[kept[:, :, None], kept[:, None, :]]  # b k k
        pairs = table[:, offsets].movedim(-1, -3)  # layers heads n n, or layers b heads k k
        pairs = F.pad(pairs, (self.prefix, 0, self.prefix, 0))
        found = [AttentionPositions(bias=bias) for bias in pairs]
        return found * depth if len(found) == 1 else found

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        if grid == self.grid:
            return {}
        bias = self.bias.detach()
        shape = *bias.shape[:2], 2 * grid[0] - 1, 2 * grid[1] - 1
        return {"bias": self._table(bias, grid).transpose(1, 2).reshape(shape)}

    def _table(self, bias: Tensor, grid: tuple[int, int]) -> Float[Tensor, "layers offsets heads"]:
        """Return the bias of every offset between two patches of a grid."""
        layers, heads, down, across = bias.shape
        table = bias.reshape(layers, heads, down * across).transpose(1, 2)
        return resize_grid(table, (down, across), (2 * grid[0] - 1, 2 * grid[1] - 1), self.resize)


class RotaryPositions(Positions):
    """Rotates queries and keys by row and column ("axial").

    Half of a head's channel pairs use the row, and the other half use the column. Frequencies are 100^(-i / (d / 4)).
    The product of a query and a key depends only on the offset of their patches.
    """

    def __init__(self, head_width: int, *, prefix: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.prefix = prefix

    def for_attention(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[AttentionPositions | None]:
        quarter = self.head_width // 4
        frequencies = 100.0 ** (-torch.arange(quarter, device=device) / quarter)
        y, x = patch_places(grid, device)
        angles = torch.cat([y[:, None] * frequencies, x[:, None] * frequencies], dim=1)  # n d/2
        if kept is not None:
            angles = angles[kept][:, None]  # b 1 k d/2: the same for all heads
        angles = F.pad(angles, (0, 0, self.prefix, 0))
        angles = torch.cat([angles, angles], dim=-1)
        return [AttentionPositions(rotation=(angles.cos(), angles.sin()))] * depth


def _offsets(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Return the index of each patch pair's offset in a table of (2 rows - 1) x (2 columns - 1) offsets."""
    rows, columns = (place.long() for place in patch_places(grid, device))
    down = rows[:, None] - rows[None] + grid[0] - 1
    across = columns[:, None] - columns[None] + grid[1] - 1
    return down * (2 * grid[1] - 1) + across
