"""Tests of the dense layer: exchanged kernels, adapted weights, products by rows, weights prepared for prediction, and
fused kernels with bounded errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models.networks import autocast, small_vit
from vitrail.models.attention.full import attend_fused
from vitrail.models.linear.dense import ONEDNN, Linear, fuses


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


needs_onednn = pytest.mark.skipif(not ONEDNN, reason="this build of PyTorch has no oneDNN")


def test_what_is_fused() -> None:
    x = torch.ones(2, 3)
    assert not fuses(x)
    with autocast():
        assert fuses(x) is ONEDNN
    with torch.autocast("cpu", torch.float16):
        assert not fuses(x)
    with autocast(enabled=False):
        assert not fuses(x)


def test_tracing_sees_plain_operations() -> None:
    seen = []

    class Probe(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(fuses(x))
            return x + 1

    with autocast():
        torch.export.export(Probe(), (torch.ones(2, 3),))
    assert seen == [False]


@needs_onednn
@settings(max_examples=10, deadline=None)
@given(
    rows=st.lists(st.integers(1, 9), min_size=0, max_size=2),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_dense_layer_agrees_with_the_plain_one(
    rows: list[int], inputs: int, outputs: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = Linear(inputs, outputs, bias=bias)
    x = torch.randn(*rows, inputs, requires_grad=True)
    upstream = torch.randn(*rows, outputs)
    with autocast():
        found = layer(x)
    assert found.dtype == torch.bfloat16 and found.shape == upstream.shape
    ours = torch.autograd.grad(found, [x, *layer.parameters()], upstream.bfloat16())
    plain = F.linear(x, layer.weight, layer.bias)
    exact = torch.autograd.grad(plain, [x, *layer.parameters()], upstream)
    torch.testing.assert_close(found.float(), plain, rtol=0.03, atol=0.05)
    for mine, theirs, target in zip(ours, exact, [x, *layer.parameters()], strict=True):
        assert mine.dtype == target.dtype, "gradients have the master weights' format"
        torch.testing.assert_close(mine, theirs, rtol=0.04, atol=0.15)


@needs_onednn
@settings(max_examples=10, deadline=None)
@given(
    batch=st.integers(1, 4), tokens=st.integers(1, 40), heads=st.integers(1, 5), d=st.integers(1, 33),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_attention_agrees_with_the_formula(batch: int, tokens: int, heads: int, d: int, seed: int) -> None:
    torch.manual_seed(seed)
    qkv = torch.randn(batch, tokens, 3 * heads * d).bfloat16().requires_grad_()
    upstream = torch.randn(batch, tokens, heads * d).bfloat16()
    with autocast():
        found = attend_fused(qkv, heads)
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.view(batch, tokens, 3, heads, d).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2) / d**0.5).softmax(dim=-1)
    expected = (weights @ v).transpose(1, 2).reshape(batch, tokens, heads * d)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.04)
    (ours,) = torch.autograd.grad(found, qkv, upstream)
    (theirs,) = torch.autograd.grad(expected, exact, upstream.double())
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), theirs, rtol=0.05, atol=0.06)


@needs_onednn
def test_without_gradients_the_results_are_the_same_numbers() -> None:
    torch.manual_seed(0)
    layer, x, qkv = Linear(24, 40), torch.randn(3, 5, 24), torch.randn(2, 13, 72).bfloat16()
    with autocast():
        trained = layer(x), attend_fused(qkv, 4)
        with torch.no_grad():
            served = layer(x), attend_fused(qkv, 4)
        with torch.inference_mode():
            layer.freeze(torch.bfloat16)
            frozen = layer(x), attend_fused(qkv, 4)
    for one, two, three in zip(trained, served, frozen, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


@pytest.mark.parametrize(
    "options",
    [{}, {"pool": "gap"}, {"pool": "map"}, {"registers": 2, "pool": "cls+gap"}, {"layer_scale": 0.5},
     {"activation": "gelu-tanh"}, {"qkv_bias": False, "dense_bias": False}, {"activation": "swiglu"},
     {"positions": "rotary-2d"}, {"positions": "relative-bias"}, {"qk_norm": True}, {"head_hidden": 12}],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)  # fmt: skip
def test_a_network_and_its_gradients_agree_with_float32(options: dict[str, object]) -> None:
    made = small_vit(**options)
    images, labels = torch.randn(6, 3, 35, 21), torch.tensor([0, 1, 2, 3, 4, 0])

    def run(half: bool) -> tuple[Tensor, dict[str, Tensor]]:
        made.zero_grad()
        with autocast(half):
            logits = made(images)
        F.cross_entropy(logits.float(), labels).backward()
        return logits.detach().float(), {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}

    (found, ours), (expected, exact) = run(True), run(False)
    assert ours.keys() == exact.keys()
    assert (found - expected).double().norm() < 0.02 * expected.double().norm()
    largest = max(float(gradient.norm()) for gradient in exact.values())
    for name, gradient in exact.items():
        assert float((ours[name] - gradient).norm()) < 0.06 * float(gradient.norm()) + 2e-3 * largest, name
