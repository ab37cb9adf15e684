"""Tests of the categories of operations, and of their fractions of a step."""

from __future__ import annotations

import os
from unittest.mock import Mock

import pytest
import torch

from tests.bench.conftest import MakeWork
from vitrail.bench.step import CATEGORIES, OURS, Entry, breakdown, category_of, make_step

KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::mkldnn_convolution", "mkldnn::_linear_pointwise"),
    "attention": ("aten::_softmax", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"),
    "normalisation": ("aten::native_layer_norm_backward", "aten::native_group_norm"),
    "activation": ("aten::gelu_backward",),
    "copies and casts": ("aten::copy_", "aten::_to_copy", "aten::cat"),
    "optimizer": ("aten::_fused_adamw_", "Optimizer.step#AdamW.step"),
    "the rest": ("aten::add", "aten::mmap", "vitrail.bench.step", "aten::_log_softmax"),
}


def test_operations_are_told_apart_by_their_whole_name() -> None:
    assert {name: tuple(one for one in names if category_of(one) == name) for name, names in KINDS.items()} == KINDS


@pytest.mark.slow
def test_shares_make_a_whole(tiny_work: MakeWork, capfd: pytest.CaptureFixture[str]) -> None:
    shares = breakdown(make_step(Entry(OURS), tiny_work(batch=16)), torch.device("cpu"))
    assert list(shares) == [*CATEGORIES, "the rest"] and sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0 and capfd.readouterr().err == ""


def test_the_standard_error_comes_back_after_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    step = Mock(side_effect=[None, RuntimeError("no")])
    with pytest.raises(RuntimeError, match="no"):
        breakdown(step, torch.device("cpu"))
    os.write(2, b"seen")
    assert capfd.readouterr().err == "seen"
