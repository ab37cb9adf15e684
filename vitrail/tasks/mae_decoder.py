"""The decoder of masked autoencoders: a light transformer that sees the encoded patches and predicts the others."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.attention import AttentionLayer
from vitrail.models.layers import Mlp, SwiGlu
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Features
from vitrail.models.positions import sincos_2d
from vitrail.models.vit import make_block
from vitrail.models.vit_config import ViTConfig

__all__ = ["MaeDecoder", "initialise_decoder"]


class MaeDecoder(nn.Module):
    """Predicts the pixels of removed patches from the tokens of the visible ones (2111.06377, section 3).

    The encoder's tokens are projected to the decoder's width. A learned mask token stands for every removed patch. All
    patches receive fixed sines and cosines of their places. The class token and registers have no position, as in the
    published code. Attention does not depend on the order of tokens, so the removed patches come first, and the last
    block computes only them.
    """

    def __init__(self, config: ViTConfig, width: int) -> None:
        """`config` describes the blocks of the decoder, and `width` is the width of the encoder's tokens."""
        super().__init__()
        self.config = config
        self.embedding = Linear(width, config.width)
        self.mask_token = nn.Parameter(torch.empty(config.width))
        self.blocks = nn.ModuleList(make_block(config, layer) for layer in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = Linear(config.width, config.channels * config.patch_size[0] * config.patch_size[1])
        self.initialise()

    def forward(
        self, encoded: Features, visible: Int64[Tensor, "b k"], removed: Int64[Tensor, "b m"]
    ) -> Float[Tensor, "b m pixels"]:
        """Return the predictions for the removed patches, in the order of `removed`.

        `encoded.patches` has the tokens of the patches `visible`, in this order. Both are indices of patches in
        row-major order of the grid.
        """
        count = removed.shape[1]
        prefix = [] if encoded.cls is None else [encoded.cls[:, None]]
        tokens = self.embedding(torch.cat([*prefix, encoded.registers, encoded.patches], dim=1))
        tokens = tokens.to(self.mask_token.dtype)  # under autocast, the residual stream stays in float32
        first = tokens.shape[1] - visible.shape[1]
        places = sincos_2d(encoded.grid, self.config.width, device=tokens.device, lowest=False).to(tokens.dtype)
        masks = self.mask_token + places[removed]
        z = torch.cat([masks, tokens[:, :first], tokens[:, first:] + places[visible]], dim=1)
        for layer, block in enumerate(self.blocks):
            z = block(z, None, count if layer == self.config.depth - 1 else None)
        return self.head(self.norm(z)).float()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw new weights: matrices as in the blocks of the network, and the mask token with deviation 0.02."""
        nn.init.normal_(self.mask_token, std=0.02)
        initialise_decoder(self)


@torch.no_grad()
def initialise_decoder(decoder: Any) -> None:
    """Draw new matrices for the `embedding`, the `head` and the blocks of a decoder, as in the network's blocks."""
    for layer in (decoder.embedding, decoder.head):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    for module in decoder.modules():
        if isinstance(module, AttentionLayer | Mlp | SwiGlu):
            module.initialise()
