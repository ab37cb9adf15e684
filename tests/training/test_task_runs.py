"""Tests of whole runs of tasks: numbers in the units of the data, weights beside the network, which are resumed, chosen
and used, and boxes and masks, which have everything that other runs have."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.make import make_bundle, make_voc_folder
from tests.several import command
from tests.tasks.books import make_tokenizer
from tests.training import ranks
from tests.training.jobs import Make, events_of, model_bytes, results_of, same_weights, train_until, values_of
from vitrail.cli.run_options import check_effects
from vitrail.errors import ConfigError, RunError
from vitrail.models.positions import POSITIONS
from vitrail.models.variants import create
from vitrail.recipes import RECIPES
from vitrail.tasks.tokenizer import load_tokenizer
from vitrail.training.config import TrainConfig
from vitrail.training.job import prepare
from vitrail.training.run import RunResult, resume, train
from vitrail.training.start import Origin
from vitrail.transfer.facts import FinetunePlan
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run without the time of day."""
    return [{name: value for name, value in event.items() if name != "time"} for event in events_of(run, "evaluation")]


SETTINGS: dict[str, dict[str, Any]] = {
    "masked-patches": {"task": "masked-patches", "corrupt_fraction": 0.6},
    "mae": {
        "task": "mae", "remove_fraction": 0.6, "decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2,
        "learning_rate_factors": (r"decoder\..*=0.5",),
    },
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


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_voc_folder(tmp_path_factory.mktemp("drawn") / "data", train=13)
    (folder / "JPEGImages/003.png").write_bytes(b"no picture")
    return folder


def config_of(data: Path, run: Path | str, **fields: Any) -> TrainConfig:
    """Return a run of 6 steps, with pictures whose sides are not equal and one that cannot be decoded."""
    defaults = {
        "task": "detection", "data": str(data), "run": str(run), "variant": "ViT-Pico/8", "image_size": (40, 56),
        "resize": "pad", "width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "steps": 6, "batch_size": 6,
        "precision": "float32", "device": "cpu", "threads": 0, "evaluations": 2, "checkpoints": 3, "channels": 3,
        "mean": (0.5,), "std": (0.25,), "optimizer": "sgd", "learning_rate": 0.02, "clip": 0.0,
        "process_timeout": "100s", "scale_jitter": (0.6, 1.4), "flip": True,
    }  # fmt: skip
    return RECIPES["folder"]().override(**{**defaults, **fields})


def curve(run: Path) -> list[list[float]]:
    return values_of(run, "loss", "gradient_norm")


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(drawn: Path, tmp_path: Path) -> None:
    random = {"dropout": 0.1, "early_image_size": ("24x32:0.5",)}
    fields = {"optimizer": "adamw", "learning_rate": 1e-3, "average": 0.8, **random}
    config = config_of(drawn, tmp_path / "straight", **fields)
    straight = train(config)
    results_of(1, ranks.trained_and_stopped, config.override(run=str(tmp_path / "run")), 0, 3)
    assert resume(tmp_path / "run").metrics == straight.metrics
    assert curve(tmp_path / "straight") == curve(tmp_path / "run") and len(curve(tmp_path / "run")) == 6
    assert model_bytes(tmp_path / "straight") == model_bytes(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "full"])
def test_parts_and_processes_train_as_one_does(drawn: Path, tmp_path: Path, shard: str) -> None:
    alone = train(config_of(drawn, tmp_path / "one"))
    metrics, _ = results_of(2, ranks.trained, config_of(drawn, tmp_path / "more", shard=shard, accumulation=3))
    assert metrics == pytest.approx(alone.metrics, abs=1e-4)
    for ours, theirs in zip(curve(tmp_path / "one"), curve(tmp_path / "more"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.fixture(scope="session")
def trained(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train(config_of(drawn, run, average=0.5, steps=3, evaluations=1))
    return run


SHAPE = ("variant", "width", "depth", "heads", "mlp_width", "position_std")
"""Settings that a model to start from decides."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{"train_blocks": 1}, {"lora_rank": 2}, {"layer_decay": 0.5}, {"train_blocks": 0, "new_head": True}],
    ids=str,
)
def test_runs_begin_with_a_model(drawn: Path, trained: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    config = config_of(drawn, tmp_path / "run", **dict.fromkeys(SHAPE))
    train(config.override(init=str(trained), steps=2, evaluations=1, **fields))
    before, after = load(str(trained)), load(str(tmp_path / "run"))
    assert after.output == before.output and after.classes == before.classes
    first, now = (bundle.network.layers().blocks[0].state_dict() for bundle in (before, after))
    assert all(torch.equal(now[name], weight) for name, weight in first.items()) == ("train_blocks" in fields)
    assert [*map(str, after.predict(np.zeros((30, 44, 3), np.uint8)))], "the saved model predicts"


REFUSED = {
    "--probe linear,fewshot": "fewshot, linear", "--mixup 0.5": "--mixup",
    "--erase 0.5": "--erase",
    "--variant BiT-Pico": "ResNet",
    "--patch-dropout 0.5": "--patch-dropout", "--label-smoothing 0.1": "--label-smoothing",
    "--crop-share 0.8": "--crop-share",
    "--select accuracy": "--select", "--head-kind pooled": "'pooled'", "--data bundled": "bundled",
    "--task classification": "one class per image",
    "--init MODEL --linear-head": "--linear-head",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_settings_that_do_not_fit_are_refused_before_any_file_is_written(
    drawn: Path, tmp_path: Path, trained: Path, words: str
) -> None:
    run = tmp_path / "run"
    given = words.replace("MODEL", str(trained)).split()
    usual = {"--data": str(drawn), "--task": "detection", "--run": str(run), "--steps": "1", "--threads": "0"}
    options = [word for option in usual.items() if option[0] not in given for word in option]
    code, _, errors = command("train", "folder", *options, *given, "--resize", "pad")
    assert code == 2 and REFUSED[words] in errors and "Traceback" not in errors, errors
    assert not run.exists()


@pytest.mark.parametrize("given", [(), ("--crop-share", "0.9")])
def test_the_crop_of_a_model_of_classes_is_left_out_unless_given(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    bundle = make_bundle(image_size=(12, 12), patch_size=(4, 4))
    model = replace(bundle, preprocess=replace(bundle.preprocess, resize="crop", crop_share=0.75)).save(tmp_path / "m")
    seen = []

    def take(config: TrainConfig, **_: object) -> None:
        seen.append(config.images)
        raise ConfigError("seen")

    monkeypatch.setattr("vitrail.cli.train.train", take)
    words = ["--task", "detection", "--data", str(drawn), "--resize", "pad", "--steps", "1", *given]
    assert command("train", "--init", str(model), *words)[0] == 2
    (images,) = seen
    assert images.resize == "pad" and images.crop_share == (0.9 if given else 1)


def test_a_run_that_continues_keeps_the_crop_with_which_it_began(drawn: Path, tmp_path: Path) -> None:
    config = config_of(drawn, tmp_path / "run", **dict.fromkeys(SHAPE), init="model", crop_share=0.75)
    network = make_bundle(head_kind="pyramid", output="boxes").network.config
    job = prepare(config.override(image_size=network.image_size), origin=Origin("0", network))
    assert job.config.images.crop_share == 0.75


def test_settings_that_a_rule_makes_effective_or_that_the_speed_decides_about_are_accepted(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(config: TrainConfig, *_: object, **__: object) -> FinetunePlan:
        return FinetunePlan(config.override(resize="pad", evaluations=1), ())

    def tuned(bundle: Bundle, data: object, base: TrainConfig, *_: object, **__: object) -> FinetunePlan:
        return FinetunePlan(base.override(task="segmentation", evaluations=0, train_blocks=0), ())

    def seen(*_: object, **__: object) -> None:
        raise ConfigError("seen")

    monkeypatch.setattr("vitrail.recipes.from_data.plan_for_data", planned)
    monkeypatch.setattr("vitrail.cli.finetune.plan", tuned)
    for place in ("vitrail.cli.train.train", "vitrail.cli.finetune.finetune"):
        monkeypatch.setattr(place, seen)
    data = ("--data", str(drawn), "--patience", "5")
    assert command("train", *data, "--pad-value", "0")[::2] == (2, "vitrail: seen\n")
    assert command("finetune", "small", *data, "--layer-decay", "0.5")[::2] == (2, "vitrail: seen\n")
    assert "--patience: it has an effect only" in command("train", *data, "--evaluations", "5")[2]


def test_settings_of_positions_of_a_user_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POSITIONS, "linear-2d", POSITIONS["learned-2d"])
    given = {"positions": "linear-2d", "position_std": 0.1, "positions_cover": "patches"}
    check_effects(given, TrainConfig().override(variant="ViT-Pico/8", **given))


def test_layer_decay_has_an_effect_on_the_tokens_of_a_head() -> None:
    config = TrainConfig().override(init="model", train_blocks=0, layer_decay=0.5)
    check_effects({"layer_decay": 0.5}, config.override(task="detection"))
    with pytest.raises(ConfigError, match="only with trained weights below the head"):
        check_effects({"layer_decay": 0.5}, config)


@pytest.mark.slow
def test_the_command_trains_from_scratch_within_a_budget(drawn: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, errors = command(
        "train", "--task", "detection", "--data", str(drawn), "--run", str(run), "--budget", "6s", "--threads", "0"
    )
    assert code == 0, errors
    bundle = load(str(run))
    assert bundle.output == "boxes" and bundle.preprocess.resize == "pad"
    copy = shutil.copytree(run, tmp_path / "copy")
    assert command("runs", str(tmp_path))[0] == command("runs", "compare", str(run), str(copy))[0] == 0
    assert f"vitrail predict {run}/model" in out.replace("\n", "")
