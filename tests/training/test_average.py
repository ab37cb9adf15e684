"""Tests of averaged weights against the formula in float64, of exchanging them without loss, and of random states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from vitrail.training.optimizer import AverageStart
from vitrail.training.state import Average, random_state, restore_random_state


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


@pytest.mark.slow
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


Devices = list[Tensor]


@pytest.fixture(autouse=True)
def same_state_afterwards() -> Iterator[None]:
    with torch.random.fork_rng([]):
        yield


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Devices]:
    """A function that makes this machine look like one with `count` CUDA devices. It returns the states of their
    generators."""

    def pretend(count: int, *, used: bool = True) -> Devices:
        states = [torch.full((16,), 10 * count + number, dtype=torch.uint8) for number in range(count)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used and count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone() for state in states])
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states[device].copy_(state))
        return states

    return pretend


@pytest.mark.parametrize("saved", [0, 1, 3])
@pytest.mark.parametrize("present", [0, 1, 2, 3])
def test_a_state_is_restored_on_a_machine_with_other_devices(
    saved: int, present: int, machine: Callable[..., Devices]
) -> None:
    before = [state.tolist() for state in machine(saved)]
    state = random_state()
    assert set(state) == {"cpu", "cuda"} and len(state["cuda"]) == saved
    devices = machine(present)
    fresh = [device.tolist() for device in devices]
    restore_random_state(state)
    both = min(saved, present)
    assert [device.tolist() for device in devices] == before[:both] + fresh[both:]


def test_a_process_that_does_not_use_cuda_does_not_start_it(machine: Callable[..., Devices]) -> None:
    machine(2, used=False)
    assert random_state()["cuda"] == []
