"""Positions that are added to tokens: learned vectors, learned rows and columns, or sines and cosines."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.positions.embedding import Positions, ViTConfig, patch_places, resize_grid, separate_layers


class _Added(Positions):
    """Positions that are added to the patches, and to the first `covered` of the `prefix` tokens before the patches."""

    covered: int = 0

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.place = config.positions_place

    def forward(
        self,
        tokens: Float[Tensor, "b n width"],
        grid: tuple[int, int] | None = None,
        layer: int = 0,
        kept: Int64[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "b n width"]:
        grid = self.grid if grid is None else grid
        assert grid is not None
        if layer and self.place == "stem":
            return tokens
        layer = layer if self.place == "every-layer" else 0
        sequence = self._sequence(grid, layer, tokens.device)
        if kept is not None:
            prefix = torch.arange(self.prefix, device=kept.device).expand(kept.shape[0], -1)
            sequence = F.embedding(torch.cat([prefix, self.prefix + kept], dim=1), sequence[0])
        return tokens + sequence.to(tokens.dtype)

    def _sequence(self, grid: tuple[int, int], layer: int, device: torch.device) -> Float[Tensor, "1 n width"]:
        raise NotImplementedError

    def _join(self, first: Float[Tensor, "1 covered width"], patches: Float[Tensor, "1 n width"]) -> Tensor:
        blank = patches.new_zeros(1, self.prefix - self.covered, patches.shape[2])
        return torch.cat([first, blank, patches], dim=1)


class _Learned(_Added):
    """Learned positions, which are made for one grid."""

    depends_on_grid = True
    grid: tuple[int, int]

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.grid = config.grid
        self.covered = config.covered


class LearnedPositions(_Learned):
    """A learned vector for each token: `E_pos` of equation 1 ("1-D" in the paper's Table 8)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        places = self.covered + math.prod(self.grid)
        self.embedding = nn.Parameter(torch.empty(separate_layers(config), places, config.width))

    def _sequence(self, grid: tuple[int, int], layer: int, device: torch.device) -> Float[Tensor, "1 n width"]:
        whole = self.embedding[layer : layer + 1]
        if grid == self.grid and self.covered == self.prefix:
            return whole
        first, patches = whole[:, : self.covered], whole[:, self.covered :]
        return self._join(first, resize_grid(patches, self.grid, grid, self.resize))

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        if grid == self.grid:
            return {}
        whole = self.embedding.detach()
        patches = resize_grid(whole[:, self.covered :], self.grid, grid, self.resize)
        return {"embedding": torch.cat([whole[:, : self.covered], patches], dim=1)}


class LearnedPositions2d(_Learned):
    """A learned vector of length D / 2 for each column and for each row: [X, Y] of Appendix D.4."""

    @classmethod
    def problems(cls, config: ViTConfig) -> list[str]:
        width = config.width
        return [f"positions='learned-2d' has two halves: width={width} is not divisible by 2"] if width % 2 else []

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        layers, width = separate_layers(config), config.width
        self.first = nn.Parameter(torch.empty(layers, self.covered, width)) if self.covered else None
        self.columns = nn.Parameter(torch.empty(layers, self.grid[1], width // 2))
        self.rows = nn.Parameter(torch.empty(layers, self.grid[0], width // 2))

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

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        axes = (("columns", self.columns, grid[1]), ("rows", self.rows, grid[0]))
        return {
            name: resize_grid(axis.detach(), (axis.shape[1], 1), (size, 1), self.resize)
            for name, axis, size in axes
            if axis.shape[1] != size
        }


class SinCosPositions(_Added):
    """Fixed sines and cosines that are added to patches only. They are computed for each grid, so they are never
    resized."""

    lowest: ClassVar[bool] = True
    """True if the lowest frequency is 1 / 10000, as in big_vision."""

    @classmethod
    def problems(cls, config: ViTConfig) -> list[str]:
        name, width = config.positions, config.width
        return [f"positions={name!r} has four parts: width={width} is not divisible by 4"] if width % 4 else []

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.width = config.width

    def _sequence(self, grid: tuple[int, int], layer: int, device: torch.device) -> Float[Tensor, "1 n width"]:
        patches = sincos_2d(grid, self.width, device=device, lowest=self.lowest)[None]
        return self._join(patches[:, :0], patches)


class SinCosMaePositions(SinCosPositions):
    """Sines and cosines with the frequencies of MoCo v3 and MAE."""

    lowest = False


def sincos_2d(
    grid: tuple[int, int], width: int, *, device: torch.device | None = None, lowest: bool = True
) -> Float[Tensor, "n width"]:
    """Return [sin x, cos x, sin y, cos y] for every patch. Here x is the column times the frequencies, and y is the row
    times the frequencies.

    With `lowest`, the frequencies are 10000^(-i / (width / 4 - 1)), with i from 0 to width / 4 - 1, as in big_vision.
    Without it, they are 10000^(-i / (width / 4)), as in MoCo v3 (2104.02057) and MAE (2111.06377).
    """
    quarter = width // 4
    frequencies = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float32, device=device) / max(quarter - lowest, 1))
    y, x = (place[:, None] * frequencies for place in patch_places(grid, device))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)
