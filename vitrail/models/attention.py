"""Multi-head self-attention (paper Appendix A), and the choice of the kernel that computes it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.dense import Linear
from vitrail.models.kernels import attention, fuses

__all__ = ["Guide", "SelfAttention", "attend"]


class Guide(NamedTuple):
    """What positions that act inside attention tell it about its tokens (see `positions.py`)."""

    bias: Float[Tensor, "*images heads n n"] | None = None
    """Added to the logits of every pair of tokens: the same for all images, or each image its own."""
    rotation: tuple[Float[Tensor, "*images n d"], Float[Tensor, "*images n d"]] | None = None
    """Cosines and sines of the angles by which queries and keys are turned; (b 1 n d) where images differ."""


class SelfAttention(nn.Module):
    """MSA of equation 2: every token looks at every other, `heads` times in parallel.

    Queries, keys and values come from one matrix product (equation 5); the rows of its weight are all queries, then all
    keys, then all values, each ordered by head. With `qk_norm_eps` above 0 a layer norm over each head's channels comes
    between the projection and the product of queries and keys, which keeps the logits small (2302.05442).
    """

    def __init__(
        self, width: int, heads: int, *, qkv_bias: bool = True, out_bias: bool = True, qk_norm_eps: float = 0.0
    ) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width, bias=qkv_bias)
        self.query_norm = nn.LayerNorm(width // heads, eps=qk_norm_eps) if qk_norm_eps else None
        self.key_norm = nn.LayerNorm(width // heads, eps=qk_norm_eps) if qk_norm_eps else None
        self.out = Linear(width, width, bias=out_bias)

    def forward(
        self, tokens: Float[Tensor, "b n width"], guide: Guide | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        """What each token takes from all of them; with `read`, only what the first `read` tokens take."""
        if guide is None and read is None and self.query_norm is None and fuses(tokens):
            return self.out(attention(self.qkv(tokens), self.heads))
        q, k, v = self._queries_keys_values(tokens, read)
        m = q.shape[2]
        if self.query_norm is not None and self.key_norm is not None:
            q, k = _normalise(q, self.query_norm), _normalise(k, self.key_norm)
        if guide is not None and guide.rotation is not None:
            cosine, sine = (part.to(v.dtype) for part in guide.rotation)
            q, k = _rotate(q, cosine[..., :m, :], sine[..., :m, :]), _rotate(k, cosine, sine)
        mixed = attend(q, k, v, None if guide is None or guide.bias is None else guide.bias[..., :m, :])
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _queries_keys_values(
        self, tokens: Float[Tensor, "b n width"], read: int | None
    ) -> tuple[Float[Tensor, "b heads m d"], Float[Tensor, "b heads n d"], Float[Tensor, "b heads n d"]]:
        b, n, width = tokens.shape
        each_head = self.heads, width // self.heads
        if read is None:
            q, k, v = self.qkv(tokens).view(b, n, 3, *each_head).permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        readers = tokens[:, :read]
        q, kv = self.qkv.by_rows((readers, width), (tokens, 2 * width))
        q = q.view(b, readers.shape[1], *each_head).transpose(1, 2)
        k, v = kv.view(b, n, 2, *each_head).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    @torch.no_grad()
    def initialise(self) -> None:
        for projection in self.qkv.weight.chunk(3):  # each is a matrix of its own: fan-out D, not 3 D
            nn.init.xavier_uniform_(projection)
        nn.init.xavier_uniform_(self.out.weight)
        for bias in (self.qkv.bias, self.out.bias):
            if bias is not None:
                nn.init.zeros_(bias)


def attend(
    q: Float[Tensor, "b heads m d"],
    k: Float[Tensor, "b heads n d"],
    v: Float[Tensor, "b heads n d"],
    bias: Float[Tensor, "*images heads m n"] | None = None,
) -> Float[Tensor, "b heads m d"]:
    """`softmax(q k^T / sqrt(d) + bias) v` (equations 6 and 7), by whichever kernel is faster where the tensors are.

    In bfloat16 on a CPU the fused kernel is slow at the lengths of a ViT: plain products trained a network of 6 layers,
    width 192 and 50 tokens 1.5 times as fast (318 against 209 images/s; 2 cores with AVX512-BF16, 2026-11), while in
    float32 the two are equal within the noise and the fused one needs no n x n matrix in memory.
    """
    if bias is not None:
        bias = bias.to(q.dtype)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        return (logits if bias is None else logits + bias).softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _normalise(x: Float[Tensor, "b heads n d"], norm: nn.LayerNorm) -> Float[Tensor, "b heads n d"]:
    """In the format of the norm's weights: the gradients of those, summed in bfloat16, would be lost in rounding."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


def _rotate(
    x: Float[Tensor, "b heads n d"], cosine: Float[Tensor, "*images n d"], sine: Float[Tensor, "*images n d"]
) -> Float[Tensor, "b heads n d"]:
    """Turns each pair of channels (i, i + d / 2) by its token's angle (2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine
