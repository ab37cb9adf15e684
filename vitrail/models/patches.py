"""Images to tokens: the patch projection, and the class token in front of the patches."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["ClassToken", "PatchEmbedding"]


class PatchEmbedding(nn.Module):
    """Cuts an image into patches and projects each to a token: `x_p E` of equation 1.

    The projection is a matrix product over flattened patches. A convolution whose stride is its kernel is the same
    arithmetic, and its kernel reshaped to (width, channels * patch height * patch width) is this weight.
    """

    def __init__(self, patch_size: tuple[int, int], channels: int, width: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.projection = nn.Linear(channels * patch_size[0] * patch_size[1], width)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n width"]:
        """Tokens in row-major order of the grid; the patch must divide the image."""
        b, c, h, w = images.shape
        ph, pw = self.patch_size
        patches = images.reshape(b, c, h // ph, ph, w // pw, pw)
        patches = patches.permute(0, 2, 4, 1, 3, 5)  # b grid_h grid_w c ph pw
        return self.projection(patches.reshape(b, (h // ph) * (w // pw), c * ph * pw))


class ClassToken(nn.Module):
    """Puts one learned token before the patch tokens: `x_class` of equation 1. It starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, tokens: Float[Tensor, "b n width"]) -> Float[Tensor, "b m width"]:
        return torch.cat([self.token.to(tokens.dtype).expand(tokens.shape[0], -1, -1), tokens], dim=1)
