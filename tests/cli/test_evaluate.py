"""Tests of `vitrail evaluate`."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli.conftest import Cli
from tests.make import make_split_colours, small_model
from vitrail.cli import command_of, main
from vitrail.cli.evaluate import evaluator_options
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.evaluation.evaluators import EVALUATORS
from vitrail.evaluation.outputs import Outputs
from vitrail.models.variants import create
from vitrail.settings import setting
from vitrail.training.run import RunResult
from vitrail.weights.bundle import Bundle

Evaluate = Callable[..., tuple[int, str, str]]


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


# --- by features, with detail, with other names


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Return a function that runs the command with its own cache, and returns the exit code and what was printed."""
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))

    def run(model: Path, data: Path | str, *words: str) -> tuple[int, str, str]:
        code = main(["evaluate", str(model), "--data", str(data), *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """Three colours, with 27 training images and 9 test images."""
    return make_split_colours(tmp_path / "colours", test=3)


@pytest.mark.slow
def test_features_need_no_head_and_are_found_again(evaluate: Evaluate, tmp_path: Path, colours: Path) -> None:
    model = small_model(tmp_path / "headless", ())
    words = ("--by", "linear,knn,fewshot", "--shots", "1", "5", "--k", "1", "7", "--json")
    code, out, errors = evaluate(model, colours, *words)
    assert code == 0 and "cache" not in errors
    row = json.loads(out)["test"]
    assert {"linear", "linear_penalty", "knn_1", "knn_7", "fewshot_1", "fewshot_5_deviation"} <= set(row)
    assert (row["images"], row["training_images"], row["skipped"]) == (9, 27, 0)
    assert row["knn_1"] > 0.6  # colours are easy to learn
    code, again, errors = evaluate(model, colours, *words)
    assert json.loads(again) == json.loads(out)
    assert "features of 27 images read from the cache" in errors and "features of 9 images read" in errors
    assert json.loads(evaluate(model, colours, *words, "--no-cache")[1]) == json.loads(out)


@pytest.mark.slow
def test_data_with_only_a_test_split_is_measured(evaluate: Evaluate, tmp_path: Path, colours: Path) -> None:
    model = small_model(tmp_path / "model", ("blue", "green", "red"))
    both = evaluate(model, colours, "--json")
    shutil.rmtree(colours / "train")
    for words in ((), ("--split", "test"), ("--split", "all")):
        code, out, _ = evaluate(model, colours, *words, "--json")
        assert code == 0 and json.loads(out) == json.loads(both[1])
    code, _, errors = evaluate(model, colours, "--split", "train")
    assert code == 2 and "choose one that it has: test" in errors
    code, _, errors = evaluate(model, colours, "--by", "knn")
    assert code == 2 and "has a test split but no training images" in errors


@pytest.mark.slow
def test_all_evaluators_stand_in_one_table(evaluate: Evaluate, tmp_path: Path, colours: Path) -> None:
    model = small_model(tmp_path / "model", ("blue", "green", "red"))
    code, out, _ = evaluate(model, colours, "--by", "accuracy,knn,fewshot", "--shots", "1", "--l2", "loo")
    assert code == 0
    for text in ("balanced accuracy", "calibration error", "knn, k = 20", "fewshot, 1 shot", "±", "training images"):
        assert text in out, out
    code, out, _ = evaluate(model, colours, "--by", "accuracy,knn", "--split", "all", "--json")
    rows = json.loads(out)
    assert "knn_1" not in rows["train"] and {"accuracy", "accuracy_low", "knn_1"} <= set(rows["test"])
    assert rows["train"]["images"] == 27


@pytest.mark.slow
def test_classes_and_confusion_are_shown_if_asked_for(evaluate: Evaluate, tmp_path: Path, colours: Path) -> None:
    model = small_model(tmp_path / "model", ("blue", "green", "red"))
    code, out, _ = evaluate(model, colours, "--per-class", "--confusion", "--bootstrap", "0")
    assert code == 0 and "precision" in out and "true class" in out and " to " not in out
    row = json.loads(evaluate(model, colours, "--per-class", "--confusion", "--json")[1])["test"]
    assert sum(cell[2] for cell in row["confusion"]) == 9
    assert sum(cell[2] for cell in row["confusion"] if cell[0] == cell[1]) == round(row["accuracy"] * 9)
    assert [(one["name"], one["images"]) for one in row["per_class"]] == [("blue", 3), ("green", 3), ("red", 3)]


@pytest.mark.slow
def test_classes_without_images_are_named(evaluate: Evaluate, tmp_path: Path, colours: Path) -> None:
    model = small_model(tmp_path / "model", ("blue", "green", "red"))
    shutil.rmtree(colours / "test" / "green")
    code, out, _ = evaluate(model, colours)
    assert code == 0 and re.search(r"1 of 3 classes has no image .*: green", out)
    code, out, _ = evaluate(model, colours, "--per-class", "--confusion")
    assert re.search(r"green +0 ", out) and re.search(r"1 green ", out)
    code, out, errors = evaluate(model, colours, "--per-class", "--json")
    assert json.loads(out)["test"]["classes_without_images"] == ["green"] and "green" in errors


def test_a_stopped_evaluation_names_the_command_that_continues_it(
    evaluate: Evaluate, tmp_path: Path, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Preprocess, images: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("SIGTERM was ignored")

    model = small_model(tmp_path / "model", ())
    with monkeypatch.context() as patch:
        patch.setattr(Preprocess, "normalise", stop)
        code, _, errors = evaluate(model, colours, "--by", "knn", "--json", "--precision", "float32")
    assert code == 75 and "stopped: features of 0 of 27 images are kept in" in errors
    assert errors.endswith(
        f"Continue with: vitrail evaluate {model} --data {colours} --by knn --json --precision float32\n"
    )
    assert evaluate(model, colours, "--by", "knn", "--json")[0] == 0


@pytest.mark.slow
def test_another_image_size_and_merged_tokens_give_other_features(
    evaluate: Evaluate, tmp_path: Path, colours: Path
) -> None:
    model = small_model(tmp_path / "headless", ())
    evaluate(model, colours, "--by", "knn")
    for words in (("--image-size", "28", "14"), ("--reduce-tokens", "1")):
        code, out, _ = evaluate(model, colours, "--by", "knn", *words)
        assert code == 0 and "the cache has features of this data, but with other" in out


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


def test_folders_of_imagenets_numbers_are_measured_with_a_note(
    evaluate: Evaluate, tmp_path: Path, numbered: Path
) -> None:
    model = small_model(tmp_path / "model", IMAGENET)
    code, out, errors = evaluate(model, numbered, "--split", "all", "--confusion", "--json")
    assert code == 0 and "the data's classes are numbers, so they are taken as ImageNet's classes" in errors
    row = json.loads(out)["train"]
    assert row["images"] == 6 and {cell[0] for cell in row["confusion"]} == {"class 7", "class 998"}


@pytest.mark.slow
def test_real_labels_are_read_from_a_file(evaluate: Evaluate, tmp_path: Path, numbered: Path) -> None:
    model = small_model(tmp_path / "model", IMAGENET)
    labels: list[list[int]] = [[], *([list(range(1000))] * 2), *([[]] * 49_997)]
    (tmp_path / "real.json").write_text(json.dumps(labels))
    code, out, _ = evaluate(model, numbered, "--split", "all", "--real", str(tmp_path / "real.json"), "--json")
    row = json.loads(out)["train"]
    assert code == 0 and (row["real_accuracy"], row["real_images"]) == (1, 2)
    code, _, errors = evaluate(model, numbered, "--split", "all", "--real", str(tmp_path / "none.json"))
    assert code == 2 and "none.json, the ReaL labels: No such file or directory" in errors


@pytest.mark.slow
def test_a_list_of_names_says_which_output_a_wordnet_id_is(evaluate: Evaluate, tmp_path: Path, colours: Path) -> None:
    model = small_model(tmp_path / "model", ("tench", "goldfish", "kite"))
    names = {"blue": "n01443537", "green": "n01608432", "red": "n01440764"}
    for split in ("train", "test"):
        for old, new in names.items():
            (colours / split / old).rename(colours / split / new)
    (tmp_path / "names.txt").write_text("n01440764 tench, Tinca tinca\nn01443537 goldfish\nn01608432 kite\n")
    code, out, errors = evaluate(model, colours, "--class-names", str(tmp_path / "names.txt"), "--per-class", "--json")
    assert code == 0 and "by a list of WordNet ids" in errors
    assert {one["name"] for one in json.loads(out)["test"]["per_class"]} == {"tench", "goldfish", "kite"}
    code, _, errors = evaluate(model, colours)
    assert code == 2 and "do not match exactly one of the model's" in errors


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
    evaluate: Evaluate, model: Path, colours: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EVALUATORS, "share", ByShare)
    command = command_of("evaluate")[0]
    vars(command).pop("known", None)  # the options of earlier calls in this process
    assert main(["evaluate", "--help-all"]) == 0
    assert "--of-class N" in (text := capsys.readouterr().out) and "Number of the class that is counted." in text
    code, out, _ = evaluate(model, colours, "--by", "share", "--of-class", "9", "--json")
    assert code == 0 and json.loads(out)["test"]["share"] == 0
    code, _, errors = evaluate(model, colours, "--of-class", "1")
    assert code == 2 and "--of-class: only share uses it, but --by is accuracy; add share to --by" in errors
    code, _, errors = evaluate(model, colours, "--by", "share", "--of-class", "-1")
    assert code == 2 and "--of-class: -1 is less than 0" in errors
    monkeypatch.setitem(EVALUATORS, "data", ByData)
    with pytest.raises(ValueError, match="evaluator data: data is another option of evaluate"):
        list(evaluator_options())
    vars(command).pop("known", None)


@pytest.mark.slow
def test_nothing_is_computed_for_what_an_evaluator_refuses(
    evaluate: Evaluate, tmp_path: Path, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("a batch was computed")

    monkeypatch.setattr("vitrail.evaluation.outputs.Predictor", fail)
    monkeypatch.setattr("vitrail.evaluation.outputs.extract", fail)
    (tmp_path / "real.json").write_text(json.dumps([[]] * 50_000))
    model = small_model(tmp_path / "model", ("blue", "green", "red"))
    for words, message in (
        (("--by", "accuracy,linear,knn", "--k", "28"), "--k: 28 exceeds the number of labelled training images, 27"),
        (("--by", "accuracy,fewshot", "--shots", "10"), "10 shots need 10 training images per class"),
        (("--real", str(tmp_path / "real.json")), "the model has 3 outputs, but ImageNet's labels need a model"),
    ):
        code, _, errors = evaluate(model, colours, *words)
        assert code == 2 and message in errors, errors
    named = small_model(tmp_path / "imagenet", ("blue", "green", "red", *IMAGENET[3:]))
    code, _, errors = evaluate(named, colours, "--real", str(tmp_path / "real.json"))
    assert code == 2 and "is not one of ImageNet's validation images, whose names are" in errors


@pytest.mark.slow
def test_numbers_are_measured_by_head_and_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    lines = ["split,path,age,height"]
    for number in range(40):
        pixels = random.integers(0, 256, (8, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        split = "train" if number < 30 else "test"
        lines.append(f"{split},{number}.png,{pixels.mean():.3f},{'' if number % 5 == 1 else -number}")
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    torch.manual_seed(0)
    network = create("ViT-Pico/7", image_size=(14, 21), num_classes=2, channels=3)
    preprocess = Preprocess(image_size=(14, 21), channels=3)
    Bundle(network, ("age", "height"), preprocess, output="numbers").save(tmp_path / "model")

    def evaluate(*options: str) -> tuple[int, str, str]:
        words = [str(tmp_path / "model"), "--data", str(tmp_path / "people.csv"), *options]
        code = main(["evaluate", *words, "--no-cache"])
        return code, *capsys.readouterr()

    code, out, _ = evaluate("--json")
    row = json.loads(out)["test"]
    assert code == 0 and row["images"] == 10 and row["r2"] < 0
    assert "mean_absolute_error" not in row and row["standardised_error"] > 0
    code, out, _ = evaluate("--by", "regression,linear,knn", "--k", "3", "--bootstrap", "0")
    assert code == 0
    for name in ("age: R²", "height: root mean squared error", "linear, R²", "age: knn, k = 3, mean absolute error"):
        assert name in out
    assert f"{row['age:mean_absolute_error']:.4g}" in out
    code, out, _ = evaluate("--by", "knn", "--numbers", "height", "--k", "1", "--json")
    assert code == 0 and {"knn_1_r2", "knn_1_mean_absolute_error"} <= set(json.loads(out)["test"])
