"""Tests of the mistakes of models of boxes and masks."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.data.objects import Mask, Objects
from vitrail.evaluation.detection import IN_CROWD, NOTHING, matched
from vitrail.evaluation.mistakes import mistakes_of
from vitrail.weights.answers import Detections, MaskPrediction

SIZE = (50, 80)


def found(*rows: tuple[float, float, float, float, float, int]) -> Detections:
    values = np.array(rows, np.float64).reshape(len(rows), 6)
    return Detections(("a", "b"), values[:, :4], values[:, 4], values[:, 5].astype(np.int64), SIZE)


def truth(*rows: tuple[float, float, float, float, int], crowd: tuple[int, ...] = ()) -> Objects:
    boxes = [(left / 80, top / 50, right / 80, bottom / 50) for left, top, right, bottom, _ in rows]
    is_crowd = np.isin(np.arange(len(rows)), crowd)
    return Objects.of([row[4] for row in rows], boxes, crowd=is_crowd)


def test_each_true_object_is_found_at_most_once_and_by_its_class_first() -> None:
    true = truth((0, 0, 20, 20, 0), (1, 0, 21, 20, 1), (40, 10, 80, 50, 1), (0, 30, 30, 50, 0), crowd=(2,))
    objects = found(
        (1, 0, 20, 20, 0.9, 1),  # both boxes fit; its own class is preferred
        (0, 0, 20, 20, 0.8, 0),
        (0, 0, 20, 20, 0.7, 0),  # a second one of the same object
        (45, 15, 55, 25, 0.6, 0),  # inside the crowd
        (0, 30, 30, 38, 0.5, 0),  # overlaps too little
    )
    assert matched(true, objects).tolist() == [1, 0, NOTHING, IN_CROWD, NOTHING]
    assert mistakes_of(true, objects) == 3, "two are wrong, and one is missed"
    other = found((0, 0, 20, 20, 0.9, 1))
    assert (
        matched(truth((0, 0, 20, 20, 0)), other).tolist() == [0] and mistakes_of(truth((0, 0, 20, 20, 0)), other) == 1
    )
    assert mistakes_of(truth(), found()) == 0 and matched(truth(), other).tolist() == [NOTHING]


def test_wrong_pixels_are_counted_where_the_class_is_known() -> None:
    values = np.array([[0, 1, 255], [1, 1, 0]], np.uint8)
    predicted = MaskPrediction(("a", "b"), np.array([[0, 0, 1], [1, 1, 1]], np.uint8))
    assert mistakes_of(Mask("m", lambda: values, (0, 1)), predicted) == pytest.approx(2 / 5)
