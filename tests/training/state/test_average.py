"""The mean of the weights against its formula in float64, and that exchanging it loses no bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vitrail.training.state.average import Average


def module_of() -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    module[0].requires_grad_(False)
    return module


@given(decay=st.floats(0.0, 0.9999), steps=st.integers(1, 30), first=st.integers(0, 1000))
def test_it_is_the_formula(decay: float, steps: int, first: int) -> None:
    module = module_of()
    average = Average(module, decay)
    expected = {name: tensor.double() for name, tensor in average.mean.items()}
    generator = torch.Generator().manual_seed(first)
    for step in range(first, first + steps):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        average.update(step)
        kept = min(decay, (1 + step) / (10 + step))
        for name, parameter in module.named_parameters():
            if name in expected:
                expected[name] = kept * expected[name] + (1 - kept) * parameter.detach().double()
    assert set(average.mean) == {"1.weight", "1.bias"}, "only what is trained"
    for name, tensor in average.mean.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-5)


def test_exchanging_twice_changes_no_bit() -> None:
    module = module_of()
    average = Average(module, 0.9)
    with torch.no_grad():
        module[1].weight.mul_(3)
    average.update(0)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    mean = {name: tensor.clone() for name, tensor in average.mean.items()}
    held = module[1].weight
    average.swap()
    assert module[1].weight is held and torch.equal(held, mean["1.weight"])
    assert not torch.equal(held, weights["1.weight"])
    assert all(torch.equal(average.mean[name], weights[name]) for name in mean)
    average.swap()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())
    assert all(torch.equal(average.mean[name], tensor) for name, tensor in mean.items())


def test_early_on_most_of_the_start_is_forgotten() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    average = Average(module, 0.9999)
    nn.init.ones_(module.weight)
    left = 1.0
    for step in range(20):
        average.update(step)
        left *= (1 + step) / (10 + step)
    assert 1 - average.mean["weight"].item() == pytest.approx(left, abs=1e-6) and left < 1e-4
