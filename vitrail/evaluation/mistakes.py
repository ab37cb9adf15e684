"""Mistakes of models of boxes and masks: confused classes, found objects by size, and the worst images."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from vitrail.data.batch import Skipped
from vitrail.data.objects import Mask, Objects
from vitrail.data.source import Source
from vitrail.errors import plural
from vitrail.evaluation.detection import IN_CROWD, NOTHING, average_precision, matched, true_and_found
from vitrail.evaluation.metrics.intervals import Metric
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.segmentation import confused_pixels, intersection_over_union, mask_metrics
from vitrail.weights.answers import Detections, MaskPrediction

SIDES = (0, 16, 32, 64, 96, 192)
"""Least sides of the sizes of objects, in pixels: the square roots of their areas."""

WORST = 20
"""Largest number of images that are shown."""


@dataclass(frozen=True)
class PlacedReport:
    """The metrics of a model of boxes or masks on a split, and its mistakes."""

    images: int
    skipped: tuple[Skipped, ...]
    names: tuple[str, ...]
    """The classes."""
    metrics: dict[str, Metric]
    """Metrics over all images by the names of their columns, the main one first."""
    per_class: tuple[tuple[str, float | None], ...]
    """Average precision or intersection over union of each class."""
    confusion: tuple[tuple[int, int, int], ...]
    """True class, predicted class and the number of objects, or the percentage of the pixels of the true class. The
    index after the last class is the background."""
    recall: tuple[tuple[str, int, int], ...]
    """For each size of objects its name, the number of true objects and of those that were found."""
    worst: tuple[int, ...]
    """The places in the source of the images with the most mistakes."""


def box_report(outputs: Outputs, source: Source) -> PlacedReport:
    """Return the report of a model of boxes. Mistakes are counted from its score threshold on. Raise `DataError` if no
    image can be used."""
    seen = outputs.answered(source, true_and_found)
    outputs.check_usable(seen.judged, plural(len(source), "image"), "boxes")
    names = tuple(source.classes)
    truths, answers = zip(*seen.judged, strict=True)
    measured = average_precision(truths, answers, len(names), of_masks=outputs.bundle.finds_masks)
    cells: Counter[tuple[int, int]] = Counter()
    true, found, mistakes = np.zeros(len(SIDES), np.int64), np.zeros(len(SIDES), np.int64), []
    for truth, every in seen.judged:
        shown = outputs.bundle.shown(every)
        assert isinstance(shown, Detections)
        rows = matched(truth, shown)
        pairs = _pairs(truth, shown, rows, len(names))
        cells.update(pairs)
        mistakes.append(float(sum(one != other for one, other in pairs)))
        places = np.searchsorted(SIDES, np.sqrt(truth.all_areas(shown.size)), side="right") - 1
        right = rows[(rows >= 0) & (truth.labels[rows.clip(min=0)] == shown.labels)] if len(truth) else rows[:0]
        true += np.bincount(places[~truth.crowd], minlength=len(SIDES))
        found += np.bincount(places[right], minlength=len(SIDES))
    texts = [f"{first} to {last}" for first, last in itertools.pairwise(SIDES)] + [f"from {SIDES[-1]}"]
    sizes_found = zip(texts, true.tolist(), found.tolist(), strict=True)
    return PlacedReport(
        len(seen.judged),
        tuple(itertools.starmap(Skipped, outputs.skipped.items())),
        names,
        {"AP": measured.precision, "AP50": measured.precision_50, "AP75": measured.precision_75},
        tuple(zip(names, measured.by_class, strict=True)),
        tuple((one, other, count) for (one, other), count in sorted(cells.items())),
        tuple(row for row in sizes_found if row[1]),
        _worst(seen.indices, mistakes),
    )


def mask_report(outputs: Outputs, source: Source) -> PlacedReport:
    """Return the report of a model of masks. Raise `DataError` if no image can be used."""
    seen = outputs.answered(source, confused_pixels)
    outputs.check_usable(seen.judged, plural(len(source), "image"), "mask")
    names, each = tuple(source.classes), np.stack(seen.judged)
    total, metrics = each.sum(axis=0), mask_metrics(each)
    shares = intersection_over_union(total).tolist()
    percent = np.rint(100 * total / total.sum(axis=1, keepdims=True).clip(min=1)).astype(np.int64)
    wrong = 1 - np.trace(each, axis1=1, axis2=2) / each.sum(axis=(1, 2)).clip(min=1)
    return PlacedReport(
        len(each),
        tuple(itertools.starmap(Skipped, outputs.skipped.items())),
        names,
        {"mean intersection over union": metrics["mean_iou"], "pixel accuracy": metrics["pixel_accuracy"]},
        tuple((name, None if np.isnan(share) else share) for name, share in zip(names, shares, strict=True)),
        tuple((int(one), int(other), int(percent[one, other])) for one, other in np.argwhere(percent)),
        (),
        _worst(seen.indices, wrong.tolist()),
    )


def mistakes_of(truth: Objects | Mask, found: Detections | MaskPrediction) -> float:
    """Return the number of objects that are wrong or missed, or the fraction of pixels of a wrong class. Raise
    `UndecodableImage` if the true mask cannot be read."""
    if isinstance(found, Detections) and isinstance(truth, Objects):
        pairs = _pairs(truth, found, matched(truth, found), len(found.names))
        return float(sum(one != other for one, other in pairs))
    confusion = confused_pixels(truth, found)
    return 0.0 if confusion is None else float(1 - np.trace(confusion) / confusion.sum())


def _pairs(truth: Objects, found: Detections, rows: Int64[np.ndarray, " n"], background: int) -> list[tuple[int, int]]:
    """Return the true and the predicted class of each object that is true or found."""
    pairs = [
        (background if row == NOTHING else int(truth.labels[row]), label)
        for row, label in zip(rows.tolist(), found.labels.tolist(), strict=True)
        if row != IN_CROWD
    ]
    missed = np.setdiff1d(np.flatnonzero(~truth.crowd), rows)
    return pairs + [(label, background) for label in truth.labels[missed].tolist()]


def _worst(indices: Sequence[int], mistakes: Sequence[float]) -> tuple[int, ...]:
    """Return the places of the images with the most mistakes, the worst first."""
    order = np.argsort(-np.array(mistakes, np.float64), kind="stable")[:WORST].tolist()
    return tuple(indices[place] for place in order if mistakes[place])
