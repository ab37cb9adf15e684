"""Tests of recording and replaying matrix products. Their FLOPs equal the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import pytest
import torch
from torch import nn

from tests.bench.conftest import MakeWork
from vitrail.bench import step as products
from vitrail.bench.step import OURS, Entry, Operand, Product, Products, fastest_multiplication, make_step, record
from vitrail.bench.workload import Workload
from vitrail.models.linear.float32 import has_onednn

CPU = torch.device("cpu")
Precision = Literal["float32", "bf16"]


def recorded(work: Workload) -> list[Product]:
    return record(make_step(Entry(OURS), work))


BIT = {"variant": "BiT-R26x1", "image_size": (33, 40)}


def in_both(*fields: dict[str, Any]) -> list[Any]:
    """Return settings in both precisions as parameters. The slow ones are marked."""
    slow = [pytest.mark.slow]
    return [
        pytest.param(each, name, marks=slow if each == BIT else []) for each in fields for name in get_args(Precision)
    ]


@pytest.mark.parametrize(
    ("fields", "precision"),
    in_both(
        {}, {"pool": "gap"}, {"channels": 1, "width": 33, "heads": 3, "mlp_width": 17, "batch": 1},
        {"activation": "swiglu", "head_hidden": 7}, {"positions": "relative-bias", "registers": 2},
        {"positions": "relative-keys", "registers": 2},
        {"variant": "Conv+ViT-Pico/8", "image_size": (16, 24), "depth": 2}, BIT,
    ),
)  # fmt: skip
def test_a_prediction_has_the_products_of_the_closed_form(
    tiny_work: MakeWork, precision: Precision, fields: dict[str, Any]
) -> None:
    work = tiny_work(task="infer", precision=precision, **fields)
    assert Products(recorded(work), CPU).flops == work.flops


@pytest.mark.parametrize(("fields", "precision"), in_both({}, {"pool": "gap", "channels": 1}, BIT))
def test_a_training_step_has_them_within_a_hundredth(
    tiny_work: MakeWork, precision: Precision, fields: dict[str, Any]
) -> None:
    # wide enough that the scores, which a fused kernel computes twice, count as little as in published sizes
    wide = {} if "variant" in fields else {"width": 96, "heads": 3, "mlp_width": 384}
    work = tiny_work(precision=precision, **wide, **fields)
    assert Products(recorded(work), CPU).flops == pytest.approx(work.flops, rel=0.01)


def test_strides_and_formats_are_kept() -> None:
    x, weight = torch.randn(5, 3, dtype=torch.bfloat16), torch.randn(7, 3, dtype=torch.bfloat16)
    (product,) = record(lambda: nn.functional.linear(x, weight))
    assert product == Product("mm", (Operand((5, 3), (3, 1), torch.bfloat16), Operand((3, 7), (1, 3), torch.bfloat16)))
    again = product.operands[1].random(CPU)
    assert again.shape == (3, 7) and again.stride() == (1, 3) and again.dtype == torch.bfloat16


def test_replaying_makes_the_same_calls(tiny_work: MakeWork) -> None:
    for fields in ({}, {"variant": "Conv+ViT-Pico/8", "image_size": (16, 24), "depth": 1}):
        first = recorded(tiny_work(**fields))
        again = record(Products(first, CPU))  # the kernel that is fastest may order its factors in another way
        assert [(each.operation, each.flops) for each in again] == [(each.operation, each.flops) for each in first]
        assert [each for each in again if each.operation != "mm"] == [each for each in first if each.operation != "mm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", ["", "left", "right", "both"])
def test_every_kernel_of_a_product_agrees(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, turned: str) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(6, 4).to(dtype), torch.randn(4, 5).to(dtype)
    left = left.t().contiguous().t() if turned in ("left", "both") else left
    right = right.t().contiguous().t() if turned in ("right", "both") else right
    tried = []

    def measured(timers: dict[Any, Callable[[], float]], **_: int) -> dict[Any, list[float]]:
        """The kernel that comes first was the slowest."""
        tried.extend(timers)
        return {kernel: [float(-number)] for number, kernel in enumerate(timers)}

    monkeypatch.setattr(products, "interleave", measured)
    chosen = fastest_multiplication(left, right)
    assert chosen is [torch.mm, *tried][-1] and len(tried) == (3 if has_onednn(dtype) else 0)
    for kernel in tried:
        torch.testing.assert_close(kernel(left, right), left @ right)
    assert fastest_multiplication(left, right[:, :1].expand(4, 5)) is torch.mm, "oneDNN takes no expanded tensors"


def test_a_packed_weight_counts_as_a_product() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    x, weight = torch.randn(2, 5, 3), torch.randn(7, 3)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 10)
    for each in (weight, packed):
        (product,) = record(lambda each=each: torch.ops.mkldnn._linear_pointwise(x, each, None, "none", [], ""))
        assert product.operation == "mm" and product.flops == 2 * 2 * 5 * 3 * 7
        Products([product], CPU)()
