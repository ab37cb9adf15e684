"""Multi-head self-attention (paper Appendix A), and the choice of the kernel that computes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["SelfAttention", "attend"]


class SelfAttention(nn.Module):
    """MSA of equation 2: every token looks at every other, `heads` times in parallel.

    Queries, keys and values come from one matrix product (equation 5); the rows of its weight are all queries, then all
    keys, then all values, each ordered by head.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        b, n, width = tokens.shape
        qkv = self.qkv(tokens).view(b, n, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each b heads n head_width
        mixed = attend(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(b, n, width))


def attend(
    q: Float[Tensor, "b heads n d"], k: Float[Tensor, "b heads n d"], v: Float[Tensor, "b heads n d"]
) -> Float[Tensor, "b heads n d"]:
    """`softmax(q k^T / sqrt(d)) v` (equations 6 and 7), by whichever kernel is faster where the tensors are.

    In bfloat16 on a CPU the fused kernel is slow at the lengths of a ViT: plain products trained a network of 6 layers,
    width 192 and 50 tokens 1.5 times as fast (318 against 209 images/s; 2 cores with AVX512-BF16, 2026-11), while in
    float32 the two are equal within the noise and the fused one needs no n x n matrix in memory.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v)
