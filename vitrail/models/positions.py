"""Position embeddings. Here: the paper's default, one learned vector per token in raster order."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["LearnedPositions"]


class LearnedPositions(nn.Module):
    """Adds a learned vector to each token: `E_pos` of equation 1 ("1-D", paper section 3.1 and Table 8)."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(1, tokens, width))

    def forward(self, tokens: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        return tokens + self.embedding.to(tokens.dtype)
