"""Kernels for matrix products in bfloat16 on a CPU, and the choice of a dense layer's kernel.

The kernels return the same results as PyTorch's kernels, with fewer passes over memory. On GPUs and inside
torch.compile, PyTorch's own kernels are used. In float32, `float32.py` chooses between PyTorch's kernel and oneDNN's.
`docs/performance.md` lists the measured speeds.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitrail.errors import ConfigError
from vitrail.models.linear.float32 import float32_linear, has_onednn, uses_onednn
from vitrail.models.shortcuts import can_fuse

Gelu = Literal["none", "tanh"]
"""PyTorch's names for the exact GELU and for its approximation."""

ONEDNN = has_onednn(torch.bfloat16)
"""True if oneDNN's dense layer with bias can compute in bfloat16 here."""


FORMATS = torch.float32, torch.bfloat16
"""The number formats that autocast converts to bfloat16, and that the fused kernels take."""


def fuses(*tensors: Tensor | None) -> bool:
    """Return True if the fused kernels can be used with these tensors: under autocast to bfloat16 on a CPU, outside
    torch.compile. Inside torch.compile, the compiler fuses the operations.
    """
    return (
        ONEDNN
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and can_fuse(tensors, FORMATS)
    )


def linear(
    x: Float[Tensor, "*batch inputs"], weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "*batch outputs"]:
    """Return `x weight^T + bias`.

    The bias is added while the matrix product is written to memory. PyTorch's kernel copies the bias into the output
    first and adds the product to the copy, which is slower (`docs/performance.md`). For the backward pass, `x` is kept
    in bfloat16 only. In float32, oneDNN computes the layer on processors on which it is faster than MKL. Raises
    `ConfigError` if the weight is on another device than `x`.
    """
    if weight.device != x.device:  # with a weight on "meta", `F.linear` returns memory that nothing was written to
        raise ConfigError(
            f"the weight of a dense layer is on device {str(weight.device)!r}, but its input is on "
            f"{str(x.device)!r}; move the network to that device, or load its weights if the device is 'meta'"
        )
    if fuses(x, weight, bias):
        return _linear(x, weight, bias, None)
    return float32_linear(x, weight, bias) if uses_onednn(x, weight, bias) else F.linear(x, weight, bias)


def gelu_linear(
    x: Float[Tensor, "*batch inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None,
    approximate: Gelu,
) -> Float[Tensor, "*batch outputs"]:
    """Return `gelu(x) weight^T + bias` without keeping GELU's output. The backward pass computes the output again.

    `fuses(x, weight, bias)` must be true. `docs/performance.md` reports the saved memory and the added time.
    """
    return _linear(x, weight, bias, approximate)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: Gelu | None) -> Tensor:
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias, gelu)  # type: ignore[no-untyped-call]
    return _product(x.to(torch.bfloat16), weight.to(torch.bfloat16), bias, gelu)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: Gelu | None) -> Tensor:
    x = x if gelu is None else F.gelu(x, approximate=gelu)
    bias = None if bias is None else bias.to(torch.bfloat16).contiguous()  # oneDNN ignores the strides of a bias
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: Gelu | None) -> Tensor:
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        ctx.save_for_backward(x, weight)
        ctx.gelu = gelu
        return _product(x, weight, bias, gelu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.shape[0])
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        seen = x if ctx.gelu is None else F.gelu(x, approximate=ctx.gelu)
        x_gradient = None
        if to_x:
            x_gradient = (rows @ weight).view(x.shape)
            if ctx.gelu is not None:
                x_gradient = torch.ops.aten.gelu_backward(x_gradient, x, approximate=ctx.gelu)
        weight_gradient = rows.t() @ seen.reshape(-1, weight.shape[1]) if to_weight else None
        return x_gradient, weight_gradient, rows.sum(0) if to_bias else None, None
