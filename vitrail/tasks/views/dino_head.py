"""The projection of DINO: three dense layers, and cosine similarities with learned prototypes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["DinoHead", "Prototypes"]


class Prototypes(nn.Linear):
    """A linear layer without bias whose weights have length 1 for each output, or trained lengths that start at 1."""

    lengths: nn.Parameter | None

    def __init__(self, width: int, outputs: int, *, unit: bool) -> None:
        super().__init__(width, outputs, bias=False)
        self.register_parameter("lengths", None if unit else nn.Parameter(torch.ones(outputs, 1)))

    def forward(self, vectors: Float[Tensor, "b width"]) -> Float[Tensor, "b outputs"]:
        """Return the product of each vector with each prototype.

        The products are computed in float32, because a low temperature multiplies their rounding errors.
        """
        with torch.autocast(vectors.device.type, enabled=False):
            weight = F.normalize(self.weight, dim=1)
            return F.linear(vectors.float(), weight if self.lengths is None else self.lengths * weight)


class DinoHead(nn.Module):
    """Dense layers with GELU to a bottleneck of length 1, and its products with prototypes."""

    def __init__(self, width: int, hidden: int, bottleneck: int, outputs: int, *, unit: bool) -> None:
        super().__init__()
        self.hidden = hidden
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.prototypes = Prototypes(bottleneck, outputs, unit=unit)

    def forward(self, embeddings: Float[Tensor, "b width"]) -> Float[Tensor, "b outputs"]:
        return self.prototypes(F.normalize(self.layers(embeddings).float(), dim=1))

    @property
    def macs(self) -> int:
        """Number of multiply-accumulates per embedding."""
        return sum(weight.numel() for name, weight in self.named_parameters() if name.endswith("weight"))

    @property
    def kept_bytes(self) -> int:
        """Number of bytes per embedding that a step holds for the backward pass and the loss."""
        return 4 * (4 * self.hidden + 3 * self.prototypes.in_features + 3 * self.prototypes.out_features)
