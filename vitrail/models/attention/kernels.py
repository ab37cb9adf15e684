"""Kernels of full attention: the choice of a kernel by device and format, and a fused kernel for bfloat16 on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def attend(
    q: Float[Tensor, "*batch m d"],
    k: Float[Tensor, "*batch n d"],
    v: Float[Tensor, "*batch n d"],
    bias: Float[Tensor, "*#batch #m n"] | None = None,
) -> Float[Tensor, "*batch m d"]:
    """Return `softmax(q k^T / sqrt(d) + bias) v` (equations 6 and 7) by the faster kernel for these tensors.

    In bfloat16 on a CPU, plain matrix products are faster than PyTorch's fused kernel for the sequences of a ViT
    (`docs/performance.md`). In float32, both are equally fast, and the fused kernel keeps no n x n matrix in memory.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return attend_plainly(q, k, v, bias)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q.dtype))


def attend_plainly(
    q: Float[Tensor, "*batch m d"],
    k: Float[Tensor, "*batch n d"],
    v: Float[Tensor, "*batch n d"],
    bias: Float[Tensor, "*#batch #m n"] | None = None,
) -> Float[Tensor, "*batch m d"]:
    """Return what `attend` returns, by plain matrix products."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return (logits if bias is None else logits + bias.to(q.dtype)).softmax(dim=-1) @ v


def attend_fused(qkv: Float[Tensor, "b n three_width"], heads: int) -> Float[Tensor, "b n width"]:
    """Return `softmax(q k^T / sqrt(d)) v` of every head, with shape (b, n, width).

    `vitrail.models.linear.kernels.fuses` must return True for the layer's input. The forward pass copies queries, keys
    and values once into the order that the kernels need, and the backward pass copies their gradients once. The matrix
    products include the scale `d**-0.5`.
    """
    if torch.is_grad_enabled():
        return _Attention.apply(qkv, heads)  # type: ignore[no-untyped-call]
    return _attend(qkv, heads)[0]


def _attend(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the queries, keys and values in the shape (3, b * heads, n, d), and the attention weights."""
    b, n, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    d = width // heads
    ordered = qkv.view(b, n, 3, heads, d).permute(2, 0, 3, 1, 4).reshape(3, b * heads, n, d)
    q, k, v = ordered
    weights = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=d**-0.5).softmax(dim=-1)
    mixed = torch.bmm(weights, v).view(b, heads, n, d).transpose(1, 2).reshape(b, n, width)
    return mixed, ordered, weights


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int) -> Tensor:
        mixed, ordered, weights = _attend(qkv, heads)
        ctx.save_for_backward(ordered, weights)
        ctx.heads = heads
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ordered, weights = ctx.saved_tensors
        (b, n, width), heads = gradient.shape, ctx.heads
        d = width // heads
        q, k, v = ordered
        from_mixed = gradient.reshape(b, n, heads, d).transpose(1, 2).reshape(b * heads, n, d)
        gradients = torch.empty_like(ordered)
        torch.bmm(weights.transpose(1, 2), from_mixed, out=gradients[2])
        to_weights = torch.bmm(from_mixed, v.transpose(1, 2))
        to_logits = torch._softmax_backward_data(to_weights, weights, -1, weights.dtype)
        torch.baddbmm(gradients[0], to_logits, k, beta=0, alpha=d**-0.5, out=gradients[0])
        torch.baddbmm(gradients[1], to_logits.transpose(1, 2), q, beta=0, alpha=d**-0.5, out=gradients[1])
        return gradients.view(3, b, heads, n, d).permute(1, 3, 0, 2, 4).reshape(b, n, 3 * width), None
