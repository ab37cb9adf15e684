"""Tests of the library of float32 products: equal results by both, the choice, and training that keeps it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.models.linear import float32
from vitrail.models.linear.dense import Linear
from vitrail.models.linear.float32 import VARIABLE, float32_products, resolve_float32_products, uses_onednn

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True, scope="module")
def small_layers() -> Iterator[None]:
    """Lets oneDNN compute the small layers of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float32, "SMALLEST", 1)
        yield


@pytest.fixture
def onednn() -> Iterator[None]:
    with float32_products("onednn"):
        yield


@needs_onednn
@given(
    rows=st.lists(st.integers(0, 9), min_size=0, max_size=2),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_layer_agrees_with_the_plain_one(rows: list[int], inputs: int, outputs: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = Linear(inputs, outputs, bias=bias)
    x = torch.randn(*rows, inputs, requires_grad=True)
    upstream = torch.randn(*rows, outputs)
    with float32_products("onednn"):
        found = layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x), found)
        ours = torch.autograd.grad(found, [x, *layer.parameters()], upstream)
    plain = F.linear(x, layer.weight, layer.bias)
    exact = torch.autograd.grad(plain, [x, *layer.parameters()], upstream)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(ours, exact)


@needs_onednn
def test_tensors_of_any_strides(onednn: None) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(5, 7, 12)[:, :3, ::2], Linear(6, 4)
    turned = torch.nn.Parameter(torch.randn(6, 4).t())
    for weight in (layer.weight, turned):
        found = layer.product(x, weight, layer.bias)
        torch.testing.assert_close(found, F.linear(x, weight, layer.bias))
        (gradient,) = torch.autograd.grad(found.sum(), weight)  # the gradient of a sum has strides of 0
        (expected,) = torch.autograd.grad(F.linear(x, weight, layer.bias).sum(), weight)
        torch.testing.assert_close(gradient, expected)


@needs_onednn
def test_all_three_products_are_onednns(onednn: None) -> None:
    x, layer = torch.randn(9, 6, requires_grad=True), Linear(6, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        layer(x).sum().backward()
    names = [event.name for event in profile.events()]
    assert names.count("mkldnn::_linear_pointwise") == 3 and "aten::mm" not in names


@needs_onednn
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, when it differentiates forward
def test_transforms_and_second_derivatives_still_work(onednn: None) -> None:
    torch.manual_seed(0)
    layer, x = Linear(3, 2), torch.randn(4, 3, dtype=torch.float32, requires_grad=True)

    def energy(x: Tensor) -> Tensor:
        return layer(x).square().sum()

    hessian = torch.autograd.functional.hessian(energy, x)
    assert isinstance(hessian, Tensor)
    expected = 2 * layer.weight.t() @ layer.weight
    for row in range(4):
        torch.testing.assert_close(hessian[row, :, row], expected)
    torch.testing.assert_close(torch.func.vmap(layer)(x), F.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(torch.func.grad(energy)(x), 2 * layer(x) @ layer.weight)
    value, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    torch.testing.assert_close((value, tangent), (layer(x), (torch.ones_like(x) @ layer.weight.t())))


@needs_onednn
def test_other_tensors_take_pytorchs_kernel(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    with monkeypatch.context() as patch:
        patch.setattr(float32, "SMALLEST", 12)
        assert uses_onednn(x, weight) and not uses_onednn(x, weight[1:])
    assert uses_onednn(x, weight)
    assert not uses_onednn(x.double(), weight.double()) and not uses_onednn(x[:0], weight)
    with torch.autocast("cpu", torch.float16):
        assert not uses_onednn(x, weight)
    with float32_products("mkl"):
        assert not uses_onednn(x, weight)
    assert uses_onednn(x, weight), "the choice inside a block ends with it"


@pytest.mark.parametrize(
    ("vendor", "flags", "mkl", "library"),
    [
        ("AuthenticAMD", {"avx2", "avx512f"}, True, "onednn"),
        ("AuthenticAMD", {"avx2"}, True, "mkl"),
        ("AuthenticAMD", {"avx2", "avx512f"}, False, "mkl"),
        ("GenuineIntel", {"avx2", "avx512f"}, True, "mkl"),
        ("", set(), True, "mkl"),
    ],
)
def test_the_faster_library_of_a_processor(
    monkeypatch: pytest.MonkeyPatch, vendor: str, flags: set[str], mkl: bool, library: str
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(float32, "cpu_vendor", lambda: vendor)
    monkeypatch.setattr(float32, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(float32, "has_onednn", lambda dtype: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    float32._faster.cache_clear()
    assert resolve_float32_products("auto") == library
    float32._faster.cache_clear()


def test_the_environment_variable_replaces_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32, "has_onednn", lambda dtype: True)
    for name in ("mkl", "onednn"):
        monkeypatch.setenv(VARIABLE, name)
        assert [resolve_float32_products(setting) for setting in ("auto", "mkl", "onednn")] == [name, "mkl", "onednn"]
    monkeypatch.setenv(VARIABLE, "blas")
    with pytest.raises(ConfigError, match="VITRAIL_FLOAT32_PRODUCTS='blas' is not one of 'auto', 'mkl', 'onednn'"):
        resolve_float32_products()
    monkeypatch.setattr(float32, "has_onednn", lambda dtype: False)
    assert resolve_float32_products("onednn") == "mkl"
