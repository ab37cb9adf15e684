"""Tests of the small modules of a block against their formulas, and of the initial weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from vitrail.models.blocks import LayerScale, Mlp, StochasticDepth, SwiGlu, lecun_normal_, make_mlp
from vitrail.models.vit_config import Activation


def drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "gelu-tanh", "swiglu"])
def test_each_mlp_is_its_formula(activation: Activation, bias: bool) -> None:
    mlp = drawn(make_mlp(5, 7, activation, bias=bias))
    weights = {name: tensor.double() for name, tensor in mlp.state_dict().items()}
    assert set(weights) == {"up.weight", "down.weight", *(["up.bias", "down.bias"] if bias else [])}
    assert weights["up.weight"].shape == ((14 if activation == "swiglu" else 7), 5)
    x = torch.randn(2, 3, 5)
    h = x.double() @ weights["up.weight"].T + weights.get("up.bias", 0.0)
    if activation == "swiglu":
        hidden = h[..., :7] * torch.sigmoid(h[..., :7]) * h[..., 7:]
    elif activation == "gelu":
        hidden = h * (1 + torch.erf(h / math.sqrt(2))) / 2
    else:
        hidden = h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
    expected = hidden @ weights["down.weight"].T + weights.get("down.bias", 0.0)
    torch.testing.assert_close(mlp(x), expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_dropout_of_an_mlp_is_after_each_dense_layer(activation: Activation) -> None:
    mlp, x = drawn(make_mlp(5, 400, activation, dropout=0.25)).train(), torch.randn(2, 3, 5)
    seen: list[tuple[Tensor, Tensor]] = []
    for module in mlp.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, given, result: seen.append((given[0], result)))
    result = mlp(x)
    assert [before.shape[-1] for before, _ in seen] == [400, 5]
    assert result is seen[1][1]
    before, after = seen[0]
    assert abs((after != 0).double().mean() - 0.75) < 0.05
    torch.testing.assert_close(after[after != 0], before[after != 0] / 0.75)
    seen.clear()
    assert torch.equal(mlp.eval()(x), mlp(x))


def assert_xavier(weight: Tensor) -> None:
    bound = math.sqrt(6 / sum(weight.shape))
    assert 0.99 * bound < weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)


@pytest.mark.parametrize("kind", [Mlp, SwiGlu])
def test_mlps_start_xavier_uniform_with_tiny_biases(kind: type[Mlp] | type[SwiGlu]) -> None:
    torch.manual_seed(0)
    mlp = kind(96, 2048).requires_grad_(False)
    mlp.initialise()
    for layer in (mlp.up, mlp.down):
        assert_xavier(layer.weight)
    assert mlp.up.bias.std().item() == pytest.approx(1e-6, rel=0.1)
    assert mlp.down.bias.std().item() == pytest.approx(1e-6, rel=0.25)
    without = kind(96, 128, bias=False)
    without.initialise()
    assert without.up.bias is None and without.down.bias is None
    assert_xavier(without.up.weight.detach())


def test_layer_scale_multiplies_channels_and_starts_where_it_is_told() -> None:
    layer = LayerScale(3, 1e-5)
    layer.initialise()
    assert torch.equal(layer.gamma, torch.full((3,), 1e-5))
    with torch.no_grad():
        layer.gamma.copy_(torch.tensor([1.0, -2.0, 0.5]))
    x = torch.randn(2, 4, 3)
    assert torch.equal(layer(x), x * torch.tensor([1.0, -2.0, 0.5]))
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_stochastic_depth_drops_whole_branches_and_keeps_the_mean() -> None:
    layer = StochasticDepth(0.3).train()
    torch.manual_seed(0)
    branch = torch.randn(20_000, 2, 3)
    result = layer(branch)
    kept = (result != 0).flatten(1)
    assert torch.equal(kept.all(1), kept.any(1))
    torch.testing.assert_close(result[kept.all(1)], branch[kept.all(1)] / 0.7)
    assert abs(kept.double().mean() - 0.7) < 0.015
    assert abs(layer(torch.ones(20_000, 1, 1)).double().mean() - 1) < 0.02
    assert torch.equal(layer.eval()(branch), branch)


@pytest.mark.parametrize("shape", [(4096, 48), (512, 3, 7, 7), (2048, 64, 1, 1)])
def test_lecun_normal_has_variance_1_over_fan_in_and_no_tails(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.empty(shape)
    lecun_normal_(weight)
    std = math.prod(shape[1:]) ** -0.5
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert abs(weight.mean().item()) < 0.02 * std
    cut = 2 * std / 0.87962566103423978  # what a unit normal, cut at +-2, has left of its deviation
    assert 0.99 * cut < weight.abs().max() <= cut
    inside = (weight.abs() < cut / 2).double().mean().item()
    assert inside == pytest.approx(math.erf(1 / math.sqrt(2)) / math.erf(2 / math.sqrt(2)), abs=0.01)
