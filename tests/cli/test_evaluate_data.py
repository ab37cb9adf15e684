"""Tests of the data that `vitrail evaluate` opens: it holds out the same images as training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.make import keys_of
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import open_data
from vitrail.evaluation.measured_images import open_images
from vitrail.models.variants import create
from vitrail.weights.bundle import Bundle


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    """40 training images and 6 validation images of two classes."""
    for split, count in (("train", 20), ("val", 3)):
        for name in ("daisy", "rose"):
            folder = tmp_path / "flowers" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (5, 4), number).save(folder / f"{number}.png")
    return tmp_path / "flowers"


def trained(**provenance: Any) -> Bundle:
    network = create("ViT-Pico/4", width=8, depth=1, heads=2, mlp_width=8, num_classes=2, image_size=(4, 4))
    return Bundle(network, ("daisy", "rose"), Preprocess(image_size=(4, 4)), provenance=provenance)


@pytest.mark.parametrize("validation", ["train", "train[-5:]"])
def test_the_official_split_is_the_test_split_of_a_model_whose_training_used_it_so(
    flowers: Path, validation: str
) -> None:
    bundle = trained(data=str(flowers), validation=validation, validation_share=0.2, cut_method="stratified")
    expected = open_data(str(flowers), validation_share=0.2, validation=validation)
    for split, source in (("test", expected.test), ("validation", expected.validation), ("held-out", expected.test)):
        head = open_images(bundle, str(flowers), split)
        (found,) = head.sources.values()
        assert source is not None and keys_of(found) == keys_of(source)
    features = open_images(bundle, str(flowers / "." / ""), "test", by_features=True)
    assert list(features.sources) == ["test"] and len(features.train) == (40 if validation == "train" else 35)
    other = open_images(trained(data="elsewhere", validation=validation), str(flowers), "held-out")
    assert list(other.sources) == ["validation"]


def test_a_model_without_held_out_images_is_told_from_others(flowers: Path) -> None:
    bundle = trained(data=str(flowers), validation="train", validation_share=0.0, cut_method="stratified")
    assert list(open_images(bundle, str(flowers), "held-out").sources) == ["test"]
    seen = open_images(bundle, str(flowers), "validation")
    assert any("the measured images were among its training images" in note for note in seen.notes)


def test_a_model_of_an_earlier_version_is_measured_on_the_images_that_it_held_out(flowers: Path) -> None:
    spec = str(flowers / "train")
    cuts = {
        method: open_data(spec, validation_share=0.3, cut_method=method).validation
        for method in ("stratified", "threshold")
    }
    earlier = trained(data=spec, validation_share=0.3)
    for bundle, method in (
        (earlier, "threshold"),
        (trained(validation_share=0.3, cut_method="stratified"), "stratified"),
    ):
        (found,) = open_images(bundle, spec, "held-out").sources.values()
        assert keys_of(found) == keys_of(cuts[method])
    assert keys_of(cuts["stratified"]) != keys_of(cuts["threshold"])
