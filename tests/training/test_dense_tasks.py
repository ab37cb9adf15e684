"""Runs of tasks that learn boxes and masks have everything that the runs of other tasks have."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.make import make_bundle, make_voc_folder
from tests.several import command
from tests.training import ranks
from tests.training.jobs import model_bytes, results_of, values_of
from vitrail.cli.run_options import check_effects
from vitrail.errors import ConfigError
from vitrail.models.positions import POSITIONS
from vitrail.recipes import RECIPES
from vitrail.training.config import TrainConfig
from vitrail.training.job import prepare
from vitrail.training.run import resume, train
from vitrail.training.start import Origin
from vitrail.transfer.facts import FinetunePlan
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


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
