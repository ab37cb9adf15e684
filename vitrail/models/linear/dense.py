"""The dense layer of all networks, with kernels for bfloat16 on a CPU.

The kernel of a layer can be exchanged, and an adapter can change its weight. The kernels of this module return the same
results as PyTorch's kernels, with fewer passes over memory. On GPUs and inside torch.compile, PyTorch's own kernels are
used. In float32, `float32.py` chooses between PyTorch's kernel and oneDNN's. `docs/performance.md` lists the measured
speeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitrail.errors import ConfigError
from vitrail.models.linear.float32 import float32_linear, has_onednn, uses_onednn
from vitrail.models.shortcuts import can_fuse, has_plain_type, is_plain, skippable

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
        return _linear(x, weight, bias)
    return float32_linear(x, weight, bias) if uses_onednn(x, weight, bias) else F.linear(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return _product(x.to(torch.bfloat16), weight.to(torch.bfloat16), bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.to(torch.bfloat16).contiguous()  # oneDNN ignores the strides of a bias
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.shape[0])
        to_x, to_weight, to_bias = ctx.needs_input_grad
        x_gradient = (rows @ weight).view(x.shape) if to_x else None
        weight_gradient = rows.t() @ x.reshape(-1, weight.shape[1]) if to_weight else None
        return x_gradient, weight_gradient, rows.sum(0) if to_bias else None


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function that computes a dense layer from the input, the weight and the bias, like `kernels.linear`."""


@skippable
class Linear(nn.Linear):
    """A dense layer, whose kernel can be exchanged, and whose weight a module can change."""

    product: Product
    """The kernel that computes the layer, which can be assigned."""
    adapter: nn.Module | None
    """A module that computes the kernel's weight from the layer's own weight (`lora.py`), or None."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.product, self.adapter = linear, None

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # on "meta" there is nothing to draw, and drawing is slow
            super().reset_parameters()

    @property
    def operand(self) -> Float[Tensor, "outputs inputs"]:
        """The weight that the kernel uses: the layer's own weight, or the adapter's result."""
        return self.weight if self.adapter is None else self.adapter(self.weight)

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        return self.product(x, self.operand, self.bias)

    def by_rows(self, *inputs: tuple[Float[Tensor, " ..."], int]) -> tuple[Tensor, ...]:
        """Return the products of several inputs with consecutive rows of the weight.

        Each argument is a pair of an input and a number of rows. The first input is multiplied by the first rows, the
        second input by the rows after these, and so on. The numbers must add up to the number of rows of the weight.
        `can_split(layer)` must be true.
        """
        rows = [count for _, count in inputs]
        weights = torch.split(self.operand, rows)
        biases = [None] * len(rows) if self.bias is None else torch.split(self.bias, rows)
        return tuple(
            self.product(x, weight, bias) for (x, _), weight, bias in zip(inputs, weights, biases, strict=True)
        )

    def freeze(self, dtype: torch.dtype | None) -> None:
        """Replace the weight by the weight that the kernel uses, converted to `dtype` (None keeps the format).

        The layer cannot be trained afterwards: `Predictor` calls this on its own copy of a network. A weight that
        needs no change stays the same tensor. So does the weight of a layer with hooks or a parametrisation, which may
        compute it in every call, and a weight of a class of its own.
        """
        if not can_split(self):
            return
        operand = self.operand.detach()
        if self.adapter is not None or dtype is not None:
            self.weight = nn.Parameter(operand if dtype is None else operand.to(dtype), requires_grad=False)
        self.adapter = None


@torch.no_grad()
def initialise_parts(layer: nn.Linear, parts: int = 1) -> None:
    """Draw a layer of several projections, each of which is a matrix of its own (Xavier uniform). Biases start at 0."""
    for projection in layer.weight.chunk(parts):
        nn.init.xavier_uniform_(projection)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def can_split(layer: nn.Module) -> bool:
    """Return True if products with rows of the layer's weight, or with a converted weight, may replace calls of it."""
    return is_plain(layer, Linear) and isinstance(layer, Linear) and has_plain_type(layer.weight)
