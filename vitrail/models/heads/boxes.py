"""Heads for boxes: one box for each cell of a small pyramid of feature maps, or for each detection token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.heads.dense_head import MOST_BOXES, BoxHead, FoundBoxes
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Features

# --- the pyramid
#
# It has maps of half the patch size, the patch size, and twice the patch size, made from tokens of one size (ViTDet,
# 2203.16527): those after the last block and those after the first half of the blocks, which raise the average
# precision of a frozen DINOv2-S by 4 points (docs/log.md). Each cell predicts one box, as in FCOS (1904.01355), so the
# head learns from a few hundred images, where queries need many epochs.


NARROWEST, WIDEST = 64, 256
"""Least and largest number of channels of the feature maps, which have a third of the network's width."""

GROUPS = 16
"""Groups of the norms (1803.08494), which do not depend on the number of images."""

LAYERS = 2
"""Convolutions before the last one, for classes and for distances."""

PRIOR = 0.01
"""Probability of each class at the beginning (RetinaNet, 1708.02002)."""

OVERLAP = 0.6
"""Intersection over union above which two boxes of one class are the same object."""

CANDIDATES = 1000
"""Number of boxes of an image among which those that overlap are sought."""

FIRST_DISTANCE = 1.5
"""Distance from a cell to each side of its box at the beginning, in cells."""


class Pyramid(BoxHead):
    """Boxes from three feature maps, of which the finest has four cells for a patch.

    A row of the output is a cell: left, top, right and bottom of its box as fractions of the input, and a logit of each
    class. The rows of the finest map come first, in row-major order.
    """

    reads_middle = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = _width(config)
        self.middle_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.up = nn.ConvTranspose2d(2 * config.width, width, 2, stride=2)
        self.same = nn.Conv2d(2 * config.width, width, 1)
        self.down = nn.Conv2d(2 * config.width, width, 2, stride=2)
        self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, width) for _ in range(3))
        self.class_tower, self.box_tower = _tower(width), _tower(width)
        self.class_logits = nn.Conv2d(width, config.num_classes, 3, padding=1)
        self.distances = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, features: Features) -> Float[Tensor, "b cells outputs"]:
        grid = rows, columns = features.grid
        image = torch.unflatten(features.with_middle(self.middle_norm).transpose(1, 2), 2, grid)
        even = F.pad(image, (0, columns % 2, 0, rows % 2), mode="replicate")
        maps = [
            norm(each)
            for norm, each in zip(self.norms, (self.up(image), self.same(image), self.down(even)), strict=True)
        ]
        outputs = torch.cat([self._of_map(each) for each in maps], dim=1)
        places, sides = cells_of(grid, outputs.device)
        reach = F.softplus(outputs[..., :4]) * sides[:, None] / outputs.new_tensor([columns, rows, columns, rows])
        boxes = torch.cat([places - reach[..., :2], places + reach[..., 2:]], dim=2)
        return torch.cat([boxes, outputs[..., 4:]], dim=2)

    def _of_map(self, features: Float[Tensor, "b width h w"]) -> Float[Tensor, "b cells outputs"]:
        """Return four numbers for the distances and the logits of the classes, for each cell of a map."""
        found = self.distances(self.box_tower(features)), self.class_logits(self.class_tower(features))
        return torch.cat(found, dim=1).float().flatten(2).transpose(1, 2)

    @torch.no_grad()
    def initialise(self) -> None:
        super().initialise()
        starts = -math.log((1 - PRIOR) / PRIOR), math.log(math.expm1(FIRST_DISTANCE))
        for last, start in zip((self.class_logits, self.distances), starts, strict=True):
            assert last.bias is not None
            nn.init.normal_(last.weight, std=0.01)
            nn.init.constant_(last.bias, start)

    @classmethod
    def objects(cls, outputs: Float[Tensor, "b cells outputs"], grid: tuple[int, int]) -> list[FoundBoxes]:
        return [best_boxes(image[:, :4], scores) for image, scores in zip(outputs, cls.scores(outputs), strict=True)]

    @classmethod
    def row_logits(cls, outputs: Float[Tensor, "b cells outputs"]) -> Float[Tensor, "b cells classes"]:
        return outputs[..., 4:]

    @classmethod
    def scores(cls, outputs: Float[Tensor, "b cells outputs"]) -> Float[Tensor, "b cells classes"]:
        return outputs[..., 4:].sigmoid()

    @classmethod
    def macs(cls, config: Any) -> int:
        rows, columns = config.grid
        patches, coarse = rows * columns, -(-rows // 2) * -(-columns // 2)
        width = _width(config)
        first = 2 * config.width * width * (4 * patches + patches + 4 * coarse)
        each = 9 * width * (2 * LAYERS * width + config.num_classes + 4)
        return first + each * (4 * patches + patches + coarse)

    @classmethod
    def kept_values(cls, config: Any) -> int:
        rows, columns = config.grid
        cells = 5 * rows * columns + -(-rows // 2) * -(-columns // 2)
        return 3 * config.width * rows * columns + cells * _width(config) * (2 + 6 * LAYERS)


def cells_of(grid: tuple[int, int], device: torch.device) -> tuple[Float[Tensor, "cells 2"], Float[Tensor, " cells"]]:
    """Return the centre (x, y) of each row's cell, as fractions of an input with this grid of patches, and the side of
    the cell in patches."""
    rows, columns = grid
    places, sides = [], []
    for side, height, width in (
        (0.5, 2 * rows, 2 * columns),
        (1.0, rows, columns),
        (2.0, -(-rows // 2), -(-columns // 2)),
    ):
        down = (torch.arange(height, device=device) + 0.5) * (side / rows)
        across = (torch.arange(width, device=device) + 0.5) * (side / columns)
        places.append(torch.stack([across.repeat(height), down.repeat_interleave(width)], dim=1))
        sides.append(torch.full((height * width,), side, device=device))
    return torch.cat(places), torch.cat(sides)


def best_boxes(boxes: Float[Tensor, "n 4"], scores: Float[Tensor, "n classes"]) -> FoundBoxes:
    """Return the boxes with the highest scores. Of boxes of one class that overlap by more than `OVERLAP`, only the one
    with the highest score stays (non-maximum suppression)."""
    values, places = scores.flatten().topk(min(CANDIDATES, scores.numel()))
    rows, labels = places // scores.shape[1], places % scores.shape[1]
    boxes = boxes[rows]
    same = (overlaps(boxes, boxes) > OVERLAP) & (labels[:, None] == labels)
    kept: list[int] = []
    left = torch.ones(len(values), dtype=torch.bool)
    for place in range(len(values)):
        if left[place]:
            kept.append(place)
            left &= ~same[place]
            if len(kept) == MOST_BOXES:
                break
    chosen = torch.tensor(kept, dtype=torch.int64)
    return FoundBoxes(boxes[chosen].clamp(0, 1), values[chosen], labels[chosen], rows=rows[chosen])


def overlaps(first: Float[Tensor, "n 4"], second: Float[Tensor, "m 4"]) -> Float[Tensor, "n m"]:
    """Return the intersection over union of each pair of boxes."""
    ends = torch.minimum(first[:, None, 2:], second[None, :, 2:]) - torch.maximum(
        first[:, None, :2], second[None, :, :2]
    )
    common = ends.clamp(min=0).prod(dim=2)
    areas = [(each[:, 2:] - each[:, :2]).clamp(min=0).prod(dim=1) for each in (first, second)]
    return common / (areas[0][:, None] + areas[1][None] - common).clamp(min=1e-12)


def _width(config: Any) -> int:
    width: int = min(WIDEST, max(NARROWEST, GROUPS * round(config.width / (3 * GROUPS))))
    return width


def _tower(width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, width), nn.SiLU()]
    return nn.Sequential(*layers)


# --- detection tokens, as in YOLOS (2106.00666): each register token is one object or none


TOKENS = 100
"""Number of detection tokens unless the config has registers."""


class ThreeLayers(nn.Module):
    """An MLP of three layers with ReLU between them. The hidden layers are as wide as the input."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(width, each) for each in (width, width, outputs))

    def forward(self, tokens: Float[Tensor, "b n width"]) -> Float[Tensor, "b n outputs"]:
        first, second, last = self.layers
        return last(F.relu(second(F.relu(first(tokens)))))


class DetectionTokens(BoxHead):
    """One box for each register token, which the blocks turn into an object or into "no object".

    A row of the output is a token: left, top, right and bottom of its box as fractions of the input, a logit of each
    class, and the logit of "no object". The box is computed as its centre and its size, so that it can end outside of
    the input.
    """

    fields = ("registers", "positions_cover", "positions_at")
    reads_patches = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.classes = ThreeLayers(config.width, config.num_classes + 1)
        self.boxes = ThreeLayers(config.width, 4)

    def forward(self, features: Features) -> Float[Tensor, "b tokens outputs"]:
        tokens = features.registers
        centres, sizes = self.boxes(tokens).float().sigmoid().split(2, dim=2)
        return torch.cat([centres - sizes / 2, centres + sizes / 2, self.classes(tokens).float()], dim=2)

    @classmethod
    def objects(cls, outputs: Float[Tensor, "b tokens outputs"], grid: tuple[int, int]) -> list[FoundBoxes]:
        """Return the likeliest class of each token with its box. Boxes that overlap all stay, because each object has
        one token."""
        scores, labels = cls.scores(outputs).max(dim=2)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :MOST_BOXES]
        boxes = outputs[..., :4].clamp(0, 1)
        return [
            FoundBoxes(boxes[image][rows], scores[image][rows], labels[image][rows], rows=rows)
            for image, rows in enumerate(order)
        ]

    @classmethod
    def row_logits(cls, outputs: Float[Tensor, "b tokens outputs"]) -> Float[Tensor, "b tokens classes"]:
        return outputs[..., 4:-1]

    @classmethod
    def scores(cls, outputs: Float[Tensor, "b tokens outputs"]) -> Float[Tensor, "b tokens classes"]:
        return outputs[..., 4:].softmax(dim=2)[..., :-1]

    @classmethod
    def needed(cls, config: Any) -> dict[str, Any]:
        if config.head_kind == "detection-tokens":
            return {}
        covered = {"positions_cover": "all"} if config.positions == "learned" else {}
        return {"registers": TOKENS, **covered}

    @classmethod
    def problems(cls, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if not config.registers:
            yield (
                f"registers=0 does not fit head_kind={config.head_kind!r}, whose detection tokens are the registers; "
                f"choose registers={TOKENS}"
            )

    @classmethod
    def macs(cls, config: Any) -> int:
        return config.registers * config.width * (4 * config.width + config.num_classes + 1 + 4)

    @classmethod
    def kept_values(cls, config: Any) -> int:
        return config.registers * (9 * config.width + config.num_classes + 9)
