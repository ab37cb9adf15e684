"""Commands refuse models and data of boxes and masks that do not fit, each with one message, and use those that do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.make import dense_bundle, make_bundle, make_colour_folder, make_masks_folder, make_voc_folder
from tests.several import command


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and models of classes, boxes and masks."""
    root = tmp_path_factory.mktemp("dense")
    make_voc_folder(root / "voc")
    make_masks_folder(root / "masks")
    make_colour_folder(root / "colours")
    dense_bundle().save(root / "boxer")
    dense_bundle("patches").save(root / "masker")
    make_bundle(num_classes=3).save(root / "classifier")
    return root


REFUSED = {
    "evaluate boxer --data voc --by linear": "this data has boxes",
    "evaluate boxer --data voc --by fewshot": "this data has boxes",
    "evaluate masker --data masks --by knn": "this data has masks",
    "evaluate boxer --data voc --by accuracy": "this data has boxes",
    "evaluate boxer --data colours": "has one class per image, but the model predicts boxes",
    "evaluate boxer --data masks": "has a mask per image, but the model predicts boxes",
    "evaluate masker --data voc": "has boxes of objects, but the model predicts masks",
    "evaluate classifier --data voc": "has boxes of objects, but the model predicts classes",
    "evaluate classifier --data masks --by accuracy": "has a mask per image, but the model predicts classes",
    "evaluate boxer classifier --data voc": "has boxes of objects, but the model predicts classes",
    "predict boxer voc/JPEGImages/001.png --top 2": "--top",
    "optimize boxer --data voc": "a model that predicts boxes cannot be made faster",
    "optimize classifier --data voc": "has boxes of objects, but the model predicts classes",
    "report boxer --data voc": "a model that predicts boxes cannot be reported on",
    "report classifier --data masks": "has a mask per image, but the model predicts classes",
    "compare boxer masker --data voc": "a model that predicts boxes cannot be compared",
    "data label colours --teacher boxer --out labels": "outputs 'boxes'",
    "train folder --task distillation --teacher classifier --data voc --run run": "boxes of objects",
    "train folder --task distillation --teacher masker --data colours --run run": "outputs 'mask'",
    "noisy-student --teacher boxer --data colours --unlabelled voc --run run": "outputs 'boxes'",
    "noisy-student --teacher classifier --data voc --unlabelled colours --run run": "boxes of objects",
    "convert boxer boxer.safetensors --to timm": "head_kind='pyramid'",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_model_or_data_of_another_kind_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    code, _, errors = command(*words.split())
    assert code == 2 and errors.startswith("vitrail: ") and REFUSED[words] in errors, errors
    assert len(errors.splitlines()) == 1 and sorted(place.rglob("*")) == before, errors


@pytest.mark.parametrize("words", [
    "evaluate boxer --data voc",
    "evaluate boxer --data colours --by linear",
    "embed boxer --data voc --out features",
    "convert boxer larger --to vitrail --image-size 48 56",
])  # fmt: skip
def test_what_makes_sense_works(place: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(place)
    code, _, errors = command(*words.split())
    assert code == 0, errors
