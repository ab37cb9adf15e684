"""The dense layer of all networks. The kernel of the layer can be exchanged, and an adapter can change the weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.linear.kernels import Gelu, fuses, gelu_linear, linear
from vitrail.models.shortcuts import has_plain_type, is_plain, skippable

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function that computes a dense layer from the input, the weight and the bias, like `kernels.linear`."""


@skippable
class Linear(nn.Linear):
    """A dense layer. `use_product` exchanges the kernel, and `adapt` lets a module change the weight that the kernel
    uses."""

    product: Product
    """The kernel that computes the layer."""
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

    def after_gelu(self, hidden: Float[Tensor, "*batch inputs"], approximate: Gelu) -> Float[Tensor, "*batch outputs"]:
        """Return `layer(gelu(hidden))`, computed by the fused kernel if the layer has no other kernel and the tensors
        allow it. `is_plain(layer, Linear)` must be true."""
        operand = self.operand
        if self.product is linear and fuses(hidden, operand, self.bias):
            return gelu_linear(hidden, operand, self.bias, approximate)
        return self.product(F.gelu(hidden, approximate=approximate), operand, self.bias)

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

    def use_product(self, product: Product) -> None:
        """Compute the layer by another kernel from now on."""
        self.product = product

    def adapt(self, adapter: nn.Module) -> None:
        """Pass the weight through a module before the kernel uses it."""
        self.adapter = adapter

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


def can_split(layer: nn.Module) -> bool:
    """Return True if products with rows of the layer's weight, or with a converted weight, may replace calls of it."""
    return is_plain(layer, Linear) and isinstance(layer, Linear) and has_plain_type(layer.weight)
