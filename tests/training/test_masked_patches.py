"""Tests of whole runs of the tasks without labels: resuming, the best weights, probes, and the use of the saved
model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.training.curves import events_of, same_weights
from tests.training.jobs import Make, train_until
from vitrail.errors import ConfigError
from vitrail.training.config import TrainConfig
from vitrail.training.job import prepare
from vitrail.training.run import resume, train
from vitrail.weights.load import load

Events = list[dict[str, Any]]


def evaluations(run: Path) -> Events:
    """Return the evaluations of a run without the time of day."""
    return [{name: value for name, value in event.items() if name != "time"} for event in events_of(run, "evaluation")]


SETTINGS: dict[str, dict[str, Any]] = {
    "masked-patches": {"task": "masked-patches", "corrupt_fraction": 0.6},
    "mae": {"remove_fraction": 0.6, "decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2},
    "simclr": {"projection_width": 8, "crop_area": (0.3, 1.0)},
    "dino": {
        "crop_area": (0.4, 1.0), "local_views": 3, "local_size": (14, 7), "prototypes": 32, "projection_hidden": 24,
        "bottleneck": 8, "target_temperature": 0.07, "target_temperature_epochs": 0.6, "frozen_epochs": 0.5,
        "teacher_momentum": 0.8, "end_weight_decay": 0.4,
    },
    "moco": {"crop_area": (0.3, 1.0), "projection_width": 8, "projection_hidden": 12, "teacher_momentum": 0.8},
}  # fmt: skip
MEASURED = {
    "masked-patches": ("patch_loss", "mask_embedding"),
    "mae": ("patch_loss", "decoder.mask_token"),
    "simclr": ("contrast_loss", "projection.0.weight"),
    "dino": ("dino_loss", "network.blocks.0.norm1.weight"),
    "moco": ("contrast_loss", "teacher.blocks.0.norm1.weight"),
}
"""The loss of each task, and one of the weights beside the network."""


@pytest.fixture
def masked(small: Make, tmp_path: Path) -> Make:
    """Return a function that makes configs of short runs on grey images, with all kinds of randomness switched on."""

    def make(name: str, **fields: Any) -> TrainConfig:
        chosen: dict[str, Any] = {"steps": 8, "evaluations": 4, "checkpoints": 2}
        chosen |= SETTINGS[fields.get("task", "masked-patches")]
        return small(tmp_path / name, **{**chosen, **fields})

    return make


@pytest.mark.slow
@pytest.mark.parametrize("task", SETTINGS)
def test_a_run_resumes_bitwise_and_keeps_the_best_decoder(task: str, masked: Make, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"task": task, "probe": "knn", "accumulation": 2}
    straight = train(masked("straight", **fields))
    train_until(masked("stopped", **fields), 3)
    stopped = resume(tmp_path / "stopped")
    for name in ("model/model.safetensors", "beside.safetensors"):
        assert same_weights(straight.folder / name, stopped.folder / name)
    loss, beside = MEASURED[task]
    assert beside in load_file(straight.folder / "beside.safetensors")
    page = (stopped.folder / "report.html").read_text(encoding="utf-8")
    title = "Restored patches" if loss == "patch_loss" else "Nearest neighbours"
    assert f"<h2>{title}</h2>" in page and page.count("<img") >= 24
    *during, validation, _ = evaluations(straight.folder)
    assert during == [event for event in evaluations(stopped.folder) if not event.get("kept")]
    best = min(during, key=lambda event: event[loss])
    assert validation[loss] == best[loss] == straight.metrics[f"validation_{loss}"]
    if task == "masked-patches":
        assert validation["colour_accuracy"] == best["colour_accuracy"]
    probes = events_of(straight.folder, "probe")
    assert len(probes) == 4 and all(0 <= event["knn_1"] <= 1 for event in probes)


@pytest.mark.slow
def test_the_saved_model_has_features_and_starts_other_runs(masked: Make, small: Make, tmp_path: Path) -> None:
    result = train(masked("pre-training", patch_target="pixels", steps=2, evaluations=1, checkpoints=1))
    assert set(result.metrics) == {"validation_patch_loss", "test_patch_loss"} and result.examples == ()
    bundle = load(result.folder)
    assert bundle.classes == () and bundle.network.head is None
    short: dict[str, Any] = {
        "init": str(result.folder), "variant": None, "width": None, "depth": None, "heads": None, "mlp_width": None,
        "position_std": None, "steps": 2, "evaluations": 1, "checkpoints": 1,
    }  # fmt: skip
    tuned = train(small(tmp_path / "tuned", **short))
    assert len(tuned.bundle.classes) == 10
    again = train(masked("again", **{**short, "init": str(tuned.folder)}))
    assert again.bundle.classes == () and again.bundle.network.head is None


@pytest.mark.slow
def test_labels_are_not_needed_but_probes_measure_by_them(masked: Make, colour_folder: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in colour_folder.glob("*/*.png"):
        (flat / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    fields: dict[str, Any] = {"data": str(flat), "channels": 3, "mean": (0.5,), "std": (0.5,), "validation_share": 0.3}
    train(masked("unlabelled", steps=2, evaluations=1, checkpoints=1, **fields))
    with pytest.raises(ConfigError, match=r"probe='knn' is measured by labels, but the images of .* have none; leave"):
        train(masked("probed", probe="knn", **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positions": "none"}, "needs positions"),
        ({"early_patch_dropout": ("0.5:0.5",)}, "patch_dropout=0.5 removes patches"),
        ({"task": "mae", "remove_fraction": 0.97}, r"remove_fraction=0.97 of 16 patches .* leaves no visible patch"),
        ({"task": "dino", "local_size": (14, 13)}, r"local_size=\(14, 13\) does not fit the network"),
        ({"task": "simclr", "head_hidden": 8}, "head_hidden=8 is a layer that task='simclr' does not train"),
        ({"task": "mae", "decoder_heads": 3}, "decoder_width=8 with decoder_heads=3 does not work"),
        ({"corrupt_fraction": 0.03}, r"corrupt_fraction=0.03 of 16 patches \(4 x 4\) leaves no corrupted patch"),
    ],
)
def test_a_run_that_cannot_work_leaves_no_folder(
    masked: Make, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(masked("none", **fields))
    assert not (tmp_path / "none").exists()
