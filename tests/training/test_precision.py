"""What "auto" stands for, and which tensors are in which number format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from vitrail.machine import has_bf16_matrix_units
from vitrail.training.config import TrainConfig
from vitrail.training.loop import train_step
from vitrail.training.precision import autocast, resolve_precision

CPU = torch.device("cpu")


def test_auto_follows_the_processor() -> None:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    has_units = any(flag in flags.split() for flag in ("amx_bf16", "avx512_bf16", "bf16"))
    assert has_bf16_matrix_units(CPU) is has_units
    assert resolve_precision("auto", CPU) == ("bf16" if has_units else "float32")


@pytest.mark.parametrize("units", [True, False])
def test_auto_is_bf16_only_with_matrix_units(units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.training.precision.has_bf16_matrix_units", lambda device: units)
    assert resolve_precision("auto", CPU) == ("bf16" if units else "float32")
    assert resolve_precision("bf16", CPU) == "bf16" and resolve_precision("float32", CPU) == "float32"


def test_products_run_in_the_format_asked_for() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with autocast("bf16", CPU):
        assert layer(x).dtype == torch.bfloat16
    with autocast("float32", CPU):
        assert layer(x).dtype == torch.float32


def test_weights_and_optimizer_state_stay_in_float32(
    small: Callable[..., TrainConfig], prepare: Callable, tmp_path: Path
) -> None:
    state, plan = prepare(small(tmp_path / "run", precision="bf16"))
    outputs = []
    handle = state.objective.network.blocks[0].mlp.up.register_forward_hook(lambda *given: outputs.append(given[-1]))
    figures = train_step(state, plan, next(state.batches))
    handle.remove()
    assert outputs[0].dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in state.objective.parameters())
    tensors = [value for item in state.optimizer.state.values() for value in item.values()]
    assert len(tensors) > 10 and all(value.dtype == torch.float32 for value in tensors)
    assert figures["loss"].dtype == torch.float32
