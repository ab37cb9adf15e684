"""Evaluators of the model's own head, with intervals. They fit nothing and do not read the training split."""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.data.source import Source, check_known, samples_of
from vitrail.errors import DataError
from vitrail.evaluation.evaluators import Bootstrapped, check_head
from vitrail.evaluation.imagenet import imagenet_columns, map_classes, read_real, real_accuracy, real_labels
from vitrail.evaluation.metrics.intervals import with_intervals
from vitrail.evaluation.metrics.report import (
    ClassificationReport,
    RegressionReport,
    absent_note,
    regression_report,
    report,
)
from vitrail.evaluation.outputs import Outputs


@dataclass(frozen=True)
class ByAccuracy(Bootstrapped):
    """Metrics of the head over all images: accuracy with intervals, calibration, and the other metrics of `report`."""

    real: str = ""
    """Also measure with the ReaL labels of ImageNet's validation images: public, or a file real.json."""
    class_names: str = ""
    """File with the WordNet id and name of each model output, in order. Needed only if the data uses other class names
    than the model."""

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `DataError` if the targets are numbers or unknown, or if an image has no ReaL label to measure."""
        _check_classes(held_out)
        if self.real:
            imagenet_columns(outputs.bundle.classes)
            real_labels([held_out.key(index) for index in range(len(held_out))], self._real())

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics. The classes of `held_out` are matched to the model's classes by `map_classes`.

        Raise `ConfigError` for a model without a head, and `DataError` for classes that the model does not have.
        """
        _check_classes(held_out)
        classes = outputs.bundle.classes
        if classes and classes != tuple(held_out.classes):
            mapped = map_classes(classes, held_out.classes, mapping=self.class_names or None)
            outputs.note(mapped.note)
            held_out = samples_of(held_out).renumbered(mapped.columns, classes)
        predictions = outputs.predictions(held_out)
        found = report(predictions, bootstrap=self.bootstrap)
        if note := absent_note(found):
            outputs.note(note)
        metrics = with_intervals(found.metrics)
        if self.real:
            by_real, images = real_accuracy(predictions, self._real(), bootstrap=self.bootstrap)
            metrics |= {**with_intervals({"real_accuracy": by_real}), "real_images": float(images)}
        return metrics | _counts(found)

    def _real(self) -> tuple[tuple[int, ...], ...]:
        return read_real(None if self.real == "public" else self.real)


@dataclass(frozen=True)
class ByRegression(Bootstrapped):
    """Errors of predicted numbers over all images, with intervals (`regression_report`)."""

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `ConfigError` if the model does not predict numbers, and `DataError` if it predicts other numbers than
        the targets."""
        check_known(held_out, "regression")
        check_head(
            "numbers", outputs.bundle, held_out,
            lacks="regression needs numbers, but the targets of this data are classes; use accuracy",
            other="regression measures predicted numbers, but this model predicts classes; use linear or knn",
        )  # fmt: skip

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return `r2` and `standardised_error`, averaged over the outputs, and for each output `r2`,
        `mean_absolute_error` and `root_mean_squared_error`.

        If there are several outputs, the names of their metrics are NAME:r2 and so on. Raise the errors of `check`.
        """
        self.check(outputs, train, held_out)
        found = regression_report(outputs.predictions(held_out), bootstrap=self.bootstrap)
        metrics = with_intervals(found.metrics)
        for row in found.per_output:
            if row.metrics is not None:
                metrics |= with_intervals(row.metrics, f"{row.name}:" if len(found.per_output) > 1 else "")
        return metrics | _counts(found)


def _counts(found: ClassificationReport | RegressionReport) -> dict[str, float]:
    unlabelled = {"unlabelled": float(found.unlabelled)} if found.unlabelled else {}
    return {**unlabelled, "images": float(found.images), "skipped": float(len(found.skipped))}


def _check_classes(source: Source) -> None:
    """Raise `DataError` if the targets of a source are numbers, or if no target is known."""
    if check_known(source, "accuracy").kind == "numbers":
        raise DataError("accuracy needs classes, but the targets of this data are numbers; use regression")
