"""Modules that turn images into tokens: the patch projection, mask tokens, and class and register tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn

from vitrail.models.linear.dense import Linear
from vitrail.models.tokens.grids import image_sides

Replace = Callable[[Tensor], Tensor]
"""A function that receives patch embeddings (b, n, width), before positions are added, and returns their
replacements."""


class PatchEmbedding(nn.Module):
    """Cuts an image into patches and projects each to a token: `x_p E` of equation 1.

    The projection is a matrix product over flattened patches. A convolution whose stride equals its kernel size
    computes the same. The kernel of that convolution, reshaped to (width, channels * patch height * patch width), is
    the weight of this projection.
    """

    def __init__(self, patch_size: tuple[int, int], channels: int, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.projection = Linear(channels * patch_size[0] * patch_size[1], width, bias=bias)

    def forward(
        self, images: Float[Tensor, "b c h w"], kept: Int64[Tensor, "b k"] | None = None
    ) -> Float[Tensor, "b n width"]:
        """Return one token per patch, in row-major order of the grid. With `kept`, return only the tokens at these
        indices. Rows and columns of pixels that fill no patch are ignored."""
        patches = cut_patches(images, self.patch_size).flatten(2)
        if kept is not None:
            patches = patches[torch.arange(images.shape[0], device=kept.device)[:, None], kept]
        return self.projection(patches)


def cut_patches(images: Shaped[Tensor, "b c h w"], patch_size: tuple[int, int]) -> Shaped[Tensor, "b n c ph pw"]:
    """Return the patches of images in row-major order of the grid. Rows and columns of pixels that fill no patch are
    ignored."""
    (ph, pw), (h, w) = patch_size, image_sides(images)
    images = images[:, :, : -(h % ph) or None, : -(w % pw) or None]
    patches = torch.unflatten(torch.unflatten(images, 3, (w // pw, pw)), 2, (h // ph, ph))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # b (grid_h grid_w) c ph pw


class PrefixTokens(nn.Module):
    """Puts learned tokens before the patch tokens: `x_class` of equation 1, then registers (2309.16588).

    The class token starts at zero. Registers start at normal numbers of standard deviation 0.02.
    """

    def __init__(self, width: int, *, class_token: bool = True, registers: int = 0) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.zeros(1, 1, width)) if class_token else None
        self.registers = nn.Parameter(torch.empty(1, registers, width)) if registers else None

    def forward(self, tokens: Float[Tensor, "b n width"]) -> Float[Tensor, "b m width"]:
        prefix = [part for part in (self.cls, self.registers) if part is not None]
        if not prefix:
            return tokens
        return torch.cat([*(part.to(tokens.dtype).expand(tokens.shape[0], -1, -1) for part in prefix), tokens], dim=1)

    @torch.no_grad()
    def initialise(self) -> None:
        if self.cls is not None:
            nn.init.zeros_(self.cls)
        if self.registers is not None:
            nn.init.normal_(self.registers, std=0.02)


def mask_tokens(token: Float[Tensor, " width"], masked: Bool[Tensor, "b n"]) -> Replace:
    """Return a function for `VisionTransformer.encode` that replaces the embeddings of masked patches by the mask
    token."""

    def replace(embeddings: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        return torch.where(masked[:, :, None], token.to(embeddings.dtype), embeddings)

    return replace
