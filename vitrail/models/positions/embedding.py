"""The contract of position embeddings, and the functions that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.attention.kind import AttentionPositions
from vitrail.models.cost.footprint import FootprintPrecision
from vitrail.models.tokens.grids import GridResize

if TYPE_CHECKING:
    from vitrail.models.vit_config import ViTConfig


PositionPlace = Literal["stem", "every-layer", "shared"]
"""Layers that add positions (Table 8). "stem" adds them once, before the first block. "every-layer" adds separate
positions before every block. "shared" adds the same positions before every block."""
Covered = Literal["all", "class", "patches"]
"""Tokens that have learned positions: all tokens, class token and patches without registers, or patches only."""
PositionResize = GridResize


class PositionEmbedding:
    """A position embedding for one config, which `ViTConfig.positions` chooses.

    This base class is "none". To add a position embedding, write a class like the ones in `added.py` or `inside.py`,
    and add it to `POSITIONS`.
    """

    inside_attention: ClassVar[Literal["none", "bias", "keys", "rotation"]] = "none"
    """Effect of the positions inside attention: none, a bias that is added to the logits, keys of offsets whose
    products with the queries are added to the logits, or a rotation of queries and keys."""
    default_place: ClassVar[PositionPlace] = "stem"
    """Layers that add positions if `ViTConfig.positions_at` is None."""
    depends_on_grid: ClassVar[bool] = False
    """True if some weights are made for one grid of patches and resized for others."""

    def __init__(self, config: ViTConfig) -> None:
        self.config = config

    @property
    def layers(self) -> int:
        """Number of layers with separate positions."""
        return self.config.num_blocks if self.config.positions_place == "every-layer" else 1

    def problems(self) -> list[str]:
        """Return a message for every field of the config that does not fit this position embedding."""
        return []

    def build(self) -> Positions:
        """Return the module."""
        return Positions()

    def parameters(self) -> int:
        """Return the number of weights."""
        return 0

    def macs_in_attention(self, read: int) -> int:
        """Return the multiply-accumulates that positions add to the attention of a block with `read` queries."""
        return 0

    def bytes_in_attention(self, read: int, precision: FootprintPrecision) -> int:
        """Return the bytes per image that positions store for the backward pass in the attention of a block with `read`
        queries."""
        return 0

    def backward_bytes_in_attention(self, tokens: int, precision: FootprintPrecision) -> int:
        """Return the extra bytes per image that positions need during the backward pass of an attention."""
        return 0

    def misplaced(self) -> list[str]:
        """Return a message if the config adds positions at the stem that act inside attention."""
        if self.config.positions_at != "stem":
            return []
        return [f"positions={self.config.positions!r} acts inside attention, so positions_at='stem' does not fit"]

    def bytes_of_kept(self, patches: int, precision: FootprintPrecision) -> int:
        """Return the bytes per image that positions store for the backward pass, if patch dropout leaves `patches`
        patches."""
        return 0


class Positions(nn.Module):
    """The module of a position embedding.

    Subclasses change the tokens before a block, or the block's attention; this base class changes nothing. If only some
    patches are kept, `kept[image, i]` is the index in the grid, in row-major order, of the i-th patch token.
    """

    grid: tuple[int, int] | None = None
    """Grid of a `forward` without one: the grid that the weights are made for. None if there are no such weights."""

    def forward(
        self,
        tokens: Float[Tensor, "b n width"],
        grid: tuple[int, int] | None = None,
        layer: int = 0,
        kept: Int64[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "b n width"]:
        """Return tokens with the positions that are added before block `layer`. Layer 0 is the stem (equation 1)."""
        return tokens

    def for_attention(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[AttentionPositions | None]:
        """Return the positions that act inside the attention of each block."""
        return [None] * depth

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        """Return the weights that depend on the grid, resized to another grid, by their names."""
        return {}

    @torch.no_grad()
    def initialise(self, std: float) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)


def patch_places(grid: tuple[int, int], device: torch.device | None) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return row and column of every patch, in row-major order."""
    rows, columns = (torch.arange(size, dtype=torch.float32, device=device) for size in grid)
    # The ONNX exporter of PyTorch 2.13 gets `repeat_interleave` wrong for sizes that are symbols.
    return rows[:, None].expand(*grid).reshape(-1), columns.expand(*grid).reshape(-1)
