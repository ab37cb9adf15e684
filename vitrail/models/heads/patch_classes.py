"""A head for masks: a linear layer of each patch token, as in the linear protocol of DINOv2 (2304.07193)."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.heads.dense_head import DenseHead
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Features


class PatchClasses(DenseHead):
    """The logits of the classes of each patch, in row-major order of the grid."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = Linear(config.width, config.num_classes)

    def forward(self, features: Features) -> Float[Tensor, "b patches classes"]:
        return self.layer(features.patches).float()

    @torch.no_grad()
    def initialise(self) -> None:
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    @classmethod
    def class_maps(
        cls, outputs: Float[Tensor, "b patches classes"], grid: tuple[int, int]
    ) -> Float[Tensor, "b classes h w"]:
        return outputs.transpose(1, 2).reshape(len(outputs), -1, *grid)

    @classmethod
    def macs(cls, config: Any) -> int:
        return math.prod(config.grid) * config.width * config.num_classes

    @classmethod
    def kept_values(cls, config: Any) -> int:
        return math.prod(config.grid) * (config.width + config.num_classes)
