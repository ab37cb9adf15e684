"""From images to tokens, and from tokens to one vector: patches, masks, class and register tokens, and pooling."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn

from vitrail.models.attention.full import attend, in_format_of
from vitrail.models.blocks import make_mlp
from vitrail.models.linear.dense import Linear, initialise_parts
from vitrail.models.network import Features, image_sides
from vitrail.models.reduction import size_bias
from vitrail.models.vit_config import Activation, Pool

Replace = Callable[[Tensor], Tensor]
"""A function that receives patch embeddings (b, n, width), before positions are added, and returns their
replacements."""


class Patches(NamedTuple):
    """The patches of a batch of images that are encoded."""

    grid: tuple[int, int]
    """Numbers of rows and columns of patches in an image."""
    kept: Int64[Tensor, "b k"] | None = None
    """Indices of the encoded patches of each image in row-major order of the grid, or None for all patches."""
    replace: Replace | None = None
    """Replaces the patch embeddings before positions are added, or None."""


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


class AttentionPool(nn.Module):
    """Multi-head attention pooling (MAP) of big_vision: a learned query attends to all tokens, and an MLP follows."""

    def __init__(self, width: int, heads: int, mlp_width: int, activation: Activation, norm_eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.probe = nn.Parameter(torch.empty(1, 1, width))
        self.query = Linear(width, width)
        self.key_value = Linear(width, 2 * width)
        self.out = Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = make_mlp(width, mlp_width, activation)

    def forward(
        self, tokens: Float[Tensor, "b n width"], sizes: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b width"]:
        b, n, width = tokens.shape
        each_head = self.heads, width // self.heads
        q = self.query(self.probe.to(tokens.dtype)).view(1, 1, *each_head).transpose(1, 2).expand(b, -1, -1, -1)
        k, v = self.key_value(tokens).view(b, n, 2, *each_head).permute(2, 0, 3, 1, 4).unbind(0)
        x = self.out(attend(q, k, v, size_bias(sizes)).transpose(1, 2).reshape(b, 1, width))
        x = in_format_of(self.norm, x)  # a residual stream like that of the blocks: see VisionTransformer.embedding
        return (x + self.mlp(self.norm(x)))[:, 0]

    @torch.no_grad()
    def initialise(self) -> None:
        nn.init.xavier_uniform_(self.probe[0])  # a (1, width) matrix, as flax counts its fans
        initialise_parts(self.query)
        initialise_parts(self.key_value, 2)
        initialise_parts(self.out)


def pool(
    features: Features, how: Pool, attention: AttentionPool | None, sizes: Float[Tensor, "b n"] | None = None
) -> Float[Tensor, "b pooled"]:
    """Return the pooled vector of each image by the method `how` (see `ViTConfig.pool`).

    `sizes` are the numbers of patches that the tokens stand for, which weigh them. By default every token stands for
    one patch.
    """
    if how == "map":
        assert attention is not None
        first = [] if features.cls is None else [features.cls[:, None]]
        tokens = torch.cat([*first, features.registers, features.patches], dim=1)
        return attention(tokens) if sizes is None else attention(tokens, sizes)
    if how == "gap":
        return _mean(features.patches, sizes)
    assert features.cls is not None
    if how == "cls":
        return features.cls
    if how == "cls+dist":
        return torch.cat([features.cls, features.registers[:, 0]], dim=1) / 2
    return torch.cat([features.cls, _mean(features.patches, sizes)], dim=1)


def _mean(patches: Float[Tensor, "b n width"], sizes: Float[Tensor, "b m"] | None) -> Float[Tensor, "b width"]:
    """Return the mean of the patches. `sizes` also has the tokens before them."""
    if sizes is None:
        return patches.mean(dim=1)
    sizes = sizes[:, -patches.shape[1] :]
    return (patches * (sizes / sizes.sum(dim=1, keepdim=True))[:, :, None]).sum(dim=1)
