"""Linformer (2006.04768): the keys and values of all patches are projected to a fixed number of rows.

Each row is a learned weighted sum over the grid of patches. Class token and registers are keys of their own. At another
resolution, the weights are interpolated over the grid, and scaled so that their sums stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.attention.base import AttentionContext, AttentionLayer
from vitrail.models.attention.full import FullAttention, SelfAttention, attend
from vitrail.models.network import FootprintPrecision, bytes_each
from vitrail.models.positions.embedding import AttentionPositions, resize_grid
from vitrail.settings import setting

Share = Literal["none", "heads", "keys-values", "layers"]


@dataclass(frozen=True)
class LinformerSettings:
    """The settings of "linformer"."""

    rows: int = setting(64, least=1)
    """Number of rows to which keys and values are projected."""
    share: Share = "heads"
    """Sharing of the projections: none; by all heads; also by keys and values; also by all layers."""


class LinformerAttention(FullAttention):
    """Each token sees `rows` weighted sums of all patches, and class token and registers."""

    Settings = LinformerSettings
    can_reduce = False
    needs_grid = True
    depends_on_grid = True
    settings: LinformerSettings

    def problems(self) -> list[str]:
        found, name = super().problems(), f"attention={self.config.attention!r}"
        if self.config.position_embedding.inside_attention != "none":
            found.append(
                f"positions={self.config.positions!r} acts on pairs of patches, but {name} mixes the keys of all "
                "patches; choose positions that are added to tokens"
            )
        return found

    def context(self) -> AttentionContext:
        return LinformerContext(self)

    def layer_class(self) -> type[SelfAttention]:
        return LinformerSelfAttention

    def macs(self, tokens: int, read: int) -> int:
        width, rows, prefix = self.config.width, self.settings.rows, self.config.prefix
        projected = self.macs_of_shared_weights(tokens, read)
        return (2 * tokens + 2 * read) * width * width + projected + 2 * read * (rows + prefix) * width

    def macs_of_shared_weights(self, tokens: int, read: int) -> int:
        return 2 * self.settings.rows * (tokens - self.config.prefix) * self.config.width

    def kept_bytes(self, tokens: int, read: int, precision: FootprintPrecision) -> int:
        config, seen = self.config, self.settings.rows + self.config.prefix
        if precision == "bf16":
            kept, weights = 2 * tokens + 2 * read, config.heads * read * seen
        else:  # queries, keys and values are one tensor, besides the copies for the projections
            kept, weights = 4 * tokens + 2 * read, config.heads * read
        return bytes_each(precision) * ((kept + 2 * seen) * config.width + weights)

    def backward_bytes(self, tokens: int, precision: FootprintPrecision) -> int:
        return 0


class LinformerContext(AttentionContext):
    """The projections of all layers, with the shape (layers, keys and values, heads, rows, patches).

    An axis has length 1 if its members share their projections.
    """

    def __init__(self, kind: LinformerAttention) -> None:
        config, share = kind.config, kind.settings.share
        super().__init__(config.attention)
        self.grid, self.resize = config.grid, config.position_resize
        layers = 1 if share == "layers" else config.num_blocks
        parts, heads = 2 if share in ("none", "heads") else 1, config.heads if share == "none" else 1
        self.projections = nn.Parameter(torch.empty(layers, parts, heads, kind.settings.rows, prod(config.grid)))

    def for_blocks(self, grid: tuple[int, int], blocks: int, device: torch.device) -> Sequence[Tensor]:
        found = list(self._for_grid(self.projections, grid))
        return found * blocks if len(found) == 1 else found

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        return {} if grid == self.grid else {"projections": self._for_grid(self.projections.detach(), grid)}

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw projections that leave the size of keys and values as it is."""
        nn.init.normal_(self.projections, std=prod(self.grid) ** -0.5)

    def _for_grid(self, projections: Tensor, grid: tuple[int, int]) -> Float[Tensor, "layers parts heads rows n"]:
        """Return the projections for a grid."""
        if grid == self.grid:
            return projections
        *shape, rows, patches = projections.shape
        columns = projections.reshape(-1, rows, patches).transpose(1, 2)
        found = resize_grid(columns, self.grid, grid, self.resize) * (prod(self.grid) / prod(grid))
        return found.transpose(1, 2).reshape(*shape, rows, prod(grid))


class LinformerSelfAttention(SelfAttention):
    """Multi-head self-attention over projected keys and values. It has no weight for each pair of tokens."""

    weights = AttentionLayer.weights
    operands = AttentionLayer.operands

    def forward(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        assert positions is not None
        q, k, v, _ = self._operands(tokens, None, read)
        of_keys, of_values = positions.context[0], positions.context[-1]
        return self.combine(attend(q, self._projected(k, of_keys), self._projected(v, of_values)))

    def _projected(
        self, x: Float[Tensor, "b heads n d"], projection: Float[Tensor, "#heads rows patches"]
    ) -> Float[Tensor, "b heads m d"]:
        """Return the keys or values of class token and registers, and the weighted sums of those of the patches."""
        of_patches = x[:, :, self.prefix :]
        if len(projection) == 1:
            rows = torch.einsum("rn,bhnd->bhrd", projection[0], of_patches)
        else:
            rows = torch.einsum("hrn,bhnd->bhrd", projection, of_patches)
        return torch.cat([x[:, :, : self.prefix], rows], dim=2)
