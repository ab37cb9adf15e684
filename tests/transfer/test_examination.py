"""Tests of the examination of training images: mirroring and the image size, on images that are made for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.make import MemorySource, encode
from tests.targets import multi_labels, number_targets, single_labels
from vitrail.data.pipeline import Readers
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.data.sources import open_data
from vitrail.evaluation.outputs import Outputs
from vitrail.models.variants import create, variant_config
from vitrail.transfer import examination
from vitrail.transfer.examination import (
    FormsCompared,
    Mirrored,
    chance,
    compare,
    compare_sizes,
    divide,
    errors,
    examine,
    larger_is_better,
    larger_size,
    mirror_test,
    mirrored_reason,
    mirroring_hurts,
    pixel_features,
)
from vitrail.transfer.facts import DataFacts
from vitrail.weights.bundle import Bundle

FACTS = DataFacts(90, 20, "class", True)
CPU = torch.device("cpu")


def bars(images: int = 90, *, upright: bool = False) -> MemorySource:
    """Return noisy grey images with a bright bar. Its side tells the class, or with `upright` its height does."""

    def draw(index: int) -> np.ndarray:
        pixels = np.random.default_rng(index).integers(0, 60, (18, 23, 1), dtype=np.uint8)
        if upright:
            (pixels[2:5] if index % 2 else pixels[12:15])[:] = 220
        else:
            pixels[:, 2:6] += np.uint8(150 * (index % 2))
            pixels[:, 16:20] += np.uint8(150 * (1 - index % 2))
        return pixels

    return drawn(draw, images)


def drawn(draw: Callable[[int], np.ndarray], images: int = 90) -> MemorySource:
    """Return images of two classes in turn."""
    labels = [index % 2 for index in range(images)]
    return MemorySource([draw(index) for index in range(images)], labels=labels, classes=("first", "second"))


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    torch.manual_seed(0)
    network = create("ViT-Pico/7", width=32, depth=2, heads=2, mlp_width=48, num_classes=2, image_size=(28, 35))
    return Bundle(network.eval(), ("a", "b"), Preprocess(image_size=(28, 35)))


def mirrored(source: Source, bundle: Bundle) -> FormsCompared | None:
    """Return the test of mirroring with the features of a model."""
    division = divide(source)
    return mirror_test(Outputs(bundle).features, division, 3)


@pytest.mark.slow
def test_mirroring_hurts_if_left_and_right_tell_the_classes_and_not_if_height_does(bundle: Bundle) -> None:
    found = mirrored(bars(), bundle)
    assert found is not None and found.before < 0.1 and found.after >= 0.3 and mirroring_hurts(found)
    found = mirrored(bars(upright=True), bundle)
    assert found is not None and found.before == found.after == 0 and not mirroring_hurts(found)


def test_both_parts_have_all_classes_and_no_image_twice() -> None:
    division = divide(bars(91))
    fitted, tested = ({one.key(index) for index in range(len(one))} for one in (division.fitted, division.tested))
    assert len(tested) == 30 and len(fitted) == 61 and not fitted & tested
    assert {division.tested.target(index) for index in range(30)} == {0, 1}
    assert divide(bars(30)) is None, "ten images are too few to measure with"
    assert divide(open_data("scenes:60", validation_share=0.2).train) is None, "no linear model predicts sentences"


def test_a_mirrored_source_mirrors_files_and_arrays() -> None:
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    mirrored = Mirrored(MemorySource((encode(pixels, "png"), pixels, b"broken"), labels=(0, 1, 0)), channels=3)
    for index in (0, 1):
        image = mirrored[index].image
        assert isinstance(image, np.ndarray) and np.array_equal(image, pixels[:, ::-1])
    assert mirrored[2].image == b"broken", "the pipeline reports it"
    assert (len(mirrored), mirrored.key(1), mirrored.target(1), mirrored.target_kind) == (3, "1", 1, "class")


def test_differences_are_paired() -> None:
    before, after = np.array([0.0, 0, 0, 1]), np.array([1.0, 1, 0, 1])
    found = compare(before, after)
    assert found[:2] == (0.25, 0.75) and found.images == 4 and found.kind == "class"
    assert found.standard_errors == pytest.approx(0.5 / (0.5 / 2))
    assert compare(before, before).standard_errors == 0
    assert compare(before, before + 1).standard_errors == math.inf, "every image has become worse"


def test_only_clear_differences_count() -> None:
    for found, hurts, larger in (
        (FormsCompared(0.1, 0.2, 3.0, 100), True, False),
        (FormsCompared(0.1, 0.2, 2.0, 100), False, False),  # chance
        (FormsCompared(0.1, 0.12, 9.0, 100_000), False, False),  # too little to matter
        (FormsCompared(0.2, 0.1, -3.0, 100), False, True),
        (FormsCompared(0.2, 0.19, -3.0, 100), False, False),
    ):
        assert (mirroring_hurts(found), larger_is_better(found)) == (hurts, larger)


def test_a_larger_size_is_the_models_own_or_twice_that_of_a_model_for_tiny_images(bundle: Bundle) -> None:
    config = variant_config("ViT-Pico/7", image_size=(224, 280))
    assert larger_size(config, (98, 126), 80) == (182, 224) and larger_size(config, (182, 224), 500) is None
    config = bundle.network.config
    assert larger_size(config, (28, 35), 70) == (56, 70)
    assert larger_size(config, (28, 35), 69) is None and larger_size(config, (28, 35), None) is None


@pytest.mark.slow
def test_fine_detail_asks_for_the_larger_size(bundle: Bundle) -> None:
    def chequerboard(index: int) -> np.ndarray:
        """Draw a fine chequerboard, which vanishes at a small size, or a plain grey."""
        pixels = np.full((56, 70, 1), 128)
        if index % 2:
            pixels[::2, ::2], pixels[1::2, 1::2] = 255, 255
            pixels[::2, 1::2], pixels[1::2, ::2] = 0, 0
        noise = np.random.default_rng(index).integers(-40, 40, (8, 10, 1)).repeat(7, 0).repeat(7, 1)
        return (pixels // 2 + 64 + noise).clip(0, 255).astype(np.uint8)

    division = divide(drawn(chequerboard))
    found = compare_sizes(bundle, division, ((14, 14), (56, 70)))
    assert found is not None and found.before > 0.2 and found.after < 0.1 and larger_is_better(found)


def test_what_is_chosen_is_not_examined_and_few_images_are_not_either(bundle: Bundle) -> None:
    def findings(source: MemorySource, **explicit: object) -> tuple[bool | None, tuple[int, int] | None]:
        found = examine(bundle, source, FACTS, device=CPU, readers=Readers(), precision="float32", explicit=explicit)
        return found.flip, found.image_size

    assert findings(bars(), flip=True) == (None, None)
    assert findings(bars(20)) == (None, None)
    assert findings(bars(upright=True)) == (True, None)


@pytest.mark.slow
def test_the_models_batch_follows_from_the_memory_and_the_users_size_is_examined(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int | None, tuple[int, int]]] = []

    class Recorded(Outputs):
        def __init__(self, bundle: Bundle, **options: Any) -> None:
            super().__init__(bundle, **options)
            made.append((self.batch_size, bundle.preprocess.image_size))

    monkeypatch.setattr(examination, "Outputs", Recorded)
    found = examine(
        bundle, bars(), FACTS, device=CPU, readers=Readers(), precision="float32", explicit={"image_size": (21, 35)}
    )
    assert found.flip is False and made == [(None, (21, 35))]
    division = divide(bars())
    compare_sizes(bundle, division, ((14, 14), (28, 35)))
    assert made[1:] == [(None, (14, 14)), (None, (28, 35))]


def labelled(counts: list[int]) -> MemorySource:
    """Return black images of classes with these numbers of images."""
    labels = np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)), counts)).tolist()
    black = [np.zeros((3, 5, 1), np.uint8)] * len(labels)
    return MemorySource(black, labels=labels, classes=tuple(str(label) for label in range(len(counts))))


@pytest.mark.parametrize(
    ("counts", "fitted", "tested"),
    [
        ([20] * 300, {6}, {3}),  # 100 classes of 9 images
        ([4] * 500, {3}, {1}),  # 225 classes of 4 images
        ([2] * 1000 + [3] * 50, {2}, {1}),  # classes of two images cannot be measured
        ([2000] * 2 + [10], {7, 297}, {3, 148}),  # few classes: all of them, as equally as possible
    ],
)
def test_whole_classes_are_drawn_if_there_are_many(counts: list[int], fitted: set[int], tested: set[int]) -> None:
    division = divide(labelled(counts))
    assert division is not None and len(division.fitted) + len(division.tested) <= 900
    for part, expected in ((division.fitted, fitted), (division.tested, tested)):
        found = np.bincount([part.target(index) for index in range(len(part))], minlength=len(counts))
        assert set(found[found > 0].tolist()) == expected


@pytest.mark.slow
def test_nothing_is_found_if_the_linear_model_guesses(bundle: Bundle) -> None:
    noise = drawn(lambda index: np.random.default_rng(index).integers(0, 255, (18, 23, 1), dtype=np.uint8), 150)
    division = divide(noise)
    assert division is not None and mirrored(noise, bundle) is None
    assert compare_sizes(bundle, division, ((14, 14), (28, 35))) is None
    assert mirrored(labelled([90]), bundle) is None, "one class"


def test_errors_are_relative_to_a_constant_prediction() -> None:
    labels = multi_labels(np.array([[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]], np.uint8))
    assert errors(np.array([[1.0, -1, -1]] * 4), labels).tolist() == [4, 0, 0, 0], "one of three labels, of 1 / 12"
    assert chance(labels) == 1 and chance(multi_labels(np.ones((4, 2), np.uint8))) == 0
    numbers = number_targets(np.array([[1.0, 5], [3.0, 5], [math.nan, 5]]))
    assert errors(np.array([[2.0, 7]] * 3), numbers).tolist() == [1, 1, 0], "the second number does not vary"
    assert chance(numbers) == pytest.approx(2 / 3) and chance(single_labels(np.array([0, 2, 2, -1]), 3)) == 0.5


def test_pixel_features_of_mirrored_images_are_mirrored() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (33, 47, 3), dtype=np.uint8)
    pictures = MemorySource((pixels, b"broken", pixels[:, ::-1]), labels=(0, 0, 0))
    found, mirrored = pixel_features(pictures, 3), pixel_features(Mirrored(pictures, 3), 3)
    assert found.keys == mirrored.keys == ("0", "2") and found.features.shape == (2, 3 * 16 * 16)
    np.testing.assert_allclose(mirrored.features, found.features[::-1], atol=1.01 / 255)
    np.testing.assert_array_equal(
        mirrored.features.reshape(2, 3, 16, 16)[..., ::-1], found.features.reshape(2, 3, 16, 16)
    )


@pytest.mark.parametrize(
    ("classes", "targets", "before", "after"),
    [
        # the side of the bar, and a number that is unknown for half of the images
        (2, [(float(at % 2), 1.0 + at % 2 if at % 4 < 2 else math.nan) for at in range(81)], 0.2, (1.0, 9.0)),
        # the side of the bar as one of three labels, of which the second is always there, and the third never
        pytest.param(3, [(0, 1) if at % 2 else (1,) for at in range(90)], 0.0, (0.6, 1.4), marks=pytest.mark.slow),
    ],
)
def test_numbers_and_several_labels_are_compared_with_a_constant_prediction(
    bundle: Bundle, classes: int, targets: list[Any], before: float, after: tuple[float, float]
) -> None:
    """At most one of three labels is wrong, but a constant prediction errs as often."""
    images = bars(len(targets)).images
    found = mirrored(MemorySource(images, labels=targets, classes=("first", "second", "third")[:classes]), bundle)
    assert found is not None and found.before <= before and after[0] < found.after < after[1]
    assert mirroring_hurts(found)
    assert mirrored_reason(found, "features").startswith("no mirroring: a linear model of the features")
