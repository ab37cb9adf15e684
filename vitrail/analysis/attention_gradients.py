"""Gradients of classes with respect to attention weights."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.analysis.copies import detached_copy, with_all_tokens
from vitrail.models.attention.kind import AttentionLayer, AttentionPositions
from vitrail.models.block import Block
from vitrail.models.vit import VisionTransformer


class GradientPass:
    """Computes gradients with respect to attention weights, with dense attention in the chosen layers."""

    def __init__(self, network: VisionTransformer, layers: tuple[int, ...]) -> None:
        self.network = with_all_tokens(detached_copy(network))
        self.layers = layers
        self.dense: dict[int, _DenseAttention] = {}
        for layer in {*layers}:
            block = self.network.blocks[layer]
            assert isinstance(block, Block)
            self.dense[layer] = block.attention = _DenseAttention(block.attention)

    def __call__(self, images: Tensor, targets: Tensor) -> Float[Tensor, "b layers heads n n"]:
        """Return the gradients of the logits of `targets`, one class per image."""
        with torch.enable_grad():
            logits = self.network(images)
            chosen = logits.gather(1, targets[:, None]).float().sum()
            maps = [self.dense[layer].map for layer in self.layers]
            gradients = torch.autograd.grad(chosen, [map_ for map_ in maps if map_ is not None])
        for dense in self.dense.values():
            dense.map = None
        return torch.stack(gradients, dim=1)


class _DenseAttention(AttentionLayer):
    """Computes what the given layer computes, by a map of weights that stays available for gradients."""

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        self.layer = layer
        self.map: Tensor | None = None

    def forward(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        q, k, v, bias = self.layer.operands(tokens, positions)
        self.map = attention_map(q, k, bias)
        if not self.map.requires_grad:
            self.map.requires_grad_()
        return self.layer.combine((self.map[:, :, :read] @ v.to(self.map.dtype)).to(v.dtype))


def attention_map(
    q: Float[Tensor, "b heads n d"], k: Float[Tensor, "b heads n d"], bias: Float[Tensor, "*images heads n n"] | None
) -> Float[Tensor, "b heads n n"]:
    """Return the attention weights in float32, or in float64 if the queries are."""
    exact = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        logits = (q.to(exact) * q.shape[-1] ** -0.5) @ k.to(exact).transpose(-1, -2)
        return (logits if bias is None else logits + bias).softmax(dim=-1)
