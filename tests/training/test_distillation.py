"""Tests of whole runs of distillation: resuming, and the best weights with those beside the network."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.listening import Display
from vitrail.errors import RunError, Stopped
from vitrail.models.variants import create
from vitrail.training.config import TrainConfig
from vitrail.training.job import prepare
from vitrail.training.log import Log, read_journal
from vitrail.training.run import resume, train
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


@pytest.mark.slow
def test_a_run_resumes_bitwise_and_saves_the_mean_of_both_heads(
    small: Callable[..., TrainConfig], stop_at: Callable[[int], Display], tmp_path: Path
) -> None:
    usual = small(tmp_path / "usual")
    torch.manual_seed(1)
    network = create(
        "ViT-Pico/7", image_size=(28, 28), channels=1, num_classes=10, width=16, depth=1, heads=2, mlp_width=32
    )
    assert network.head is not None
    torch.nn.init.normal_(network.head.weight)
    teacher = Bundle(network, prepare(usual).splits.classes, usual.images).save(tmp_path / "teacher")
    fields: dict[str, Any] = {
        "task": "distillation", "teacher": str(teacher), "steps": 8, "evaluations": 4, "checkpoints": 2, "mixup": 0.4,
        "pool": "cls+dist", "registers": 1, "accumulation": 2,
    }  # fmt: skip
    straight = train(small(tmp_path / "straight", **fields))
    with pytest.raises(Stopped):
        train(small(tmp_path / "stopped", **fields), log=Log(stop_at(3)))
    shutil.copytree(tmp_path / "stopped", tmp_path / "other")
    stopped = resume(tmp_path / "stopped")
    for name in ("model/model.safetensors", "beside.safetensors"):
        one, other = load_file(straight.folder / name), load_file(stopped.folder / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert set(one) == {"bias_difference"} and one["bias_difference"].abs().max() > 0
    assert straight.bundle.provenance["teacher"] == str(teacher)
    assert load(straight.folder).network.config.pool == "cls+dist"
    steps = [event for event in read_journal(straight.folder / "journal.jsonl") if event["event"] == "step"]
    assert all(0 <= event["teacher_agreement"] <= 1 for event in steps)
    with torch.no_grad():
        network.head.weight[0, 0] += 1
    Bundle(network, prepare(usual).splits.classes, usual.images).save(teacher, overwrite=True)
    with pytest.raises(RunError, match=r"teacher='.*teacher' has other weights now than when run .*other began"):
        resume(tmp_path / "other")
