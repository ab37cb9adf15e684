"""The evaluator of objects: COCO's average precision of the boxes or the masks that a model finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from vitrail.data.objects import Objects, Runs, overlaps_with
from vitrail.data.source import Source, check_outlines
from vitrail.data.targets import Target
from vitrail.errors import plural
from vitrail.evaluation.evaluators import Bootstrapped, check_head
from vitrail.evaluation.metrics.intervals import Metric, interval_or_wilson, with_intervals
from vitrail.evaluation.outputs import Outputs
from vitrail.models.heads.dense_head import MOST_BOXES
from vitrail.settings import setting
from vitrail.weights.answers import AnyPrediction, Detections


@dataclass(frozen=True)
class ByDetection(Bootstrapped):
    """Average precision of the objects that a model finds, with intervals (`average_precision`). It is that of masks
    if the model finds them, else that of boxes."""

    bootstrap: int = setting(200, least=0, most=1_000_000)
    """Number of bootstrap resamples for each 95 % confidence interval. 0 computes no intervals."""

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `ConfigError` if the model does not predict boxes, and `DataError` if the data has none, has other
        classes, or lacks the outlines for a model that predicts masks."""
        check_head(
            "boxes", outputs.bundle, held_out,
            lacks="detection needs boxes of objects, and this data has none; choose other data",
            other="detection measures boxes, and this model predicts none; fine-tune it on data with boxes (vitrail "
            "finetune)",
        )  # fmt: skip
        if outputs.bundle.finds_masks:
            check_outlines(held_out, "detection with a model of masks", "measure a model of boxes")

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return `average_precision` over the thresholds from 0.5 to 0.95, `average_precision_50` and
        `average_precision_75`, with their intervals; `NAME:average_precision` of each class; those of small, medium and
        large objects as `average_precision_small` and so on; and the `score_threshold` with the best F1 at an overlap
        of boxes of 0.5. A model of masks also has the `box_average_precision` of the boxes around them.

        Raise `DataError` if none of the images can be used.
        """
        self.check(outputs, train, held_out)
        seen = outputs.answered(held_out, true_and_found)
        counts = {"images": float(len(seen.indices)), "skipped": float(len(held_out) - len(seen.indices))}
        if not seen.is_finite:
            return {"average_precision": float("nan"), **counts}
        outputs.check_usable(seen.judged, plural(len(held_out), "image"), "boxes")
        truths, found = zip(*seen.judged, strict=True)
        classes, of_masks = len(held_out.classes), outputs.bundle.finds_masks
        report = average_precision(truths, found, classes, of_masks=of_masks, resamples=self.bootstrap)
        main = {"": report.precision, "_50": report.precision_50, "_75": report.precision_75}
        values = with_intervals({f"average_precision{ending}": metric for ending, metric in main.items()})
        parts = {f"average_precision_{name}": value for name, value in report.by_size.items()}
        if of_masks:
            of_boxes = average_precision(truths, found, classes, resamples=0)
            parts["box_average_precision"] = of_boxes.precision.value
        of_classes = zip(held_out.classes, report.by_class, strict=True)
        parts |= {f"{name}:average_precision": value for name, value in of_classes}
        values |= {name: value for name, value in parts.items() if value is not None}
        values["score_threshold"] = best_threshold(truths, found)
        return values | counts


def true_and_found(target: Target, found: AnyPrediction) -> tuple[Objects, Detections]:
    """Return the true objects of an image, and those that a model finds. An image without a target has no objects."""
    assert isinstance(found, Detections)
    return (target if isinstance(target, Objects) else Objects.of([], [])), found


# COCO's average precision of boxes and of masks, with bootstrap intervals over the images.


SIZES = ("all", "small", "medium", "large")
"""Sizes of objects: areas below 32 x 32 pixels are small, those of at least 96 x 96 large."""


MOST_RESAMPLED = 10**7
"""Number of pairs of a class and an image that all resamples of the bootstrap examine, unless there are few resamples.
It takes about half a minute."""

LEAST_RESAMPLES = 20


@dataclass(frozen=True)
class PrecisionReport:
    """Average precisions. Those of sizes or classes without a true object are None."""

    precision: Metric
    """Mean over classes and over the thresholds 0.5, 0.55 ... 0.95 of the intersection over union (AP)."""
    precision_50: Metric
    precision_75: Metric
    by_size: dict[str, float | None]
    """The mean over thresholds and classes for small, medium and large objects."""
    by_class: tuple[float | None, ...]
    """The mean over thresholds of each class."""


def average_precision(
    truths: Sequence[Objects],
    found: Sequence[Detections],
    classes: int,
    *,
    of_masks: bool = False,
    resamples: int = 200,
    seed: int = 0,
) -> PrecisionReport:
    """Return the average precision of images, from the true objects of each and those that were found.

    Crowds are ignored as in COCO: boxes that cover them are neither right nor wrong. The values are pycocotools'.
    A resample draws the images with replacement, and each drawn copy counts as an image. There are fewer resamples for
    many classes and images (`MOST_RESAMPLED`). Those without a true object are left out. If all others have the same
    value, such as for perfect answers or a single image, the interval is Wilson's for as many samples as images.
    """
    from faster_coco_eval import COCOeval_faster  # type: ignore[import-untyped]
    from faster_coco_eval.faster_eval_api_cpp import COCOevalAccumulate  # type: ignore[import-untyped]

    true, predicted = _datasets(truths, found, classes, of_masks=of_masks)
    evaluation = COCOeval_faster(
        true, predicted, "segm" if of_masks else "bbox", print_function=_quiet, separate_eval=True
    )
    evaluation.params.maxDets = [1, 10, MOST_BOXES]
    evaluation.evaluate()
    params, images = evaluation._paramsEval, evaluation._evalImgs_cpp
    whole = _precisions(COCOevalAccumulate(params, images))
    count, areas = len(truths), len(SIZES)
    table = np.arange(classes * areas * count).reshape(classes, areas, count)[:, 0]  # objects of all sizes
    params.areaRng, params.areaRngLbl = params.areaRng[:1], params.areaRngLbl[:1]
    random = np.random.default_rng(seed)
    resampled = np.empty((min(resamples, max(LEAST_RESAMPLES, MOST_RESAMPLED // max(1, table.size))), 3))
    for row in resampled:
        drawn = table[:, random.integers(0, count, count)].ravel().tolist()
        row[:] = _means(_precisions(COCOevalAccumulate(params, [images[place] for place in drawn])))
    values = np.nan_to_num(_means(whole)).tolist()
    mean, at_50, at_75 = (
        interval_or_wilson(value, column, count)
        for value, column in zip(values, resampled[~np.isnan(resampled[:, 0])].T, strict=True)
    )
    by_size = {name: _mean(whole[:, :, :, place]) for place, name in enumerate(SIZES) if place}
    by_class = tuple(_mean(whole[:, :, label, 0]) for label in range(classes))
    return PrecisionReport(mean, at_50, at_75, by_size, by_class)


def best_threshold(truths: Sequence[Objects], found: Sequence[Detections]) -> float:
    """Return the score above which the objects that were found have the best F1 at an overlap of 0.5. Those inside
    crowds are neither right nor wrong. It is 0.5 if no object was found rightly."""
    scores, hits, total = [np.zeros(0)], [np.zeros(0, np.bool_)], 0
    for truth, one in zip(truths, found, strict=True):
        total += int((~truth.crowd).sum())
        rows = matched(truth, one, of_class=True)
        scores.append(one.scores[rows != IN_CROWD])
        hits.append(rows[rows != IN_CROWD] != NOTHING)
    order = np.argsort(-np.concatenate(scores), kind="stable")
    sorted_scores, right = np.concatenate(scores)[order], np.cumsum(np.concatenate(hits)[order])
    if not len(right) or not right[-1]:
        return 0.5
    last = np.append(sorted_scores[1:] < sorted_scores[:-1], True)  # a threshold takes all of equal scores
    f1 = np.where(last, 2 * right / (np.arange(1, len(right) + 1) + total), 0)
    return float(sorted_scores[int(f1.argmax())])


NOTHING = -1
"""Row of a found object that is no true object."""

IN_CROWD = -2
"""Row of a found object inside a box around many objects. It is neither right nor wrong."""

OVERLAP = 0.5
"""Least intersection over union of a found object and the true object that it is."""


def matched(truth: Objects, found: Detections, *, of_class: bool = False) -> Int64[np.ndarray, " n"]:
    """Return the row of the true object that each found object is, or `NOTHING` or `IN_CROWD`.

    Objects with the highest scores choose first. A true object of their own class is preferred. With `of_class`, true
    objects and crowds of other classes do not count.
    """
    boxes = truth.boxes * np.tile(found.size[::-1], 2)
    rows = np.full(len(found), NOTHING, np.int64)
    free = ~truth.crowd
    for row in np.argsort(-found.scores, kind="stable").tolist() if len(truth) else ():
        box, same = found.boxes[row], truth.labels == found.labels[row]
        common, overlap = overlaps_with(boxes, box)
        allowed, preference = (same, 0) if of_class else (True, same)
        fits = free & allowed & (overlap >= OVERLAP)
        if fits.any():
            best = int(np.where(fits, overlap + preference, 0).argmax())
            rows[row], free[best] = best, False
        elif (truth.crowd & allowed & (common >= OVERLAP * (box[2:] - box[:2]).prod())).any():
            rows[row] = IN_CROWD
    return rows


def _datasets(
    truths: Sequence[Objects],
    found: Sequence[Detections],
    classes: int,
    *,
    of_masks: bool,
) -> tuple[Any, Any]:
    """Return the true and the predicted objects in the form of COCO's program."""
    from faster_coco_eval import COCO

    images = [{"id": n, "height": one.size[0], "width": one.size[1]} for n, one in enumerate(found, start=1)]
    categories = [{"id": label + 1, "name": str(label)} for label in range(classes)]
    annotations: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, (truth, one) in enumerate(zip(truths, found, strict=True), start=1):
        size, scale = one.size, np.tile(one.size[::-1], 2).astype(np.float64)
        boxes = _corners_and_sides(truth.boxes * scale)
        rows = zip(truth.labels.tolist(), boxes.tolist(), truth.crowd.tolist(), strict=True)
        for row, (label, box, crowd) in enumerate(rows):
            item: dict[str, Any] = {
                "id": len(annotations) + 1, "image_id": number, "category_id": label + 1, "bbox": box,
                "area": truth.area(row, size), "iscrowd": int(crowd),
            }  # fmt: skip
            if of_masks:
                runs = Runs.of(truth.mask(row, size))
                item["segmentation"] = {"size": list(runs.size), "counts": runs.counts}
            annotations.append(item)
        best = np.argsort(-one.scores, kind="stable")[:MOST_BOXES]
        boxes = _corners_and_sides(one.boxes[best])
        found_rows = zip(
            best.tolist(), one.labels[best].tolist(), boxes.tolist(), one.scores[best].tolist(), strict=True
        )
        for row, label, box, score in found_rows:
            item = {"image_id": number, "category_id": label + 1, "score": score}
            if of_masks:  # with a box, COCO's program would take its area as that of the mask
                item["segmentation"] = {"size": list(one.masks[row].size), "counts": one.masks[row].counts}
            else:
                item["bbox"] = box
            results.append(item)
    true = COCO({"images": images, "categories": categories, "annotations": annotations}, print_function=_quiet)
    empty = {"images": images, "categories": categories, "annotations": []}
    return true, true.loadRes(results) if results else COCO(empty, print_function=_quiet)


def _quiet(*_: object) -> None:
    """Print nothing."""


def _corners_and_sides(boxes: Float64[np.ndarray, "n 4"]) -> Float64[np.ndarray, "n 4"]:
    """Return left, top, width and height of boxes with left, top, right and bottom."""
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def _precisions(accumulated: dict[str, Any]) -> Float64[np.ndarray, "thresholds recalls classes areas"]:
    """Return the precision at each threshold, recall, class and size, for the largest number of boxes. It is -1 where
    there is no true object."""
    return np.array(accumulated["precision"]).reshape(accumulated["counts"])[..., -1]


def _means(precisions: Float64[np.ndarray, "thresholds recalls classes areas"]) -> list[float]:
    """Return the means over all thresholds, and at 0.5 and 0.75, of all sizes. They are NaN if nothing is true."""
    # NumPy makes NaN of None.
    return np.array([_mean(some[..., 0]) for some in (precisions, precisions[:1], precisions[5:6])], float).tolist()


def _mean(values: Float64[np.ndarray, ...]) -> float | None:
    known = values[values > -1]
    return float(known.mean()) if len(known) else None
