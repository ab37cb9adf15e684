"""Tests of dense layers in 8-bit integers, against rounded factors that are multiplied in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from vitrail import machine
from vitrail.errors import ConfigError
from vitrail.machine import has_int8_products
from vitrail.models.linear.dense import Linear
from vitrail.models.linear.low_bits import Int8Product, quantized, use_int8
from vitrail.models.predictor import Predictor

CPU = torch.device("cpu")
LACKS = "this machine has no fast products of 8-bit integers"
needs_int8 = pytest.mark.skipif(not has_int8_products(CPU), reason=LACKS)


def rounded(x: Tensor) -> Tensor:
    """Return each row rounded to multiples of its largest magnitude / 127, in float64."""
    units = x.double().abs().amax(dim=1, keepdim=True) / 127
    return (x.double() / units).round() * units


def vit(**fields: Any) -> Any:
    torch.manual_seed(0)
    network = vitrail.create(
        "ViT-Pico/7", num_classes=5, image_size=(35, 21), width=48, depth=3, heads=4, mlp_width=80, **fields
    ).eval()
    torch.nn.init.normal_(network.head.weight)  # type: ignore[union-attr, arg-type]
    return network


@needs_int8
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 7, 5), (33, 48, 80), (197, 80, 48), (2, 3, 1)])
def test_products_are_those_of_the_rounded_factors(rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    layer = Linear(inputs, outputs)
    x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
    exact = rounded(x) @ rounded(layer.weight.detach()).t() + layer.bias.detach().double()
    found = Int8Product(layer.operand)(x, layer.weight.detach(), layer.bias.detach())
    size = (rounded(x).abs() @ rounded(layer.weight.detach()).abs().t() + 1).float()
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
    network, images = vit(**fields), torch.randn(3, 3, 35, 21)
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
    network, images = vit(), torch.randn(2, 3, 35, 21)
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx512_vnni"})
    found = Predictor(network, "int8")(images)
    assert found.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(found, Predictor(network)(images)).min() > 0.995


def test_a_machine_without_the_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx2"})
    with pytest.raises(ConfigError, match=r"precision='int8' needs a CPU with VNNI instructions .* choices: 'auto'"):
        Predictor(vit(), "int8")
    assert not has_int8_products(torch.device("meta"))


def test_a_network_without_dense_layers_in_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision='int8' needs dense layers in a transformer's blocks"):
        use_int8(vitrail.create("BiT-R26x1", num_classes=5, image_size=(35, 21), width=32, depths=(1, 1)))
