"""Heads for masks: a linear layer of each patch token, as in the linear protocol of DINOv2 (2304.07193), and a small
decoder with finer maps."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.heads.dense_head import MaskHead
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Features


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
