"""The random weights with which published networks start, beside those of the ViT paper (`VisionTransformer`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

InitialWeights = Literal["paper", "mae", "moco", "timm", "dinov2", "beit"]

Draw = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Distributions:
    """Distributions of the initial weights of one publication. Biases of dense layers start at 0."""

    matrix: Draw
    """Weights of dense layers."""
    token: Draw
    """Class token and registers."""
    patches: Draw | None = None
    """Weights of the patch projection, as a matrix. By default they and the biases are uniform, as in a new
    `nn.Conv2d`."""
    patch_bias: bool = False
    """True to start the biases of the patch projection as in a new `nn.Conv2d`, and False to start them at 0."""
    splits_qkv: bool = False
    """True to draw queries, keys and values as three matrices."""
    by_depth: bool = False
    """True to divide the output layers of both branches of block l, counted from 1, by sqrt(2 l)."""

    @torch.no_grad()
    def draw_dense(self, module: nn.Module) -> None:
        """Draw the weights of all dense layers in a module, and set their biases to 0."""
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear):
                for part in layer.weight.chunk(3 if self.splits_qkv and name.endswith("qkv") else 1):
                    self.matrix(part)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    @torch.no_grad()
    def draw(self, network: Any) -> None:
        """Draw new weights for a Vision Transformer. Norms, positions, LayerScale, a hybrid's root and biases of a
        linear head keep theirs."""
        head_bias = network.head.bias.clone() if isinstance(network.head, nn.Linear) else None
        self.draw_dense(network)
        if head_bias is not None:
            network.head.bias.copy_(head_bias)
        projection = network.patches.projection
        bound = projection.weight[0].numel() ** -0.5
        (self.patches or partial(nn.init.uniform_, a=-bound, b=bound))(
            projection.weight.view(len(projection.weight), -1)
        )
        if projection.bias is not None:
            width = bound if self.patch_bias or self.patches is None else 0.0
            nn.init.uniform_(projection.bias, -width, width)
        for token in network.prefix.parameters():
            self.token(token)
        for number, block in enumerate(network.blocks if self.by_depth else (), start=1):
            for layer in (block.attention.out, block.mlp.down):
                layer.weight.div_(math.sqrt(2 * number))


_NORMAL = partial(nn.init.trunc_normal_, std=0.02)
"""Normal numbers, which PyTorch and timm truncate at -2 and 2, or 100 standard deviations."""

_TRUNCATED = partial(nn.init.trunc_normal_, std=0.02, a=-0.02, b=0.02)
"""Normal numbers that are truncated at one standard deviation, so that theirs is 0.0108."""

INITIAL_WEIGHTS: dict[InitialWeights, Distributions] = {
    "mae": Distributions(nn.init.xavier_uniform_, _NORMAL, nn.init.xavier_uniform_, patch_bias=True),
    "moco": Distributions(
        nn.init.xavier_uniform_, partial(nn.init.normal_, std=1e-6), nn.init.xavier_uniform_, splits_qkv=True
    ),
    "timm": Distributions(_NORMAL, _NORMAL),
    "dinov2": Distributions(_NORMAL, partial(nn.init.normal_, std=1e-6)),
    "beit": Distributions(_TRUNCATED, _TRUNCATED, _TRUNCATED, by_depth=True),
}
"""Distributions of publications: 2111.06377, 2104.02057, timm (also DINO, iBOT, DeiT and DeiT III), 2304.07193 and
2106.08254."""
