"""Tests of the paper's protocol: its table, and choosing a learning rate by runs on held-out images."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, NonFiniteLoss, RunError, Stopped
from vitrail.models.variants import AnyConfig, variant_config
from vitrail.training import after_step
from vitrail.training.after_step import Run
from vitrail.training.config import TrainConfig
from vitrail.training.log import Log, read_journal
from vitrail.training.state import TrainState
from vitrail.transfer.facts import DataFacts, FinetunePlan
from vitrail.transfer.finetune import plan
from vitrail.transfer.protocols import check_final_run, final_config, plan_by_paper
from vitrail.transfer.trials import Tried, choose_rate, is_trial, trials_folder
from vitrail.weights.bundle import Bundle

PLENTY = 10**12
FACTS = DataFacts(1000, 400, "class", True)


def planned(
    base: TrainConfig, network: AnyConfig, facts: DataFacts = FACTS, memory: int = PLENTY, **explicit: object
) -> FinetunePlan:
    preprocess = Preprocess(image_size=network.image_size)
    return plan_by_paper(base, network, preprocess, facts, memory=memory, explicit=explicit)


def test_rows_are_those_of_table_4() -> None:
    rates = (0.001, 0.003, 0.01, 0.03)
    for images, steps, warmup, tried_rates, share in (
        (2040, 500, 100, rates, 0.1),
        (50_000, 10_000, 500, rates, 0.02),
        (1_281_167, 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.01),
    ):
        base = TrainConfig().override(init="B_16.npz")
        found = planned(base, variant_config("ViT-B/16"), FACTS._replace(images=images))
        run, optimizer = found.config.run, found.config.optimizer
        assert (run.steps, optimizer.warmup, found.rates) == (steps, warmup / steps, tried_rates)
        assert found.config.data.validation_share == share


def test_settings_are_the_papers() -> None:
    base = TrainConfig().override(data="pets", init="B_16.npz", image_size=(224, 224))
    network = variant_config("ViT-B/16", num_classes=21_843)
    found = planned(base, network, FACTS._replace(images=3680))
    config, optimization = found.config, found.config.optimizer
    assert (config.run.steps, config.run.batch_size, config.images.image_size) == (500, 512, (384, 384))
    assert (optimization.kind, optimization.momentum, optimization.weight_decay) == ("sgd", 0.9, 0.0)
    assert (optimization.schedule, optimization.clip, optimization.warmup) == ("cosine", 1.0, 0.2)
    assert optimization.layer_decay == 1 and optimization.average == 0
    assert (config.task.label_smoothing, config.augment.mixup, config.augment.crop_area) == (0, None, (0.05, 1.0))
    assert config.augment.crop_rule == "tensorflow"
    assert (config.data.spec, config.start.init, config.data.validation_share) == ("pets", "B_16.npz", 0.1)
    assert found.config.start.new_head
    assert found.rates == (0.001, 0.003, 0.01, 0.03) and "0.001, 0.003, 0.01, 0.03, chosen on 10%" in found.reasons[-1]


@pytest.mark.parametrize("preprocess", [
    Preprocess(image_size=(224, 224), resize="crop", crop_share=0.9, interpolation="bicubic", mean=(0.4,)),
    Preprocess(image_size=(224, 224), scaled_decode=True),
    Preprocess(image_size=(224, 224)).with_geometry("big_vision-crop"),
])  # fmt: skip
def test_images_are_scaled_as_in_the_original_code(preprocess: Preprocess) -> None:
    """The scaling does not depend on the library that the weights came from, but mean and standard deviation do."""
    network = variant_config("ViT-B/16", num_classes=3)

    def images(**explicit: Any) -> Preprocess:
        base = TrainConfig().override(init="model")
        plan = plan_by_paper(base, network, preprocess, FACTS, memory=10**12, explicit=explicit)
        return plan.config.images

    found = images()
    assert found == replace(preprocess, image_size=(384, 384)).with_geometry("vision_transformer")
    assert images(resize="pad") == replace(found, resize="pad")
    shape = replace(preprocess, image_size=(384, 384), resize="squash", crop_share=1.0, scaled_decode=False)
    assert images(antialias=True) == replace(shape, antialias=True)


def test_a_patch_that_does_not_divide_the_size_is_cut_as_in_the_original_and_parts_fit() -> None:
    base = TrainConfig().override(init="model")
    network = variant_config("ViT-H/14", num_classes=10)
    found = planned(base, network).config
    assert found.images.image_size == (384, 384) and found.model.overrides == {"cut_uneven": True}
    assert planned(base, network, image_size=(518, 518)).config.model.overrides == {}
    small = planned(base, network, memory=16 * 10**9, image_size=(140, 140)).config
    assert small.images.image_size == (140, 140) and small.run.accumulation > 1 and small.run.batch_size == 512


def test_a_row_can_be_chosen_and_one_rate_needs_no_trial() -> None:
    base, network = TrainConfig().override(init="model"), variant_config("ViT-B/16", num_classes=10)
    facts = FACTS._replace(images=1000)
    found = plan_by_paper(base, network, Preprocess(image_size=(224, 224)), facts, memory=PLENTY, row="vtab")
    optimization = found.config.optimizer
    assert (found.config.run.steps, optimization.learning_rate, found.rates) == (2500, 0.01, ())
    assert (optimization.warmup, found.config.data.validation_share, found.config.run.evaluations) == (0.2, 0, 0)
    assert found.reasons[0] == "the paper's settings for VTAB: as chosen"
    augment, images = found.config.augment, found.config.images
    assert (augment.crop_from, augment.crop_area, images.image_size) == ((448, 448), None, (384, 384))
    assert augment.training_preprocess(images).image_size == (448, 448) and augment.flip
    assert (
        "training images are scaled to 448 x 448 (height x width), and random boxes of 384 x 384 are cut out"
        in found.reasons
    )
    images = Preprocess(image_size=(224, 224))
    tried = plan_by_paper(base, network, images, facts, memory=PLENTY, row="vtab", rates=(0.01, 0.03))
    assert tried.rates == (0.01, 0.03) and tried.config.data.validation_share == 0.2


def test_crops_of_the_row_follow_the_image_size_unless_the_user_chose_crops() -> None:
    base, network = TrainConfig().override(init="model"), variant_config("ViT-B/16", num_classes=10)
    for explicit, crop_from in (({"image_size": (96, 192)}, (112, 224)), ({"crop_area": (1.0, 1.0)}, None)):
        preprocess = Preprocess(image_size=(224, 224))
        plan = plan_by_paper(base, network, preprocess, FACTS, memory=PLENTY, row="vtab", explicit=explicit)
        augment = plan.config.augment
        assert (augment.crop_from, augment.settings.crop_area) == (crop_from, None)
        assert augment.settings.crop_rule == "tensorflow"
        assert any("cut out" in reason for reason in plan.reasons) == (crop_from is not None)


@pytest.fixture
def base(tiny_bundle: Bundle, model: Path, colours: Path) -> TrainConfig:
    return replace(TrainConfig(), images=tiny_bundle.preprocess).override(
        data=str(colours), init=str(model), steps=3, batch_size=4, validation_share=0.3, keep="last", evaluations=1,
        checkpoints=1,
    )  # fmt: skip


def tried(
    bundle: Bundle, config: TrainConfig, rates: tuple[float, ...], folder: Path, **others: object
) -> dict[float, Tried]:
    return choose_rate(config, config.data.open_whole(), rates, folder, initial=bundle, **others)  # type: ignore[arg-type]


class Notes:
    """Collects what is shown."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        if "text" in event:
            self.texts.append(event["text"])


@pytest.mark.slow
def test_each_rate_has_a_run_and_the_test_split_no_part(base: TrainConfig, tiny_bundle: Bundle, tmp_path: Path) -> None:
    notes = Notes()
    trials = tried(tiny_bundle, base, (0.01, 1e-5, 0.1), tmp_path / "rates", log=Log(notes))
    assert set(trials) == {0.01, 1e-5, 0.1}
    said = [text.partition(":")[0] for text in notes.texts if text.endswith("on the held-out images")]
    assert said == ["learning rate 0.01", "learning rate 1e-05", "learning rate 0.1"]
    assert list(trials) == sorted(trials, key=lambda rate: (-(trials[rate].value or 0), trials[rate].loss, rate))
    for rate in trials:
        folder = tmp_path / "rates" / f"learning-rate-{rate:g}"
        record = json.loads((folder / "run.json").read_text())
        assert record["config"]["optimizer"]["learning_rate"] == rate
        splits = {event["split"] for event in read_journal(folder / "journal.jsonl") if "split" in event}
        assert splits == {"validation"}


@pytest.mark.slow
def test_a_rate_that_diverges_is_skipped(base: TrainConfig, tiny_bundle: Bundle, tmp_path: Path) -> None:
    notes, wild = Notes(), base.override(optimizer="sgd", clip=0.0, steps=6)
    trials = tried(tiny_bundle, wild, (0.01, 1e30), tmp_path / "rates", log=Log(notes))
    assert list(trials) == [0.01]
    assert "learning rate 1e+30 is skipped: loss is nan at step 2" in notes.texts
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


def test_no_held_out_image_is_refused(base: TrainConfig, tiny_bundle: Bundle, tmp_path: Path) -> None:
    config = base.override(validation_share=0.0, evaluations=0)
    with pytest.raises(ConfigError, match="leaves no labelled image for choosing the learning rate; set learning_rate"):
        tried(tiny_bundle, config, (0.01,), tmp_path / "rates")
    assert not (tmp_path / "rates").exists(), "no run was done for it"


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


@pytest.mark.slow
def test_a_stopped_trial_continues(
    base: TrainConfig, tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = base.override(checkpoints=3)
    expected = tried(tiny_bundle, config, (0.01,), tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(after_step, "report", stop_at(2, after_step.report))
        with pytest.raises(Stopped):
            tried(tiny_bundle, config, (0.01,), tmp_path / "rates")
    assert tried(tiny_bundle, config, (0.01,), tmp_path / "rates") == expected
    assert "resumed" in (tmp_path / "rates" / "learning-rate-0.01" / "journal.jsonl").read_text()


def stop_at(step: int, usual: Callable[[Run, TrainState], None]) -> Callable[[Run, TrainState], None]:
    """Return the function that reports a step, which asks the run to stop at this step."""

    def report(run: Run, state: TrainState) -> None:
        usual(run, state)
        if state.step >= step:
            run.stop.is_asked = True

    return report


def test_a_given_rate_leaves_nothing_to_hold_out() -> None:
    base = TrainConfig().override(data="pets", init="B_16.npz", evaluations=10)
    found = planned(base, variant_config("ViT-B/16", num_classes=10), learning_rate=0.02)
    assert (found.config.optimizer.learning_rate, found.config.data.validation_share) == (0.02, 0.0)
    assert found.config.run.evaluations == 0 and found.config.run.keep == "last"
    assert found.rates == () and not any("best" in reason for reason in found.reasons)
    assert any("the run trains on all training images" in reason for reason in found.reasons)


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


def test_runs_that_try_a_rate_are_told_by_their_place() -> None:
    folder = trials_folder(Path("runs/pets"))
    assert folder == Path("runs/pets-trials")
    assert is_trial(folder / "learning-rate-0.01") and not is_trial(folder) and not is_trial(Path("runs/pets"))


def test_the_data_s_own_validation_split_measures_and_chooses_nothing(
    base: TrainConfig, tiny_bundle: Bundle, colours: Path, tmp_path: Path
) -> None:
    data = tmp_path / "official"
    shutil.copytree(colours / "train", data / "train")
    shutil.copytree(colours / "test", data / "val")
    config = base.override(data=str(data))
    chosen = plan(tiny_bundle, config.data.open_whole(), config, "paper", {"steps": 2, "batch_size": 4})
    assert chosen.config.data.validation == "train"
    splits = chosen.config.data.open()
    assert splits.test is not None and len(splits.test) == 12 and len(splits.validation or ()) == 3
    keys = [source.key(index) for source in (splits.train, splits.validation) for index in range(len(source))]
    assert sorted(keys) == sorted(str(path.relative_to(data / "train")) for path in (data / "train").rglob("*.png"))
    last = final_config(chosen.config, 0.01).data.open()
    assert (len(last.train), last.validation, last.test is not None) == (30, None, True)
    shutil.copytree(colours / "test", data / "test")
    chosen = plan(tiny_bundle, config.data.open_whole(), config, "paper")
    assert chosen.config.data.validation == "auto", "the test split measures"
    given = plan(tiny_bundle, config.data.open_whole(), config, "paper", {"validation": "train[-5:]"})
    assert final_config(given.config, 0.01).data == replace(given.config.data, validation="train", validation_share=0.0)
