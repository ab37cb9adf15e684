"""Tests of `vitrail predict`."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.cli.conftest import Cli
from vitrail.cli.console import image_paths
from vitrail.data.sources import open_data
from vitrail.training.run import RunResult
from vitrail.weights.load import load


def test_a_folder_as_json_says_what_the_api_says(model: Path, trained: RunResult, cli: Cli) -> None:
    folder = trained.folder / "examples"
    rows = [json.loads(line) for line in cli.shows("predict", model, folder, "--json").splitlines()]
    paths = sorted(folder.glob("*.png"))
    assert [row["image"] for row in rows] == [str(path) for path in paths]
    for row, prediction in zip(rows, load(model).predict(paths), strict=True):
        assert (row["label"], row["probability"]) == (prediction.label, prediction.probability)
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)


def test_what_vitrail_wrote_is_neither_predicted_nor_data(
    model: Path, trained: RunResult, tmp_path: Path, cli: Cli
) -> None:
    images = sorted((trained.folder / "examples").glob("*.png"))[:4]
    for number, image in enumerate(images):
        place = tmp_path / "cd"[number % 2] / image.name
        place.parent.mkdir(exist_ok=True)
        shutil.copy(image, place)
    shutil.copytree(trained.folder, tmp_path / "runs/first")
    for words, name in ((["--json"], "said.jsonl"), (["--csv"], "all.csv"), (["--csv", "--top", "2"], "two.csv")):
        (tmp_path / name).write_text(printed := cli.shows("predict", model, tmp_path, *words))
        assert "examples" not in printed and all(image.name in printed for image in images)
    splits = open_data(str(tmp_path), validation_share=0.0)
    assert splits.classes == ("c", "d") and len(splits.train) == 4
    notes = "\n".join(splits.notes)
    assert "all.csv, said.jsonl, two.csv" in notes and "that Vitrail wrote: runs" in notes


def test_another_image_size(model: Path, trained: RunResult, cli: Cli) -> None:
    example = trained.examples[0].path
    captured = cli.call("predict", model, example, "--json", "--image-size", "32", "24")
    assert "the image size was changed from " in captured.err
    expected = load(model, image_size=(32, 24)).predict([example])[0]
    assert json.loads(captured.out)["probability"] == expected.probability


def test_json_has_the_likeliest_only_if_asked(model: Path, trained: RunResult, cli: Cli) -> None:
    example = trained.examples[0]
    for words, count in ((("--top", "2"), 2), (("--top", "99"), 10), ((), 10)):
        captured = cli.call("predict", model, example.path, "--json", *words)
        row = json.loads(captured.out)
        assert row["label"] == example.prediction.label and not captured.err
        assert list(row["probabilities"].items()) == list(load(model).predict([example.path])[0].ranking[:count])


def test_csv_has_the_numbers_of_json(model: Path, trained: RunResult, tmp_path: Path, cli: Cli) -> None:
    broken = tmp_path / 'a "page", really.jpg'
    broken.write_text("<html>not found</html>")
    words = ["predict", str(model), str(trained.examples[0].path), str(broken)]
    row, error = map(json.loads, cli.call(*words, "--json", "--top", "2", code=2).out.splitlines())
    captured = cli.call(*words, "--csv", "--top", "2", code=2)
    header, first, second = csv.reader(captured.out.splitlines())
    assert header == ["image", "class_1", "probability_1", "class_2", "probability_2", "error"]
    pairs = [word for pair in row["probabilities"].items() for word in map(str, pair)]
    assert first == [row["image"], *pairs, ""]
    assert second == [str(broken), "", "", "", "", error["error"]] and error["error"] in captured.err
    head = cli.shows("predict", model, trained.examples[0].path, "--csv").splitlines()[0]
    assert head.endswith("class_3,probability_3,error")
    head = cli.shows("predict", model, trained.examples[0].path, "--csv", "--top", "99").splitlines()[0]
    assert head.endswith("class_10,probability_10,error")  # no empty columns beyond the classes of the model
    shown = cli.shows("predict", model, trained.examples[0].path, "--top", "2")
    assert trained.examples[0].prediction.label in shown and "2." in shown and "3." not in shown
    assert "'' is not a path" in cli.refuses("predict", model, "")  # such as an unset variable of the shell
    assert "SPEC is empty" in cli.refuses("data", "check", "")


def test_a_table_of_paths_needs_no_labels_and_may_begin_with_a_tilde(
    model: Path, trained: RunResult, here: Path, cli: Cli
) -> None:
    names = [Path(shutil.copy(example.path, here)).name for example in trained.examples[:3]]
    Path("~list.csv").write_text("path,split\n" + "".join(f"{name},train\n" for name in names))
    rows = [json.loads(line) for line in cli.shows("predict", model, "~list.csv", "--json").splitlines()]
    assert [row["image"] for row in rows] == names
    assert [row["label"] for row in rows] == [example.prediction.label for example in trained.examples[:3]]


def test_numbers_have_names_instead_of_ranks(trained: RunResult, tmp_path: Path, cli: Cli) -> None:
    bundle = replace(load(trained.folder, classes=("height", "mass")), output="numbers")
    bundle.network.head.bias.data.copy_(torch.tensor([1.25, -300.5]))
    model, image = bundle.save(tmp_path / "model"), trained.examples[0].path
    row = cli.json("predict", model, image)
    assert row == {"image": str(image), "numbers": {"height": 1.25, "mass": -300.5}}
    shown = cli.shows("predict", model, image)
    assert "height" in shown and "mass" in shown and "1.25" in shown and "-300.5" in shown
    assert cli.shows("predict", model, image, "--csv") == f"image,height,mass,error\n{image},1.25,-300.5,\n"


def test_links_to_folders_are_followed_once_and_thumbnails_of_systems_are_no_images(tmp_path: Path) -> None:
    for name in ("a.png", "._a.png", "@eaDir/a.png", "__MACOSX/._a.png", ".cache/a.png", "deep/b.PNG", "../c/a.png"):
        (place := tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(place)
    (tmp_path / "here/link").symlink_to(tmp_path / "c")
    (tmp_path / "c/back").symlink_to(tmp_path / "here")
    found = [path.relative_to(tmp_path / "here").as_posix() for path in image_paths([tmp_path / "here"])]
    assert found == ["a.png", "deep/b.PNG", "link/a.png"]
