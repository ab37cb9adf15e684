"""Tests of self-attention against plain formulas, PyTorch's own layer, and the fused kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.attention import AttentionPositions
from vitrail.models.attention.full import SelfAttention, attend


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v


def with_gradients(function: object, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the output of a function of tensors, and the gradients of a fixed weighted sum of the output."""
    assert callable(function)
    result = function(*tensors)
    weighting = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    return [result.detach(), *torch.autograd.grad((result * weighting).sum(), tensors)]


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 17, 8), (2, 4, 50, 32), (1, 2, 197, 64)])
def test_bfloat16_on_the_cpu_equals_the_fused_kernel(shape: tuple[int, ...]) -> None:
    ours = with_gradients(attend, inputs(*shape, dtype=torch.bfloat16))
    fused = with_gradients(F.scaled_dot_product_attention, inputs(*shape, dtype=torch.bfloat16))
    exact = with_gradients(F.scaled_dot_product_attention, tuple(t.detach().float().requires_grad_() for t in inputs(
        *shape, dtype=torch.bfloat16)))  # fmt: skip
    for mine, theirs, true in zip(ours, fused, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        scale = true.square().mean().sqrt().clamp_min(1e-3)
        assert (mine.float() - theirs.float()).square().mean().sqrt() < 0.01 * scale
        assert (mine.float() - true).square().mean().sqrt() < 0.01 * scale
        assert (mine.float() - true).abs().max() < 0.1 * scale


def test_bfloat16_survives_large_scores() -> None:
    q, k, v = (tensor.detach() for tensor in inputs(1, 1, 9, 16, dtype=torch.bfloat16))
    result = attend(q * 300, k * 300, v)
    assert result.isfinite().all()
    chosen = ((q.float() @ k.float().transpose(-1, -2)) * 300).argmax(-1)
    torch.testing.assert_close(result[0, 0], v[0, 0][chosen[0, 0]], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("fields", [{}, {"qkv_bias": False}, {"qk_norm_eps": 1e-3, "out_bias": False}])
@pytest.mark.parametrize("kind", ["none", "bias", "rotation", "bias of each image", "rotation of each image"])
def test_the_first_tokens_alone_take_what_they_take_among_all(fields: dict[str, Any], kind: str) -> None:
    torch.manual_seed(0)
    layer, tokens = SelfAttention(24, 3, **fields), torch.randn(2, 9, 24)
    angles = torch.randn(*([2, 1] if "each" in kind else []), 9, 8)
    inside = {
        "none": None,
        "bias": AttentionPositions(bias=torch.randn(*([2] if "each" in kind else []), 3, 9, 9)),
        "rotation": AttentionPositions(rotation=(angles.cos(), angles.sin())),
    }[kind.partition(" ")[0]]
    whole = layer(tokens, inside)
    weighting = torch.randn(2, 9, 24)
    for read in (1, 4, 9):
        part = layer(tokens, inside, read)
        torch.testing.assert_close(part, whole[:, :read], atol=1e-5, rtol=1e-5)
        gradients = [
            torch.autograd.grad((result * weighting[:, :read]).sum(), list(layer.parameters()), retain_graph=True)
            for result in (part, whole[:, :read])
        ]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            coarse = layer(tokens, inside, read)
        assert coarse.dtype == torch.bfloat16
        torch.testing.assert_close(coarse.float(), part, atol=0.03, rtol=0.05)


@pytest.mark.parametrize("fields", [{}, {"qk_norm_eps": 1e-6}], ids=str)
def test_the_fused_kernel_is_given_heads_without_copies(
    fields: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU kernels need a last dimension without gaps and one number format. Some do not accept a mask."""
    layer, seen, real = SelfAttention(24, 3, **fields), [], F.scaled_dot_product_attention

    def spy(*tensors: Tensor, attn_mask: Tensor | None) -> Tensor:
        seen.append((tensors, attn_mask))
        return real(*tensors, attn_mask=attn_mask)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    layer(torch.randn(2, 7, 24))
    (tensors, mask) = seen[0]
    assert mask is None and len({tensor.dtype for tensor in tensors}) == 1
    assert all(tensor.shape == (2, 3, 7, 8) and tensor.stride(-1) == 1 for tensor in tensors)
    if not fields:
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1, "all are views of one product"
