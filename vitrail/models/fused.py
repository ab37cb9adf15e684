"""The same arithmetic in fewer passes over memory, where products run in bfloat16 on a CPU: `Linear` and `attention`.

Everywhere else (float32, GPUs, inside torch.compile) they are PyTorch's own, and so are all results within rounding.
What each choice is worth stands beside it, on two cores of an AMD EPYC 9004 (AVX512-BF16), November 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitrail.machine import Precision, autocast, resolve_precision

__all__ = ["Linear", "attention", "frozen_weights", "fuses", "gelu_linear", "linear", "predicting"]

Gelu = Literal["none", "tanh"]
"""PyTorch's names for the exact GELU and for its approximation."""

ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether there is oneDNN's dense layer, which adds the bias by itself, and it knows bfloat16 on this processor."""


def fuses(x: Tensor) -> bool:
    """Whether products of `x` run in bfloat16 on a CPU by autocast, and nothing is traced that would fuse by itself."""
    return (
        x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and ONEDNN
        and not torch.compiler.is_compiling()
    )


class Linear(nn.Linear):
    """A dense layer whose product `linear` computes, or what `product` was replaced with."""

    frozen: Tensor | None
    """The weight as products take it, while `frozen_weights` lasts."""
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """Of input, weight and bias."""
    adapter: nn.Module | None
    """What products take is this of the weight, where there is one (`lora.py`)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.frozen, self.product, self.adapter = None, linear, None

    @property
    def operand(self) -> Float[Tensor, "outputs inputs"]:
        """The weight as products take it."""
        if self.frozen is not None:
            return self.frozen
        return self.weight if self.adapter is None else self.adapter(self.weight)

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        return self.product(x, self.operand, self.bias)


def linear(
    x: Float[Tensor, "*batch inputs"], weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "*batch outputs"]:
    """`x weight^T + bias`, the bias added while the product is written, not before.

    PyTorch copies a bias into the output and has the product add to it: 324 to 386 GFLOP/s on the shapes of a ViT-S,
    where this reaches 370 to 430. Of `x`, only the bfloat16 form that the product saw is kept for backward.
    """
    return _linear(x, weight, bias, None) if fuses(x) else F.linear(x, weight, bias)


def gelu_linear(
    layer: Linear, hidden: Float[Tensor, "*batch inputs"], approximate: Gelu
) -> Float[Tensor, "*batch outputs"]:
    """`layer(gelu(hidden))`, for a `hidden` that `fuses` accepts; GELU's output is not kept but made again in backward.

    That saves 18 % of the bytes that ViT-S/16 keeps, for 1 % of the step's time.
    """
    if layer.product is not linear:
        return layer(F.gelu(hidden, approximate=approximate))
    return _linear(hidden, layer.operand, layer.bias, approximate)


@contextmanager
def frozen_weights(network: nn.Module) -> Iterator[None]:
    """While this lasts, weights must not change: what every layer makes of its own for products, it makes once.

    Otherwise dense layers convert them in every call inside autocast, which for ViT-B/16 and one image takes 19 ms of
    129, and a ResNet standardises its filters.
    """
    layers: list[Any] = [module for module in network.modules() if getattr(module, "frozen", module) is None]
    for layer in layers:
        operand = layer.operand
        kind = operand.device.type
        if torch.is_autocast_enabled(kind):
            layer.frozen = operand.detach().to(torch.get_autocast_dtype(kind))
        elif operand is not layer.weight:
            layer.frozen = operand.detach()
    try:
        yield
    finally:
        for layer in layers:
            layer.frozen = None


@contextmanager
def predicting(network: nn.Module, precision: Precision = "float32") -> Iterator[None]:
    """Everything that a prediction wants: evaluation mode, no gradients, products in `precision`, weights converted
    once. "auto" is bf16 where the processor has units for it. The network's mode comes back."""
    device = next(network.parameters()).device
    was_training = network.training
    network.eval()
    try:
        with torch.inference_mode(), autocast(resolve_precision(precision, device), device), frozen_weights(network):
            yield
    finally:
        network.train(was_training)


def attention(qkv: Float[Tensor, "b n three_width"], heads: int) -> Float[Tensor, "b n width"]:
    """`softmax(q k^T / sqrt(d)) v` of every head, from and to the layout of the dense layers around it.

    For a `qkv` that `fuses` accepts: queries, keys and values are brought into order in one copy, their gradients in
    another, and the products scale. A step of ViT-S/16 takes 2.5 % less time than with the operations one by one.
    """
    if torch.is_grad_enabled():
        return _Attention.apply(qkv, heads)  # type: ignore[no-untyped-call]
    return _attend(qkv, heads)[0]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: Gelu | None) -> Tensor:
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias, gelu)  # type: ignore[no-untyped-call]
    return _product(x.to(torch.bfloat16), weight.to(torch.bfloat16), bias, gelu)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: Gelu | None) -> Tensor:
    x = x if gelu is None else F.gelu(x, approximate=gelu)
    bias = None if bias is None else bias.to(torch.bfloat16)
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


def _attend(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The result, queries with keys and values in order (3, b * heads, n, d), and the attention weights."""
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
