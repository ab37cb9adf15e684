"""Tests of fine-tuning from a model to a report, by the rule and by the paper's protocol."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.make import make_colour_folder
from vitrail.data.formats import folder
from vitrail.errors import ConfigError, DataError, RunError
from vitrail.evaluation.metrics.report import RegressionReport
from vitrail.evaluation.outputs import Outputs
from vitrail.tasks.regression import Regression
from vitrail.training.config import TrainConfig
from vitrail.training.log import read_journal
from vitrail.training.run import train
from vitrail.transfer.facts import FinetunePlan
from vitrail.transfer.finetune import FinetuneResult, evaluate_run, finetune, plan
from vitrail.weights.bundle import Bundle


@pytest.fixture
def model(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    return tiny_bundle.save(tmp_path / "model")


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(bundle: Bundle, model: Path, data: Path, **explicit: object) -> TrainConfig:
    base = TrainConfig().override(data=str(data), init=str(model), device="cpu")
    return plan(bundle, base.data.open_whole(), base, explicit=explicit).config


def by_paper(bundle: Bundle, model: Path, data: Path, **explicit: object) -> FinetunePlan:
    base = TrainConfig().override(data=str(data), init=str(model), device="cpu", name="paper")
    return plan(bundle, base.data.open_whole(), base, "paper", {"image_size": (14, 21), **explicit})


def finetuned(config: TrainConfig, bundle: Bundle, **others: Any) -> FinetuneResult:
    return finetune(config, config.data.open_whole(), bundle, **others)


def test_the_plan_is_for_this_model_and_this_data(tiny_bundle: Bundle, model: Path, colours: Path) -> None:
    config = planned(tiny_bundle, model, colours)
    assert config.images == tiny_bundle.preprocess and config.start.init == str(model)
    assert config.data.spec == str(colours)
    assert (config.run.batch_size, config.run.steps) == (4, 135)  # 27 images, 20 times each
    assert planned(tiny_bundle, model, colours, image_size=(28, 35)).images.image_size == (28, 35)


@pytest.mark.slow
def test_a_model_learns_another_task_and_is_looked_at(
    tiny_bundle: Bundle, model: Path, colours: Path, in_folder: Path
) -> None:
    config = planned(tiny_bundle, model, colours).override(steps=20, precision="float32", keep="last")
    found = finetuned(config, tiny_bundle)
    assert isinstance(found, FinetuneResult) and not found.trials
    assert found.split == "test" and found.report is not None and found.report.images == 12
    assert (
        found.report.metrics["accuracy"].value == found.run.metrics["test_accuracy"] > 0.9
    )  # colours tell the classes
    assert found.report.scaled is not None, "a temperature from the validation split"
    assert found.page == Path("runs/colours0/report.html") or found.page == found.run.folder / "report.html"
    assert found.page.is_file() and "blue" in found.page.read_text(encoding="utf-8")
    bundle = vitrail.load(found.run.folder / "model")
    assert bundle.classes == ("blue", "green", "red") and bundle.provenance["init"] == str(model)
    assert tiny_bundle.classes == ("a", "b", "c", "d") and not torch.equal(
        bundle.network.patches.projection.weight, tiny_bundle.network.patches.projection.weight
    )


@pytest.mark.slow
def test_held_out_images_are_predicted_once(
    tiny_bundle: Bundle, model: Path, colours: Path, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report uses the outputs that the run measured, and computes them again if the images are others."""
    config = planned(tiny_bundle, model, colours).override(steps=2, precision="float32")
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


def test_without_a_test_split_no_temperature_is_judged_by_what_it_was_fitted_to(
    tiny_bundle: Bundle, model: Path, colours: Path, in_folder: Path
) -> None:
    config = planned(tiny_bundle, model, colours / "train").override(steps=2, precision="float32")
    found = finetuned(config, tiny_bundle)
    assert found.split == "validation" and found.report is not None and found.report.scaled is None


def test_with_nothing_held_out_nothing_is_measured(
    tiny_bundle: Bundle, model: Path, colours: Path, in_folder: Path
) -> None:
    config = planned(tiny_bundle, model, colours / "train", validation_share=0.0, steps=2, precision="float32")
    found = finetuned(config, tiny_bundle)
    assert (found.split, found.report, found.page) == (None, None, None)
    assert vitrail.load(found.run.folder / "model").classes == ("blue", "green", "red")


def test_the_papers_protocol_chooses_and_then_learns_from_all(
    tiny_bundle: Bundle, model: Path, colours: Path, in_folder: Path
) -> None:
    found = by_paper(tiny_bundle, model, colours, batch_size=4, steps=4, precision="float32")
    assert found.rates == (0.001, 0.003, 0.01, 0.03)
    found = finetuned(found.config, tiny_bundle, rates=(0.003, 0.03))
    assert set(found.trials) == {0.003, 0.03}
    assert found.run.folder == Path("runs/paper")
    assert Path("runs/paper-trials/learning-rate-0.003/model").is_dir()
    (started,) = [event for event in read_journal(found.run.folder / "journal.jsonl") if event["event"] == "started"]
    assert started["steps"] == 4
    assert found.run.bundle.provenance["validation_share"] == 0.0 and found.split == "test"
    assert "validation_accuracy" not in found.run.metrics, "all images were learned from"


def test_the_papers_row_is_for_all_training_images(tiny_bundle: Bundle, model: Path, in_folder: Path) -> None:
    images, labels = np.zeros((21_000, 8, 8), np.uint8), (np.arange(21_000) % 10).astype(np.uint8)
    for array, kind in ((images, "images-idx3"), (labels, "labels-idx1")):
        sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
        (in_folder / f"train-{kind}-ubyte").write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())
    assert planned(tiny_bundle, model, in_folder).run.steps == 1772, "3 times 18,900 images; a tenth is held out"
    found = by_paper(tiny_bundle, model, in_folder)
    assert (found.config.run.steps, found.config.data.validation_share) == (10_000, 0.02)
    assert "21,000 training images" in found.reasons[0]


def test_data_is_opened_once_and_read_by_all_runs(
    tiny_bundle: Bundle, model: Path, colours: Path, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    usual = folder.read_folder

    def counted(root: Path, *arguments: Any, **settings: Any) -> folder.FolderImages:
        opened.append(root)
        return usual(root, *arguments, **settings)

    monkeypatch.setattr(folder, "read_folder", counted)
    config = TrainConfig().override(data=str(colours), init=str(model), device="cpu", name="paper")
    data = config.data.open_whole()
    explicit = {"image_size": (14, 21), "batch_size": 4, "steps": 2, "precision": "float32"}
    chosen = plan(tiny_bundle, data, config, "paper", explicit)
    found = finetune(chosen.config, data, tiny_bundle, rates=chosen.rates[:2])
    assert len(found.trials) == 2 and found.page is not None
    chosen = plan(tiny_bundle, data, config, explicit=explicit)
    assert finetune(chosen.config, data, tiny_bundle).page is not None
    assert opened == [colours / "train", colours / "test"]


def test_rates_to_try_are_chosen_with_any_protocol(tiny_bundle: Bundle, model: Path, colours: Path) -> None:
    base = TrainConfig().override(data=str(colours), init=str(model), device="cpu")
    data = base.data.open_whole()
    chosen = plan(tiny_bundle, data, base, rates=(0.02, 0.1))
    assert chosen.rates == (0.02, 0.1) and chosen.config.optimizer.learning_rate == 0.02
    assert chosen.reasons[-1].startswith("the best learning rate of 0.02, 0.1 on held-out images")
    alone = plan(tiny_bundle, data, base, rates=(0.1,))
    assert alone.rates == () and alone.config.optimizer.learning_rate == 0.1
    assert plan(tiny_bundle, data, base, "paper", rates=(0.02, 0.1), row="vtab").rates == (0.02, 0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rates": ()}, r"learning_rates=\(\) must be one or more numbers above 0"),
        ({"rates": (0.1, -0.2)}, r"learning_rates=\(0.1, -0.2\) must be one or more numbers above 0"),
        (
            {"rates": (0.1,), "explicit": {"learning_rate": 0.3}},
            r"learning_rate=0.3 and learning_rates=\(0.1,\) exclude each other; choose one",
        ),
        ({"row": "vtab"}, "table_row='vtab' is a row of the paper's Table 4; choose protocol='paper' as well"),
        ({"protocol": "bit"}, "protocol='bit' is the rule of Big Transfer for BiT ResNets, but the model is a Vision"),
        ({"protocol": "bit", "rates": (0.1,)}, r"learning_rates=\(0.1,\): BiT's rule has one learning rate; set"),
    ],
)
def test_settings_of_a_protocol_that_do_not_fit(
    tiny_bundle: Bundle, model: Path, colours: Path, settings: dict[str, Any], message: str
) -> None:
    base = TrainConfig().override(data=str(colours), init=str(model), device="cpu")
    with pytest.raises(ConfigError, match=message):
        plan(tiny_bundle, base.data.open_whole(), base, **settings)


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
            chosen = plan(tiny_bundle, data, base, protocol, rates=(0.02, 0.1))
            trial = chosen.config.data.cut(data)
            assert chosen.config.data.validation == "train" and chosen.config.run.keep == "last"
            assert trial.test is not None and len(trial.test) == 12 and len(trial.train) < 30


@pytest.mark.parametrize("explicit", [{"preset": "augreg-light2"}, {"crop_from": (32, 48)}, {"crop_area": (0.5, 1.0)}])
@pytest.mark.parametrize(("protocol", "row"), [("rule", None), ("paper", None), ("paper", "vtab")])
def test_crops_of_the_user_replace_those_of_a_protocol(
    tiny_bundle: Bundle, model: Path, colours: Path, explicit: dict[str, Any], protocol: Any, row: Any
) -> None:
    base = TrainConfig().override(data=str(colours), init=str(model), device="cpu", image_size=(28, 42))
    explicit = {"image_size": (28, 42), **explicit}
    augment = plan(tiny_bundle, base.data.open_whole(), base, protocol, explicit, row=row).config.augment
    assert augment.crop_from == explicit.get("crop_from")
    assert augment.settings.crop_area == (None if augment.crop_from else explicit.get("crop_area", (0.05, 1.0)))


def test_reasons_do_not_state_what_the_user_replaced(tiny_bundle: Bundle, model: Path, colours: Path) -> None:
    base = TrainConfig().override(data=str(colours), init=str(model), device="cpu")
    data = base.data.open_whole()
    explicit = {"weight_decay": 0.1, "optimizer": "adamw"}
    chosen = plan(tiny_bundle, data, base, "paper", explicit, rates=(1e-4, 3e-4))
    assert not [reason for reason in chosen.reasons if "weight decay" in reason or "SGD" in reason]
    chosen = plan(tiny_bundle, data, base, "rule", rates=(0.01, 0.1))
    assert len([reason for reason in chosen.reasons if "learning rate" in reason]) == 1


def test_scaling_that_the_user_chose_is_used_in_training_too(tiny_bundle: Bundle, model: Path, colours: Path) -> None:
    base = TrainConfig().override(data=str(colours), init=str(model), device="cpu")
    config = plan(tiny_bundle, base.data.open_whole(), base, "paper", {"interpolation": "bicubic"}).config
    assert config.augment.training_preprocess(config.images) == config.images
    assert config.images.interpolation == "bicubic"


def test_four_images_are_enough_if_none_is_held_out(tiny_bundle: Bundle, model: Path, tmp_path: Path) -> None:
    make_colour_folder(tmp_path / "few", images=1)
    base = TrainConfig().override(data=str(tmp_path / "few"), init=str(model), device="cpu")
    chosen = plan(tiny_bundle, base.data.open_whole(), base, "paper", {"learning_rate": 0.01})
    assert chosen.config.data.validation_share == 0


def test_numbers_are_learned_and_reported(
    tiny_bundle: Bundle, model: Path, brightness: Path, in_folder: Path, read_page: Callable[[str], Any]
) -> None:
    numbers = ("brightness", "half <&>")
    config = TrainConfig().override(data=str(brightness), numbers=numbers, task="regression", init=str(model))
    data = config.data.open_whole()
    chosen = plan(tiny_bundle, data, config, explicit={"precision": "float32", "steps": 60, "loss": "huber"})
    assert chosen.config.task == Regression(loss="huber") and chosen.config.augment.mixup is None
    assert "task regression: the targets are numbers" in chosen.reasons
    assert any("set --crop-area 1 1" in reason for reason in chosen.reasons)
    found = finetune(chosen.config, data, tiny_bundle)
    assert isinstance(found.report, RegressionReport) and found.split == "test" and found.report.images == 15
    assert found.report.metrics["r2"].value == pytest.approx(found.run.metrics["test_r2"]) and found.page is not None
    assert found.report.metrics["r2"].value > 0.8, "brightness is easy to see"
    bundle = vitrail.load(found.run.folder / "model")
    assert bundle.output == "numbers" and bundle.classes == numbers
    page = read_page(found.page.read_text(encoding="utf-8"))
    shown = "\n".join(page.text)
    assert "on 15 test images of 2 numbers." in shown and "--numbers brightness" in shown
    for text in ("Validation R²", "Predicted and true values", "Residuals", "Largest errors", "half <&>", "huber"):
        assert text in shown
    assert "Calibration" not in shown and "Confusion" not in shown
    assert page.names.count("svg") == 5, "loss, R², learning rate and two scatter plots"
    first = 6 + min(len(found.run.examples), 6)
    assert page.names.count("img") == first + min(len(found.report.worst), 20), "at the top, and the largest errors"


@pytest.mark.slow
def test_the_papers_protocol_learns_numbers(
    tiny_bundle: Bundle, model: Path, brightness: Path, in_folder: Path
) -> None:
    base = TrainConfig().override(task="regression", init=str(model), device="cpu")
    config = base.override(data=str(brightness), numbers=("brightness",))
    explicit = {"image_size": (14, 21), "batch_size": 8, "steps": 8, "precision": "float32", "validation_share": 0.3}
    data = config.data.open_whole()
    chosen = plan(tiny_bundle, data, config, "paper", explicit)
    found = finetune(chosen.config, data, tiny_bundle, rates=(1e-6, 0.01))
    assert list(found.trials) == [0.01, 1e-6] and (found.trials[0.01].value or 0) > (found.trials[1e-6].value or 0)
    assert "validation_r2" not in found.run.metrics and found.run.metrics["test_r2"] < 1


def test_a_folder_that_is_there_is_said_before_rates_are_tried(
    tiny_bundle: Bundle, model: Path, colours: Path, in_folder: Path
) -> None:
    config = by_paper(tiny_bundle, model, colours, batch_size=4, run="there", steps=2).config
    (in_folder / "there").mkdir()
    with pytest.raises(RunError, match="run folder 'there' exists"):
        finetuned(config, tiny_bundle, rates=(0.003, 0.03))
    assert not list(in_folder.glob("*-trials"))


@pytest.mark.slow
def test_data_that_is_mixed_in_may_bring_classes(
    tiny_bundle: Bundle, model: Path, colours: Path, in_folder: Path
) -> None:
    config = planned(tiny_bundle, model, colours)
    config = config.override(steps=2, precision="float32", mix=("0.3:fractals:2:5",))
    found = finetuned(config, tiny_bundle)
    assert len(found.run.bundle.classes) == 5 and found.run.bundle.classes[:3] == ("blue", "green", "red")
    assert found.report is not None and found.report.images == 12
    assert found.report.metrics["accuracy"].value == found.run.metrics["test_accuracy"]


def test_classes_of_one_image_are_learned_and_nothing_is_measured(
    tiny_bundle: Bundle, model: Path, colours: Path, in_folder: Path
) -> None:
    for name in ("blue", "red"):
        (in_folder / "data" / name).mkdir(parents=True)
        image = next((colours / "train" / name).iterdir())
        (in_folder / "data" / name / image.name).write_bytes(image.read_bytes())
    with pytest.raises(DataError, match=r"leaves the validation split of data .* empty: that is less than half"):
        planned(tiny_bundle, model, in_folder / "data")
    config = planned(tiny_bundle, model, in_folder / "data", validation_share=0.0)
    found = finetuned(config.override(steps=2, precision="float32"), tiny_bundle)
    assert (found.split, found.page, found.run.metrics) == (None, None, {})


def test_a_test_split_without_labels_is_not_measured(
    tiny_bundle: Bundle, model: Path, colours: Path, in_folder: Path
) -> None:
    shutil.copytree(colours, in_folder / "colours")
    images = sorted(path.relative_to(in_folder) for path in (in_folder / "colours").rglob("*.png"))
    rows = [f"{one},{one.parent.name},train" if "train" in one.parts else f"{one},,test" for one in images]
    (in_folder / "data.csv").write_text("\n".join(["path,label,split", *rows]))
    config = planned(tiny_bundle, model, in_folder / "data.csv").override(steps=2, precision="float32")
    found = finetuned(config, tiny_bundle)
    assert found.split == "validation" and set(found.run.metrics) == {"validation_accuracy"}


@pytest.mark.slow
def test_the_next_commands_can_be_pasted(tiny_bundle: Bundle, model: Path, colours: Path, in_folder: Path) -> None:
    config = planned(tiny_bundle, model, colours).override(steps=2, precision="float32", run="my run")
    page = finetuned(config, tiny_bundle).page
    assert page is not None and "vitrail predict &#x27;my run/model&#x27;" in page.read_text(encoding="utf-8")


def test_data_that_cannot_be_used_says_so_before_anything_is_written(
    tiny_bundle: Bundle, model: Path, in_folder: Path
) -> None:
    with pytest.raises(DataError, match="nowhere"):
        planned(tiny_bundle, model, Path("nowhere"))
    assert not (in_folder / "runs").exists()
