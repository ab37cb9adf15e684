"""Tests of dense layers in float8: exact for rounded factors, bounded errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.networks import autocast, small_vit
from vitrail.errors import ConfigError
from vitrail.machine import resolve_precision
from vitrail.models.linear.dense import Linear, linear
from vitrail.models.linear.float8 import check_float8, float8_linear, use_float8
from vitrail.models.predictor import Predictor
from vitrail.models.variants import variant_config
from vitrail.models.vit import VisionTransformer


def works() -> bool:
    try:
        return resolve_precision("float8", torch.device("cpu")) == "float8"
    except ConfigError:
        return False


needs_float8 = pytest.mark.skipif(not works(), reason="this CPU build of PyTorch has no products in 8 bits")

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)


def rounded(x: Tensor, format: tuple[torch.dtype, float]) -> Tensor:  # noqa: A002
    """Return a tensor rounded to 8 bits, with the scale of the largest number of `x`, in float64."""
    dtype, largest = format
    unit = x.detach().float().abs().max() / largest
    return (x.detach().float() / unit).to(dtype).double() * unit.double()


def assert_product(found: Tensor, a: Tensor, b: Tensor, added: Tensor | None = None, digits: int = 8) -> None:
    """Assert that `found` is the product `a b`, plus `added`.

    The error may be that of sums in float32 plus that of one rounding to `digits` binary digits.
    """
    exact = a @ b if added is None else a @ b + added.double()
    sums = a.abs() @ b.abs() + (0 if added is None else added.double().abs())
    allowed = exact.abs() * 2.0**-digits + sums * a.shape[-1] * 2.0**-22
    assert bool(((found.double() - exact).abs() <= allowed).all())


@needs_float8
@settings(max_examples=10, deadline=None)
@given(
    rows=st.lists(st.integers(1, 7), min_size=1, max_size=2), inputs=st.integers(1, 3), outputs=st.integers(1, 3),
    bias=st.booleans(), scale=st.sampled_from([1e-6, 1.0, 1e4]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_products_are_exact_on_what_rounding_leaves(
    rows: list[int], inputs: int, outputs: int, bias: bool, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = Linear(16 * inputs, 16 * outputs, bias=bias)
    x = (scale * torch.randn(*rows, 16 * inputs)).requires_grad_()
    upstream = (scale * torch.randn(*rows, 16 * outputs)).bfloat16()
    with autocast():
        found = float8_linear(x, layer.weight, layer.bias)
    assert found.dtype == torch.bfloat16 and found.shape == upstream.shape
    a, w = rounded(x.flatten(0, -2), E4M3), rounded(layer.weight, E4M3)
    assert_product(found.flatten(0, -2), a, w.T, None if layer.bias is None else layer.bias.detach().bfloat16())
    gradients = torch.autograd.grad(found, [x, *layer.parameters()], upstream)
    g = rounded(upstream.flatten(0, -2), E5M2)
    assert_product(gradients[0].flatten(0, -2), g, w)
    assert_product(gradients[1], g.T, a, digits=22)
    if bias:
        torch.testing.assert_close(gradients[2], upstream.flatten(0, -2).float().sum(0))
    for gradient, target in zip(gradients, [x, *layer.parameters()], strict=True):
        assert gradient.dtype == target.dtype and gradient.shape == target.shape


@needs_float8
@pytest.mark.parametrize("value", [0.0, 3e38, float("nan")])
def test_numbers_at_the_ends(value: float) -> None:
    x, weight = torch.full((3, 16), value), torch.randn(16, 16, requires_grad=True)
    with autocast():
        found = float8_linear(x, weight / weight.abs().sum(), None)
    assert found.isnan().all() if value != value else found.isfinite().all()
    assert value or not found.any()


@settings(max_examples=10, deadline=None)
@given(powers=st.tuples(*[st.integers(-126, 127)] * 3), seed=st.integers(0, 2**31))
def test_scales_stay_inside_the_range_of_float32(powers: tuple[int, int, int], seed: int) -> None:
    """The kernel of a processor may apply one scale before the other, or divide by a scale."""
    torch.manual_seed(seed)
    x, weight, upstream = (
        torch.randn(16, 16, dtype=torch.float64).clamp(-0.99, 0.99).mul(2.0**power).float() for power in powers
    )
    products: list[tuple[Tensor, Tensor]] = []

    def product(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, **_: Any) -> Tensor:
        sums = a.double().abs() @ b.double().abs()
        products.append((a.double() * scale_a.double(), b.double() * scale_b.double()))
        limits = torch.finfo(torch.float32)
        for scale in (scale_a, scale_b):
            assert limits.tiny <= scale <= limits.max and limits.tiny <= 1 / scale <= limits.max
        result = sums.max() * scale_a.double() * scale_b.double()
        for scale in (scale_a, scale_b):
            assert result > limits.max or sums.max() * scale.double() < limits.max
        assert bool(a.float().isfinite().all()) and bool(b.float().isfinite().all())
        return torch.zeros(len(a), b.shape[1], dtype=out_dtype)

    with pytest.MonkeyPatch.context() as patch, autocast():
        patch.setattr(torch, "_scaled_mm", product)
        found = float8_linear(x.requires_grad_(), weight.requires_grad_(), None)
        found.backward(upstream.bfloat16())
    for (a, b), (left, right) in zip(products, [(x, weight.T), (upstream, weight), (upstream.T, x)], strict=True):
        unit = left.abs().max().clamp(min=1e-30).double() * right.abs().max().clamp(min=1e-30).double()
        expected = left.detach().double() @ right.detach().double()
        assert ((a @ b - expected).abs() <= 16 * 0.2 * unit).all()


def test_without_gradients_or_autocast_nothing_changes() -> None:
    torch.manual_seed(0)
    layer, x = Linear(32, 16), torch.randn(3, 32)
    assert torch.equal(float8_linear(x, layer.weight, layer.bias), layer(x))
    with autocast(), torch.no_grad():
        assert torch.equal(float8_linear(x, layer.weight, layer.bias), linear(x, layer.weight, layer.bias))


def network(**fields: Any) -> VisionTransformer:
    return small_vit(std=0.0, **{"heads": 3, "num_classes": 4, **fields})


def test_layers_of_blocks_whose_sides_fit_are_taken() -> None:
    def layers_in_8_bits(made: VisionTransformer) -> int:
        use_float8(made)
        assert made.head.product is linear
        return sum(isinstance(part, Linear) and part.product is float8_linear for part in made.modules())

    assert layers_in_8_bits(network()) == 12
    assert layers_in_8_bits(network(mlp_width=84)) == 6, "84 is no multiple of 16, so MLPs stay as they are"
    swiglu = network(width=32, heads=2, mlp_width=24, activation="swiglu")
    assert layers_in_8_bits(swiglu) == 9, "up has 48 outputs then"


@pytest.mark.parametrize("variant", ["ViT-Pico/7", "BiT-R50x1"])
def test_a_network_without_such_layers_is_refused(variant: str) -> None:
    fields = {"width": 24, "heads": 2, "mlp_width": 40} if variant.startswith("ViT") else {}
    with pytest.raises(ConfigError, match=r"^precision='float8' needs dense layers in a transformer's blocks .* none"):
        check_float8(variant_config(variant, image_size=224, **fields))
    check_float8(variant_config("R50+ViT-B/16"))


@needs_float8
@pytest.mark.parametrize(("fields", "products"), [({}, 13), ({"pool": "gap"}, 12), ({"activation": "swiglu"}, 13)])
def test_every_such_layer_trains_in_8_bits(
    fields: dict[str, Any], products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a class token, the queries of the last block have a matrix product of their own."""
    made, calls, product = network(**fields), [], torch._scaled_mm

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(args[0].dtype)
        return product(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    use_float8(made)
    with autocast():
        logits = made(torch.randn(2, 3, 35, 21))
    assert calls == products * [torch.float8_e4m3fn]
    logits.float().square().sum().backward()
    assert calls[products:] == 2 * products * [torch.float8_e5m2]
    calls.clear()
    Predictor(made, "bf16").logits(torch.randn(2, 3, 35, 21))
    assert not calls, "predictions are in the precision that they were asked for"


def test_a_device_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("only on devices with compute capability >= 8.9\nand more")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    message = r"^precision='float8' needs CUDA .* \(only on devices with .* >= 8.9\); choices: 'auto', 'bf16'"
    with pytest.raises(ConfigError, match=message):
        resolve_precision("float8", torch.device("cpu"))
