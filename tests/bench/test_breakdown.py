"""Tests of the categories of operations, and of their fractions of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vitrail.bench.step import CATEGORIES, OURS, Entry, breakdown, category_of, make_step
from vitrail.bench.workload import Workload


@pytest.mark.parametrize(
    ("operation", "category"),
    [
        ("aten::mm", "products"),
        ("aten::addmm", "products"),
        ("aten::bmm", "products"),
        ("aten::mkldnn_convolution", "products"),
        ("aten::convolution_backward", "products"),
        ("mkldnn::_linear_pointwise", "products"),
        ("aten::_softmax", "attention"),
        ("aten::_softmax_backward_data", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::native_group_norm", "normalisation"),
        ("aten::gelu_backward", "activation"),
        ("aten::copy_", "copies and casts"),
        ("aten::_to_copy", "copies and casts"),
        ("aten::cat", "copies and casts"),
        ("aten::_fused_adamw_", "optimizer"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::add", "the rest"),
        ("aten::mmap", "the rest"),
        ("vitrail.bench.step", "the rest"),
        ("aten::_log_softmax", "the rest"),
    ],
)
def test_kinds(operation: str, category: str) -> None:
    assert category_of(operation) == category


@pytest.mark.slow
def test_shares_make_a_whole(tiny_work: Callable[..., Workload], capfd: pytest.CaptureFixture[str]) -> None:
    shares = breakdown(make_step(Entry(OURS), tiny_work(batch=16)), torch.device("cpu"))
    assert list(shares) == [*CATEGORIES, "the rest"] and sum(shares.values()) == pytest.approx(1)
    assert all(shares[name] > 0 for name in shares)
    assert capfd.readouterr().err == ""


def test_the_standard_error_comes_back_after_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    calls = []

    def failing() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        breakdown(failing, torch.device("cpu"))
    import os

    os.write(2, b"seen")
    assert capfd.readouterr().err == "seen"
