"""Pooling: the reduction of all tokens to the one vector that the head receives."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.attention.kernels import attend
from vitrail.models.layers import Activation, in_format_of, make_mlp
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Features
from vitrail.models.tokens.reduction import size_bias

Pool = Literal["cls", "gap", "map", "cls+gap", "cls+dist"]
FinalNorm = Literal["tokens", "pooled"]


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
        x = in_format_of(self.norm, x)  # a residual stream like that of the blocks: see VisionTransformer._encode
        return (x + self.mlp(self.norm(x)))[:, 0]

    @torch.no_grad()
    def initialise(self) -> None:
        nn.init.xavier_uniform_(self.probe[0])  # a (1, width) matrix, as flax counts its fans
        nn.init.xavier_uniform_(self.query.weight)
        for projection in self.key_value.weight.chunk(2):
            nn.init.xavier_uniform_(projection)
        nn.init.xavier_uniform_(self.out.weight)
        for layer in (self.query, self.key_value, self.out):
            nn.init.zeros_(layer.bias)


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
    if how == "cls":
        assert features.cls is not None
        return features.cls
    if how == "cls+dist":
        assert features.cls is not None
        return torch.cat([features.cls, features.registers[:, 0]], dim=1) / 2
    mean = _mean(features.patches, None if sizes is None else sizes[:, -features.patches.shape[1] :])
    if how == "gap":
        return mean
    assert features.cls is not None
    return torch.cat([features.cls, mean], dim=1)


def _mean(patches: Float[Tensor, "b n width"], sizes: Float[Tensor, "b n"] | None) -> Float[Tensor, "b width"]:
    if sizes is None:
        return patches.mean(dim=1)
    return (patches * (sizes / sizes.sum(dim=1, keepdim=True))[:, :, None]).sum(dim=1)
