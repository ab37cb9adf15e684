"""The evaluator of objects: COCO's average precision of the boxes or the masks that a model finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vitrail.data.objects import Objects
from vitrail.data.source import Source, check_outlines, target_kind
from vitrail.errors import ConfigError, DataError, plural
from vitrail.evaluation.metrics.average_precision import average_precision, best_threshold
from vitrail.evaluation.metrics.intervals import with_intervals
from vitrail.evaluation.outputs import Outputs
from vitrail.settings import problems, raise_problems, setting
from vitrail.weights.answers import AnyPrediction, Detections


class FoundInSource(NamedTuple):
    """The true objects of the images of a source, and those that a model finds."""

    indices: list[int]
    """Indices in the source of the images that can be used."""
    truths: list[Objects]
    found: list[Detections]
    is_finite: bool
    """False if an output of the model is not finite. `found` is then empty."""


@dataclass(frozen=True)
class ByDetection:
    """Average precision of the objects that a model finds, with intervals (`average_precision`). It is that of masks
    if the model finds them, else that of boxes."""

    bootstrap: int = setting(200, least=0, most=1_000_000)
    """Number of bootstrap resamples for each 95 % confidence interval. 0 computes no intervals."""

    def __post_init__(self) -> None:
        raise_problems(problems(self))

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `ConfigError` if the model does not predict boxes, and `DataError` if the data has none, has other
        classes, or lacks the outlines for a model that predicts masks."""
        if target_kind(held_out) != "boxes":
            raise DataError("detection needs boxes of objects, and this data has none; choose other data")
        bundle = outputs.bundle
        if bundle.output != "boxes":
            raise ConfigError(
                "detection measures boxes, and this model predicts none; fine-tune it on data with boxes "
                "(vitrail finetune)"
            )
        if bundle.classes != tuple(held_out.classes):
            raise DataError(
                f"the model finds {', '.join(bundle.classes)}, but the objects of this data are "
                f"{', '.join(held_out.classes)}; both must have the same names in the same order"
            )
        if bundle.finds_masks:
            check_outlines(held_out, "detection with a model of masks", "measure a model of boxes")

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return `average_precision` over the thresholds from 0.5 to 0.95, `average_precision_50` and
        `average_precision_75`, with their intervals; `NAME:average_precision` of each class; those of small, medium and
        large objects as `average_precision_small` and so on; and the `score_threshold` with the best F1 at an overlap
        of boxes of 0.5. A model of masks also has the `box_average_precision` of the boxes around them.

        Raise `DataError` if none of the images can be used.
        """
        self.check(outputs, train, held_out)
        seen = outputs.once(held_out, objects_in)
        counts = {"images": float(len(seen.indices)), "skipped": float(len(held_out) - len(seen.indices))}
        if not seen.is_finite:
            return {"average_precision": float("nan"), **counts}
        if not seen.found:
            raise outputs.none_usable(plural(len(held_out), "image"), "boxes")
        classes, of_masks = len(held_out.classes), outputs.bundle.finds_masks
        report = average_precision(seen.truths, seen.found, classes, of_masks=of_masks, resamples=self.bootstrap)
        main = {"": report.precision, "_50": report.precision_50, "_75": report.precision_75}
        values = with_intervals({f"average_precision{ending}": metric for ending, metric in main.items()})
        parts = {f"average_precision_{name}": value for name, value in report.by_size.items()}
        if of_masks:
            of_boxes = average_precision(seen.truths, seen.found, classes, resamples=0)
            parts["box_average_precision"] = of_boxes.precision.value
        of_classes = zip(held_out.classes, report.by_class, strict=True)
        parts |= {f"{name}:average_precision": value for name, value in of_classes}
        values |= {name: value for name, value in parts.items() if value is not None}
        values["score_threshold"] = best_threshold(seen.truths, seen.found)
        return values | counts


def objects_in(outputs: Outputs, source: Source) -> FoundInSource:
    """Return the true objects of the images of a source, and those that the model finds. Images that cannot be decoded
    or whose annotation has another size are skipped. An image without a target has no objects."""
    seen = FoundInSource([], [], [], is_finite=True)

    def take(place: int, found: AnyPrediction) -> None:
        assert isinstance(found, Detections)
        seen.indices.append(place)
        seen.found.append(found)
        target = source.target(place)
        seen.truths.append(target if isinstance(target, Objects) else Objects.of([], []))

    return seen if outputs.each_answer(source, take) else FoundInSource([], [], [], is_finite=False)
