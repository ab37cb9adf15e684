"""Tests of the averaged weights against the formula in float64, and of exchanging them without loss."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vitrail.training.optimizer import AverageStart
from vitrail.training.state import Average


def module_of() -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    module[0].requires_grad_(False)
    return module


def kept_by_formula(start: AverageStart, decay: float, update: int) -> float:
    """The fraction of the mean that an update keeps, from the weights of the updates in an average of all of them."""
    if start == "initial":
        return decay
    if start == "capped":
        return min(decay, (1 + update) / (10 + update))
    return 1 - 1 / sum(decay**age for age in range(update + 1))


@given(
    decay=st.floats(0.0, 0.9999),
    updates=st.integers(1, 30),
    first=st.integers(0, 1000),
    start=st.sampled_from(get_args(AverageStart)),
)
def test_it_is_the_formula(decay: float, updates: int, first: int, start: AverageStart) -> None:
    module = module_of()
    average = Average(module, decay, start)
    average.updates = first
    expected = {name: tensor.double() for name, tensor in average.mean.items()}
    generator = torch.Generator().manual_seed(first)
    for update in range(first, first + updates):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        kept = kept_by_formula(start, decay, update)
        average.update()
        for name, parameter in module.named_parameters():
            if name in expected:
                expected[name] = kept * expected[name] + (1 - kept) * parameter.detach().double()
    assert set(average.mean) == {"1.weight", "1.bias"}, "only what is trained"
    for name, tensor in average.mean.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("start", "newest", "initial"), [
    ("debiased", 0.2097, 0.0), ("initial", 0.1813, 0.1353), ("capped", 0.6125, 0.0),
])  # fmt: skip
def test_the_weight_of_the_last_tenth_of_20_000_steps(start: AverageStart, newest: float, initial: float) -> None:
    """With a decay of 0.9999, as in the paper's ImageNet runs: 1 - 0.9999**2000 is 0.1813."""
    average = Average(nn.Linear(1, 1), 0.9999, start)
    kept = []
    for average.updates in range(20_000):
        kept.append(average.kept)
    assert 1 - math.prod(kept[18_000:]) == pytest.approx(newest, abs=1e-4)
    assert math.prod(kept) == pytest.approx(initial, abs=1e-4)


def test_a_debiased_mean_is_the_weighted_mean_of_all_steps() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 1e6)
    average, seen = Average(module, 0.9), []
    for step in range(6):
        nn.init.constant_(module.weight, float(step**2))
        average.update()
        seen.append(float(step**2))
        weights = [0.9**age for age in range(step, -1, -1)]
        expected = sum(weight * value for weight, value in zip(weights, seen, strict=True)) / sum(weights)
        assert average.mean["weight"].item() == pytest.approx(expected, rel=1e-6)


def test_exchanging_twice_changes_no_bit() -> None:
    module = module_of()
    average = Average(module, 0.9)
    with torch.no_grad():
        module[1].weight.mul_(3)
    average.updates = 5
    average.update()
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


def test_a_capped_mean_forgets_most_of_the_start_early() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    average = Average(module, 0.9999, "capped")
    nn.init.ones_(module.weight)
    left = 1.0
    for step in range(20):
        average.update()
        left *= (1 + step) / (10 + step)
    assert 1 - average.mean["weight"].item() == pytest.approx(left, abs=1e-6) and left < 1e-4
