"""Training on a GPU: the same config, the same order, bf16 by itself, and an exact resume of what can be exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vitrail.machine import has_bf16_matrix_units, pick_device
from vitrail.training.config import TrainConfig
from vitrail.training.journal import read_journal
from vitrail.training.run import train
from vitrail.weights.load import load

pytestmark = pytest.mark.gpu


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_journal(folder / "journal.jsonl") if event["event"] == "step"]


def test_auto_picks_the_gpu_and_bf16() -> None:
    device = pick_device("auto")
    assert device.type == "cuda"
    assert has_bf16_matrix_units(device) == (torch.cuda.get_device_capability() >= (8, 0))


def test_float32_follows_the_cpu(tiny: Callable[..., TrainConfig], tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        train(tiny(device=device, run=str(tmp_path / device), steps=12))
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


def test_a_model_from_the_gpu_predicts_alike_on_the_cpu(tiny: Callable[..., TrainConfig]) -> None:
    result = train(tiny(device="cuda", precision="bf16", steps=12))
    paths = [example.path for example in result.examples]
    here, there = (load(result.folder, device=name).predict(paths) for name in ("cpu", "cuda"))
    for ours, theirs in zip(here, there, strict=True):
        assert dict(ours.ranking) == pytest.approx(dict(theirs.ranking), abs=1e-4)
    assert result.summary["peak_memory_bytes"] == torch.cuda.max_memory_allocated()
