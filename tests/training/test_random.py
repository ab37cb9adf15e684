"""Random states: the same names on every machine, all devices, and a machine with other devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from vitrail.training.state import random_state, restore_random_state

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


def test_the_cpu_draws_the_same_numbers_again() -> None:
    torch.manual_seed(3)
    state = random_state()
    expected = torch.rand(5), torch.randn(3)
    torch.rand(100)
    restore_random_state(state)
    assert torch.equal(torch.rand(5), expected[0]) and torch.equal(torch.randn(3), expected[1])


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
