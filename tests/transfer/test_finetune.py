"""Tests of fine-tuning from a model to a report, by the rule and by the paper's protocol."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.make import idx_bytes, make_colour_folder
from vitrail.data.formats import folder
from vitrail.errors import ConfigError, DataError, Interrupted, RunError
from vitrail.evaluation.metrics.report import RegressionReport
from vitrail.evaluation.outputs import Outputs
from vitrail.tasks.regression import Regression
from vitrail.training.config import TrainConfig
from vitrail.training.log import read_journal
from vitrail.training.run import train
from vitrail.transfer.facts import FinetunePlan
from vitrail.transfer.finetune import FinetuneResult, Method, evaluate_run, finetune, plan
from vitrail.transfer.trials import Tried
from vitrail.weights.bundle import Bundle

Planning = Callable[..., Callable[..., FinetunePlan]]
Planned = Callable[..., TrainConfig]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


UNEXAMINED = {"image_size": (14, 21), "flip": True}
"""Settings with which the rule does not examine the training images."""


@pytest.fixture
def planning(tiny_bundle: Bundle, model: Path) -> Planning:
    """Returns a function of the choices of a `Method`, which plans for the small transformer and a data set."""

    def of(data: Path, **fields: Any) -> Callable[..., FinetunePlan]:
        base = TrainConfig().override(data=str(data), init=str(model), device="cpu", **fields)
        opened = base.data.open_whole()
        return lambda *choices, **named: plan(tiny_bundle, opened, base, Method(*choices, **named))

    return of


@pytest.fixture
def planned(planning: Planning) -> Planned:
    """Returns the config that the rule chooses for a data set."""
    return lambda data, **explicit: planning(data)(explicit=explicit).config


def finetuned(config: TrainConfig, bundle: Bundle, **others: Any) -> FinetuneResult:
    return finetune(config, config.data.open_whole(), bundle, **others)


def test_the_plan_is_for_this_model_and_this_data(
    planned: Planned, tiny_bundle: Bundle, model: Path, colours: Path
) -> None:
    config = planned(colours)
    assert config.images == tiny_bundle.preprocess and config.start.init == str(model)
    assert config.data.spec == str(colours)
    assert (config.run.batch_size, config.run.steps) == (4, 135)  # 27 images, 20 times each
    assert planned(colours, flip=True, image_size=(28, 35)).images.image_size == (28, 35)


@pytest.mark.slow
def test_a_model_learns_another_task_and_is_looked_at(
    planned: Planned, tiny_bundle: Bundle, model: Path, colours: Path
) -> None:
    config = planned(colours).override(steps=20, precision="float32", keep="last", run="my run")
    found = finetuned(config, tiny_bundle)
    assert isinstance(found, FinetuneResult) and not found.trials
    assert found.split == "test" and found.report is not None and found.report.images == 12
    assert found.report.metrics["accuracy"].value == found.run.metrics["test_accuracy"] > 0.9, "classes are colours"
    assert found.report.scaled is not None, "a temperature from the validation split"
    assert found.page == found.run.folder / "report.html"
    page = found.page.read_text(encoding="utf-8")
    assert "blue" in page and "vitrail predict &#x27;my run/model&#x27;" in page, "commands can be pasted"
    bundle = vitrail.load(found.run.folder / "model")
    assert bundle.classes == ("blue", "green", "red") and bundle.provenance["init"] == str(model)
    assert tiny_bundle.classes == ("a", "b", "c", "d") and not torch.equal(
        bundle.network.patches.projection.weight, tiny_bundle.network.patches.projection.weight
    )


@pytest.mark.slow
def test_held_out_images_are_predicted_once(
    planned: Planned, tiny_bundle: Bundle, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report uses the outputs that the run measured, and computes them again if the images are others."""
    config = planned(colours).override(steps=2, precision="float32")
    data = config.data.open_whole()
    run = train(config, data=data, initial=tiny_bundle)
    assert {name: len(found) for name, found in run.predictions.items()} == {"validation": 3, "test": 12}
    counted: list[int] = []
    real = Outputs.predictions
    monkeypatch.setattr(Outputs, "predictions", lambda self, source: counted.append(1) or real(self, source))
    first = evaluate_run(run, config, config.data.cut(data))
    assert not counted and first.report is not None
    again = evaluate_run(replace(run, predictions={}), config, config.data.cut(data))
    assert len(counted) == 2 and again.report is not None
    assert (again.report.metrics, again.report.scaled) == (first.report.metrics, first.report.scaled)
    other = replace(config.data.cut(data), test=config.data.cut(data).train)
    assert evaluate_run(run, config, other).report.images == 27 and len(counted) == 3  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_papers_protocol_chooses_and_then_learns_from_all(
    tiny_bundle: Bundle, model: Path, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data is opened once and read by all runs."""
    opened: list[Path] = []
    usual = folder.read_folder

    def counted(root: Path, *arguments: Any, **settings: Any) -> folder.FolderImages:
        opened.append(root)
        return usual(root, *arguments, **settings)

    monkeypatch.setattr(folder, "read_folder", counted)
    config = TrainConfig().override(data=str(colours), init=str(model), device="cpu", name="paper")
    data = config.data.open_whole()
    explicit = {"image_size": (14, 21), "batch_size": 4, "steps": 4, "precision": "float32"}
    chosen = plan(tiny_bundle, data, config, Method("paper", explicit))
    assert chosen.rates == (0.001, 0.003, 0.01, 0.03)
    found = finetune(chosen.config, data, tiny_bundle, rates=(0.003, 0.03))
    assert opened == [colours / "train", colours / "test"]
    assert set(found.trials) == {0.003, 0.03} and found.page is not None
    assert found.run.folder == Path("runs/paper")
    assert Path("runs/paper-trials/learning-rate-0.003/model").is_dir()
    (started,) = [event for event in read_journal(found.run.folder / "journal.jsonl") if event["event"] == "started"]
    assert started["steps"] == 4
    assert found.run.bundle.provenance["validation_share"] == 0.0 and found.split == "test"
    assert "validation_accuracy" not in found.run.metrics, "all images were learned from"


@pytest.mark.slow
def test_the_papers_row_is_for_all_training_images(planning: Planning, tmp_path: Path) -> None:
    images, labels = np.zeros((21_000, 8, 8), np.uint8), (np.arange(21_000) % 10).astype(np.uint8)
    for array, kind in ((images, "images-idx3"), (labels, "labels-idx1")):
        (tmp_path / f"train-{kind}-ubyte").write_bytes(idx_bytes(array))
    planning_of = planning(tmp_path)
    assert planning_of(explicit=UNEXAMINED).config.run.steps == 1772, "3 times 18,900 images; a tenth is held out"
    found = planning_of("paper", UNEXAMINED)
    assert (found.config.run.steps, found.config.data.validation_share) == (10_000, 0.02)
    assert "21,000 training images" in found.reasons[0]


def test_rates_to_try_are_chosen_with_any_protocol(planning: Planning, colours: Path) -> None:
    planning_of = planning(colours)
    chosen = planning_of(explicit=UNEXAMINED, rates=(0.02, 0.1))
    assert chosen.rates == (0.02, 0.1) and chosen.config.optimizer.learning_rate == 0.02
    assert "learning rate" in chosen.reasons[-1] and not any("learning rate" in one for one in chosen.reasons[:-1])
    alone = planning_of(explicit=UNEXAMINED, rates=(0.1,))
    assert alone.rates == () and alone.config.optimizer.learning_rate == 0.1
    assert planning_of("paper", rates=(0.02, 0.1), row="vtab").rates == (0.02, 0.1)
    chosen = planning_of("paper", {"weight_decay": 0.1, "optimizer": "adamw"}, rates=(1e-4, 3e-4))
    assert not [reason for reason in chosen.reasons if "weight decay" in reason or "SGD" in reason]


def test_bits_rule_is_refused_for_a_transformer(planning: Planning, colours: Path) -> None:
    with pytest.raises(
        ConfigError, match="protocol='bit' is the rule of Big Transfer for BiT ResNets, but the model is"
    ):
        planning(colours)("bit")


@pytest.mark.parametrize("pool", ["map", "cls+gap"])
def test_a_pooling_that_needs_other_weights_is_refused(pool: str, planning: Planning, colours: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"pool={pool!r} needs other weights")):
        planning(colours)("rule", {"pool": pool})


def test_the_official_validation_split_never_chooses_a_rate_and_measures(
    tiny_bundle: Bundle, model: Path, colours: Path, tmp_path: Path
) -> None:
    """If there is no test split, or if no image of the test split has a label."""
    shutil.copytree(colours / "train", tmp_path / "data" / "train")
    shutil.copytree(colours / "test", tmp_path / "data" / "val")
    images = sorted(path.relative_to(tmp_path) for path in (tmp_path / "data").rglob("*.png"))
    rows = [f"{one},{one.parent.name},{one.parts[1]}" for one in images]
    blank = [f"{one},,test" for one in images[:5]]
    (tmp_path / "data.csv").write_text("\n".join(["path,label,split", *rows, *blank]), encoding="utf-8")
    for spec in ("data", "data.csv"):
        base = TrainConfig().override(data=str(tmp_path / spec), init=str(model), device="cpu")
        data = base.data.open_whole()
        for protocol in ("rule", "paper"):
            chosen = plan(tiny_bundle, data, base, Method(protocol, UNEXAMINED, (0.02, 0.1)))
            trial = chosen.config.data.cut(data)
            assert chosen.config.data.validation == "train" and chosen.config.run.keep == "last"
            assert trial.test is not None and len(trial.test) == 12 and len(trial.train) < 30


@pytest.mark.parametrize(("protocol", "row"), [("rule", None), ("paper", None), ("paper", "vtab")])
def test_crops_and_scaling_of_the_user_replace_those_of_a_protocol(
    planning: Planning, colours: Path, protocol: str, row: str | None
) -> None:
    planning_of = planning(colours, image_size=(28, 42))
    crops: list[dict[str, Any]] = [{"preset": "augreg-light2"}, {"crop_from": (32, 48)}, {"crop_area": (0.5, 1.0)}]
    for explicit in crops:
        given = {"image_size": (28, 42), "flip": True, **explicit}
        augment = planning_of(protocol, given, row=row).config.augment
        assert augment.crop_from == explicit.get("crop_from")
        assert augment.settings.crop_area == (None if augment.crop_from else explicit.get("crop_area", (0.05, 1.0))), (
            explicit
        )
    config = planning_of("paper", {"interpolation": "bicubic"}).config
    assert config.augment.training_preprocess(config.images) == config.images
    assert config.images.interpolation == "bicubic"


def test_four_images_are_enough_if_none_is_held_out(planning: Planning, tmp_path: Path) -> None:
    chosen = planning(make_colour_folder(tmp_path / "few", images=1))("paper", {"learning_rate": 0.01})
    assert chosen.config.data.validation_share == 0


@pytest.mark.slow
def test_numbers_are_learned_and_reported(
    tiny_bundle: Bundle, model: Path, brightness: Path, read_page: Callable[[str], Any]
) -> None:
    numbers = ("brightness", "half <&>")
    config = TrainConfig().override(data=str(brightness), numbers=numbers, task="regression", init=str(model))
    data = config.data.open_whole()
    chosen = plan(tiny_bundle, data, config, Method(explicit={"precision": "float32", "steps": 40, "loss": "huber"}))
    assert chosen.config.task == Regression(loss="huber") and chosen.config.augment.mixup is None
    assert "task regression: the targets are numbers" in chosen.reasons
    assert any("set --crop-area 1 1" in reason for reason in chosen.reasons)
    found = finetune(chosen.config, data, tiny_bundle)
    assert isinstance(found.report, RegressionReport) and found.split == "test" and found.report.images == 15
    assert found.report.metrics["r2"].value == pytest.approx(found.run.metrics["test_r2"]) and found.page is not None
    assert found.report.metrics["r2"].value > 0.8, "brightness is easy to see"
    bundle = vitrail.load(found.run.folder / "model")
    assert bundle.output == "numbers" and bundle.classes == numbers
    shown = "\n".join(read_page(found.page.read_text(encoding="utf-8")).text)
    for text in ("Validation R²", "Predicted and true values", "Residuals", "Largest errors", "half <&>", "huber"):
        assert text in shown
    assert "--numbers brightness" in shown and "Calibration" not in shown and "Confusion" not in shown


def test_a_folder_that_is_there_is_said_before_rates_are_tried(
    planning: Planning, tiny_bundle: Bundle, colours: Path, tmp_path: Path
) -> None:
    explicit = {"image_size": (14, 21), "batch_size": 4, "run": "there", "steps": 2}
    config = planning(colours)("paper", explicit).config
    Path("there").mkdir()
    with pytest.raises(RunError, match="run folder 'there' exists"):
        finetuned(config, tiny_bundle, rates=(0.003, 0.03))
    assert not list(tmp_path.glob("*-trials"))


def test_a_signal_between_trials_names_what_is_kept(
    planning: Planning, tiny_bundle: Bundle, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = planning(colours)("paper", {"image_size": (14, 21), "batch_size": 4, "run": "stopped", "steps": 2})
    monkeypatch.setattr("vitrail.transfer.finetune.choose_rate", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Interrupted, match="stopped-trials"):
        finetuned(chosen.config, tiny_bundle, rates=(0.003, 0.03))


@pytest.mark.slow
def test_a_folder_that_another_command_makes_meanwhile_is_not_taken(
    planning: Planning, tiny_bundle: Bundle, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = planning(colours)(explicit={"image_size": (14, 21), "flip": True, "learning_rate": 1e-3, "steps": 1})

    def search(config: TrainConfig, *_: Any, **__: Any) -> tuple[TrainConfig, tuple[Tried, ...]]:
        (Path("runs") / colours.name).mkdir(parents=True)
        return config, (Tried("a linear model", 0, 0.5),)

    monkeypatch.setattr("vitrail.transfer.finetune.search_settings", search)
    found = finetuned(chosen.config, tiny_bundle, search=chosen.search)
    assert found.run.folder == Path("runs") / f"{colours.name}-2"


@pytest.mark.slow
def test_data_that_is_mixed_in_may_bring_classes(planned: Planned, tiny_bundle: Bundle, colours: Path) -> None:
    config = planned(colours).override(steps=2, precision="float32", mix=("0.3:fractals:2:5",))
    found = finetuned(config, tiny_bundle)
    assert len(found.run.bundle.classes) == 5 and found.run.bundle.classes[:3] == ("blue", "green", "red")
    assert found.report is not None and found.report.images == 12
    assert found.report.metrics["accuracy"].value == found.run.metrics["test_accuracy"]


@pytest.mark.slow
def test_classes_of_one_image_are_learned_and_nothing_is_measured(
    planned: Planned, tiny_bundle: Bundle, tmp_path: Path
) -> None:
    data = make_colour_folder(tmp_path / "data", images=1, classes=("blue", "red"))
    with pytest.raises(DataError, match=r"validation split of data .* empty: each of its classes has only one"):
        planned(data)
    config = planned(data, validation_share=0.0)
    found = finetuned(config.override(steps=2, precision="float32"), tiny_bundle)
    assert (found.split, found.report, found.page, found.run.metrics) == (None, None, None, {})
    assert vitrail.load(found.run.folder / "model").classes == ("blue", "red")


@pytest.mark.slow
def test_a_test_split_without_labels_is_not_measured(planned: Planned, tiny_bundle: Bundle, colours: Path) -> None:
    shutil.copytree(colours, "colours")
    images = sorted(Path("colours").rglob("*.png"))
    rows = [f"{one},{one.parent.name},train" if "train" in one.parts else f"{one},,test" for one in images]
    Path("data.csv").write_text("\n".join(["path,label,split", *rows]))
    found = finetuned(planned(Path("data.csv")).override(steps=2, precision="float32"), tiny_bundle)
    assert found.split == "validation" and set(found.run.metrics) == {"validation_accuracy"}
    assert found.report is not None and found.report.scaled is None, "no other images can judge a temperature"
