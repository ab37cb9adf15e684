"""The dense layer of all networks: its product can be exchanged, and its weight can be adapted."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.kernels import Gelu, gelu_linear, linear

__all__ = ["Linear", "Product"]

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes a dense layer from its input, weight and bias, like `kernels.linear`."""


class Linear(nn.Linear):
    """A dense layer. `use_product` exchanges the kernel, `adapt` changes the weight that products take."""

    product: Product
    """The kernel that computes the layer."""
    adapter: nn.Module | None
    """Maps the weight to the one that products take, or None (`lora.py`)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.product, self.adapter = linear, None

    @property
    def operand(self) -> Float[Tensor, "outputs inputs"]:
        """The weight that products take: the layer's own, or the adapter's result."""
        return self.weight if self.adapter is None else self.adapter(self.weight)

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        return self.product(x, self.operand, self.bias)

    def after_gelu(self, hidden: Float[Tensor, "*batch inputs"], approximate: Gelu) -> Float[Tensor, "*batch outputs"]:
        """Return `layer(gelu(hidden))` by the fused kernel. `kernels.fuses` must be true of `hidden`."""
        if self.product is not linear:
            return self(F.gelu(hidden, approximate=approximate))
        return gelu_linear(hidden, self.operand, self.bias, approximate)

    def by_rows(self, *inputs: tuple[Float[Tensor, ...], int]) -> tuple[Tensor, ...]:
        """Return one product for each pair of an input and a number of rows. Consecutive rows of the weight are used,
        so the numbers add up to the layer's outputs."""
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
        """Pass the weight through a module before products take it."""
        self.adapter = adapter

    def freeze(self, dtype: torch.dtype | None) -> None:
        """Replace the weight by the one that products take, converted to `dtype` (None leaves the format).

        The layer cannot be trained afterwards: `Predictor` calls this on its own copy of a network. A weight that
        needs no change stays the same tensor.
        """
        operand = self.operand.detach()
        if self.adapter is not None or dtype is not None:
            self.weight = nn.Parameter(operand if dtype is None else operand.to(dtype), requires_grad=False)
        self.adapter = None
