"""The paper's protocol: its table, and choosing a learning rate by runs on held-out images."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vitrail.errors import ConfigError, RunError
from vitrail.models.variants import variant_config
from vitrail.training.config import TrainConfig
from vitrail.training.monitoring.journal import read_journal
from vitrail.transfer.protocol import (
    Trial,
    check_last_run,
    choose_rate,
    is_trial,
    paper_rule,
    row_for,
    trials_of,
    whole_set,
)
from vitrail.transfer.rules import DataFacts, Given
from vitrail.weights.bundle import Bundle

PLENTY = 10**12


@pytest.mark.parametrize(
    ("images", "steps", "warmup", "rates", "share"),
    [
        (2040, 500, 100, (0.001, 0.003, 0.01, 0.03), 0.1),
        (50_000, 10_000, 500, (0.001, 0.003, 0.01, 0.03), 0.02),
        (1_281_167, 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.01),
    ],
)
def test_rows_are_those_of_table_4(
    images: int, steps: int, warmup: int, rates: tuple[float, ...], share: float
) -> None:
    row = row_for(images)
    assert (row.steps, row.warmup, row.rates, row.share) == (steps, warmup, rates, share)


def test_settings_are_the_papers() -> None:
    base = TrainConfig().override(data="pets", init="B_16.npz", image_size=(224, 224))
    network = variant_config("ViT-B/16", num_classes=21_843)
    found = paper_rule(base, network, DataFacts(3680, 37, 400, False, True), memory=PLENTY)
    config, optimization = found.config, found.config.optimizer
    assert (config.run.steps, config.run.batch_size, config.images.image_size) == (500, 512, (384, 384))
    assert (optimization.kind, optimization.momentum, optimization.weight_decay) == ("sgd", 0.9, 0.0)
    assert (optimization.schedule, optimization.clip, optimization.warmup) == ("cosine", 1.0, 0.2)
    assert optimization.layer_decay == 1 and optimization.average == 0
    assert (config.task.label_smoothing, config.augment.mixup, config.augment.crop_area) == (0, None, (0.05, 1.0))
    assert (config.data.spec, config.start.init, config.data.validation_share) == ("pets", "B_16.npz", 0.1)
    assert "0.001, 0.003, 0.01, 0.03 on 10%" in found.reasons[-1]


def test_a_large_patch_divides_the_size_and_parts_fit() -> None:
    base = TrainConfig().override(init="model")
    facts = DataFacts(1000, 10, 400, False, True)
    network = variant_config("ViT-H/14", num_classes=10)
    assert paper_rule(base, network, facts, memory=PLENTY).config.images.image_size == (378, 378)
    small = paper_rule(base, network, facts, memory=16 * 10**9, given=Given(image_size=(140, 140))).config
    assert small.images.image_size == (140, 140) and small.run.accumulation > 1 and small.run.batch_size == 512


@pytest.fixture
def base(tiny_bundle: Bundle, colours: Path, tmp_path: Path) -> TrainConfig:
    model = tiny_bundle.save(tmp_path / "model")
    return replace(TrainConfig(), images=tiny_bundle.preprocess).override(
        data=str(colours), init=str(model), steps=3, batch_size=4, validation_share=0.3, keep="last", evaluations=1,
        checkpoints=1,
    )  # fmt: skip


def test_each_rate_has_a_run_and_the_test_split_no_part(base: TrainConfig, tmp_path: Path) -> None:
    heard: list[Trial] = []
    trials = choose_rate(base, (0.01, 1e-5, 0.1), tmp_path / "rates", on_trial=heard.append)
    assert {trial.rate for trial in trials} == {0.01, 1e-5, 0.1} and [trial.rate for trial in heard] == [
        0.01,
        1e-5,
        0.1,
    ]
    assert list(trials) == sorted(trials, key=lambda trial: (-trial.accuracy, trial.rate))
    for trial in trials:
        assert trial.folder == tmp_path / "rates" / f"{trial.rate:g}"
        record = json.loads((trial.folder / "run.json").read_text())
        assert record["config"]["optimizer"]["learning_rate"] == trial.rate
        splits = {event["split"] for event in read_journal(trial.folder / "journal.jsonl") if "split" in event}
        assert splits == {"validation"}


def test_runs_that_are_there_are_not_done_again(base: TrainConfig, tmp_path: Path) -> None:
    first = choose_rate(base, (0.01, 0.02), tmp_path / "rates")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "rates").rglob("journal.jsonl")}
    (more,) = [trial for trial in choose_rate(base, (0.01, 0.03), tmp_path / "rates") if trial.rate == 0.03]
    assert more.folder.exists() and choose_rate(base, (0.01, 0.02), tmp_path / "rates") == first
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert choose_rate(base.override(accumulation=2), (0.01, 0.02), tmp_path / "rates") == first, "less memory is free"
    with pytest.raises(RunError, match=r"rates/0\.01 holds a run with other settings; choose another --name"):
        choose_rate(base.override(seed=1), (0.01,), tmp_path / "rates")


def test_no_held_out_image_is_refused(base: TrainConfig, tmp_path: Path) -> None:
    config = base.override(validation_share=0.0, evaluations=0)
    with pytest.raises(ConfigError, match="leaves no image to choose the learning rate by; give --learning-rate"):
        choose_rate(config, (0.01,), tmp_path / "rates")
    assert not (tmp_path / "rates").exists(), "no run was done for it"


def test_runs_from_other_weights_or_on_other_data_are_not_taken_for_these(
    base: TrainConfig, tiny_bundle: Bundle, colours: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(colours, data)
    config = base.override(data=str(data))
    first = choose_rate(config, (0.01,), tmp_path / "rates")
    assert choose_rate(config.override(overwrite=True), (0.01,), tmp_path / "rates") == first, "the same settings"
    network = copy.deepcopy(tiny_bundle.network)
    with torch.no_grad():
        network.blocks[0].mlp.up.weight += 1
    with pytest.raises(RunError, match=r"holds a run with other data or weights; choose another --name"):
        choose_rate(config, (0.01,), tmp_path / "rates", initial=replace(tiny_bundle, network=network))
    next((data / "train" / "red").iterdir()).unlink()
    with pytest.raises(RunError, match="holds a run with other data or weights"):
        choose_rate(config, (0.01,), tmp_path / "rates")


def test_a_given_rate_leaves_nothing_to_hold_out() -> None:
    base = TrainConfig().override(data="pets", init="B_16.npz", evaluations=10)
    network, facts = variant_config("ViT-B/16", num_classes=10), DataFacts(1000, 10, 400, False, True)
    found = paper_rule(base, network, facts, memory=PLENTY, given=Given(learning_rate=0.02))
    assert (found.config.optimizer.learning_rate, found.config.data.validation_share) == (0.02, 0.0)
    assert found.config.run.evaluations == 0 and found.config.run.keep == "last"
    assert "learning rate 0.02, as given" in found.reasons[-1] and "best of" not in found.reasons[-1]


def test_what_the_last_run_cannot_do_is_refused(base: TrainConfig, colours: Path, tmp_path: Path) -> None:
    check_last_run(base)
    with pytest.raises(ConfigError, match="patience=2 cannot be given with the paper's protocol"):
        check_last_run(base.override(patience=2))
    with pytest.raises(ConfigError, match="probe='knn' cannot be given with the paper's protocol"):
        check_last_run(base.override(probe="knn"))
    shutil.copytree(colours / "train", tmp_path / "data" / "train")
    shutil.copytree(colours / "test", tmp_path / "data" / "val")
    check_last_run(base.override(data=str(tmp_path / "data"), probe="knn"))


def test_runs_that_try_a_rate_are_told_by_their_place() -> None:
    folder = trials_of(Path("runs/pets"))
    assert folder == Path("runs/pets-learning-rates")
    assert is_trial(folder / "0.01") and not is_trial(folder) and not is_trial(Path("runs/pets"))


def test_the_last_run_learns_from_all_images(base: TrainConfig) -> None:
    config = whole_set(base, 0.03)
    assert (config.optimizer.learning_rate, config.data.validation_share, config.run.keep) == (0.03, 0.0, "last")
