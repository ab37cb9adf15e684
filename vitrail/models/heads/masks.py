"""Heads for masks: a linear layer of each patch token, as in the linear protocol of DINOv2 (2304.07193), a small
decoder with finer maps, and queries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.heads.dense_head import MOST_BOXES, BoxHead, FoundBoxes, MaskHead
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Features, mlp_macs
from vitrail.models.positions.embedding import AttentionPositions


class PatchClasses(MaskHead):
    """The logits of the classes of each patch, in row-major order of the grid."""

    cells: ClassVar[int] = 1
    """Number of rows of the outputs along each side of a patch."""
    layer_inputs: ClassVar[int | None] = None
    """Number of values from which the last layer computes the logits of a row. By default it is the width of tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = Linear(self.layer_inputs or config.width, config.num_classes)

    def forward(self, features: Features) -> Float[Tensor, "b cells classes"]:
        return self.layer(features.patches).float()

    @torch.no_grad()
    def initialise(self) -> None:
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    @classmethod
    def class_maps(
        cls, outputs: Float[Tensor, "b cells classes"], grid: tuple[int, int]
    ) -> Float[Tensor, "b classes h w"]:
        return outputs.transpose(1, 2).reshape(len(outputs), -1, cls.cells * grid[0], cls.cells * grid[1])

    @classmethod
    def macs(cls, config: Any) -> int:
        return math.prod(config.grid) * config.width * config.num_classes

    @classmethod
    def kept_values(cls, config: Any) -> int:
        return math.prod(config.grid) * (config.width + config.num_classes)


WIDTHS = 128, 64
"""Channels of the maps with 2 and with 4 cells along each side of a patch."""

GROUPS = 16
"""Groups of the norms (1803.08494), which do not depend on the number of images."""


class FinePatchClasses(PatchClasses):
    """The logits of the classes of 4 x 4 cells of each patch, in row-major order of all cells.

    The patch tokens of the middle of the network are read beside the last ones, because they know better where an edge
    is. Two transposed convolutions double the resolution, and a convolution of 3 x 3 cells smooths the result, so that
    things thinner than a patch can be predicted. The logits of a linear layer of the tokens are added to theirs. They
    learn rare classes in a tenth of the steps (docs/log.md).
    """

    cells = 4
    layer_inputs = WIDTHS[-1]
    reads_middle = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        first, second = WIDTHS
        self.middle_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.direct = Linear(2 * config.width, config.num_classes)
        self.up = nn.Sequential(
            nn.ConvTranspose2d(2 * config.width, first, 2, stride=2), nn.GroupNorm(GROUPS, first), nn.GELU(),
            nn.ConvTranspose2d(first, second, 2, stride=2), nn.GroupNorm(GROUPS, second), nn.GELU(),
            nn.Conv2d(second, second, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, second), nn.GELU(),
        )  # fmt: skip

    def forward(self, features: Features) -> Float[Tensor, "b cells classes"]:
        tokens = features.with_middle(self.middle_norm)
        maps = self.up(torch.unflatten(tokens.transpose(1, 2), 2, features.grid))
        coarse = torch.unflatten(self.direct(tokens).float().transpose(1, 2), 2, features.grid)
        direct = F.interpolate(coarse, scale_factor=float(self.cells), mode="bilinear", align_corners=False)
        return self.layer(maps.flatten(2).transpose(1, 2)).float() + direct.flatten(2).transpose(1, 2)

    @torch.no_grad()
    def initialise(self) -> None:
        self.middle_norm.reset_parameters()
        nn.init.zeros_(self.direct.weight)
        nn.init.zeros_(self.direct.bias)
        for module in self.up:
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.GroupNorm):
                module.reset_parameters()
        super().initialise()

    @classmethod
    def macs(cls, config: Any) -> int:
        first, second = WIDTHS
        cells = first * (2 * config.width + 4 * second) + 4 * second * (9 * second + config.num_classes)
        return math.prod(config.grid) * (4 * cells + 2 * config.width * config.num_classes)

    @classmethod
    def kept_values(cls, config: Any) -> int:
        first, second = WIDTHS
        return math.prod(config.grid) * (3 * config.width + 12 * first + 16 * (6 * second + config.num_classes))


# --- queries, as in EoMT (2503.19108): each query is one mask with a class, or none. The masks are those of objects, or
# of all pixels of a class, as the model learned them. The queries enter before the last blocks of a plain Vision
# Transformer, which compares them with the patches. There is no other decoder.


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
