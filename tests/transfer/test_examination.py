"""Tests of the examination of training images: mirroring and the image size, on images that are made for it."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.pipeline import Readers
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample, Subset
from vitrail.evaluation.outputs import Outputs
from vitrail.models.variants import create
from vitrail.transfer.choices import DataFacts
from vitrail.transfer.examination import (
    Comparison,
    Mirrored,
    compare,
    compare_sizes,
    examine,
    larger_is_better,
    larger_size,
    mirror_test,
    mirroring_hurts,
    sides_of,
)
from vitrail.weights.bundle import Bundle

FACTS = DataFacts(90, 20, "class", True)
CPU = torch.device("cpu")


class Bars:
    """Noisy grey images with a bright bar. Its side tells the class, or with `upright` its height does."""

    classes = ("first", "second")

    def __init__(self, images: int = 90, *, upright: bool = False) -> None:
        self.images, self.upright = images, upright

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> Sample:
        random = np.random.default_rng(index)
        pixels = random.integers(0, 60, (18, 23, 1), dtype=np.uint8)
        if self.upright:
            (pixels[2:5] if index % 2 else pixels[12:15])[:] = 220
        else:
            pixels[:, 2:6] += np.uint8(150 * (index % 2))
            pixels[:, 16:20] += np.uint8(150 * (1 - index % 2))
        return Sample(self.key(index), pixels, index % 2)

    def key(self, index: int) -> str:
        return str(index)

    def target(self, index: int) -> int:
        return index % 2


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    torch.manual_seed(0)
    network = create("ViT-Pico/7", width=32, depth=2, heads=2, mlp_width=48, num_classes=2, image_size=(28, 35))
    return Bundle(network.eval(), ("a", "b"), Preprocess(image_size=(28, 35)))


def test_mirroring_hurts_when_left_and_right_tell_the_classes(bundle: Bundle) -> None:
    sides = sides_of(Bars())
    assert sides is not None
    found = mirror_test(Outputs(bundle).features, sides, 3)
    assert found is not None and found.before < 0.1 and found.after >= 0.5 and mirroring_hurts(found)


def test_mirroring_is_harmless_when_height_tells_the_classes(bundle: Bundle) -> None:
    sides = sides_of(Bars(upright=True))
    assert sides is not None
    found = mirror_test(Outputs(bundle).features, sides, 3)
    assert found is not None and found.before == found.after == 0 and not mirroring_hurts(found)


def test_both_parts_have_all_classes_and_no_image_twice() -> None:
    sides = sides_of(Bars(91))
    assert sides is not None
    fitted, tested = ({one.key(index) for index in range(len(one))} for one in (sides.fitted, sides.tested))
    assert len(tested) == 30 and len(fitted) == 61 and not fitted & tested
    assert {sides.tested.target(index) for index in range(30)} == {0, 1}
    assert sides_of(Bars(30)) is None, "ten images are too few to measure with"


def test_a_mirrored_source_mirrors_files_and_arrays() -> None:
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")

    class Files(Bars):
        def __getitem__(self, index: int) -> Sample:
            image = (buffer.getvalue(), pixels, b"broken")[index]
            return Sample(str(index), image, 0)

    mirrored = Mirrored(Files(3), channels=3)
    for index in (0, 1):
        image = mirrored[index].image
        assert isinstance(image, np.ndarray) and np.array_equal(image, pixels[:, ::-1])
    assert mirrored[2].image == b"broken", "the pipeline reports it"
    assert (len(mirrored), mirrored.key(1), mirrored.target(1), mirrored.target_kind) == (3, "1", 1, "class")


def test_differences_are_paired() -> None:
    before, after = np.array([0.0, 0, 0, 1]), np.array([1.0, 1, 0, 1])
    found = compare(before, after)
    assert found[:2] == (0.25, 0.75) and found.images == 4
    assert found.standard_errors == pytest.approx(0.5 / (0.5 / 2))
    assert compare(before, before).standard_errors == 0
    assert compare(before, before + 1).standard_errors == math.inf, "every image has become worse"


@pytest.mark.parametrize(
    ("found", "hurts", "larger"),
    [
        (Comparison(0.1, 0.2, 3.0, 100), True, False),
        (Comparison(0.1, 0.2, 2.0, 100), False, False),  # chance
        (Comparison(0.1, 0.12, 9.0, 100_000), False, False),  # too little to matter
        (Comparison(0.2, 0.1, -3.0, 100), False, True),
        (Comparison(0.2, 0.19, -3.0, 100), False, False),
    ],
)
def test_only_clear_differences_count(found: Comparison, hurts: bool, larger: bool) -> None:
    assert (mirroring_hurts(found), larger_is_better(found)) == (hurts, larger)


def test_a_larger_size_is_the_models_own_up_to_a_limit() -> None:
    config = create("ViT-Pico/7", width=32, depth=1, heads=2, image_size=(224, 280)).config
    assert larger_size(config, (98, 126)) == (182, 224)
    assert larger_size(config, (182, 224)) is None


def test_fine_detail_asks_for_the_larger_size(bundle: Bundle) -> None:
    class Detail(Bars):
        """A fine chequerboard, which vanishes at a small size, or a plain grey."""

        def __getitem__(self, index: int) -> Sample:
            pixels = np.full((56, 70, 1), 128, np.uint8)
            if index % 2:
                pixels[::2, ::2], pixels[1::2, 1::2] = 255, 255
                pixels[::2, 1::2], pixels[1::2, ::2] = 0, 0
            noise = np.random.default_rng(index).integers(-40, 40, (8, 10, 1)).repeat(7, 0).repeat(7, 1)
            return Sample(str(index), (pixels.astype(int) // 2 + 64 + noise).clip(0, 255).astype(np.uint8), index % 2)

    sides = sides_of(Detail())
    assert sides is not None
    found = compare_sizes(bundle, sides, ((14, 14), (56, 70)))
    assert found is not None and found.before > 0.2 and found.after < 0.1 and larger_is_better(found)


def test_what_is_chosen_is_not_examined_and_few_images_are_not_either(bundle: Bundle) -> None:
    def findings(source: Bars, **explicit: object) -> tuple[bool | None, tuple[int, int] | None]:
        found = examine(bundle, source, FACTS, device=CPU, readers=Readers(), precision="float32", explicit=explicit)
        return found.flip, found.image_size

    assert findings(Bars()) == (False, None)
    assert findings(Bars(), flip=True) == (None, None)
    assert findings(Bars(20)) == (None, None)
    assert findings(Bars(upright=True)) == (True, None)


def test_regression_compares_squared_errors_of_known_numbers(bundle: Bundle) -> None:
    class Numbers(Bars):
        """The side of the bar as a number, and a number that is unknown for half of the images."""

        classes = ("left", "half")
        target_kind = "numbers"

        def target(self, index: int) -> Any:
            return (float(index % 2), 1.0 + index % 2 if index % 4 < 2 else math.nan)

        def __getitem__(self, index: int) -> Sample:
            return Sample(str(index), super().__getitem__(index).image, self.target(index))

    sides = sides_of(Subset(Numbers(), range(81)))
    assert sides is not None
    found = mirror_test(Outputs(bundle).features, sides, 3)
    assert found is not None and found.before < 0.2 and found.after > 1 and mirroring_hurts(found)


def test_several_labels_compare_fractions_of_wrong_labels(bundle: Bundle) -> None:
    class Several(Bars):
        """The side of the bar as one of three labels. The second is always there, and the third never."""

        classes = ("left", "always", "never")
        target_kind = "classes"

        def target(self, index: int) -> Any:
            return (0, 1) if index % 2 else (1,)

        def __getitem__(self, index: int) -> Sample:
            return Sample(str(index), super().__getitem__(index).image, self.target(index))

    sides = sides_of(Several())
    assert sides is not None
    found = mirror_test(Outputs(bundle).features, sides, 3)
    assert found is not None and found.before == 0 and found.after == pytest.approx(1 / 6, abs=0.05)
