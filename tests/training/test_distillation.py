"""Tests of whole runs of distillation: resuming, and the best weights with those beside the network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.curves import same_weights, values_of
from tests.training.jobs import Make, train_until
from vitrail.errors import RunError
from vitrail.models.variants import create
from vitrail.training.job import prepare
from vitrail.training.run import resume, train
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


@pytest.mark.slow
def test_a_run_resumes_bitwise_and_saves_the_mean_of_both_heads(small: Make, tmp_path: Path) -> None:
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
    train_until(small(tmp_path / "stopped", **fields), 3)
    shutil.copytree(tmp_path / "stopped", tmp_path / "other")
    stopped = resume(tmp_path / "stopped")
    for name in ("model/model.safetensors", "beside.safetensors"):
        assert same_weights(straight.folder / name, stopped.folder / name)
    beside = load_file(straight.folder / "beside.safetensors")
    assert set(beside) == {"bias_difference"} and beside["bias_difference"].abs().max() > 0
    assert straight.bundle.provenance["teacher"] == str(teacher)
    assert load(straight.folder).network.config.pool == "cls+dist"
    assert all(0 <= agreement <= 1 for (agreement,) in values_of(straight.folder, "teacher_agreement"))
    with torch.no_grad():
        network.head.weight[0, 0] += 1
    Bundle(network, prepare(usual).splits.classes, usual.images).save(teacher, overwrite=True)
    with pytest.raises(RunError, match=r"teacher='.*teacher' has other weights now than when run .*other began"):
        resume(tmp_path / "other")
