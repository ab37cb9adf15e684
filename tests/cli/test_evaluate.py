"""`vitrail evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from vitrail.cli import main
from vitrail.training.run import RunResult


@pytest.fixture
def labelled(trained: RunResult, tmp_path: Path) -> Path:
    """A folder of class folders made from the run's examples, each image 12 times."""
    for example in trained.examples:
        folder = tmp_path / "labelled" / example.label.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        for copy in range(12):
            Image.open(example.path).save(folder / f"{example.path.stem}-{copy}.png")
    return tmp_path / "labelled"


def test_the_test_split_gives_what_the_run_reported(
    model: Path, trained: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(model), "--data", "bundled", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["test"]
    assert row["accuracy"] == trained.metrics["test_accuracy"]
    assert (row["images"], row["skipped"]) == (2000, 0)


def test_the_validation_split_is_the_one_that_training_held_out(
    model: Path, trained: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(model), "--data", "bundled", "--split", "validation", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["validation"]["accuracy"] == trained.metrics["validation_accuracy"]
    assert "has no validation split" in captured.err


def test_all_measures_every_image(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(model), "--data", "bundled", "--split", "all"]) == 0
    shown = capsys.readouterr().out
    assert "10,000" in shown and "2,000" in shown


def test_a_plain_folder_is_never_measured_on_what_may_have_been_trained_on(
    model: Path, tmp_path: Path, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (labelled / "T-shirt-top").rename(tmp_path / "aside")  # its class is called T-shirt/top, which no folder can be
    assert main(["evaluate", str(model), "--data", str(labelled), "--json"]) == 0
    captured = capsys.readouterr()
    images = json.loads(captured.out)["validation"]["images"]
    total = sum(1 for _ in labelled.glob("*/*.png"))
    assert 0 < images < total / 2
    assert "has no validation split" in captured.err and "--split all" in captured.err
    assert main(["evaluate", str(model), "--data", str(labelled), "--split", "all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["images"] == total


def test_broken_images_are_counted_and_named(
    model: Path, tmp_path: Path, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (labelled / "T-shirt-top").rename(tmp_path / "aside")
    (labelled / "Bag").mkdir(exist_ok=True)
    (labelled / "Bag" / "empty.png").write_bytes(b"")
    assert main(["evaluate", str(model), "--data", str(labelled), "--split", "all", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["train"]["skipped"] == 1
    assert "Bag/empty.png: is empty (0 bytes)" in captured.err


def test_classes_that_the_model_does_not_know_are_named(
    model: Path, colour_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(model), "--data", str(colour_folder)]) == 2
    error = capsys.readouterr().err
    assert "blue, green, red" in error and "Ankle boot" in error


def test_a_split_that_is_not_there_is_an_error(
    model: Path, tmp_path: Path, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (labelled / "T-shirt-top").rename(tmp_path / "aside")
    assert main(["evaluate", str(model), "--data", str(labelled), "--split", "test"]) == 2
    assert "has no test split; it has: train, validation" in capsys.readouterr().err
