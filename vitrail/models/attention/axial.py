"""Axial attention (1912.12180): patches see the patches of their row, then those of their column.

As in Appendix D.6 of the paper, each layer of the network is two blocks: attention along rows and an MLP, then
attention along columns and an MLP. With `sum=on`, each layer is one block, whose attention is the sum of an attention
along rows and an attention along columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from vitrail.models.attention.groups import Group, GroupSize, whole_axis, windows
from vitrail.models.attention.kind import AttentionLayer, AttentionPositions
from vitrail.models.attention.sparse import SparseAttention
from vitrail.models.cost.footprint import FootprintPrecision, bytes_each
from vitrail.models.linear.dense import Linear


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

    def parameters(self) -> int:
        return (2 if self.settings.sum else 1) * super().parameters()

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
        along = replace(self.config, attention="axial")
        return AxialAttention(along, 0), AxialAttention(along, 1)


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
