"""Steps that train and predict, ours and a stand-in library's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vitrail.bench.contenders import OURS, Entry, entries, make_step
from vitrail.bench.peers import PEERS
from vitrail.bench.workload import Workload


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """A library called timm that builds one linear layer, and the networks it has built."""
    built: list[nn.Module] = []

    def make(config: Any) -> nn.Module:
        pixels = config.channels * config.image_size[0] * config.image_size[1]
        built.append(nn.Sequential(nn.Flatten(), nn.Linear(pixels, config.num_classes)))
        return built[-1]

    monkeypatch.setitem(PEERS, "timm", make)
    return built


def test_every_setting_is_listed_once(tiny_work: Callable[..., Workload]) -> None:
    work = tiny_work(precision="bf16")
    assert entries(work) == [Entry(OURS)]
    names = [(entry.library, entry.describe(work)) for entry in entries(work, ("timm",), best=True)]
    assert names == [
        (OURS, "bf16"), (OURS, "bf16 compiled"), ("timm", "float32"), ("timm", "bf16"), ("timm", "bf16 compiled"),
    ]  # fmt: skip
    assert entries(tiny_work(), ("timm",)) == [Entry(OURS), Entry("timm")]


@pytest.mark.parametrize(("settings", "dtype"), [("default", torch.float32), ("matched", torch.bfloat16)])
def test_a_step_trains_in_its_precision(
    tiny_work: Callable[..., Workload], stand_in: list[nn.Module], settings: Any, dtype: torch.dtype
) -> None:
    step = make_step(Entry("timm", settings), tiny_work(precision="bf16"))
    (network,) = stand_in
    seen: list[torch.dtype] = []
    network.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    before = [parameter.detach().clone() for parameter in network.parameters()]
    step()
    assert seen == [dtype] and network.training
    assert all(not torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True))
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in network.parameters())


def test_a_prediction_keeps_nothing(tiny_work: Callable[..., Workload], stand_in: list[nn.Module]) -> None:
    work = tiny_work(task="infer", precision="bf16")
    for library in (OURS, "timm"):
        logits = make_step(Entry(library), work)()
        assert isinstance(logits, torch.Tensor) and logits.shape == (3, 5)
        assert logits.is_inference() and logits.dtype == torch.bfloat16
    assert not stand_in[0].training
