"""Tests of whole runs of tasks: numbers in the units of the data, and weights beside the network, which are resumed,
chosen and used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.tasks.books import make_tokenizer
from tests.training import ranks
from tests.training.jobs import Make, events_of, results_of, same_weights, train_until, values_of
from vitrail.errors import ConfigError, RunError
from vitrail.models.variants import create
from vitrail.tasks.tokenizer import load_tokenizer
from vitrail.training.job import prepare
from vitrail.training.run import RunResult, resume, train
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run without the time of day."""
    return [{name: value for name, value in event.items() if name != "time"} for event in events_of(run, "evaluation")]


SETTINGS: dict[str, dict[str, Any]] = {
    "masked-patches": {"task": "masked-patches", "corrupt_fraction": 0.6},
    "mae": {"task": "mae", "remove_fraction": 0.6, "decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2},
    "simclr": {"task": "simclr", "projection_width": 8, "crop_area": (0.3, 1.0)},
    "dino": {
        "task": "dino", "crop_area": (0.4, 1.0), "local_views": 3, "local_size": (14, 7), "prototypes": 32,
        "projection_hidden": 24, "bottleneck": 8, "target_temperature": 0.07, "target_temperature_epochs": 0.6,
        "frozen_epochs": 0.5, "teacher_momentum": 0.8, "end_weight_decay": 0.4,
    },
    "moco": {
        "task": "moco", "crop_area": (0.3, 1.0), "projection_width": 8, "projection_hidden": 12,
        "teacher_momentum": 0.8,
    },
}  # fmt: skip
MEASURED = {
    "masked-patches": ("patch_loss", "mask_embedding"),
    "mae": ("patch_loss", "decoder.mask_token"),
    "simclr": ("contrast_loss", "projection.0.weight"),
    "dino": ("dino_loss", "network.blocks.0.norm1.weight"),
    "moco": ("contrast_loss", "teacher.blocks.0.norm1.weight"),
}
"""The loss of each task, and one of the weights beside the network."""


def straight_and_resumed(make: Make, folder: Path, *more: str, **fields: Any) -> tuple[RunResult, RunResult]:
    """Return a run, and one that was stopped and resumed to the same bits. The folder "other" is one that stopped."""
    fields = {"steps": 8, "evaluations": 4, "checkpoints": 2, "accumulation": 2, **fields}
    straight = train(make(folder / "straight", **fields))
    shutil.copytree(train_until(make(folder / "stopped", **fields), 3), folder / "other")
    resumed = resume(folder / "stopped")
    for name in ("model/model.safetensors", "beside.safetensors", *more):
        assert same_weights(straight.folder / name, resumed.folder / name)
    return straight, resumed


@pytest.mark.slow
@pytest.mark.parametrize("task", SETTINGS)
def test_a_run_resumes_bitwise_and_keeps_the_best_decoder(task: str, small: Make, tmp_path: Path) -> None:
    straight, stopped = straight_and_resumed(small, tmp_path, probe="knn", **SETTINGS[task])
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
def test_labels_are_not_needed_but_probes_measure_by_them(small: Make, colour_folder: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in colour_folder.glob("*/*.png"):
        (flat / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    fields: dict[str, Any] = {"data": str(flat), "channels": 3, "mean": (0.5,), "std": (0.5,), "validation_share": 0.3}
    fields |= {**SETTINGS["masked-patches"], "steps": 2, "evaluations": 1, "checkpoints": 1}
    train(small(tmp_path / "unlabelled", **fields))
    with pytest.raises(ConfigError, match=r"probe='knn' is measured by labels, but the images of .* have none; leave"):
        train(small(tmp_path / "probed", probe="knn", **fields))


TOKENIZER: dict[str, Any] = {
    "task": "vqvae", "codes": 24, "code_width": 6, "decoder_width": 8, "decoder_depth": 1, "restart_below": 0.3,
    "code_decay": 0.8,
}  # fmt: skip
PREDICTED: dict[str, Any] = {"task": "masked-patches", "patch_target": "tokens", "steps": 8, "evaluations": 4}


@pytest.mark.slow
def test_a_tokenizer_resumes_bitwise_and_keeps_the_best_codes(small: Make, tmp_path: Path) -> None:
    straight, stopped = straight_and_resumed(small, tmp_path, "model/tokenizer.safetensors", **TOKENIZER)
    tokenizer = straight.folder
    *during, kept, _ = events_of(tokenizer, "evaluation")
    best = min(during, key=lambda event: event["reconstruction_loss"])
    for name in ("reconstruction_loss", "perplexity", "codes_used"):
        assert kept[name] == best[name] == stopped.metrics[f"validation_{name}"]
    steps = values_of(tokenizer, "perplexity", "commitment_loss")
    assert all(0 < perplexity <= 24.001 and loss >= 0 for perplexity, loss in steps)
    page = (tokenizer / "report.html").read_text(encoding="utf-8")
    assert "<h2>Images restored from tokens</h2>" in page and page.count("<img") == 16
    assert load(tokenizer).classes == () and load_tokenizer(tokenizer).coder.config.codes == 24


@pytest.mark.slow
def test_tokens_are_predicted_and_a_changed_tokenizer_is_refused(small: Make, tmp_path: Path) -> None:
    copied = make_tokenizer(size=(28, 28), channels=1).save(tmp_path / "tokenizer")
    straight, _ = straight_and_resumed(small, tmp_path, tokenizer=str(copied), **PREDICTED, accumulation=1)
    record = json.loads((straight.folder / "run.json").read_text())
    sha256 = load_tokenizer(copied).sha256
    assert record["models"] == {"tokenizer": sha256} and straight.bundle.provenance["tokenizer_sha256"] == sha256
    assert 0 <= straight.metrics["validation_token_accuracy"] <= 1
    assert "<h2>Restored patches</h2>" in (straight.folder / "report.html").read_text(encoding="utf-8")
    changed = load_tokenizer(copied)
    changed.coder.codebook.codes[0, 0] += 1
    changed.save(copied, overwrite=True)
    with pytest.raises(RunError, match=r"tokenizer='.*tokenizer' has other weights now than when run .*other began"):
        resume(tmp_path / "other")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "tokenizer='.*' has tokens of 4 x 4 patches .* but the network has 2 x 2 patches"),
        ({"variant": "ViT-Pico/7", "early_image_size": ("14:0.5",)}, "but the network has 2 x 2 patches"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_the_run(
    fields: dict[str, Any], message: str, small: Make, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(size=(28, 28), channels=1).save(tmp_path / "tokenizer")
    chosen = {"tokenizer": str(tokenizer), "variant": "ViT-Pico/14", **PREDICTED, **fields}
    with pytest.raises(ConfigError, match=message):
        prepare(small(tmp_path / "none", **chosen))
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"restart_below": 0.4}, {"shard": "full"}, {"accumulation": 2}], ids=str)
def test_a_tokenizer_on_several_processes_is_that_of_one(
    three_splits: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    sizes = {name: TOKENIZER[name] for name in ("task", "codes", "code_width", "decoder_width", "decoder_depth")}
    fields = {**sizes, "code_decay": 0.9, **fields}
    alone = train(ranks.config_of(three_splits, tmp_path / "one", **fields | {"shard": "none"}))
    first, second = results_of(2, ranks.trained, ranks.config_of(three_splits, tmp_path / "two", **fields))
    assert first == second == pytest.approx(alone.metrics, rel=1e-3)
    one, two = (np.array(values_of(tmp_path / run, "loss", "commitment_loss", "perplexity")) for run in ("one", "two"))
    assert len(one) == 12 and one == pytest.approx(two, rel=1e-4)
    ours, theirs = (load_file(tmp_path / name / "model" / "tokenizer.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(ours["codebook.codes"], theirs["codebook.codes"], rtol=1e-3, atol=1e-4)


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
        "task": "distillation", "teacher": str(teacher), "mixup": 0.4, "pool": "cls+dist", "registers": 1,
    }  # fmt: skip
    straight, _ = straight_and_resumed(small, tmp_path, **fields)
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


@pytest.fixture
def bars(tmp_path: Path) -> Path:
    """A table of grey images with a white bar: its height in pixels, and its brightness, which is sometimes unknown."""
    random, lines = np.random.default_rng(0), ["file,height,light,name"]
    for number in range(60):
        pixels = random.integers(0, 30, (16, 24, 1), dtype=np.uint8)
        height = int(random.integers(1, 16))
        pixels[:height, 4:20] = 200
        Image.fromarray(pixels[..., 0]).save(tmp_path / f"{number:02}.png")
        light = "" if number % 5 == 0 else f"{1000 + pixels.mean():.3f}"
        lines.append(f"{number:02}.png,{height},{light},bar {number}")
    path = tmp_path / "bars.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_run_learns_numbers_in_the_units_of_the_data_and_is_trained_further(
    folder_config: Make, bars: Path, tmp_path: Path
) -> None:
    config = folder_config(
        bars, task="regression", numbers=("height", "light"), image_size=(14, 21), channels=1, flip=True, shift=0,
        batch_size=16, steps=150, learning_rate=3e-3, depth=2,
    )  # fmt: skip
    first = train(config)
    assert first.metrics["validation_r2"] > 0.8
    (found,) = load(first.folder / "model").predict([bars.parent / "03.png"])
    row = bars.read_text(encoding="utf-8").splitlines()[4].split(",")
    assert found.values == pytest.approx((float(row[1]), float(row[2])), abs=6)
    of_model = dict.fromkeys(("variant", "position_std", "width", "depth", "heads", "mlp_width"))
    short = {"run": str(tmp_path / "again"), "steps": 1, "learning_rate": 1e-9, "evaluations": 1}
    second = train(config.override(init=str(first.folder), **of_model, **short))
    assert second.metrics["validation_r2"] == pytest.approx(first.metrics["validation_r2"], abs=1e-3)
