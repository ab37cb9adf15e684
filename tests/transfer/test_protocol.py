"""Tests of the paper's protocol: its table, and choosing a learning rate by runs on held-out images."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.make import keys_of
from tests.training.jobs import StopAt
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import DataConfig
from vitrail.errors import ConfigError, NonFiniteLoss, RunError, Stopped
from vitrail.models.variants import variant_config
from vitrail.training.config import TrainConfig
from vitrail.training.log import Log, read_journal
from vitrail.transfer.facts import DataFacts, FinetunePlan
from vitrail.transfer.finetune import Method, plan
from vitrail.transfer.protocols import TableRow, check_final_run, final_config, plan_by_paper, with_all_images
from vitrail.transfer.trials import Tried, choose_rate
from vitrail.weights.bundle import Bundle

PLENTY = 10**12
FACTS = DataFacts(1000, 400, "class", True)


BASE = TrainConfig().override(init="B_16.npz")


def planned(
    variant: str = "ViT-B/16", facts: DataFacts = FACTS, memory: int = PLENTY, row: TableRow | None = None,
    rates: tuple[float, ...] | None = None, **explicit: object,
) -> FinetunePlan:  # fmt: skip
    network = variant_config(variant, num_classes=10)
    images = Preprocess(image_size=network.image_size)
    return plan_by_paper(BASE, network, images, facts, memory=memory, row=row, rates=rates, explicit=explicit)


@pytest.mark.parametrize(
    ("images", "steps", "warmup", "tried_rates", "share"),
    [
        (2040, 500, 100, (0.001, 0.003, 0.01, 0.03), 0.1),
        (50_000, 10_000, 500, (0.001, 0.003, 0.01, 0.03), 0.02),
        (1_281_167, 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.01),
    ],
)
def test_rows_are_those_of_table_4(
    images: int, steps: int, warmup: int, tried_rates: tuple[float, ...], share: float
) -> None:
    found = planned(facts=FACTS._replace(images=images))
    config, optimizer = found.config, found.config.optimizer
    assert (config.run.steps, optimizer.warmup, found.rates) == (steps, warmup / steps, tried_rates)
    assert config.data.validation_share == share and f"chosen on {share:.0%}" in found.reasons[-1]
    assert (config.run.batch_size, config.images.image_size, config.start.new_head) == (512, (384, 384), True)
    assert (optimizer.kind, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.9, 0.0)
    assert (optimizer.schedule, optimizer.clip) == ("cosine", 1.0)
    assert (config.augment.crop_area, config.augment.crop_rule) == ((0.05, 1.0), "tensorflow")


@pytest.mark.parametrize("preprocess", [
    Preprocess(image_size=(224, 224), resize="crop", crop_share=0.9, interpolation="bicubic", mean=(0.4,)),
    Preprocess(image_size=(224, 224), scaled_decode=True),
    Preprocess(image_size=(224, 224)).with_geometry("big_vision-crop"),
])  # fmt: skip
def test_images_are_scaled_as_in_the_original_code(preprocess: Preprocess) -> None:
    """The scaling does not depend on the library that the weights came from, but mean and standard deviation do."""
    network = variant_config("ViT-B/16", num_classes=3)

    def images(**explicit: Any) -> Preprocess:
        return plan_by_paper(BASE, network, preprocess, FACTS, memory=PLENTY, explicit=explicit).config.images

    found = images()
    assert found == replace(preprocess, image_size=(384, 384)).with_geometry("vision_transformer")
    assert images(resize="pad") == replace(found, resize="pad")
    shape = replace(preprocess, image_size=(384, 384), resize="squash", crop_share=1.0, scaled_decode=False)
    assert images(antialias=True) == replace(shape, antialias=True)


def test_a_patch_that_does_not_divide_the_size_is_cut_as_in_the_original_and_parts_fit() -> None:
    found = planned("ViT-H/14").config
    assert found.images.image_size == (384, 384) and found.model.overrides == {"cut_uneven": True}
    assert planned("ViT-H/14", image_size=(518, 518)).config.model.overrides == {}
    small = planned("ViT-H/14", memory=16 * 10**9, image_size=(140, 140)).config
    assert small.images.image_size == (140, 140) and small.run.accumulation > 1 and small.run.batch_size == 512


def test_a_row_can_be_chosen_and_one_rate_needs_no_trial() -> None:
    found = planned(row="vtab")
    config, optimizer, augment = found.config, found.config.optimizer, found.config.augment
    assert (config.run.steps, optimizer.learning_rate, optimizer.warmup, found.rates) == (2500, 0.01, 0.2, ())
    assert (config.data.validation_share, config.run.evaluations) == (0, 0)
    assert (augment.crop_from, augment.crop_area, config.images.image_size) == ((448, 448), None, (384, 384))
    assert augment.training_preprocess(config.images).image_size == (448, 448) and augment.flip
    tried = planned(row="vtab", rates=(0.01, 0.03))
    assert tried.rates == (0.01, 0.03) and tried.config.data.validation_share == 0.2


def test_crops_of_the_row_follow_the_image_size_unless_the_user_chose_crops() -> None:
    for explicit, crop_from in (({"image_size": (96, 192)}, (112, 224)), ({"crop_area": (1.0, 1.0)}, None)):
        found = planned(row="vtab", **explicit)
        augment = found.config.augment
        assert (augment.crop_from, augment.settings.crop_area) == (crop_from, None)
        assert augment.settings.crop_rule == "tensorflow"
        assert any("cut out" in reason for reason in found.reasons) == (crop_from is not None)


@pytest.fixture
def base(tiny_bundle: Bundle, model: Path, colours: Path) -> TrainConfig:
    return replace(TrainConfig(), images=tiny_bundle.preprocess).override(
        data=str(colours), init=str(model), steps=3, batch_size=4, validation_share=0.3, keep="last", evaluations=1,
        checkpoints=1,
    )  # fmt: skip


def tried(
    bundle: Bundle, config: TrainConfig, rates: tuple[float, ...], folder: Path, **others: object
) -> Mapping[float, Tried]:
    data = config.data.open_whole()
    return choose_rate(config, data, rates, folder, initial=bundle, **others)[1]  # type: ignore[arg-type]


@pytest.mark.slow
def test_each_rate_has_a_run_and_the_test_split_no_part(base: TrainConfig, tiny_bundle: Bundle, tmp_path: Path) -> None:
    trials = tried(tiny_bundle, base, (0.01, 1e-5, 0.1), tmp_path / "rates")
    assert set(trials) == {0.01, 1e-5, 0.1}
    assert list(trials) == sorted(trials, key=lambda rate: (-(trials[rate].value or 0), trials[rate].loss, rate))
    for rate in trials:
        folder = tmp_path / "rates" / f"learning-rate-{rate:g}"
        record = json.loads((folder / "run.json").read_text())
        assert record["config"]["optimizer"]["learning_rate"] == rate
        splits = {event["split"] for event in read_journal(folder / "journal.jsonl") if "split" in event}
        assert splits == {"validation"}


@pytest.mark.slow
def test_a_rate_that_diverges_is_skipped(base: TrainConfig, tiny_bundle: Bundle, tmp_path: Path) -> None:
    wild, told = base.override(optimizer="sgd", clip=0.0, steps=6), list[str]()
    log = Log(lambda event: told.append(str(event.get("text"))))
    assert list(tried(tiny_bundle, wild, (0.01, 1e30), tmp_path / "rates", log=log)) == [0.01]
    assert "learning rate 1e+30 is skipped: loss is nan at step 2" in told
    with pytest.raises(NonFiniteLoss, match="the run diverged"):
        tried(tiny_bundle, wild, (1e30, 1e31), tmp_path / "wild")


@pytest.mark.slow
def test_rates_of_several_labels_are_chosen_by_mean_average_precision(
    base: TrainConfig, tiny_bundle: Bundle, colours: Path, tmp_path: Path
) -> None:
    """Not by top-1 accuracy, which says little about images of several classes."""
    shutil.copytree(colours / "train", tmp_path / "train")
    images = sorted(path.relative_to(tmp_path) for path in (tmp_path / "train").rglob("*.png"))
    rows = [
        {"file": str(image), "labels": [image.parent.name, *(["odd"] if number % 2 else [])]}
        for number, image in enumerate(images)
    ]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = base.override(data=str(tmp_path / "labels.jsonl"), loss="sigmoid")
    trials = tried(tiny_bundle, config, (0.01, 0.1), tmp_path / "rates")
    for rate, trial in trials.items():
        journal = read_journal(tmp_path / "rates" / f"learning-rate-{rate:g}" / "journal.jsonl")
        (*_, last) = [event for event in journal if event["event"] == "evaluation"]
        assert trial.value == last["mean_average_precision"]


@pytest.mark.slow
def test_runs_that_are_there_are_reused_or_refused(
    base: TrainConfig, tiny_bundle: Bundle, colours: Path, tmp_path: Path
) -> None:
    data, run = tmp_path / "data", tmp_path / "rates" / "learning-rate-0.01"
    shutil.copytree(colours, data)
    config = base.override(data=str(data))
    first = tried(tiny_bundle, config, (0.01,), tmp_path / "rates")
    before = (run / "journal.jsonl").stat().st_mtime_ns
    for same in (config.override(overwrite=True), config.override(accumulation=2)):  # 2 if less memory is free
        assert tried(tiny_bundle, same, (0.01,), tmp_path / "rates") == first
    assert (run / "journal.jsonl").stat().st_mtime_ns == before
    network = copy.deepcopy(tiny_bundle.network)
    with torch.no_grad():
        network.blocks[0].mlp.up.weight += 1
    other = replace(tiny_bundle, network=network)
    for bundle, changed, message in (
        (tiny_bundle, config.override(steps=2), "steps was 3 and is 2; choose another --name"),
        (other, config, "the weights of the initial model have changed; choose another --name"),
        (tiny_bundle, config, "the images, labels or splits have changed; choose another --name"),
    ):
        if message.startswith("the images"):
            next((data / "train" / "red").iterdir()).unlink()
        with pytest.raises(RunError, match=f"contains a run with other settings: {message}"):
            tried(bundle, changed, (0.01,), tmp_path / "rates")
    replacing = config.override(steps=2, overwrite=True, run=str(tmp_path / "run"))
    tried(tiny_bundle, replacing, (0.01,), tmp_path / "rates")
    assert json.loads((run / "run.json").read_text())["config"]["run"]["steps"] == 2


def test_a_given_rate_leaves_nothing_to_hold_out() -> None:
    found = planned(learning_rate=0.02)
    assert (found.config.optimizer.learning_rate, found.config.data.validation_share) == (0.02, 0.0)
    assert found.config.run.evaluations == 0 and found.config.run.keep == "last"
    assert found.rates == () and not any("best" in reason for reason in found.reasons)


@pytest.mark.slow
def test_a_stopped_trial_continues(base: TrainConfig, tiny_bundle: Bundle, tmp_path: Path) -> None:
    config = base.override(checkpoints=3)
    expected = tried(tiny_bundle, config, (0.01,), tmp_path / "whole")
    with pytest.raises(Stopped):
        tried(tiny_bundle, config, (0.01,), tmp_path / "rates", log=Log(StopAt(2)))
    assert tried(tiny_bundle, config, (0.01,), tmp_path / "rates") == expected
    assert "resumed" in (tmp_path / "rates" / "learning-rate-0.01" / "journal.jsonl").read_text()


def test_what_the_last_run_cannot_do_is_refused(base: TrainConfig, colours: Path, tmp_path: Path) -> None:
    final = final_config(base, 0.03)
    assert (final.optimizer.learning_rate, final.data.validation_share, final.run.keep) == (0.03, 0.0, "last")
    splits = final.data.open()
    check_final_run(base, splits)
    for name, value in (("patience", 2), ("probe", "knn")):
        message = rf"{name}={value!r} cannot be used when learning rates are tried.*; leave {name} out"
        with pytest.raises(ConfigError, match=message):
            check_final_run(base.override(**{name: value}), splits)
    shutil.copytree(colours / "train", tmp_path / "data" / "train")
    shutil.copytree(colours / "test", tmp_path / "data" / "val")
    config = base.override(data=str(tmp_path / "data"), probe="knn")
    check_final_run(config, config.data.open())


def test_the_data_s_own_validation_split_measures_and_chooses_nothing(
    base: TrainConfig, tiny_bundle: Bundle, colours: Path, tmp_path: Path
) -> None:
    data = tmp_path / "official"
    shutil.copytree(colours / "train", data / "train")
    shutil.copytree(colours / "test", data / "val")
    config = base.override(data=str(data))

    def planned_data(**explicit: object) -> DataConfig:
        return plan(tiny_bundle, config.data.open_whole(), config, Method("paper", explicit)).config.data

    chosen = planned_data()
    splits, last = chosen.open(), with_all_images(config.override(validation=chosen.validation)).data.open()
    assert splits.test is not None and len(splits.test) == 12 and len(splits.validation or ()) == 3
    files = sorted(str(path.relative_to(data / "train")) for path in (data / "train").rglob("*.png"))
    assert sorted([*(keys_of(splits.train) or ()), *(keys_of(splits.validation) or ())]) == files
    assert (keys_of(last.train), last.validation, last.test is not None) == (files, None, True)
    shutil.copytree(colours / "test", data / "test")
    assert planned_data().validation == "auto", "the test split measures"
    given = config.override(validation="train[-5:]")
    assert final_config(given, 0.01).data == replace(given.data, validation="train", validation_share=0.0)
