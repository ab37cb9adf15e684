"""Tests of dense layers with fused kernels, in float8 and in int8: exact for rounded factors, bounded errors."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import vitrail
from tests.models.networks import small_vit
from vitrail import machine
from vitrail.errors import ConfigError
from vitrail.machine import has_int8_products, resolve_precision
from vitrail.models.attention.full import attend_fused
from vitrail.models.linear.dense import ONEDNN, Linear, fuses, linear
from vitrail.models.linear.low_bits import Int8Product, check_float8, float8_linear, quantized, use_float8, use_int8
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


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


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
def test_errors_stay_within_the_formats_digits() -> None:
    """A factor has 4 digits in e4m3 and 3 in e5m2. The root mean square errors of a uniform mantissa are 0.026 and
    0.053.
    """
    torch.manual_seed(0)
    layer, x = Linear(256, 128), torch.randn(5, 37, 256, requires_grad=True)
    upstream = torch.randn(5, 37, 128).bfloat16()
    exact = F.linear(x, layer.weight, layer.bias)
    expected = torch.autograd.grad(exact, [x, layer.weight], upstream.float())
    with autocast():
        found = float8_linear(x, layer.weight, layer.bias)
    ours = torch.autograd.grad(found, [x, layer.weight], upstream)
    assert 0.01 < (found - exact).norm() / exact.norm() < 0.05
    for mine, theirs in zip(ours, expected, strict=True):
        assert 0.02 < (mine - theirs).norm() / theirs.norm() < 0.08


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


CPU = torch.device("cpu")
LACKS = "this machine has no fast products of 8-bit integers"
needs_int8 = pytest.mark.skipif(not has_int8_products(CPU), reason=LACKS)


def rounded_to_int8(x: Tensor) -> Tensor:
    """Return each row rounded to multiples of its largest magnitude / 127, in float64."""
    units = x.double().abs().amax(dim=1, keepdim=True) / 127
    return (x.double() / units).round() * units


@needs_int8
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 7, 5), (33, 48, 80), (197, 80, 48), (2, 3, 1)])
def test_products_are_those_of_the_rounded_factors(rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    layer = Linear(inputs, outputs)
    x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
    exact = rounded_to_int8(x) @ rounded_to_int8(layer.weight.detach()).t() + layer.bias.detach().double()
    found = Int8Product(layer.operand)(x, layer.weight.detach(), layer.bias.detach())
    size = (rounded_to_int8(x).abs() @ rounded_to_int8(layer.weight.detach()).abs().t() + 1).float()
    assert ((found - exact).abs() <= 3e-6 * size).all()
    whole = x @ layer.weight.detach().t() + layer.bias.detach()
    assert (found - whole).norm() < 0.03 * whole.norm()


@needs_int8
def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    product = Int8Product(torch.randn(24, 40))
    x = torch.randn(6, 5, 40)
    x[2] *= 1000
    together = product(x, torch.empty(24, 40), None)
    for image, row in zip(x, together, strict=True):
        assert torch.equal(product(image[None], torch.empty(24, 40), None)[0], row)


@needs_int8
def test_rows_of_zeros_and_no_rows() -> None:
    weight, bias = torch.randn(6, 4), torch.randn(6)
    product = Int8Product(weight)
    assert torch.equal(product(torch.zeros(2, 3, 4), weight, bias), bias.expand(2, 3, 6))
    assert product(torch.zeros(0, 3, 4), weight, bias).shape == (0, 3, 6)
    assert torch.equal(Int8Product(torch.zeros(6, 4))(torch.randn(2, 4), torch.zeros(6, 4), bias), bias.expand(2, 6))


def test_inputs_are_rounded_to_nearest_and_shifted() -> None:
    x = torch.tensor([[127.0, -127.0, 0.4, 0.6, -63.6], [0.0, 0.0, 0.0, 0.0, 0.0]])
    found, scales = quantized(x)
    assert found.tolist() == [[255, 1, 128, 129, 64], [128] * 5]
    assert scales[0].item() == pytest.approx(1) and scales.shape == (2, 1)


@needs_int8
@pytest.mark.parametrize("fields", [{}, {"pool": "gap", "qk_norm": True}, {"activation": "swiglu", "pool": "map"}])
def test_a_predictor_in_int8_is_near_and_changes_nothing(fields: dict[str, Any]) -> None:
    network, images = small_vit(**fields).eval(), torch.randn(3, 3, 35, 21)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    exact = Predictor(network)(images)
    predictor = Predictor(network, "int8")
    assert predictor.precision == "int8"
    found = predictor(images).float()
    assert not torch.equal(found, Predictor(network, "bf16")(images).float())
    assert torch.nn.functional.cosine_similarity(found, exact).min() > 0.995
    assert torch.equal(Predictor(network)(images), exact)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    torch.testing.assert_close(predictor(images[:1]).float(), found[:1], rtol=0, atol=0.05)


@needs_int8
def test_without_bf16_units_the_rest_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    network, images = small_vit().eval(), torch.randn(2, 3, 35, 21)
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx512_vnni"})
    found = Predictor(network, "int8")(images)
    assert found.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(found, Predictor(network)(images)).min() > 0.995


def test_a_machine_without_the_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx2"})
    with pytest.raises(ConfigError, match=r"precision='int8' needs a CPU with VNNI instructions .* choices: 'auto'"):
        Predictor(small_vit(), "int8")
    assert not has_int8_products(torch.device("meta"))


@pytest.mark.slow
def test_a_limit_on_instructions_is_noticed() -> None:
    """Products of 8-bit integers saturate silently if oneDNN may not use VNNI, whatever the processor has."""
    code = "import torch; from vitrail.machine import has_int8_products; print(has_int8_products(torch.device('cpu')))"
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert subprocess.run([sys.executable, "-c", code], env=limited, capture_output=True, text=True).stdout == "False\n"


def test_a_network_without_dense_layers_in_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision='int8' needs dense layers in a transformer's blocks"):
        use_int8(vitrail.create("BiT-R26x1", num_classes=5, image_size=(35, 21), width=32, depths=(1, 1)))


needs_onednn = pytest.mark.skipif(not ONEDNN, reason="this build of PyTorch has no oneDNN")


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


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
@pytest.mark.parametrize("gelu", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(5, 17, 48), (1, 1, 48), (3, 48), (0, 4, 48)])
def test_gelu_in_front_of_a_dense_layer(gelu: Literal["none", "tanh"], shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    layer = Linear(48, 20)
    hidden = (2 * torch.randn(shape)).bfloat16().float().requires_grad_()
    upstream = torch.randn(*shape[:-1], 20).bfloat16()
    with autocast():
        found = layer.after_gelu(hidden, gelu)
    plain = layer(F.gelu(hidden, approximate=gelu))
    torch.testing.assert_close(found.float(), plain, rtol=0.02, atol=0.03)
    targets = [hidden, layer.weight, layer.bias]
    ours = torch.autograd.grad(found, targets, upstream)
    exact = torch.autograd.grad(plain, targets, upstream.float())
    for mine, theirs in zip(ours, exact, strict=True):
        assert relative(mine, theirs) < 0.01


@needs_onednn
def test_gelu_keeps_one_wide_tensor_only() -> None:
    layer, hidden = Linear(64, 16), torch.randn(7, 64, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with autocast(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer.after_gelu(hidden.bfloat16(), "none")
    assert [tuple(tensor.shape) for tensor in kept] == [(7, 64), (16, 64)]
    assert all(tensor.dtype == torch.bfloat16 for tensor in kept)


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
        trained = layer(x), layer.after_gelu(x, "none"), attend_fused(qkv, 4)
        with torch.no_grad():
            served = layer(x), layer.after_gelu(x, "none"), attend_fused(qkv, 4)
        with torch.inference_mode():
            layer.freeze(torch.bfloat16)
            frozen = layer(x), layer.after_gelu(x, "none"), attend_fused(qkv, 4)
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
    assert relative(found, expected) < 0.02
    largest = max(float(gradient.norm()) for gradient in exact.values())
    for name, gradient in exact.items():
        assert float((ours[name] - gradient).norm()) < 0.06 * float(gradient.norm()) + 2e-3 * largest, name
