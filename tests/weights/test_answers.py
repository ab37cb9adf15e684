from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.make import dense_bundle
from vitrail.data.objects import Runs
from vitrail.errors import ConfigError
from vitrail.weights.answers import Detections, MaskPrediction

SIZE = (20, 12)
MASK = np.zeros(SIZE, np.uint8)
MASK[:8] = 1
BOX = np.array([[1.0, 2.0, 9.0, 18.0]])


def detections(*masks: Runs) -> Detections:
    return Detections(("a", "b"), BOX, np.array([0.9]), np.array([1]), SIZE, masks)


PREDICTIONS = [detections(), detections(Runs.of(MASK > 0)), MaskPrediction(("a", "b"), MASK)]


@pytest.mark.parametrize("prediction", PREDICTIONS, ids=["boxes", "masks of objects", "mask"])
def test_a_turned_photo_is_drawn_upright_and_another_size_is_refused(prediction: Any) -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", SIZE, "grey").save(file, "PNG", exif=exif)
    drawn = prediction.drawn(file.getvalue())
    assert drawn.size == SIZE[::-1]
    for same in (Image.open(file), Image.new("RGB", SIZE[::-1], "grey"), np.full((*SIZE, 3), 128, np.uint8)):
        assert np.array_equal(prediction.drawn(same), drawn)
    with pytest.raises(ConfigError, match=r"20 x 12"):
        prediction.drawn(Image.new("RGB", SIZE, "grey"))


@pytest.mark.parametrize("kind", ["pyramid", "patches"])
def test_outputs_of_boxes_and_masks_need_their_placements(kind: str) -> None:
    bundle = dense_bundle(kind)
    images = [np.zeros((20, 12, 3), np.uint8), np.zeros((9, 30, 3), np.uint8)]
    outputs = bundle.predictor().logits(bundle.inputs([bundle.preprocess.pixels(image) for image in images]))
    assert len(bundle.answers(outputs, placements=bundle.placements(images))) == 2
    for wrong in ((), bundle.placements(images[:1])):
        with pytest.raises(ConfigError, match="placements"):
            bundle.answers(outputs, placements=wrong)


def test_numbers_of_classes_fit_the_classes(types_unchecked: None) -> None:
    assert detections().coco(np.array([7, 9]))[0]["category_id"] == 9  # type: ignore[arg-type]
    for wrong in ([7], [7, 8, 9], "ab", [0.5, 1.0]):
        with pytest.raises(ConfigError, match="ids"):
            detections().coco(wrong)  # type: ignore[arg-type]
