"""Position embeddings: every kind that the paper compares (Appendix D.4, Table 8), and two that came after it.

| kind | what it is | where it acts |
|---|---|---|
| none | tokens are a set | - |
| learned | a vector for each place in the sequence | added to tokens |
| learned-2d | a vector of D / 2 for each column and one for each row, concatenated | added to tokens |
| sincos-2d | sines and cosines of column and row, fixed (2205.01580) | added to patch tokens |
| relative-bias | a number for each head and offset between two patches (2103.14030) | added to attention's logits |
| rotary-2d | queries and keys are turned by angles that grow with row and column (2403.13298) | on patch tokens |

The paper's relative variant multiplies queries with an embedding of the offset as a second key. The bias kept here is
the same without the query: at 14 x 14 patches its table has 729 numbers a head, where the keys would cost a product of
every query with 729 vectors, 3.7 times attention's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.attention import Guide

__all__ = [
    "Covered",
    "LearnedPositions",
    "LearnedPositions2d",
    "PositionKind",
    "PositionResize",
    "Positions",
    "RelativeBias",
    "RotaryPositions",
    "SinCosPositions",
    "Where",
    "make_positions",
    "resize_grid",
    "sincos_2d",
]

PositionKind = Literal["none", "learned", "learned-2d", "sincos-2d", "relative-bias", "rotary-2d"]
Where = Literal["stem", "every-layer", "shared"]
"""Once before the first block; before every block, each with its own; before every block, the same one (Table 8)."""
Covered = Literal["all", "class", "patches"]
"""Which tokens have learned positions: all; the class token and patches, but no register; patches alone."""
PositionResize = Literal["linear-corners", "bilinear", "bicubic", "bicubic-corners", "bicubic-antialias"]

RESIZES: dict[str, tuple[str, bool, bool]] = {  # mode, corners aligned, antialias
    "linear-corners": ("bilinear", True, False),  # vision_transformer and big_vision
    "bilinear": ("bilinear", False, False),
    "bicubic": ("bicubic", False, False),  # DINO, DINOv2, Hugging Face
    "bicubic-corners": ("bicubic", True, False),  # torchvision
    "bicubic-antialias": ("bicubic", False, True),  # timm
}


class Positions(nn.Module):
    """No positions, and what every kind can do: change tokens before a layer, or guide its attention.

    Where patches are dropped, `kept` says which patches of the grid each image's tokens are: `kept[image, i]` is the
    place, in row-major order, of the i-th token after the prefix.
    """

    def forward(
        self,
        tokens: Float[Tensor, "b n width"],
        grid: tuple[int, int],
        layer: int = 0,
        kept: Int64[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "b n width"]:
        """Tokens as block number `layer` is to see them. Layer 0 is the stem: equation 1."""
        return tokens

    def guides(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[Guide | None]:
        """What each block's attention is told."""
        return [None] * depth

    @torch.no_grad()
    def initialise(self, std: float) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)


class _Added(Positions):
    """Positions that are added to [class token, registers, patches]: to the first `covered` of them and to patches."""

    def __init__(self, prefix: int, covered: int, where: Where) -> None:
        super().__init__()
        self.prefix = prefix
        self.covered = covered
        self.where = where

    def forward(
        self,
        tokens: Float[Tensor, "b n width"],
        grid: tuple[int, int],
        layer: int = 0,
        kept: Int64[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "b n width"]:
        if layer and self.where == "stem":
            return tokens
        layer = layer if self.where == "every-layer" else 0
        sequence = self._sequence(grid, layer, tokens.device)
        if kept is not None:
            prefix = torch.arange(self.prefix, device=kept.device).expand(len(kept), -1)
            sequence = F.embedding(torch.cat([prefix, self.prefix + kept], dim=1), sequence[0])
        return tokens + sequence.to(tokens.dtype)

    def _sequence(self, grid: tuple[int, int], layer: int, device: torch.device) -> Float[Tensor, "1 n width"]:
        raise NotImplementedError

    def _join(self, first: Float[Tensor, "1 covered width"], patches: Float[Tensor, "1 n width"]) -> Tensor:
        blank = patches.new_zeros(1, self.prefix - self.covered, patches.shape[2])
        return torch.cat([first, blank, patches], dim=1)


class LearnedPositions(_Added):
    """A learned vector for each token: `E_pos` of equation 1 ("1-D", paper section 3.1 and Table 8)."""

    def __init__(
        self,
        grid: tuple[int, int],
        width: int,
        *,
        prefix: int = 0,
        covered: int = 0,
        where: Where = "stem",
        layers: int = 1,
        resize: PositionResize = "linear-corners",
    ) -> None:
        super().__init__(prefix, covered, where)
        self.grid = grid
        self.resize = resize
        self.embedding = nn.Parameter(torch.empty(layers, covered + math.prod(grid), width))

    def _sequence(self, grid: tuple[int, int], layer: int, device: torch.device) -> Float[Tensor, "1 n width"]:
        whole = self.embedding[layer : layer + 1]
        if grid == self.grid and self.covered == self.prefix:
            return whole
        first, patches = whole[:, : self.covered], whole[:, self.covered :]
        return self._join(first, resize_grid(patches, self.grid, grid, self.resize))


class LearnedPositions2d(_Added):
    """A learned vector of D / 2 for each column and for each row: [X, Y] of Appendix D.4."""

    def __init__(
        self,
        grid: tuple[int, int],
        width: int,
        *,
        prefix: int = 0,
        covered: int = 0,
        where: Where = "stem",
        layers: int = 1,
        resize: PositionResize = "linear-corners",
    ) -> None:
        super().__init__(prefix, covered, where)
        self.resize = resize
        self.first = nn.Parameter(torch.empty(layers, covered, width)) if covered else None
        self.columns = nn.Parameter(torch.empty(layers, grid[1], width // 2))
        self.rows = nn.Parameter(torch.empty(layers, grid[0], width // 2))

    def _sequence(self, grid: tuple[int, int], layer: int, device: torch.device) -> Float[Tensor, "1 n width"]:
        height, width = grid
        x, y = (
            resize_grid(axis[layer : layer + 1], (axis.shape[1], 1), (size, 1), self.resize)
            for axis, size in ((self.columns, width), (self.rows, height))
        )
        half = x.shape[2]
        grid_of_both = torch.cat(
            [x[:, None].expand(1, height, width, half), y[:, :, None].expand(1, height, width, half)], dim=3
        )
        first = x.new_zeros(1, 0, 2 * half) if self.first is None else self.first[layer : layer + 1]
        return self._join(first, grid_of_both.reshape(1, height * width, 2 * half))


class SinCosPositions(_Added):
    """Fixed sines and cosines, added to patches alone. They exist for every grid, so nothing is ever resized."""

    def __init__(self, width: int, *, prefix: int = 0, where: Where = "stem") -> None:
        super().__init__(prefix, 0, where)
        self.width = width

    def _sequence(self, grid: tuple[int, int], layer: int, device: torch.device) -> Float[Tensor, "1 n width"]:
        patches = sincos_2d(grid, self.width, device=device)[None]
        return self._join(patches[:, :0], patches)


class RelativeBias(Positions):
    """A learned number for each head and each offset between two patches, added to attention's logits.

    Pairs with a class or register token have no offset and no bias.
    """

    def __init__(
        self, grid: tuple[int, int], heads: int, *, prefix: int, layers: int, resize: PositionResize = "linear-corners"
    ) -> None:
        super().__init__()
        self.grid = grid
        self.prefix = prefix
        self.resize = resize
        self.bias = nn.Parameter(torch.empty(layers, heads, 2 * grid[0] - 1, 2 * grid[1] - 1))

    def guides(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[Guide | None]:
        """A bias a layer, or the same for all. For another grid, the table of offsets is resized."""
        layers, heads, down, across = self.bias.shape
        new = 2 * grid[0] - 1, 2 * grid[1] - 1
        table = self.bias.reshape(layers, heads, down * across).transpose(1, 2)
        table = resize_grid(table, (down, across), new, self.resize)
        offsets = _offsets(grid, device)
        if kept is not None:
            offsets = offsets[kept[:, :, None], kept[:, None, :]]  # b k k
        pairs = table[:, offsets].movedim(-1, -3)  # layers heads n n, or layers b heads k k
        pairs = F.pad(pairs, (self.prefix, 0, self.prefix, 0))
        guides = [Guide(bias=bias) for bias in pairs]
        return guides * depth if layers == 1 else guides


class RotaryPositions(Positions):
    """Turns queries and keys: half of a head's pairs of channels by the row, half by the column ("axial").

    Frequencies are 100^(-i / (d / 4)). What attention then sees of two patches' places is their offset alone.
    """

    def __init__(self, head_width: int, *, prefix: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.prefix = prefix

    def guides(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[Guide | None]:
        quarter = self.head_width // 4
        frequencies = 100.0 ** (-torch.arange(quarter, device=device) / quarter)
        y, x = _places(grid, device)
        angles = torch.cat([y[:, None] * frequencies, x[:, None] * frequencies], dim=1)  # n d/2
        if kept is not None:
            angles = angles[kept][:, None]  # b 1 k d/2: the same for all heads
        angles = F.pad(angles, (0, 0, self.prefix, 0))
        angles = torch.cat([angles, angles], dim=-1)
        return [Guide(rotation=(angles.cos(), angles.sin()))] * depth


def make_positions(
    kind: PositionKind,
    *,
    grid: tuple[int, int],
    width: int,
    heads: int,
    depth: int,
    prefix: int,
    covered: int,
    where: Where,
    resize: PositionResize,
) -> Positions:
    """Positions of a kind, for `depth` blocks and a sequence that begins with `prefix` tokens which are no patches."""
    layers = depth if where == "every-layer" else 1
    if kind in ("learned", "learned-2d"):
        learned = LearnedPositions if kind == "learned" else LearnedPositions2d
        return learned(grid, width, prefix=prefix, covered=covered, where=where, layers=layers, resize=resize)
    if kind == "sincos-2d":
        return SinCosPositions(width, prefix=prefix, where=where)
    if kind == "relative-bias":
        return RelativeBias(grid, heads, prefix=prefix, layers=layers, resize=resize)
    return RotaryPositions(width // heads, prefix=prefix) if kind == "rotary-2d" else Positions()


def sincos_2d(grid: tuple[int, int], width: int, *, device: torch.device | None = None) -> Float[Tensor, "n width"]:
    """[sin x, cos x, sin y, cos y] of column and row, each times 10000^(-i / (width / 4 - 1)) (big_vision)."""
    quarter = width // 4
    frequencies = 10_000.0 ** (-torch.arange(quarter, device=device) / max(quarter - 1, 1))
    y, x = (place[:, None] * frequencies for place in _places(grid, device))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


def resize_grid(
    embedding: Float[Tensor, "l n width"], old: tuple[int, int], new: tuple[int, int], how: PositionResize
) -> Float[Tensor, "l m width"]:
    """A grid of vectors in row-major order, stretched from `old` (rows, columns) to `new`. Equals change nothing."""
    if old == new:
        return embedding
    layers, _, width = embedding.shape
    mode, corners, antialias = RESIZES[how]
    image = embedding.reshape(layers, *old, width).permute(0, 3, 1, 2).float()
    image = F.interpolate(image, size=new, mode=mode, align_corners=corners, antialias=antialias)
    return image.permute(0, 2, 3, 1).reshape(layers, new[0] * new[1], width).to(embedding.dtype)


def _places(grid: tuple[int, int], device: torch.device | None) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Row and column of every patch, in row-major order."""
    rows = torch.arange(grid[0], dtype=torch.float32, device=device).repeat_interleave(grid[1])
    return rows, torch.arange(grid[1], dtype=torch.float32, device=device).repeat(grid[0])


def _offsets(grid: tuple[int, int], device: torch.device) -> Tensor:
    """For each pair of patches, the index of its offset in a table of (2 rows - 1) x (2 columns - 1)."""
    rows, columns = (place.long() for place in _places(grid, device))
    down = rows[:, None] - rows[None] + grid[0] - 1
    across = columns[:, None] - columns[None] + grid[1] - 1
    return down * (2 * grid[1] - 1) + across
