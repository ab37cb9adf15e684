"""A head that reads query tokens, as in EoMT (2503.19108): each query is one mask with a class, or none. The masks are
those of objects, or of all pixels of a class, as the model learned them.

The queries enter before the last blocks of a plain Vision Transformer, which compares them with the patches. There is
no other decoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.heads.dense_head import MOST_BOXES, BoxHead, FoundBoxes, MaskHead
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Features, mlp_macs
from vitrail.models.positions.embedding import AttentionPositions

CELLS = 4
"""Cells of a mask along each side of a patch."""

HIDDEN = -1e9
"""Bias of the attention logits of a query to a patch that is not part of its mask."""


class Enlarged(nn.Module):
    """A map with twice as many rows and columns: a transposed convolution, GELU, a convolution of each channel, and a
    norm of each cell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.mix = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, maps: Float[Tensor, "b width h w"]) -> Float[Tensor, "b width h2 w2"]:
        mixed = self.mix(F.gelu(self.up(maps)))
        return self.norm(mixed.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class QueryMasks(BoxHead, MaskHead):
    """A mask and a class for each query. The logit of a cell is the product of an MLP of the query with the enlarged
    map of patch tokens.

    A row of the output is a query: a logit of each class, the logit of "no object", and a logit of each of the 4 x 4
    cells of all patches, in row-major order.

    Of an object, the pixels are those with a positive logit, the box is around them, and the score is the probability
    of the class times the mean probability of the pixels. A class of all pixels has the sum over the queries of the
    probability of the class times that of the cell.
    """

    fields = ("queries", "query_blocks")
    adds_tokens = True
    has_masks = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first = config.num_blocks - config.query_blocks
        self.num_classes = config.num_classes
        self.queries = nn.Parameter(torch.empty(config.queries, config.width))
        self.classes = Linear(config.width, config.num_classes + 1)
        self.layers = nn.ModuleList(Linear(config.width, config.width) for _ in range(3))
        self.enlarged = nn.Sequential(Enlarged(config.width), Enlarged(config.width))

    def entering(self, tokens: Float[Tensor, "b n width"], layer: int) -> Float[Tensor, "b m width"]:
        if layer != self.first:
            return tokens
        return torch.cat([tokens, self.queries.to(tokens.dtype).expand(tokens.shape[0], -1, -1)], dim=1)

    def forward(self, features: Features) -> Float[Tensor, "b queries outputs"]:
        found, patches = features.queries, features.patches
        assert found is not None, "the network adds the queries of its head"
        first, second, last = self.layers
        masks = last(F.gelu(second(F.gelu(first(found)))))
        maps = self.enlarged(torch.unflatten(patches.transpose(1, 2), 2, features.grid))
        return torch.cat([self.classes(found).float(), (masks @ maps.flatten(2)).float()], dim=2)

    @torch.no_grad()
    def focus(
        self, outputs: Float[Tensor, "b queries outputs"], grid: tuple[int, int], tokens: int, chance: float
    ) -> AttentionPositions | None:
        """Return the bias with which each query attends only to the patches of its mask, with the probability `chance`
        for each query, and to all tokens that are no patches. The sequence has `tokens` tokens."""
        if chance <= 0:
            return None
        patches, queries = math.prod(grid), outputs.shape[1]
        masks = outputs[..., self.num_classes + 1 :].reshape(-1, queries, CELLS * grid[0], CELLS * grid[1])
        seen = F.interpolate(masks, grid, mode="bilinear", align_corners=False).flatten(2) > 0
        seen |= torch.rand(len(seen), queries, 1, device=seen.device) > chance
        bias = outputs.new_zeros(len(outputs), 1, tokens, tokens)
        bias[:, 0, -queries:, tokens - queries - patches : tokens - queries].masked_fill_(~seen, HIDDEN)
        return AttentionPositions(bias)

    @torch.no_grad()
    def initialise(self) -> None:
        nn.init.normal_(self.queries)
        super().initialise()

    @classmethod
    def class_maps(
        cls, outputs: Float[Tensor, "b queries outputs"], grid: tuple[int, int]
    ) -> Float[Tensor, "b classes h w"]:
        """Return the sum over the queries of the probability of each class times that of the mask (2112.01527)."""
        classes, masks = cls._parts(outputs, grid)
        return torch.einsum("bqc,bqhw->bchw", classes, masks.sigmoid())

    @classmethod
    def objects(cls, outputs: Float[Tensor, "b queries outputs"], grid: tuple[int, int]) -> list[FoundBoxes]:
        """Return the likeliest pairs of a query and a class, as in the published evaluation. Masks without a cell are
        left out."""
        classes, masks = cls._parts(outputs, grid)
        return [_best_pairs(*each) for each in zip(classes, masks, strict=True)]

    @classmethod
    def _parts(
        cls, outputs: Float[Tensor, "b queries outputs"], grid: tuple[int, int]
    ) -> tuple[Float[Tensor, "b queries classes"], Float[Tensor, "b queries h w"]]:
        """Return the probabilities of the classes of each query, and the logits of the cells of its mask."""
        size = CELLS * grid[0], CELLS * grid[1]
        count = math.prod(size)
        return outputs[..., :-count].softmax(dim=2)[..., :-1], torch.unflatten(outputs[..., -count:], 2, size)

    @classmethod
    def problems(cls, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        kind = f"head_kind={config.head_kind!r}"
        if not 0 < config.query_blocks < config.num_blocks:
            yield (
                f"query_blocks={config.query_blocks} does not fit {kind}, whose queries enter before some of the "
                f"{config.num_blocks} blocks; choose from 1 to {config.num_blocks - 1}"
            )
        needed = {"attention": "full", "reversible": False, "final_norm": "tokens"}
        for name, value in needed.items():
            if getattr(config, name) != value:
                yield f"{name}={getattr(config, name)!r} does not fit {kind}, which adds tokens; choose {value!r}"
        if config.position_embedding.inside_attention != "none":
            yield (
                f"positions={config.positions!r} does not fit {kind}, whose queries have no positions; choose 'learned'"
            )
        elif config.positions_place != "stem":
            yield f"positions_at={config.positions_place!r} does not fit {kind}, which adds tokens; choose 'stem'"

    @classmethod
    def macs(cls, config: Any) -> int:
        width, queries, patches = config.width, config.queries, math.prod(config.grid)
        tokens, attention = config.tokens, config.attention_kind
        more = attention.macs(tokens + queries, tokens + queries) - attention.macs(tokens, tokens)
        more += queries * mlp_macs(config)
        rows = width * (config.num_classes + 1 + 3 * width + CELLS**2 * patches)
        maps = 4 * patches * width * (width + 9) + 16 * patches * width * (width + 9)
        return config.query_blocks * more + queries * rows + maps

    @classmethod
    def kept_values(cls, config: Any) -> int:
        width, queries, patches = config.width, config.queries, math.prod(config.grid)
        blocks = config.query_blocks * queries * (10 * width + 2 * config.mlp_width)
        return blocks + queries * (6 * width + CELLS**2 * patches) + 5 * (4 + 16) * patches * width


def _best_pairs(classes: Float[Tensor, "queries classes"], masks: Float[Tensor, "queries h w"]) -> FoundBoxes:
    """Return the pairs of a query and a class with the highest probabilities. The boxes are those around the cells."""
    rows = (masks > 0).flatten(1).any(dim=1).nonzero()[:, 0]
    scores, places = classes[rows].flatten().sort(descending=True, stable=True)
    count = classes.shape[1]
    mask_rows, labels = rows[places[:MOST_BOXES] // count], places[:MOST_BOXES] % count
    ends = []
    for axis in (1, 2):  # the columns of cells, then the rows
        seen = (masks > 0).any(dim=axis).long()
        first, behind = seen.argmax(dim=1), seen.shape[1] - seen.flip(1).argmax(dim=1)
        ends.append(torch.stack([first, behind]).to(masks.dtype) / seen.shape[1])
    (left, right), (top, bottom) = ends
    boxes = torch.stack([left, top, right, bottom], dim=1)[mask_rows]
    return FoundBoxes(boxes, scores[:MOST_BOXES], labels, masks, mask_rows)
