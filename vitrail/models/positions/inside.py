"""Positions inside attention: a bias or a key for each offset between patches, or rotations of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.network import FootprintPrecision, bytes_each
from vitrail.models.positions.embedding import (
    AttentionPositions,
    OffsetKeys,
    Positions,
    ViTConfig,
    patch_places,
    resize_grid,
    separate_layers,
)


class RelativeBias(Positions):
    """A learned number for each head and each offset between two patches, added to attention's logits.

    Pairs with a class or register token have no offset and no bias. If `of_pairs` is False, attention is given the
    table of offsets, and reads the bias of the pairs that it computes.
    """

    inside_attention = "bias"
    default_place = "every-layer"
    depends_on_grid = True

    @classmethod
    def bytes_of_kept(cls, config: ViTConfig, patches: int, precision: FootprintPrecision) -> int:
        return 8 * patches**2  # the offset of each pair of patches

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.of_pairs = not config.attention_kind.takes_offsets
        self.grid = grid = config.grid
        self.bias = nn.Parameter(torch.empty(separate_layers(config), config.heads, 2 * grid[0] - 1, 2 * grid[1] - 1))

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
        pairs = self._with_prefix(F.pad(pairs, (self.prefix, 0, self.prefix, 0)))
        found = [AttentionPositions(bias=bias) for bias in pairs]
        return found * depth if len(found) == 1 else found

    def _with_prefix(self, pairs: Tensor) -> Tensor:
        """Return the bias of all pairs of tokens, for which `pairs` is 0 if one of them is no patch."""
        return pairs

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


class RelativeBiasWithClass(RelativeBias):
    """`RelativeBias` with three more numbers for each head, as in BEiT (2106.08254): for the class token that attends
    to a patch, for a patch that attends to the class token, and for the class token with itself."""

    @classmethod
    def problems(cls, config: ViTConfig) -> list[str]:
        found = super().problems(config)
        if not config.has_class_token or config.attention != "full":
            found.append(
                f"positions={config.positions!r} needs a class token and attention='full'; choose both, or "
                "positions='relative-bias'"
            )
        return found

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.class_bias = nn.Parameter(torch.empty(len(self.bias), config.heads, 3))

    def _with_prefix(self, pairs: Tensor) -> Tensor:
        place = torch.arange(pairs.shape[-1], device=pairs.device)
        is_class, is_patch = (place == 0).to(pairs.dtype), (place >= self.prefix).to(pairs.dtype)
        groups = torch.stack([is_class[:, None] * is_patch, is_patch[:, None] * is_class, is_class[:, None] * is_class])
        added = torch.einsum("lhp,pij->lhij", self.class_bias, groups)
        return pairs + (added if pairs.ndim == added.ndim else added[:, None])  # kept patches differ between images


class RotaryPositions(Positions):
    """Rotates queries and keys by row and column ("axial").

    Half of a head's channel pairs use the row, and the other half use the column. Frequencies are 100^(-i / (d / 4)).
    The product of a query and a key depends only on the offset of their patches.
    """

    inside_attention = "rotation"
    default_place = "every-layer"

    @classmethod
    def problems(cls, config: ViTConfig) -> list[str]:
        found = []
        if config.heads >= 1 and config.width % config.heads == 0 and (config.width // config.heads) % 4:
            found.append(
                f"positions='rotary-2d' rotates channels in pairs for two directions: width / heads = "
                f"{config.width // config.heads} is not divisible by 4"
            )
        found += super().problems(config)
        if config.positions_at == "shared":
            found.append("positions='rotary-2d' has no weights to share: positions_at must be 'every-layer'")
        return found

    @classmethod
    def bytes_of_kept(cls, config: ViTConfig, patches: int, precision: FootprintPrecision) -> int:
        """Return the bytes of the rotation's cosines and sines for one image. In bf16, every block keeps a rounded copy
        of its own."""
        head_width, tokens = config.width // config.heads, patches + config.prefix
        return 2 * tokens * head_width * (4 if precision == "float32" else 2 * config.num_blocks)

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.head_width = config.width // config.heads

    def for_attention(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[AttentionPositions | None]:
        quarter = self.head_width // 4
        frequencies = 100.0 ** (-torch.arange(quarter, dtype=torch.float32, device=device) / quarter)
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


class RelativeKeyPositions(Positions):
    """A learned embedding for each offset of two patches in row-major order.

    Each head uses its part of the embedding as a key. Pairs with a class or register token have no offset. For another
    grid, the embedding of every row and column offset is interpolated as in "relative-bias". The embedding of a
    row-major offset is then the mean over the pairs of patches that have this offset.
    """

    inside_attention = "keys"
    default_place = "every-layer"
    depends_on_grid = True
    grid: tuple[int, int]

    @classmethod
    def macs_in_attention(cls, config: ViTConfig, read: int) -> int:
        return max(0, read - config.prefix) * _offset_count(config.grid) * config.width

    @classmethod
    def bytes_in_attention(cls, config: ViTConfig, read: int, precision: FootprintPrecision) -> int:
        """Return the bytes of the copy of the queries of patches, which is ordered by heads. If patches are dropped,
        the products with all keys and the offset of each pair are kept too."""
        patches = max(0, read - config.prefix)
        kept = patches * config.width
        if config.patch_dropout:
            kept += config.heads * patches * _offset_count(config.grid)
        return bytes_each(precision) * kept + (8 * patches**2 if config.patch_dropout else 0)

    @classmethod
    def backward_bytes_in_attention(cls, config: ViTConfig, tokens: int, precision: FootprintPrecision) -> int:
        """Return the bytes of the gradient of the products with all keys, which is made in two steps."""
        return bytes_each(precision) * 2 * config.heads * (tokens - config.prefix) * _offset_count(config.grid)

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.grid = config.grid
        self.heads = config.heads
        self.keys = nn.Parameter(torch.empty(separate_layers(config), _offset_count(config.grid), config.width))

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
        count = _offset_count(grid)
        total = pairs.new_zeros(count).index_add(0, new, pairs)
        sums = spread.new_zeros(len(keys), count, keys.shape[2]).index_add(1, new, spread)
        return sums / total[:, None].to(keys.dtype)


def _offset_count(grid: tuple[int, int]) -> int:
    """Return the number of row-major offsets between two patches of a grid."""
    return 2 * math.prod(grid) - 1


def _rows_and_columns(grid: tuple[int, int], device: torch.device) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
    """Return for each offset in rows and columns its number among the row-major offsets, and its number of pairs of
    patches."""
    rows, columns = (torch.arange(1 - side, side, device=device) for side in grid)
    numbers = rows[:, None] * grid[1] + columns + math.prod(grid) - 1
    pairs = (grid[0] - rows.abs())[:, None] * (grid[1] - columns.abs())
    return numbers.flatten(), pairs.flatten()
