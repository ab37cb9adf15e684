"""COCO's average precision equals pycocotools', whatever is drawn."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.objects import Objects, Runs, drawn
from vitrail.evaluation.detection import average_precision, best_threshold
from vitrail.evaluation.metrics.intervals import wilson_ends
from vitrail.weights.answers import Detections

CLASSES = 3
NAMES = ("a", "b", "c")


def pictures(seed: int, count: int) -> tuple[list[Objects], list[Detections], list[tuple[int, int]]]:
    """Return true objects, some of them crowds, and boxes near them and elsewhere, with equal scores among them."""
    random = np.random.default_rng(seed)
    truths, found, sizes = [], [], []
    for _ in range(count):
        size = int(random.integers(60, 260)), int(random.integers(60, 260))
        true, boxes = int(random.integers(0, 6)), int(random.integers(0, 9))
        corners = random.uniform(0, 0.7, (true, 2))
        places = np.concatenate([corners, corners + random.uniform(0.05, 0.3, (true, 2))], axis=1)
        labels = random.integers(0, CLASSES, true)
        outlines = tuple((np.array([(b[0], b[1]), (b[2], b[1]), (b[0], b[3])]),) for b in places)
        crowd = random.uniform(size=true) < 0.2
        truths.append(Objects(labels, places, crowd, np.full(true, np.nan), outlines, size))
        near = places[random.integers(0, true, boxes)] if true else np.tile([0.1, 0.1, 0.4, 0.5], (boxes, 1))
        moved = (near + random.normal(0, 0.03, near.shape)).clip(0, 1)
        moved = np.concatenate([np.minimum(moved[:, :2], moved[:, 2:]), np.maximum(moved[:, :2], moved[:, 2:])], axis=1)
        masks = tuple(
            Runs.of(drawn((np.array([(b[0], b[1]), (b[2], b[1]), (b[2], b[3]), (b[0], b[3])]),), size)) for b in moved
        )
        scores = random.integers(0, 5, boxes) / 5
        moved = moved * np.tile(size[::-1], 2)
        found.append(Detections(NAMES, moved, scores, random.integers(0, CLASSES, boxes), size, masks))
        sizes.append(size)
    return truths, found, sizes


def by_pycocotools(
    truths: list[Objects], found: list[Detections], sizes: list[tuple[int, int]], kind: str
) -> tuple[Any, Any]:
    """Return the twelve numbers of pycocotools, and the precision of each class."""
    coco = pytest.importorskip("pycocotools.coco")
    evaluate = pytest.importorskip("pycocotools.cocoeval")
    data: dict[str, Any] = {"images": [], "annotations": [], "categories": [{"id": n} for n in range(CLASSES)]}
    results = []
    for number, (truth, one, (height, width)) in enumerate(zip(truths, found, sizes, strict=True)):
        data["images"].append({"id": number, "height": height, "width": width})
        scale = np.array([width, height, width, height])
        for row, label in enumerate(truth.labels.tolist()):
            left, top, right, bottom = truth.boxes[row] * scale
            runs = Runs.of(truth.mask(row, (height, width)))
            data["annotations"].append({
                "id": len(data["annotations"]) + 1, "image_id": number, "category_id": label,
                "bbox": [left, top, right - left, bottom - top], "area": float(truth.mask(row, (height, width)).sum()),
                "iscrowd": int(truth.crowd[row]),
                "segmentation": {"size": [height, width], "counts": runs.counts},
            })  # fmt: skip
        for row in range(len(one.scores)):
            left, top, right, bottom = one.boxes[row]
            results.append({
                "image_id": number, "category_id": int(one.labels[row]), "score": one.scores[row],
                "bbox": [left, top, right - left, bottom - top],
                "segmentation": {"size": [height, width], "counts": one.masks[row].counts},
            })  # fmt: skip
    if kind == "segm":
        for item in results:
            del item["bbox"]
    with contextlib.redirect_stdout(io.StringIO()):
        true = coco.COCO()
        true.dataset = data
        true.createIndex()
        found_there = true.loadRes(results)
        evaluation = evaluate.COCOeval(true, found_there, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats, evaluation.eval["precision"][:, :, :, 0, 2]


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["bbox", "segm"]))
def test_values_are_those_of_pycocotools(seed: int, kind: str) -> None:
    truths, found, sizes = pictures(seed, 7)
    if not any(len(one.scores) for one in found):
        return
    report = average_precision(truths, found, CLASSES, of_masks=kind == "segm", resamples=5)
    stats, classes = by_pycocotools(truths, found, sizes, kind)
    theirs = [None if value == -1 else value for value in stats.tolist()]
    ours = [report.precision.value, report.precision_50.value, report.precision_75.value, *report.by_size.values()]
    assert ours == pytest.approx([value or 0.0 if place < 3 else value for place, value in enumerate(theirs[:6])])
    for label, value in enumerate(report.by_class):
        known = classes[:, :, label][classes[:, :, label] > -1]
        assert value == (pytest.approx(known.mean()) if len(known) else None)


def test_an_object_without_a_stated_area_has_that_of_its_outline() -> None:
    """A thin diagonal is small, however large its box is."""
    corners = np.array([(0, 0), (4, 0), (100, 96), (100, 100), (96, 100), (0, 4)]) / 100
    truth = Objects.of([0], [(0, 0, 1, 1)], outlines=((corners,),), size=(100, 100))
    mask = truth.mask(0, (100, 100))
    found = Detections(("a",), np.array([[0.0, 0, 100, 100]]), np.ones(1), np.zeros(1, np.int64), mask.shape)
    assert truth.area(0, (100, 100)) == mask.sum() < 32**2
    assert average_precision([truth], [found], 1, resamples=0).by_size == {"small": 1.0, "medium": None, "large": None}


def test_the_area_of_a_box_is_that_of_its_pixels() -> None:
    """A box of 32 x 32 pixels is small and of medium size, unless its area is rounded."""
    boxes = np.array([(x, y, x + 32, y + 32) for x in range(0, 600, 40) for y in range(0, 440, 40)])
    for height, width in ((480, 640), (483, 655)):
        truth = Objects.of([0] * len(boxes), (boxes / (width, height, width, height)).tolist())
        assert {*truth.all_areas((height, width)).tolist()} == {1024.0}


def test_a_stated_area_is_that_of_its_file() -> None:
    truth = Objects.of([0], [(0, 0, 1, 1)], areas=np.array([1024 / (100 * 110)]))
    assert (1024 / (100 * 110)) * (100 * 110) != 1024 == truth.area(0, (100, 110))


def test_the_size_of_a_found_mask_is_that_of_its_pixels() -> None:
    """A wrong thin line is a small object, however large the box around it is."""
    size = (200, 200)
    corners = np.array([(10, 10), (20, 10), (20, 20), (10, 20)]) / 200
    truth = Objects.of([0], [(0.05, 0.05, 0.1, 0.1)], outlines=((corners,),), size=size)
    line = Runs.of(np.eye(200, dtype=np.bool_))
    boxes = np.array([(0, 0, 200, 200), (10, 10, 20, 20)], np.float64)
    found = Detections(
        ("a",), boxes, np.array([0.9, 0.8]), np.zeros(2, np.int64), size, (line, Runs.of(truth.mask(0, size)))
    )
    report = average_precision([truth], [found], 1, of_masks=True, resamples=0)
    assert report.precision.value == report.by_size["small"] == pytest.approx(0.5)


def test_the_area_of_polygons_is_counted_without_a_mask_of_the_image() -> None:
    """A mask of this image would take 10 GB, and as many in each measurement."""
    corners = np.array([(0, 0), (0.001, 0), (0.001, 0.001), (0, 0.001)])
    truth = Objects.of([0, 0], [(0, 0, 1, 1)] * 2, outlines=((corners,), ()), size=(100_000, 100_000))
    assert [truth.area(row, truth.size) for row in range(2)] == [100.0**2, 100_000.0**2]


def test_the_threshold_has_the_best_f1_of_all_scores() -> None:
    truths, found, _ = pictures(5, 12)
    best = best_threshold(truths, found)

    def f1(threshold: float) -> float:
        right = total = count = 0
        for truth, one in zip(truths, found, strict=True):
            free = [row for row in range(len(truth)) if not truth.crowd[row]]
            total += len(free)
            for item in sorted(one.above(threshold), key=lambda item: -item.score):
                count += 1
                overlaps = {row: overlap(truth.boxes[row] * np.tile(one.size[::-1], 2), item.box) for row in free
                            if NAMES[truth.labels[row]] == item.label}  # fmt: skip
                if overlaps and max(overlaps.values()) >= 0.5:
                    right += 1
                    free.remove(max(overlaps, key=overlaps.__getitem__))
                elif any(
                    inside(item.box, truth.boxes[row] * np.tile(one.size[::-1], 2)) >= 0.5
                    for row in range(len(truth))
                    if truth.crowd[row] and NAMES[truth.labels[row]] == item.label
                ):
                    count -= 1  # as in COCO's average precision
        return 2 * right / (count + total)

    assert f1(best) == pytest.approx(max(f1(score) for score in (0.0, 0.2, 0.4, 0.6, 0.8)))
    assert best_threshold(truths, [one.taken(np.zeros(0, np.int64)) for one in found]) == 0.5


def common(first: Any, second: Any) -> float:
    width, height = (min(first[k + 2], second[k + 2]) - max(first[k], second[k]) for k in (0, 1))
    return float(max(width, 0) * max(height, 0))


def area(box: Any) -> float:
    return float((box[2] - box[0]) * (box[3] - box[1]))


def overlap(first: Any, second: Any) -> float:
    shared = common(first, second)
    return shared / (area(first) + area(second) - shared)


def inside(box: Any, crowd: Any) -> float:
    return common(box, crowd) / area(box)


def test_objects_found_inside_a_crowd_do_not_raise_the_threshold() -> None:
    places = [(0, 0, 0.2, 0.2), (0.2, 0.2, 0.4, 0.4), (0.4, 0.4, 1, 1)]
    truth = Objects.of([0, 0, 0], places, crowd=np.array([False, False, True]))
    boxes = np.array([(0, 0, 20, 20), *[(50 + n, 50, 70 + n, 70) for n in range(9)], (20, 20, 40, 40)], np.float64)
    scores = np.array([0.9, *[0.5] * 9, 0.2])
    found = Detections(NAMES, boxes, scores, np.zeros(11, np.int64), (100, 100))
    assert best_threshold([truth], [found]) == 0.2
    assert best_threshold([truth], [found.taken(np.arange(1, 10))]) == 0.5, "nothing is right"


def test_perfect_and_empty_answers_and_their_intervals() -> None:
    truths, _, sizes = pictures(3, 9)
    truths = [Objects.of(one.labels.tolist(), one.boxes.tolist(), size=one.size) for one in truths]
    perfect = [
        Detections(NAMES, one.boxes * np.tile(size[::-1], 2), np.ones(len(one)), one.labels, size)
        for one, size in zip(truths, sizes, strict=True)
    ]
    nothing = [one.taken(np.zeros(0, np.int64)) for one in perfect]
    best = average_precision(truths, perfect, CLASSES, resamples=20).precision
    low, _ = wilson_ends(1.0, len(truths))
    assert (best.value, best.low, best.high) == pytest.approx((1, low, 1)), "few images leave a doubt"
    assert average_precision(truths, nothing, CLASSES, resamples=0).precision.value == 0
    half = [one if n % 2 else nothing[n] for n, one in enumerate(perfect)]
    some = average_precision(truths, half, CLASSES, resamples=50).precision
    assert some.low is not None and some.high is not None and some.low < some.value < some.high


def test_resamples_without_a_true_object_are_left_out() -> None:
    size = (40, 60)
    empty, full = Objects.of([], [], size=size), Objects.of([0], [(0.1, 0.1, 0.6, 0.6)], size=size)
    right = Detections(NAMES, full.boxes * np.tile(size[::-1], 2), np.ones(1), full.labels, size)
    nothing = right.taken(np.zeros(0, np.int64))
    truths, found = [full, empty, empty, empty], [right, nothing, nothing, nothing]
    precision = average_precision(truths, found, CLASSES, resamples=50).precision
    assert precision.value == pytest.approx(1) and precision.low == pytest.approx(wilson_ends(1.0, 4)[0])
