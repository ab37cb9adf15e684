"""Tests of `vitrail evaluate`."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console, RenderableType

from tests.cli.conftest import Cli
from tests.make import OBJECT_NAMES, coco_data, dense_model, make_split_colours, small_model
from tests.targets import single_labels
from vitrail.cli import command_of
from vitrail.cli.evaluate import confusion_table, evaluator_options, per_class_table
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.data.sources import open_data
from vitrail.evaluation.detection import average_precision
from vitrail.evaluation.evaluators import EVALUATORS
from vitrail.evaluation.metrics.report import report
from vitrail.evaluation.outputs import Outputs, Predictions
from vitrail.settings import setting
from vitrail.training.run import RunResult
from vitrail.weights.load import load


@pytest.fixture
def labelled(trained: RunResult, tmp_path: Path) -> Path:
    """Class folders of the run's example images, 12 copies of each."""
    for example in trained.examples:
        folder = tmp_path / "labelled" / example.label.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        for copy in range(12):
            Image.open(example.path).save(folder / f"{example.path.stem}-{copy}.png")
    return tmp_path / "labelled"


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_bundled")
@pytest.mark.parametrize(("split", "images"), [("test", 300), ("validation", 59)])
def test_a_split_gives_what_the_run_reported(
    split: str, images: int, model: Path, trained: RunResult, cli: Cli
) -> None:
    captured = cli.call("evaluate", model, "--data", "bundled", "--split", split, "--json")
    row = json.loads(captured.out)[split]
    assert row["accuracy"] == trained.metrics[f"{split}_accuracy"]
    assert (row["images"], row["skipped"]) == (images, 0)
    assert ("has no validation split" in captured.err) == (split == "validation")


@pytest.mark.slow
def test_a_plain_folder_is_never_measured_on_what_may_have_been_trained_on(
    model: Path, tmp_path: Path, labelled: Path, cli: Cli
) -> None:
    (labelled / "T-shirt-top").rename(tmp_path / "aside")  # its class is called T-shirt/top, which no folder can be
    captured = cli.call("evaluate", model, "--data", labelled, "--json")
    images = json.loads(captured.out)["validation"]["images"]
    total = sum(1 for _ in labelled.glob("*/*.png"))
    assert 0 < images < total / 2
    next(labelled.iterdir()).joinpath("empty.png").write_bytes(b"")
    assert "has no validation split" in captured.err and "--split all" in captured.err
    captured = cli.call("evaluate", model, "--data", labelled, "--split", "all", "--json")
    row = json.loads(captured.out)["train"]
    assert (row["images"], row["skipped"]) == (total, 1) and "empty.png: is empty (0 bytes)" in captured.err


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command with its own cache."""
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
    return Cli(capsys, "evaluate")


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """Three colours, with 27 training images and 9 test images."""
    return make_split_colours(tmp_path / "colours", test=3)


@pytest.mark.slow
def test_features_need_no_head_and_are_found_again(evaluate: Cli, tmp_path: Path, colours: Path) -> None:
    words = [small_model(tmp_path / "headless"), "--data", colours, "--by", "linear,knn,fewshot", "--json"]
    words += ["--shots", "1", "5", "--k", "1", "7"]
    first = evaluate.call(*words)
    assert "cache" not in first.err
    row = json.loads(first.out)["test"]
    assert {"linear", "linear_penalty", "knn_1", "knn_7", "fewshot_1", "fewshot_5_deviation"} <= set(row)
    assert (row["images"], row["training_images"], row["skipped"]) == (9, 27, 0)
    assert row["knn_1"] > 0.6  # colours are easy to learn
    again = evaluate.call(*words)
    assert again.out == evaluate.shows(*words, "--no-cache") == first.out
    assert "features of 27 images read from the cache" in again.err and "features of 9 images read" in again.err
    for more in (("--image-size", "28", "14"), ("--reduce-tokens", "1")):
        assert "cache" not in evaluate.call(*words, *more).err


@pytest.mark.slow
def test_data_with_only_a_test_split_is_measured(evaluate: Cli, tmp_path: Path, colours: Path) -> None:
    words = [small_model(tmp_path / "model", ("blue", "green", "red")), "--data", colours]
    both = evaluate.json(*words)
    shutil.rmtree(colours / "train")
    for split in ((), ("--split", "test"), ("--split", "all")):
        assert evaluate.json(*words, *split) == both
    assert "choose one that it has: test" in evaluate.refuses(*words, "--split", "train")
    assert "has a test split but no training images" in evaluate.refuses(*words, "--by", "knn")


@pytest.mark.slow
def test_all_evaluators_stand_in_one_table(evaluate: Cli, tmp_path: Path, colours: Path) -> None:
    words = [small_model(tmp_path / "model", ("blue", "green", "red")), "--data", colours, "--by"]
    shown = evaluate.shows(*words, "accuracy,knn,fewshot", "--shots", "1", "--l2", "loo")
    for text in ("balanced accuracy", "knn, k = 20", "fewshot, 1 shot", "±", "training images"):
        assert text in shown, shown
    captured = evaluate.call(*words, "accuracy,knn", "--split", "all", "--json")
    rows = json.loads(captured.out)
    assert "knn learns from the training images, so it measures only the others" in captured.err
    assert "knn_1" not in rows["train"] and {"accuracy", "accuracy_low", "knn_1"} <= set(rows["test"])
    assert rows["train"]["images"] == 27


@pytest.mark.slow
def test_classes_and_confusion_are_shown_if_asked_for(evaluate: Cli, tmp_path: Path, colours: Path) -> None:
    words = [small_model(tmp_path / "model", ("blue", "green", "red")), "--data", colours]
    row = evaluate.json(*words, "--per-class", "--confusion")["test"]
    assert sum(cell[2] for cell in row["confusion"]) == 9
    assert sum(cell[2] for cell in row["confusion"] if cell[0] == cell[1]) == round(row["accuracy"] * 9)
    assert [(one["name"], one["images"]) for one in row["per_class"]] == [("blue", 3), ("green", 3), ("red", 3)]
    shutil.rmtree(colours / "test" / "green")
    assert re.search(r"1 of 3 classes has no image .*: green", evaluate.shows(*words))
    shown = evaluate.shows(*words, "--per-class", "--confusion", "--bootstrap", "0")
    assert "precision" in shown and "true class" in shown and " to " not in shown
    assert re.search(r"green +0 ", shown) and re.search(r"1 green ", shown)
    printed = evaluate.call(*words, "--per-class", "--json")
    assert json.loads(printed.out)["test"]["classes_without_images"] == ["green"] and "green" in printed.err


def test_a_stopped_evaluation_names_the_command_that_continues_it(
    evaluate: Cli, tmp_path: Path, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Preprocess, images: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("SIGTERM was ignored")

    model = small_model(tmp_path / "model", ())
    with monkeypatch.context() as patch:
        patch.setattr(Preprocess, "normalise", stop)
        words = ("--data", colours, "--by", "knn", "--json", "--precision", "float32")
        errors = evaluate.call(model, *words, code=75).err
    assert "stopped: features of 0 of 27 images are kept in" in errors
    assert errors.endswith(f"Continue with: vitrail evaluate {model} {' '.join(map(str, words))}\n")
    evaluate.shows(model, *words)


IMAGENET = tuple(f"class {number}" for number in range(1000))


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """Two folders with numbers as names, as in ImageNet-V2. Their files have the names of ImageNet's validation
    images."""
    root = tmp_path / "numbered"
    random = np.random.default_rng(0)
    for number, name in enumerate(("7", "7", "7", "998", "998", "998"), start=1):
        (root / name).mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (12, 17, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / name / f"ILSVRC2012_val_{number:08}.png")
    return root


@pytest.mark.slow
def test_folders_of_imagenets_numbers_are_measured_with_a_note_and_with_real_labels(
    evaluate: Cli, tmp_path: Path, numbered: Path
) -> None:
    words = [small_model(tmp_path / "model", IMAGENET), "--data", numbered, "--split", "all"]
    printed = evaluate.call(*words, "--confusion", "--json")
    assert "the data's classes are numbers, so they are taken as ImageNet's classes" in printed.err
    row = json.loads(printed.out)["train"]
    assert row["images"] == 6 and {cell[0] for cell in row["confusion"]} == {"class 7", "class 998"}
    words.append("--real")
    labels: list[list[int]] = [[], *([list(range(1000))] * 2), *([[]] * 49_997)]
    (tmp_path / "real.json").write_text(json.dumps(labels))
    row = evaluate.json(*words, tmp_path / "real.json")["train"]
    assert (row["real_accuracy"], row["real_images"]) == (1, 2)
    errors = evaluate.refuses(*words, tmp_path / "none.json")
    assert "none.json, the ReaL labels: No such file or directory" in errors


@pytest.mark.slow
def test_a_list_of_names_says_which_output_a_wordnet_id_is(evaluate: Cli, tmp_path: Path, colours: Path) -> None:
    model = small_model(tmp_path / "model", ("tench", "goldfish", "kite"))
    names = {"blue": "n01443537", "green": "n01608432", "red": "n01440764"}
    for split in ("train", "test"):
        for old, new in names.items():
            (colours / split / old).rename(colours / split / new)
    (tmp_path / "names.txt").write_text("n01440764 tench, Tinca tinca\nn01443537 goldfish\nn01608432 kite\n")
    words = ("--class-names", tmp_path / "names.txt", "--per-class", "--json")
    printed = evaluate.call(model, "--data", colours, *words)
    assert "by a list of WordNet ids" in printed.err
    assert {one["name"] for one in json.loads(printed.out)["test"]["per_class"]} == {"tench", "goldfish", "kite"}
    assert "do not match exactly one of the model's" in evaluate.refuses(model, "--data", colours)


@dataclass(frozen=True)
class ByShare:
    """Fraction of the held-out images that belong to one class."""

    of_class: int = setting(0, least=0)
    """Number of the class that is counted."""

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        targets = [held_out.target(index) for index in range(len(held_out))]
        share = sum(target == self.of_class for target in targets) / len(targets)
        return {"share": share, "images": float(len(targets)), "skipped": 0.0}


@dataclass(frozen=True)
class ByData(ByShare):
    data: str = ""


@pytest.mark.slow
def test_the_settings_of_an_evaluator_of_ones_own_are_options(
    evaluate: Cli, model: Path, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EVALUATORS, "share", ByShare)
    command = command_of("evaluate")[0]
    vars(command).pop("known", None)  # the options of earlier calls in this process
    shown, words = evaluate.shows("--help-all"), (model, "--data", colours)
    assert "--of-class N" in shown and "Number of the class that is counted." in shown
    assert evaluate.json(*words, "--by", "share", "--of-class", "9")["test"]["share"] == 0
    errors = evaluate.refuses(*words, "--of-class", "1")
    assert "--of-class: only share uses it, but the model's own head is measured; add share to --by" in errors
    assert "--of-class: -1 is less than 0" in evaluate.refuses(*words, "--by", "share", "--of-class", "-1")
    monkeypatch.setitem(EVALUATORS, "data", ByData)
    with pytest.raises(ValueError, match="evaluator data: data is another option of evaluate"):
        list(evaluator_options())
    vars(command).pop("known", None)


@pytest.mark.slow
def test_nothing_is_computed_for_what_an_evaluator_refuses(
    evaluate: Cli, tmp_path: Path, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("a batch was computed")

    monkeypatch.setattr("vitrail.evaluation.outputs.Predictor", fail)
    monkeypatch.setattr("vitrail.evaluation.outputs.extract", fail)
    (tmp_path / "real.json").write_text(json.dumps([[]] * 50_000))
    model = small_model(tmp_path / "model", ("blue", "green", "red"))
    named = small_model(tmp_path / "imagenet", ("blue", "green", "red", *IMAGENET[3:]))
    real = ("--real", tmp_path / "real.json")
    for words, message in (
        ((model, "--by", "accuracy,linear,knn", "--k", "28"), "--k: 28 exceeds the number of labelled training images"),
        ((model, "--by", "accuracy,fewshot", "--shots", "10"), "10 shots need 10 training images per class"),
        ((model, *real), "the model has 3 outputs, but ImageNet's labels need a model"),
        ((named, *real), "is not one of ImageNet's validation images, whose names are"),
    ):
        assert message in evaluate.refuses(*words, "--data", colours)


@pytest.mark.slow
def test_numbers_are_measured_by_head_and_features(evaluate: Cli, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lines = ["split,path,age,height"]
    for number in range(40):
        pixels = random.integers(0, 256, (8, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        split = "train" if number < 30 else "test"
        lines.append(f"{split},{number}.png,{pixels.mean():.3f},{'' if number % 5 == 1 else -number}")
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    model = small_model(tmp_path / "model", ("age", "height"), output="numbers")
    words = [model, "--data", tmp_path / "people.csv", "--no-cache"]
    row = evaluate.json(*words)["test"]
    assert row["images"] == 10 and row["r2"] < 0
    assert "mean_absolute_error" not in row and row["standardised_error"] > 0
    shown = evaluate.shows(*words, "--by", "regression,linear,knn", "--k", "3", "--bootstrap", "0")
    for name in ("age: R²", "height: root mean squared error", "linear, R²", "age: knn, k = 3, mean absolute error"):
        assert name in shown
    assert f"{row['age:mean_absolute_error']:.4g}" in shown
    row = evaluate.json(*words, "--by", "knn", "--numbers", "height", "--k", "1")["test"]
    assert {"knn_1_r2", "knn_1_mean_absolute_error"} <= set(row)


def words_of(table: RenderableType) -> list[list[str]]:
    """Return the words of each line of a table."""
    file = io.StringIO()
    Console(file=file, width=200).print(table)
    return [line.split() for line in file.getvalue().splitlines() if line.strip()]


def test_the_least_accurate_class_and_the_most_confused_pairs_come_first() -> None:
    labels = [number for number in range(30) for _ in range(4)]
    likeliest = [label if copy else (label + 1) % 30 for label in range(30) for copy in range(4)]
    likeliest[5] = 9  # of class 1, except the class that is confused with 2
    likeliest[6] = 9
    names, logits = tuple(f"c{number}" for number in range(30)), np.eye(30, dtype=np.float32)[likeliest]
    truth = single_labels(np.array(labels, np.int64), len(names))
    found = report(Predictions(logits, truth, tuple(map(str, range(120))), np.arange(120), names), bootstrap=0)
    assert words_of(per_class_table("test", found))[2][:4] == ["c1", "4", "2", "25.00%"]
    lines = words_of(confusion_table("test", found, names))
    assert lines[2] == ["c1", "c9", "2", "50.00%"]
    assert lines[3] == ["c0", "c1", "1", "25.00%"]
    assert len(lines) == 23 and lines[-1][:3] == ["and", "11", "pairs"]


def test_boxes_have_a_table_and_json_with_notes_of_the_data(tmp_path: Path, cli: Cli) -> None:
    data, model = coco_data(tmp_path / "data", [5, 17, 90]), dense_model(tmp_path / "model", "pyramid")
    file = data / "test" / "_annotations.coco.json"
    values = json.loads(file.read_text())
    values["annotations"][0]["bbox"] = [20, 3, 30, 9]  # reaches beyond the image
    file.write_text(json.dumps(values))
    captured = cli.call("evaluate", model, "--data", data, "--json")
    (row,) = json.loads(captured.out).values()
    test = open_data(str(data), validation_share=0.0).test
    assert test is not None and "reaches beyond the image" in captured.err
    found = load(model).predict([data / test.key(index) for index in range(len(test))])
    truths: list[Any] = [test.target(index) for index in range(len(test))]
    expected = average_precision(truths, found, len(OBJECT_NAMES))
    assert row["average_precision"] == pytest.approx(expected.precision.value)
    assert row["average_precision_50_low"] == pytest.approx(expected.precision_50.low)
    named = dict(zip(OBJECT_NAMES, expected.by_class, strict=True))
    assert {name: row.get(f"{name}:average_precision") for name in OBJECT_NAMES} == pytest.approx(named)
    shown = cli.shows("evaluate", model, "--data", data)
    assert "AP50" in shown and "AP of small objects" in shown and f"{OBJECT_NAMES[0]}: AP" in shown
    errors = cli.call("evaluate", model, "--data", data, "--split", "test").err
    assert "held out" not in errors, "no validation split is cut for the test split"
