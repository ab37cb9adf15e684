"""Segmentation by a linear layer on frozen patch tokens, and its metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score

from tests.make import dense_bundle, make_bundle, make_masks_folder, make_voc_folder, randomised
from vitrail.cli import main
from vitrail.data.objects import IGNORED
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.evaluation.metrics.intervals import wilson_ends
from vitrail.evaluation.segmentation import mask_metrics, pixel_confusion
from vitrail.models.variants import variant_config
from vitrail.weights.answers import MaskPrediction
from vitrail.weights.bundle import Bundle

COLOURS = np.array([[20, 40, 200], [200, 30, 30], [240, 240, 60]], np.uint8)


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4))
def test_metrics_are_those_of_scikit_learn(seed: int, count: int, classes: int) -> None:
    random = np.random.default_rng(seed)
    truths = [random.integers(0, classes, (5, 7)).astype(np.uint8) for _ in range(count)]
    answers = [random.integers(0, classes, (5, 7)) for _ in range(count)]
    for truth in truths:
        truth[0, :2] = IGNORED
    found = mask_metrics(np.stack([pixel_confusion(*pair, classes) for pair in zip(truths, answers, strict=True)]))
    truth, answer = (np.concatenate([one.ravel() for one in some]) for some in (truths, answers))
    known = truth != IGNORED
    expected = jaccard_score(truth[known], answer[known], average="macro")
    assert found["mean_iou"].value == pytest.approx(expected)
    assert found["pixel_accuracy"].value == pytest.approx(accuracy_score(truth[known], answer[known]))
    if count == 1:
        assert (found["mean_iou"].low, found["mean_iou"].high) == pytest.approx(wilson_ends(expected, 1))


def test_a_class_that_is_nowhere_does_not_count() -> None:
    confusion = pixel_confusion(np.array([[0, 2, 2, 255]], np.uint8), np.array([[0, 2, 0, 1]]), 4)
    found = mask_metrics(confusion[None], resamples=0)
    assert found["mean_iou"].value == pytest.approx((1 / 2 + 1 / 2) / 2) and found["mean_iou"].low is None
    assert found["pixel_accuracy"].value == pytest.approx(2 / 3)


def make_scenes(root: Path, split: str, count: int) -> None:
    """Write pictures of coloured rectangles on a background, with their masks."""
    random = np.random.default_rng(count)
    for folder in ("images", "masks"):
        (root / folder / split).mkdir(parents=True)
    for number in range(count):
        mask = np.zeros((48, 60 + number % 3), np.uint8)
        top, left = random.integers(0, (24, 30))
        mask[top : top + 24, left : left + 20] = 1
        mask[:8] = 2
        noise = random.integers(-15, 15, (*mask.shape, 3))
        Image.fromarray((COLOURS[mask] + noise).clip(0, 255).astype(np.uint8)).save(
            root / f"images/{split}/{number}.png"
        )
        mask[-1] = IGNORED
        Image.fromarray(mask).save(root / f"masks/{split}/{number}.png")
    (root / "classes.txt").write_text("sea\nsail\nsun\n")


def test_a_hybrid_and_pictures_without_a_class_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The patches of a hybrid are those of a smaller map of features."""
    for split in ("train", "test"):
        make_scenes(tmp_path, split, 3)
    command = ["evaluate", "small", "--data", str(tmp_path), "--by", "segmentation", "--learning-epochs", "1"]
    assert main([*command, "--patches", "40"]) == 0
    Image.new("L", (60, 48), 255).save(tmp_path / "masks/test/0.png")
    bundle = replace(make_bundle(head_kind="patches", output="mask"), classes=("sea", "sail", "sun"))
    replace(bundle, preprocess=replace(bundle.preprocess, resize="pad")).save(tmp_path / "model")
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "model"), "--data", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test"]["images"] == 2


@pytest.mark.slow
def test_a_linear_layer_of_patch_tokens_finds_coloured_things(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network with random weights sees colours. At 4 x 5 pixels a patch, borders stay uncertain."""
    make_scenes(tmp_path / "data", "train", 12)
    make_scenes(tmp_path / "data", "test", 5)
    Image.new("L", (9, 9)).save(tmp_path / "data/masks/test/4.png")
    make_bundle(num_classes=0, positions="none").save(tmp_path / "model")
    Image.new("RGB", (9, 9)).save(tmp_path / "data/images/train/alone.png")
    command = ["evaluate", str(tmp_path / "model"), "--data", str(tmp_path / "data"), "--by", "segmentation"]
    assert main([*command, "--json", "--head-rate", "0.03"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)["test"]
    assert found["images"] == 4 and found["skipped"] == 1 and "9 x 9 pixels" in err and "4.png" in err
    assert "alone.png" in err, "what is skipped in the data is said, also if a test split is measured"
    assert found["mean_iou_low"] <= found["mean_iou"] <= found["mean_iou_high"]
    assert found["mean_iou"] > 0.75 and found["pixel_accuracy"] > 0.9
    assert found["mean_iou"] == pytest.approx(np.mean([found[f"{name}:iou"] for name in ("sea", "sail", "sun")]))
    assert main([*command[:-1], "knn"]) == 2
    assert "this data has masks" in capsys.readouterr().err


def test_the_masks_of_a_model_are_measured_at_the_size_of_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_scenes(tmp_path / "data", "train", 6)
    make_scenes(tmp_path / "data", "test", 5)
    Image.new("L", (9, 9)).save(tmp_path / "data/masks/test/4.png")
    bundle = make_bundle(head_kind="patches", output="mask")
    bundle = replace(
        bundle, classes=("sea", "sail", "sun"), preprocess=replace(bundle.preprocess, resize="pad", crop_share=0.9)
    )
    bundle.save(tmp_path / "model")
    assert main(["evaluate", str(tmp_path / "model"), "--data", str(tmp_path / "data"), "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)["test"]
    assert found["images"] == 4 and found["skipped"] == 1 and "4.png" in err
    images = [tmp_path / f"data/images/test/{number}.png" for number in range(4)]
    answers = bundle.predict(images)
    truths = [np.asarray(Image.open(str(image).replace("images", "masks"))) for image in images]
    assert all(
        isinstance(one, MaskPrediction) and one.indices.shape == (48, 60 + n % 3) for n, one in enumerate(answers)
    )
    truth = np.concatenate([one.ravel() for one in truths])
    answer = np.concatenate([one.indices.ravel() for one in answers if isinstance(one, MaskPrediction)])
    known = truth != IGNORED
    expected = jaccard_score(truth[known], answer[known], average=None)
    assert [found[f"{name}:iou"] for name in ("sea", "sail", "sun")] == pytest.approx(expected)
    assert found["mean_iou"] == pytest.approx(expected.mean()) and found["mean_iou_low"] <= found["mean_iou"]
    assert found["pixel_accuracy"] == pytest.approx(accuracy_score(truth[known], answer[known]))
    for number in range(4):
        Image.new("L", (9, 9)).save(tmp_path / f"data/masks/test/{number}.png")
    assert main(["evaluate", str(tmp_path / "model"), "--data", str(tmp_path / "data")]) == 2
    assert "none of 5 images" in (error := capsys.readouterr().err) and "has 9 x 9 pixels" in error


@pytest.mark.parametrize(
    ("by", "kind", "fields", "message"),
    [
        ("masks", "patches", {"resize": "crop"}, "resize='pad'"),
        ("masks", "patches", {"classes": ("sea", "sail", "sun")}, "do not match"),
        ("segmentation", "network", {}, "patch tokens"),
        ("segmentation", "boxes", {}, "images with masks"),
    ],
)
def test_models_and_data_without_masks_or_patches_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str, kind: str, fields: dict[str, Any], message: str
) -> None:
    data = make_voc_folder(tmp_path / "data") if kind == "boxes" else make_masks_folder(tmp_path / "data")
    if kind == "network":
        network = randomised(variant_config("BiT-Pico", num_classes=0, image_size=32))
        bundle = Bundle(network, (), Preprocess(image_size=(32, 32)))
    else:
        bundle = make_bundle(num_classes=0) if kind == "boxes" else dense_bundle(kind)
        preprocess = replace(bundle.preprocess, resize=fields.get("resize", "pad"))
        bundle = replace(bundle, preprocess=preprocess, classes=fields.get("classes", bundle.classes))
    bundle.save(tmp_path / "model")
    assert main(["evaluate", str(tmp_path / "model"), "--data", str(data), "--by", by]) == 2
    assert message in capsys.readouterr().err
