"""Tests of `vitrail predict`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vitrail.cli import main
from vitrail.training.run import RunResult
from vitrail.weights.load import load


def test_a_folder_as_json_says_what_the_api_says(
    model: Path, trained: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained.folder / "examples"
    assert main(["predict", str(model), str(folder), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    paths = sorted(folder.glob("*.png"))
    assert [row["image"] for row in rows] == [str(path) for path in paths]
    for row, prediction in zip(rows, load(model).predict(paths), strict=True):
        assert (row["label"], row["probability"]) == (prediction.label, prediction.probability)
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)


def test_a_table_shows_the_likeliest(model: Path, trained: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    example = trained.examples[0]
    assert main(["predict", str(model), str(example.path), "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert example.prediction.label in shown and f"{example.prediction.probability:.1%}" in shown
    assert "2." in shown and "3." not in shown


def test_a_run_folder_stands_for_its_model(trained: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(trained.folder), str(trained.examples[0].path)]) == 0
    assert trained.examples[0].prediction.label in capsys.readouterr().out


def test_numbers_have_names_instead_of_ranks(
    trained: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = replace(load(trained.folder, classes=("height", "mass")), output="numbers")
    bundle.network.head.bias.data.copy_(torch.tensor([1.25, -300.5]))
    model, image = bundle.save(tmp_path / "model"), trained.examples[0].path
    assert main(["predict", str(model), str(image), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row == {"image": str(image), "numbers": {"height": 1.25, "mass": -300.5}}
    assert main(["predict", str(model), str(image)]) == 0
    shown = capsys.readouterr().out
    assert "height" in shown and "mass" in shown and "1.25" in shown and "-300.5" in shown


def test_a_broken_image_fails_alone(
    model: Path, trained: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "page.jpg"
    broken.write_text("<html>not found</html>")
    assert main(["predict", str(model), str(trained.examples[0].path), str(broken), "--json"]) == 2
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert rows[0]["label"] == trained.examples[0].prediction.label
    assert "is not an image" in rows[1]["error"] and str(broken) in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{model}"], "IMAGE... is missing; usage: vitrail predict MODEL IMAGE..."),
        (["{model}", "{folder}/none.png"], "none.png' does not exist"),
        (["{model}", "{folder}"], "has no images"),
        (["{folder}/none", "{image}"], "none' does not exist"),
        (["{folder}", "{image}"], "is not a model: it has no model.json"),
        (["{model}", "{image}", "--top", "many"], "--top: 'many' is not a whole number"),
        (["{model}", "{image}", "--device", "tpu"], "--device: 'tpu' cannot be used here"),
        (["{model}", "{image}", "--top", "0"], "--top: 0 is out of range, because this model has 10 classes"),
    ],
)
def test_mistakes_are_named(
    words: list[str],
    message: str,
    model: Path,
    trained: RunResult,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    image = trained.examples[0].path
    filled = [word.format(model=model, folder=tmp_path, image=image) for word in words]
    assert main(["predict", *filled]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
