"""All metrics of a model on held-out samples in one record, of classes or of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from vitrail.data.batch import Skipped
from vitrail.data.source import evenly
from vitrail.data.targets import Targets
from vitrail.errors import DataError, listed, plural
from vitrail.evaluation.metrics.classes import (
    CalibrationBin,
    ClassMetrics,
    PerSample,
    average_precision,
    binary_cross_entropy,
    binary_logits,
    calibration_bins,
    f1_scores,
    per_class,
    per_class_of_targets,
    per_sample,
    top_k,
)
from vitrail.evaluation.metrics.intervals import (
    Metric,
    balanced_accuracy_interval,
    calibration_error_interval,
    mean_interval,
)
from vitrail.evaluation.metrics.numbers import number_metrics
from vitrail.evaluation.outputs import Predictions


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


METRICS = {
    "accuracy": ("accuracy", ".2%"),
    "balanced_accuracy": ("balanced accuracy", ".2%"),
    "top5_accuracy": ("top-5 accuracy", ".2%"),
    "mean_average_precision": ("mean average precision", ".2%"),
    "micro_f1": ("micro F1", ".2%"),
    "macro_f1": ("macro F1", ".2%"),
    "exact_match": ("all labels right", ".2%"),
    "cross_entropy": ("cross-entropy, nats", ".4f"),
    "calibration_error": ("calibration error", ".2%"),
}
"""Names and number formats of the metrics over all images, in the order of tables."""


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
    has_several_labels: bool
    """True if images can have several labels. A class is then predicted if its probability is above 0.5."""
    metrics: dict[str, Metric]
    """Metrics over all images, by the names in `METRICS`. A metric that is not defined is missing.

    The likeliest class of an accurate prediction is the label, or one of several labels. `balanced_accuracy` is the
    mean of the per-class accuracies. `top5_accuracy` needs more than five classes. With sigmoid outputs, or if images
    can have several labels, `cross_entropy` is the sum of the binary cross-entropies of all classes, in nats. Images
    that can have several labels also have average precision, F1, and `exact_match`, the fraction of images whose
    predicted classes are exactly their true classes."""
    calibration: Calibration | None
    """Calibration of the probabilities, or None if images can have several labels."""
    scaled: Calibration | None
    """Calibration with the temperature that was given to `report`."""
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
    if labelled.truth.kind == "numbers":
        raise DataError("a classification report needs classes, but these samples have numbers; use regression_report")
    unlabelled = len(predictions) - len(labelled)
    if labelled.truth.kind == "classes":
        return _several_labels(labelled, labelled.truth, settings, worst)
    return _one_label(labelled, labelled.truth, unlabelled, settings, temperature, worst)


def _one_label(
    predictions: Predictions,
    truth: Targets,
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
    metrics = {"accuracy": mean_interval(correct, **settings)}
    if count > 5:
        metrics["top5_accuracy"] = mean_interval(top_k(logits, labels, 5), **settings)
    metrics |= {
        "balanced_accuracy": balanced_accuracy_interval(labels, judged.predicted, count, **settings),
        "cross_entropy": calibration.cross_entropy,
        "calibration_error": calibration.error,
    }
    cells, numbers = np.unique(labels * count + judged.predicted, return_counts=True)
    return ClassificationReport(
        images=len(labels),
        unlabelled=unlabelled,
        skipped=predictions.skipped,
        num_classes=count,
        has_several_labels=False,
        metrics=metrics,
        calibration=calibration,
        scaled=scaled,
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
    predictions: Predictions, truth: Targets, settings: dict[str, int], worst: int
) -> ClassificationReport:
    targets, count = truth.dense, len(predictions.classes)
    logits = binary_logits(predictions.logits) if predictions.scores == "softmax" else predictions.logits
    predicted = logits > 0
    losses = binary_cross_entropy(logits, targets)
    likeliest = predictions.logits.argmax(axis=1)
    exact = (predicted == (targets > 0)).all(axis=1)
    precisions = average_precision(logits, targets > 0)
    classes = per_class_of_targets(predicted, targets)
    micro, macro = f1_scores(predicted, targets)
    mean = float(np.nanmean(precisions)) if targets.any() else math.nan
    scores = {"mean_average_precision": mean, "micro_f1": micro, "macro_f1": macro}
    metrics = {
        "accuracy": mean_interval(truth.hits(likeliest), **settings),
        **{name: Metric(float(value)) for name, value in scores.items() if not math.isnan(value)},
        "exact_match": mean_interval(exact, **settings),
        "cross_entropy": mean_interval(losses, **settings),
    }

    def names(row: Bool[np.ndarray, " classes"]) -> tuple[str, ...]:
        return tuple(predictions.classes[number] for number in np.flatnonzero(row))

    return ClassificationReport(
        images=len(predictions),
        unlabelled=0,
        skipped=predictions.skipped,
        num_classes=count,
        has_several_labels=True,
        metrics=metrics,
        calibration=None,
        scaled=None,
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


# The report of predicted numbers: metrics, residuals and largest errors. Its plain values can be printed, drawn or
# saved.


QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Quantiles of the residuals that a report contains."""


@dataclass(frozen=True)
class OutputRow:
    """The metrics and residuals of one output, which is one of the numbers that the model predicts. A residual is the
    predicted minus the true number."""

    index: int
    name: str
    images: int
    """Number of images for which the number is known."""
    metrics: dict[str, Metric] | None
    """Metrics of the number (`OF_EACH`). If the number is unknown for all images, this field and the following fields
    are None or empty."""
    mean: float | None
    """Mean of the true numbers."""
    deviation: float | None
    """Standard deviation of the true numbers (divided by n)."""
    mean_residual: float | None
    residual_quantiles: tuple[float, ...]
    """Values of the residuals at the quantiles `QUANTILES`."""
    points: tuple[tuple[float, float], ...]
    """Pairs of true and predicted numbers, for a scatter plot. If there are many images, evenly spaced ones are
    used."""


@dataclass(frozen=True)
class LargeError:
    """One of the largest errors."""

    index: int
    """Index of the sample in the source."""
    key: str
    name: str
    """Name of the number."""
    true: float
    predicted: float
    deviations: float | None
    """Absolute error divided by the standard deviation of the true numbers, or None if all true numbers are equal."""


@dataclass(frozen=True)
class RegressionReport:
    """The result of `regression_report`. `vitrail.settings.to_plain` converts it to JSON values."""

    images: int
    """Number of measured images."""
    unlabelled: int
    """Number of images without any known number. They are skipped."""
    skipped: tuple[Skipped, ...]
    """Images that could not be decoded."""
    names: tuple[str, ...]
    """Names of the numbers."""
    metrics: dict[str, Metric]
    """Means over the numbers of the metrics without a unit (`MEANS`)."""
    per_output: tuple[OutputRow, ...]
    """A row for each number, in the order of the outputs."""
    worst: tuple[LargeError, ...]
    """The largest errors, measured in standard deviations, largest first."""


def regression_report(
    predictions: Predictions, *, bootstrap: int = 1000, seed: int = 0, worst: int = 20, points: int = 1000
) -> RegressionReport:
    """Return all metrics of predicted numbers, with 95 % intervals from `bootstrap` resamples that `seed` draws.

    `points` is the maximum number of points of a scatter plot. Raise `DataError` if the targets are not numbers, or if
    no number is known.
    """
    if predictions.truth.kind != "numbers":
        raise DataError("a regression report needs numbers, but these samples have classes; use report")
    labelled = predictions.labelled()
    if not len(labelled):
        raise DataError(f"none of {len(predictions):,} images has a known number, so there is nothing to measure")
    truth, predicted = labelled.truth.values, labelled.logits.astype(np.float64)
    metrics, each = number_metrics(predicted, truth, resamples=bootstrap, seed=seed)
    rows = tuple(
        _row(index, name, predicted[:, index], truth[:, index], one, points)
        for index, (name, one) in enumerate(zip(predictions.classes, each, strict=True))
    )
    return RegressionReport(
        images=len(labelled),
        unlabelled=len(predictions) - len(labelled),
        skipped=predictions.skipped,
        names=predictions.classes,
        metrics=metrics,
        per_output=rows,
        worst=_largest_errors(labelled, predicted - truth, rows, worst),
    )


def _row(
    index: int,
    name: str,
    predicted: Float64[np.ndarray, " n"],
    truth: Float64[np.ndarray, " n"],
    metrics: dict[str, Metric] | None,
    points: int,
) -> OutputRow:
    known = np.flatnonzero(~np.isnan(truth))
    if metrics is None:
        return OutputRow(index, name, 0, None, None, None, None, (), ())
    true, residuals = truth[known], predicted[known] - truth[known]
    shown = known[evenly(len(known), points)]
    return OutputRow(
        index=index,
        name=name,
        images=len(known),
        metrics=metrics,
        mean=float(true.mean()),
        deviation=float(true.std()),
        mean_residual=float(residuals.mean()),
        residual_quantiles=tuple(np.quantile(residuals, QUANTILES).tolist()),
        points=tuple(zip(truth[shown].tolist(), predicted[shown].tolist(), strict=True)),
    )


def _largest_errors(
    predictions: Predictions, residuals: Float64[np.ndarray, "n outputs"], rows: tuple[OutputRow, ...], count: int
) -> tuple[LargeError, ...]:
    """Return the largest errors that are not 0. Equal errors keep the order of the samples."""
    scale = np.array([row.deviation or 0.0 for row in rows])
    errors = np.nan_to_num(np.abs(residuals), nan=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        deviations = np.where(errors > 0, errors / scale, 0.0)
    order = np.argsort(-deviations, axis=None, kind="stable")[:count]
    found = [(int(one) // len(rows), int(one) % len(rows)) for one in order if deviations.flat[one] > 0]
    return tuple(
        LargeError(
            index=int(predictions.indices[row]),
            key=predictions.keys[row],
            name=rows[output].name,
            true=float(predictions.truth.values[row, output]),
            predicted=float(predictions.logits[row, output]),
            deviations=float(deviations[row, output]) if scale[output] else None,
        )
        for row, output in found
    )


# The metrics of a report with their names and number formats, as tables show them.


class NamedMetric(NamedTuple):
    """A metric with its name and its texts."""

    name: str
    metric: Metric
    value: str
    interval: str
    """Text of the interval, or "" if there is none."""


def named_metrics(report: ClassificationReport) -> list[NamedMetric]:
    """Return the metrics over all images that the report has, in the order of tables."""
    named = METRICS
    if report.has_several_labels:
        named = METRICS | {"accuracy": ("likeliest class is a label", ".2%")}
    found = [(name, report.metrics[key], form) for key, (name, form) in named.items() if key in report.metrics]
    return [NamedMetric(name, one, f"{one.value:{form}}", interval_text(one, form)) for name, one, form in found]


def interval_text(metric: Metric, form: str) -> str:
    """Return the text of a metric's interval, or "" if there is none."""
    if metric.low is None or metric.high is None:
        return ""
    return f"{metric.low:{form}} to {metric.high:{form}}"
