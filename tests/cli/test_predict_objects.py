"""Tests of `vitrail predict` for boxes and masks: files of results, drawn images, tables, and refused options."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from faster_coco_eval import COCO
from PIL import Image
from pyarrow import parquet

from tests.cli.conftest import Cli
from tests.make import (
    OBJECT_NAMES,
    coco_data,
    dense_bundle,
    dense_model,
    make_masks_folder,
    make_outlines_folder,
    make_voc_folder,
)
from vitrail.cli import main
from vitrail.data.objects import Runs
from vitrail.data.source import samples_of
from vitrail.data.sources import open_data
from vitrail.tasks.detection import Detection
from vitrail.training.config import TrainConfig
from vitrail.training.run import train
from vitrail.weights.load import load
from vitrail.weights.tiles import predict_tiles

IDS = [5, 17, 90]
NAMES = OBJECT_NAMES


@pytest.fixture
def detector(tmp_path: Path) -> Path:
    metrics = {"validation_score_threshold": 0.55, "test_score_threshold": 0.01}
    return dense_model(tmp_path / "detector", "pyramid", metrics=metrics, provenance={"class_ids": IDS})


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with a wide image, a tall one in a folder of its own, and one that its EXIF tag turns."""
    (tmp_path / "photos" / "more").mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, size in (("a.png", (31, 67)), ("more/b.jpg", (83, 40)), ("turned.jpg", (20, 50))):
        exif = Image.Exif()
        exif[0x0112] = 6 if name == "turned.jpg" else 1
        Image.fromarray(random.integers(0, 255, (*size, 3), np.uint8)).save(tmp_path / "photos" / name, exif=exif)
    return tmp_path / "photos"


@pytest.mark.slow
def test_coco_results_have_all_boxes_with_the_numbers_of_the_data(
    detector: Path, photos: Path, tmp_path: Path, cli: Cli
) -> None:
    file = tmp_path / "found.json"
    (photos / "broken.jpg").write_text("<html>")
    captured = cli.call("predict", detector, photos, "--coco", file, code=2)
    assert "broken.jpg" in captured.err and "threshold" not in captured.err and "category_id" not in captured.err
    (photos / "broken.jpg").unlink()
    words = ["predict", str(detector), str(photos), "--coco", str(file)]
    assert "--overwrite" in cli.refuses(*words)
    cli.shows(*words, "--overwrite")
    rows = json.loads(file.read_text())
    sizes = {"a.png": (31, 67), "more/b.jpg": (83, 40), "turned.jpg": (50, 20)}
    predictions = load(detector).predict([photos / name for name in sizes])
    for number, (name, expected) in enumerate(zip(sizes, predictions, strict=True), start=1):
        own = [row for row in rows if row["image_id"] == number]
        assert {row["file_name"] for row in own} == {name} and 0 < len(own) == len(expected) <= 100
        assert [row["score"] for row in own] == pytest.approx(expected.scores.tolist())
        assert [(row["category_id"], row["category_name"]) for row in own] == [
            (IDS[label], NAMES[label]) for label in expected.labels.tolist()
        ]
        boxes = np.array([row["bbox"] for row in own])
        boxes[:, 2:] += boxes[:, :2]
        np.testing.assert_allclose(boxes, expected.boxes, atol=2e-4)
        assert (boxes >= 0).all() and (boxes <= np.tile(sizes[name][::-1], 2) + 2e-4).all()
    assert min(row["score"] for row in rows) < 0.5, "boxes below the threshold are kept, because AP needs them"


@pytest.mark.slow
def test_shown_objects_are_above_the_chosen_score(detector: Path, photos: Path, cli: Cli) -> None:
    (every,) = load(detector).predict([photos / "a.png"])
    words = ["predict", str(detector), str(photos / "a.png")]
    counts = []
    for more, least in (((), 0.55), (("--threshold", "0.6"), 0.6), (("--threshold", "0"), 0)):
        (row,) = map(json.loads, cli.shows(*words, "--json", *more).splitlines())
        assert row == {"image": str(photos / "a.png"), "objects": every.above(least).coco(IDS)}
        counts.append(len(row["objects"]))
    assert counts[1] < counts[0] < counts[2]
    header, *rows = csv.reader(cli.shows(*words, "--csv").splitlines())
    assert header == ["image", "class", "score", "left", "top", "width", "height", "error"]
    assert [row[1] for row in rows] == [one.label for one in every.above(0.55)]
    nothing = cli.shows(*words, "--csv", "--threshold", "1").splitlines()
    assert [*csv.reader(nothing)] == [header, [str(photos / "a.png"), *[""] * 7]]
    shown = cli.shows(*words)
    assert every.above(0.55).text in shown


def test_a_model_without_a_chosen_score_says_so(tmp_path: Path, photos: Path, cli: Cli) -> None:
    model = dense_model(tmp_path / "plain", "pyramid")
    captured = cli.call("predict", model, photos, "--json", "--coco", tmp_path / "found.json")
    assert "0.3" in captured.err and "category_id" in captured.err
    rows = [row for line in captured.out.splitlines() for row in json.loads(line)["objects"]]
    assert min(row["score"] for row in rows) >= 0.3
    assert {row["category_id"] for row in json.loads((tmp_path / "found.json").read_text())} <= {1, 2, 3}


def test_images_of_parquet_files_have_names_of_their_own(detector: Path, photos: Path, tmp_path: Path) -> None:
    images = [{"bytes": path.read_bytes(), "path": "../a.png"} for path in sorted(photos.glob("*.*"))]
    (tmp_path / "rows").mkdir()
    parquet.write_table(pyarrow.table({"image": images, "label": ["a", "b"]}), tmp_path / "rows/train.parquet")
    words = ["--data", str(tmp_path / "rows"), "--split", "all", "--yolo", str(tmp_path / "yolo")]
    assert main(["predict", str(detector), *words]) == 0
    assert {path.name for path in (tmp_path / "yolo").glob("*.txt")} == {"train.parquet_0.txt", "train.parquet_1.txt"}


def test_boxes_are_drawn_and_written_as_yolo(detector: Path, photos: Path, tmp_path: Path) -> None:
    words = ["--out", str(tmp_path / "drawn"), "--yolo", str(tmp_path / "yolo")]
    assert main(["predict", str(detector), str(photos), *words]) == 0
    with Image.open(tmp_path / "drawn" / "turned.jpg") as drawn:
        assert drawn.size == (20, 50), "the image is drawn upright"
    (expected,) = load(detector).predict([photos / "more" / "b.jpg"])
    expected = expected.above(0.55)
    lines = (tmp_path / "yolo" / "more" / "b.txt").read_text().splitlines()
    values = np.array([line.split() for line in lines], float).reshape(-1, 6)
    assert values[:, 0].tolist() == expected.labels.tolist()
    centres = (expected.boxes[:, :2] + expected.boxes[:, 2:]) / 2 / (40, 83)
    np.testing.assert_allclose(values[:, 1:3], centres, atol=1e-6)
    np.testing.assert_allclose(values[:, 5], expected.scores, atol=1e-6)
    assert main(["predict", str(detector), str(photos), *words]) == 2, "a folder is not replaced unasked"


def test_only_an_earlier_prediction_is_replaced(detector: Path, photos: Path, tmp_path: Path, cli: Cli) -> None:
    album, file = tmp_path / "album", tmp_path / "found.json"
    (album / "old").mkdir(parents=True)
    for name in ("mine.jpg", "mine.txt", "old/b.jpg"):
        (album / name).write_text("mine")
    words = ["predict", str(detector), str(photos), "--overwrite"]
    for option in ("--out", "--yolo"):
        assert "holds files that Vitrail did not write" in cli.refuses(*words, option, album)
        assert main([*words, option, str(photos)]) == 2, "the images themselves"
    written = [*words, "--out", str(tmp_path / "drawn"), "--yolo", str(tmp_path / "yolo"), "--coco", str(file)]
    cli.shows(*written)
    (photos / "a.png").unlink()
    assert main(written) == 0, "also with folders in it"
    assert {path.name for path in (tmp_path / "drawn").rglob("*.jpg")} == {"b.jpg", "turned.jpg"}
    assert "predicted" in cli.refuses(*words[:2], tmp_path / "yolo/..", *written[3:])
    (tmp_path / "drawn/more/mine.jpg").write_text("mine")
    assert "Vitrail did not write (more)" in cli.refuses(*written)
    file.write_text('[{"image_id": 3}]')
    assert "no COCO results" in cli.refuses(*words, "--coco", file)
    assert len([path for path in tmp_path.rglob("mine*") if path.read_text() == "mine"]) == 3
    assert (album / "old/b.jpg").is_file() and file.read_text() == '[{"image_id": 3}]'


@pytest.mark.slow
def test_tiles_are_predicted(detector: Path, photos: Path, tmp_path: Path) -> None:
    for more in ((), ("--tiles",)):
        words = ["predict", str(detector), str(photos), "--coco", str(tmp_path / f"{len(more)}.json"), *more]
        assert main(words) == 0
    whole, found = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    by_image = [[{**row, "image_id": 0} for row in rows if row["image_id"] == 2] for rows in (whole, found)]
    expected = predict_tiles(load(detector), photos / "more" / "b.jpg")
    assert len(by_image[1]) == len(expected) and by_image[0] != by_image[1]


def test_masks_are_written_with_the_values_of_the_data(tmp_path: Path, photos: Path, cli: Cli) -> None:
    model = dense_model(tmp_path / "model", "patches", provenance={"class_ids": [0, 2, 4]})
    words = ["--masks", str(tmp_path / "new/masks"), "--out", str(tmp_path / "drawn")]
    cli.shows("predict", model, photos, *words)
    assert (tmp_path / "new/masks" / "classes.txt").read_text().splitlines() == [
        NAMES[0], "unlabelled", NAMES[1], "unlabelled", NAMES[2]
    ]  # fmt: skip
    shutil.copytree(photos, tmp_path / "new/images")
    again = open_data(str(tmp_path / "new"), validation_share=0.0).train  # what was written is read as data
    assert again.classes == NAMES and samples_of(again).targets.ids == (0, 2, 4)
    rows = [json.loads(line) for line in cli.shows("predict", model, photos, "--json").splitlines()]
    for name, row in zip(("a", "more/b", "turned"), rows, strict=True):
        (expected,) = load(model).predict([Path(row["image"])])
        with (
            Image.open(tmp_path / "new/masks" / f"{name}.png") as mask,
            Image.open(tmp_path / f"drawn/{name}.jpg") as drawn,
        ):
            assert mask.mode == "L" and drawn.width >= mask.width and drawn.height > mask.height
            np.testing.assert_array_equal(np.asarray(mask), np.array([0, 2, 4], np.uint8)[expected.indices])
        assert row["fractions"] == expected.shares() and sum(row["fractions"].values()) == pytest.approx(1)
    for more in (("--csv",), ()):
        assert next(iter(rows[0]["fractions"])) in cli.shows("predict", model, photos / "a.png", *more)


def test_other_numbers_of_masks_in_data_are_noted(tmp_path: Path, cli: Cli) -> None:
    model = dense_model(tmp_path / "model", "patches")
    data = make_masks_folder(tmp_path / "data", train=2, validation=1, test=1)
    moved = "void", *NAMES[1:], NAMES[0]  # only the first name has another number
    for number, names in enumerate((NAMES, NAMES[::-1], moved)):
        (data / "classes.txt").write_text("\n".join(names))
        said = cli.call("predict", model, "--data", data, "--masks", tmp_path / f"masks{number}").err
        assert ("gives them others" in said) == bool(number)


@pytest.mark.slow
def test_images_of_all_splits_have_different_numbers(detector: Path, tmp_path: Path, cli: Cli) -> None:
    file, data = tmp_path / "found.json", make_voc_folder(tmp_path / "voc", train=2, validation=1, test=2)
    arguments = ["predict", str(detector), "--split", "all", "--coco", str(file), "--data"]
    cli.shows(*arguments, data)
    rows = json.loads(file.read_text())
    names = {row["image_id"]: row["file_name"] for row in rows}
    assert sorted(names) == [1, 2, 3, 4, 5] and len(set(names.values())) == 5
    file.unlink()
    assert "the same image_id" in cli.call(*arguments, str(coco_data(tmp_path / "data", IDS))).err


def test_names_that_are_not_utf_8_are_escaped_in_cocos_file(
    detector: Path, photos: Path, tmp_path: Path, cli: Cli
) -> None:
    (photos / "a.png").rename(photos / "bad\udcff.png")
    cli.shows("predict", detector, photos / "bad\udcff.png", "--coco", tmp_path / "found.json")
    assert {row["file_name"] for row in json.loads((tmp_path / "found.json").read_text())} == {"bad\udcff.png"}


def test_images_of_a_data_set_keep_their_numbers(detector: Path, tmp_path: Path, cli: Cli) -> None:
    data, file = coco_data(tmp_path / "data", IDS), tmp_path / "found.json"
    cli.shows("predict", detector, "--data", data, "--split", "test", "--coco", file)
    rows = json.loads(file.read_text())
    assert {(row["image_id"], Path(row["file_name"]).name) for row in rows} == {(1000, "test0.png"), (999, "test1.png")}
    other = coco_data(tmp_path / "other", [5, 90, 17])
    words = ["--coco", str(file), "--overwrite"]
    assert "'dog' the number 90" in cli.refuses("predict", detector, "--data", other, *words)
    for path in data.glob("*/*.json"):
        path.write_text(path.read_text().replace('"dog"', '"lorry"'))
    assert "gives them others" in cli.call("predict", detector, "--data", data, "--split", "test", *words).err
    data = coco_data(tmp_path / "again", IDS)
    config = TrainConfig(task=Detection()).override(
        data=str(data), variant="ViT-Pico/8", image_size=(24, 32), depth=1, steps=1, batch_size=2,
        device="cpu", validation_share=0.25,
        precision="float32", run=str(tmp_path / "run"),
    )  # fmt: skip
    train(config)
    assert load(tmp_path / "run").class_ids == (5, 17, 90), "a run keeps the numbers of its data"
    cli.shows("predict", tmp_path / "run", data / "test", *words)
    assert {row["category_id"] for row in json.loads(file.read_text())} <= {5, 17, 90}


@pytest.mark.slow
def test_masks_of_objects_are_written_and_measured(tmp_path: Path, cli: Cli) -> None:
    make_outlines_folder(tmp_path / "data", train=2, validation=0, test=4)
    model = replace(dense_bundle("queries"), provenance={"class_ids": [3, 7]}).save(tmp_path / "model")
    words = ["predict", str(model), "--data", str(tmp_path / "data"), "--split", "test", "--threshold", "0.05"]
    files = ["--coco", str(tmp_path / "found.json"), "--out", str(tmp_path / "drawn"), "--yolo", str(tmp_path / "yolo")]
    assert "--yolo writes the boxes around the masks" in cli.call(*words, *files).err
    rows = json.loads((tmp_path / "found.json").read_text())
    true = COCO(str(tmp_path / "data/annotations/instances_test.json"))
    found = true.loadRes(rows)
    for row, annotation in zip(rows, found.loadAnns(found.getAnnIds()), strict=True):
        mask = found.annToMask(annotation)
        (down, across) = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
        box = [across[0], down[0], across[-1] + 1 - across[0], down[-1] + 1 - down[0]]
        assert row["bbox"] == box and row["image_id"] in range(100, 104)
    with Image.open(tmp_path / "data/test/001.png") as plain, Image.open(tmp_path / "drawn/test/001.jpg") as drawn:
        assert plain.size == drawn.size
        seen = [row for row in rows if row["image_id"] == 101 and row["score"] >= 0.05]
        inside = np.any([Runs(tuple(row["segmentation"]["size"]), row["segmentation"]["counts"].encode()).mask()
                         for row in seen], axis=0)  # fmt: skip
        changed = np.abs(np.asarray(drawn).astype(int) - np.asarray(plain.convert("RGB"))).sum(axis=2) > 60
        assert changed[inside].mean() > 0.8 and seen
    measured = cli.json("evaluate", model, "--data", tmp_path / "data", "--split", "test", "--per-class")["test"]
    assert measured["images"] == 4 and {"average_precision", "box_average_precision"} <= measured.keys()
