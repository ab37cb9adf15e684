"""The report of predicted classes: all metrics on labelled images. Its plain values can be printed, drawn or saved."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from vitrail.data.batch import Skipped
from vitrail.errors import DataError, listed, plural
from vitrail.evaluation.predictions.bootstrap import (
    Metric,
    balanced_accuracy_interval,
    calibration_error_interval,
    mean_interval,
)
from vitrail.evaluation.predictions.calibration import (
    CalibrationBin,
    PerSample,
    binary_cross_entropy,
    binary_logits,
    calibration_bins,
    per_sample,
)
from vitrail.evaluation.predictions.metrics import (
    ClassMetrics,
    average_precision,
    exact_match,
    f1_scores,
    per_class,
    per_class_of_targets,
    top_k,
)
from vitrail.evaluation.predictions.predict import Predictions
from vitrail.evaluation.truth import MultiLabels, Numbers, SingleLabels


@dataclass(frozen=True)
class ClassRow:
    """The metrics of one class. A metric is None if its denominator is 0."""

    index: int
    name: str
    images: int
    """Number of images of the class."""
    predicted: int
    """Number of images that were predicted as the class."""
    accuracy: float | None
    """Fraction of the class's images that were predicted as the class (its recall)."""
    precision: float | None
    f1: float | None
    average_precision: float | None = None
    """Average precision of the class, only if images can have several labels."""


@dataclass(frozen=True)
class Calibration:
    """Calibration of the probabilities, which are computed from logits / temperature."""

    temperature: float
    error: Metric
    """The expected calibration error. `calibration_error_interval` explains the interval of this error."""
    cross_entropy: Metric
    brier: Metric
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True)
class MultiLabel:
    """Metrics of images that can have several labels. A class is predicted if its probability is above 0.5."""

    mean_average_precision: float | None
    """Mean average precision. If no image has a label, this field and both F1 scores are None."""
    exact_match: Metric
    """Fraction of images whose predicted classes are exactly their true classes."""
    micro_f1: float | None
    macro_f1: float | None


@dataclass(frozen=True)
class Mistake:
    """An image with a wrong prediction."""

    index: int
    """Index of the image in the source."""
    key: str
    labels: tuple[str, ...]
    predicted: tuple[str, ...]
    probability: float
    """Probability of the likeliest class."""
    loss: float
    """Cross-entropy of the image, in nats."""


@dataclass(frozen=True)
class ClassificationReport:
    """The result of `report`. `vitrail.settings.to_plain` converts it to JSON values. Fractions are in [0, 1]."""

    images: int
    """Number of measured images."""
    unlabelled: int
    """Number of images without a label. They are skipped."""
    skipped: tuple[Skipped, ...]
    """Images that could not be decoded."""
    num_classes: int
    accuracy: Metric
    """Fraction of images whose likeliest class is the label, or one of several labels."""
    cross_entropy: Metric
    """Cross-entropy in nats. With sigmoid outputs, or if images can have several labels, it is the sum of the binary
    cross-entropies of all classes."""
    top5: Metric | None
    """Top-5 accuracy, or None for fewer than six classes."""
    balanced_accuracy: Metric | None
    """Mean of the per-class accuracies. If images can have several labels, this field and `calibration` are None."""
    calibration: Calibration | None
    scaled: Calibration | None
    """Calibration with the temperature that was given to `report`."""
    multi_label: MultiLabel | None
    """Multi-label metrics, only if images can have several labels."""
    per_class: tuple[ClassRow, ...]
    """Metrics of the classes that have images or were predicted, in the order of the outputs."""
    absent: tuple[str, ...]
    """Names of the classes without images, in the order of the outputs. No metric covers them."""
    confusion: tuple[tuple[int, int, int], ...]
    """The nonzero cells of the confusion matrix, row by row: true class, likeliest class and number of images. Empty if
    images can have several labels."""
    worst: tuple[Mistake, ...]
    """The wrong predictions with the largest loss, largest first."""


def report(
    predictions: Predictions,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    temperature: float | None = None,
    worst: int = 20,
) -> ClassificationReport:
    """Return all metrics of predicted classes, with 95 % intervals from `bootstrap` resamples that `seed` draws.

    If `bootstrap` is 0, no intervals are computed. With a `temperature`, the calibration with this temperature is
    reported too. The temperature should be fitted on other images (`fit_temperature`). Raise `DataError` if no image
    has a label, and `ConfigError` if the temperature is not positive.
    """
    labelled = predictions.labelled()
    if not len(predictions):
        raise DataError(f"there is no image to measure; {len(predictions.skipped):,} could not be decoded")
    if not len(labelled):
        raise DataError(f"none of {len(predictions):,} images has a label, so there is nothing to measure")
    settings = {"resamples": bootstrap, "seed": seed}
    if isinstance(labelled.truth, Numbers):
        raise DataError("a classification report needs classes, but these samples have numbers; use regression_report")
    unlabelled = len(predictions) - len(labelled)
    if isinstance(labelled.truth, MultiLabels):
        return _several_labels(labelled, labelled.truth, settings, worst)
    assert isinstance(labelled.truth, SingleLabels)
    return _one_label(labelled, labelled.truth, unlabelled, settings, temperature, worst)


def _one_label(
    predictions: Predictions,
    truth: SingleLabels,
    unlabelled: int,
    settings: dict[str, int],
    temperature: float | None,
    worst: int,
) -> ClassificationReport:
    logits, labels, count = predictions.logits, truth.values, len(predictions.classes)
    judged = per_sample(logits, labels, scores=predictions.scores)
    correct = truth.hits(judged.predicted)
    calibration = _calibration(judged, correct, 1.0, settings)
    scaled = None
    if temperature is not None:
        again = per_sample(logits, labels, scores=predictions.scores, temperature=temperature)
        scaled = _calibration(again, correct, temperature, settings)
    classes = per_class(labels, judged.predicted, count)
    cells, numbers = np.unique(labels * count + judged.predicted, return_counts=True)
    return ClassificationReport(
        images=len(labels),
        unlabelled=unlabelled,
        skipped=predictions.skipped,
        num_classes=count,
        accuracy=mean_interval(correct, **settings),
        cross_entropy=calibration.cross_entropy,
        top5=mean_interval(top_k(logits, labels, 5), **settings) if count > 5 else None,
        balanced_accuracy=balanced_accuracy_interval(labels, judged.predicted, count, **settings),
        calibration=calibration,
        scaled=scaled,
        multi_label=None,
        per_class=_rows(predictions.classes, classes),
        absent=_absent(predictions.classes, classes),
        confusion=tuple(zip((cells // count).tolist(), (cells % count).tolist(), numbers.tolist(), strict=True)),
        worst=tuple(
            Mistake(
                index=int(predictions.indices[row]),
                key=predictions.keys[row],
                labels=(predictions.classes[labels[row]],),
                predicted=(predictions.classes[judged.predicted[row]],),
                probability=float(judged.confidence[row]),
                loss=float(judged.cross_entropy[row]),
            )
            for row in _worst(~correct, judged.cross_entropy, worst)
        ),
    )


def _several_labels(
    predictions: Predictions, truth: MultiLabels, settings: dict[str, int], worst: int
) -> ClassificationReport:
    targets, count = truth.values, len(predictions.classes)
    logits = binary_logits(predictions.logits) if predictions.scores == "softmax" else predictions.logits
    predicted = logits > 0
    losses = binary_cross_entropy(logits, targets)
    likeliest = predictions.logits.argmax(axis=1)
    exact = exact_match(predicted, targets)
    precisions = average_precision(logits, targets > 0)
    classes = per_class_of_targets(predicted, targets)
    micro, macro = f1_scores(predicted, targets)

    def names(row: Bool[np.ndarray, " classes"]) -> tuple[str, ...]:
        return tuple(predictions.classes[number] for number in np.flatnonzero(row))

    return ClassificationReport(
        images=len(predictions),
        unlabelled=0,
        skipped=predictions.skipped,
        num_classes=count,
        accuracy=mean_interval(truth.hits(likeliest), **settings),
        cross_entropy=mean_interval(losses, **settings),
        top5=None,
        balanced_accuracy=None,
        calibration=None,
        scaled=None,
        multi_label=MultiLabel(
            mean_average_precision=float(np.nanmean(precisions)) if targets.any() else None,
            exact_match=mean_interval(exact, **settings),
            micro_f1=_defined(micro),
            macro_f1=_defined(macro),
        ),
        per_class=_rows(predictions.classes, classes, precisions),
        absent=_absent(predictions.classes, classes),
        confusion=(),
        worst=tuple(
            Mistake(
                index=int(predictions.indices[row]),
                key=predictions.keys[row],
                labels=names(targets[row] > 0),
                predicted=names(predicted[row]),
                probability=0.5 + 0.5 * math.tanh(logits[row, likeliest[row]] / 2),  # the logistic function
                loss=float(losses[row]),
            )
            for row in _worst(~exact, losses, worst)
        ),
    )


def absent_note(report: ClassificationReport, split: str = "") -> str:
    """Return a note that names the classes without images, or an empty text if there is none."""
    if not report.absent:
        return ""
    where = f"in the {split} split" if split else "among the measured images"
    count = f"{len(report.absent):,} of {plural(report.num_classes, 'class')}"
    verb, them = ("has", "it") if len(report.absent) == 1 else ("have", "them")
    return f"{count} {verb} no image {where}, so no metric covers {them}: {listed(report.absent)}"


def _calibration(
    judged: PerSample, correct: Bool[np.ndarray, " n"], temperature: float, settings: dict[str, int]
) -> Calibration:
    return Calibration(
        temperature=temperature,
        error=calibration_error_interval(judged.confidence, correct, **settings),
        cross_entropy=mean_interval(judged.cross_entropy, **settings),
        brier=mean_interval(judged.brier, **settings),
        bins=calibration_bins(judged.confidence, correct),
    )


def _rows(
    classes: tuple[str, ...], metrics: ClassMetrics, precisions: Float64[np.ndarray, " classes"] | None = None
) -> tuple[ClassRow, ...]:
    return tuple(
        ClassRow(
            index=number,
            name=classes[number],
            images=int(metrics.images[number]),
            predicted=int(metrics.predicted[number]),
            accuracy=_defined(metrics.recall[number]),
            precision=_defined(metrics.precision[number]),
            f1=_defined(metrics.f1[number]),
            average_precision=None if precisions is None else _defined(precisions[number]),
        )
        for number in np.flatnonzero(metrics.images + metrics.predicted).tolist()
    )


def _absent(classes: tuple[str, ...], metrics: ClassMetrics) -> tuple[str, ...]:
    return tuple(classes[number] for number in np.flatnonzero(metrics.images == 0).tolist())


def _worst(wrong: Bool[np.ndarray, " n"], losses: Float64[np.ndarray, " n"], count: int) -> Int64[np.ndarray, " worst"]:
    """Return the rows of wrong predictions with the largest losses. Equal losses keep the order of the samples."""
    rows = np.flatnonzero(wrong)
    return rows[np.argsort(-losses[rows], kind="stable")[:count]]


def _defined(value: float) -> float | None:
    """Return None for NaN, which JSON does not have."""
    return None if math.isnan(value) else float(value)
