"""The parts of a tokenizer above its encoder: a projection, a codebook, and a decoder that restores the pixels."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.linear.dense import Linear
from vitrail.models.positions import sincos_2d
from vitrail.models.vit import make_block
from vitrail.models.vit_config import ViTConfig
from vitrail.tasks.mae_decoder import initialise_decoder
from vitrail.tasks.tokens.codebook import Codebook

__all__ = ["Coder", "CoderConfig", "GridDecoder", "join_patches"]


@dataclass(frozen=True)
class CoderConfig:
    """The sizes of a coder."""

    codes: int
    """Number of codes, which is the number of different tokens."""
    code_width: int
    """Length of a code."""
    decoder: ViTConfig
    """The blocks of the decoder, and the patches that it restores."""

    def macs(self, width: int, patches: int) -> int:
        """Return the multiply-accumulates of the projection and the decoder, without the codebook. `width` is the width
        of the encoder's tokens."""
        # The decoder's macs count a patch embedding, which costs as much as the head that a coder has instead.
        return patches * self.code_width * (width + self.decoder.width) + self.decoder.macs()

    def lookup_macs(self, patches: int) -> int:
        """Return the multiply-accumulates of the search for the nearest codes, which has no backward pass."""
        return patches * self.codes * self.code_width


class Coder(nn.Module):
    """Turns the encoded patches of an image into tokens, and tokens into pixels. It has no dropout, so that training
    mode changes none of the results."""

    def __init__(self, config: CoderConfig, width: int) -> None:
        """`width` is the width of the encoder's tokens."""
        super().__init__()
        self.config = config
        self.projection = Linear(width, config.code_width)
        self.codebook = Codebook(config.codes, config.code_width)
        self.decoder = GridDecoder(config.decoder, config.code_width)
        nn.init.normal_(self.projection.weight, std=width**-0.5)
        nn.init.zeros_(self.projection.bias)

    def tokens(self, encoded: Float[Tensor, "b n width"]) -> Int64[Tensor, "b n"]:
        """Return the tokens of encoded patches."""
        return self.codebook.nearest(self.projection(encoded))

    def pixels(self, tokens: Int64[Tensor, "b n"], grid: tuple[int, int]) -> Float[Tensor, "b n pixels"]:
        """Return the normalised pixels that the decoder restores from tokens."""
        return self.decoder(self.codebook.codes[tokens], grid)


class GridDecoder(nn.Module):
    """A transformer that restores the pixels of all patches from their codes, with fixed sines and cosines of the
    places."""

    def __init__(self, config: ViTConfig, width: int) -> None:
        """`config` describes the blocks, and `width` is the length of the codes."""
        super().__init__()
        self.config = config
        self.embedding = Linear(width, config.width)
        self.blocks = nn.ModuleList(make_block(config, layer) for layer in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = Linear(config.width, config.channels * config.patch_size[0] * config.patch_size[1])
        initialise_decoder(self)

    def forward(self, codes: Float[Tensor, "b n width"], grid: tuple[int, int]) -> Float[Tensor, "b n pixels"]:
        z = self.embedding(codes).to(self.norm.weight.dtype)  # under autocast, the residual stream stays in float32
        z = z + sincos_2d(grid, self.config.width, device=z.device, lowest=False).to(z.dtype)
        for block in self.blocks:
            z = block(z, None, None)
        return self.head(self.norm(z)).float()


def join_patches(
    patches: Float[Tensor, "b n pixels"], grid: tuple[int, int], patch_size: tuple[int, int]
) -> Float[Tensor, "b c h w"]:
    """Return images from the pixels of their patches, which are in row-major order of the grid."""
    (rows, columns), (height, width) = grid, patch_size
    parts = patches.view(len(patches), rows, columns, -1, height, width)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(len(patches), -1, rows * height, columns * width)
