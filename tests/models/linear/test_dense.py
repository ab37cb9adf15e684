"""Tests of the dense layer: exchanged kernels, adapted weights, products by rows, and weights prepared for
prediction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.linear.dense import Linear


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def layer(*, bias: bool = True) -> Linear:
    torch.manual_seed(0)
    return Linear(5, 6, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_the_weight_take_inputs_of_their_own(bias: bool) -> None:
    made, x, y = layer(bias=bias), torch.randn(2, 3, 5), torch.randn(2, 1, 5)
    first, second = made.by_rows((x, 4), (y, 2))
    torch.testing.assert_close(first, made(x)[..., :4])
    torch.testing.assert_close(second, made(y)[..., 4:])


def test_an_adapter_changes_the_weight_that_products_take() -> None:
    made, x = layer(), torch.randn(2, 5)
    made.adapter = Twice()
    assert torch.equal(made(x), F.linear(x, 2 * made.weight, made.bias))
    assert torch.equal(made.by_rows((x, 6))[0], made(x))


def test_a_product_can_be_exchanged() -> None:
    made, x = layer(), torch.randn(2, 5)
    made.product = lambda x, weight, bias: F.linear(x, weight, bias) + 1
    assert torch.equal(made(x), F.linear(x, made.weight, made.bias) + 1)
    assert torch.equal(made.after_gelu(x, "none"), made(F.gelu(x))), "the fused kernel is of the layer's own product"


def test_a_frozen_weight_is_the_one_that_products_take() -> None:
    made = layer()
    own = made.weight
    made.freeze(None)
    assert made.weight is own, "a weight that needs no change stays the same tensor"
    made.adapter = Twice()
    made.freeze(None)
    assert torch.equal(made.weight, 2 * own) and made.adapter is None and not made.weight.requires_grad
    made.freeze(torch.bfloat16)
    assert torch.equal(made.weight, (2 * own).bfloat16())
