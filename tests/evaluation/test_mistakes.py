"""Tests of the mistakes of models of boxes and masks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.make import MemorySource, dense_bundle
from vitrail.data.objects import Mask, Objects
from vitrail.evaluation.detection import IN_CROWD, NOTHING, matched
from vitrail.evaluation.mistakes import box_report, mistakes_of
from vitrail.evaluation.outputs import Answered, Outputs
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


def test_objects_have_the_size_of_their_area() -> None:
    """Boxes of 32 pixels are from 32 on, and the stated area of an object counts more than its box."""
    size = (483, 655)
    boxes = [(x / 655, 0.0, (x + 32) / 655, 32 / 483) for x in range(0, 600, 40)]
    areas = np.append(np.full(len(boxes) - 1, np.nan), 100 / (483 * 655))
    true = Objects.of([0] * len(boxes), boxes, areas=areas)
    nothing = Detections(("a",), np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64), size)
    outputs, source = Outputs(dense_bundle()), MemorySource(labels=[true], classes=("a",))
    outputs.remember(source, Answered([0], [(true, nothing)], True))
    assert box_report(outputs, source).recall == (("0 to 16", 1, 0), ("32 to 64", len(boxes) - 1, 0))
