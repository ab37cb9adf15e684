"""Sections of the report for classifiers: summary, confusion matrix, classes, calibration and largest errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from PIL import Image

from vitrail.charts.lines import legend
from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source
from vitrail.errors import DataError, plural
from vitrail.evaluation.predictions.named import interval_text, named_metrics
from vitrail.evaluation.predictions.report import Calibration, ClassificationReport, ClassRow, Mistake
from vitrail.page import figure, table, thumbnail
from vitrail.transfer.charts import confusion_matrix, reliability_diagram, shorten

__all__ = [
    "MAX_MISTAKES",
    "MAX_NAME",
    "UNDEFINED",
    "calibration_section",
    "class_rows",
    "classes_section",
    "confusion_section",
    "headline",
    "largest_errors",
    "mistakes_section",
    "picture_of",
]

MAX_MATRIX_CLASSES = 40
"""Maximum number of classes for which the confusion matrix is drawn. With more classes, only the most confused pairs
are listed."""

MAX_PAIRS = 40
PAIRS_BESIDE_MATRIX = 10
MAX_CLASSES = 200
MAX_MISTAKES = 20

MAX_NAME = 60
"""Maximum number of letters of a name under a picture."""

UNDEFINED = "-"
"""Text for a metric that was not computed or whose denominator is 0."""


def headline(report: ClassificationReport) -> tuple[str, str]:
    """Return the text of the main metric and of its interval."""
    name, metric = "accuracy", report.accuracy
    if report.multi_label is not None:
        name, metric = "all labels right", report.multi_label.exact_match
    return f"{metric.value:.2%} {name}", interval_text(metric, ".1%")


def class_rows(report: ClassificationReport) -> list[tuple[str, str, str]]:
    """Return table rows with the names, values and intervals of the metrics over all images."""
    return [(one.name, one.value, one.interval or UNDEFINED) for one in named_metrics(report)]


def picture_of(index: int, source: Source) -> Image.Image | None:
    """Return an image of a source, or None if it cannot be decoded."""
    try:
        return to_pil(source[index].image, 3)
    except DataError:
        return None


def confusion_section(report: ClassificationReport) -> Iterator[str]:
    """Yield the confusion matrix of all classes that occur, and the most frequently confused pairs of classes."""
    if report.multi_label is not None:
        return
    positions = {row.index: position for position, row in enumerate(report.per_class)}
    names = [row.name for row in report.per_class]
    cells = [(positions[true], positions[predicted], images) for true, predicted, images in report.confusion]
    wrong = [cell for cell in cells if cell[0] != cell[1]]
    wrong.sort(key=lambda cell: (-cell[2], -cell[2] / report.per_class[cell[0]].images))
    fits = len(names) <= MAX_MATRIX_CLASSES
    yield "<h2>Confusion matrix</h2>" if fits else "<h2>Most confused classes</h2>"
    if fits:
        yield (
            '<p class="dim">Number of images per true class (row) and predicted class (column). The shade is the '
            "fraction of the row.</p>"
        )
        label = f"Confusion matrix of {plural(len(names), 'class')}; the table below lists the most confused pairs."
        yield f'<div class="scroll">\n{confusion_matrix(cells, names, label=label)}\n</div>'
    if not wrong:
        yield "<p>No image was predicted as another class.</p>"
        return
    shown = PAIRS_BESIDE_MATRIX if fits else MAX_PAIRS
    rows = [
        (names[true], names[predicted], f"{images:,}", f"{images / report.per_class[true].images:.1%}")
        for true, predicted, images in wrong[:shown]
    ]
    yield f'<div class="texts">{table(("true class", "predicted as", "images", "of the class"), rows)}</div>'
    if len(wrong) > shown:
        yield f'<p class="dim">and {plural(len(wrong) - shown, "rarer pair")}</p>'


def classes_section(report: ClassificationReport) -> Iterator[str]:
    """Yield a table of at most 200 classes, worst first.

    Classes are sorted by accuracy, or by average precision if images can have several labels.
    """
    multi_label = report.multi_label is not None

    def quality(row: ClassRow) -> tuple[float, int]:
        value = row.average_precision if multi_label else row.accuracy
        return (math.inf if value is None else value), -row.images

    classes = sorted(report.per_class, key=quality)
    rows = [
        (
            row.name,
            f"{row.images:,}",
            *([_percent(row.average_precision)] if multi_label else []),
            _percent(row.accuracy),
            _percent(row.precision),
            _percent(row.f1),
        )
        for row in classes[:MAX_CLASSES]
    ]
    first = ["average precision", "recall"] if multi_label else ["accuracy"]
    yield "<h2>Metrics per class, worst first</h2>"
    yield table(("class", "images", *first, "precision", "F1"), rows)
    if len(classes) > MAX_CLASSES:
        yield f'<p class="dim">and {plural(len(classes) - MAX_CLASSES, "better class")}</p>'


def calibration_section(report: ClassificationReport) -> Iterator[str]:
    """Yield the reliability diagram and the calibration metrics, before and after temperature scaling."""
    before, after = report.calibration, report.scaled
    if before is None:
        return
    columns: list[tuple[str, Calibration]] = [("uncalibrated", before)]
    if after is not None:
        columns.append((f"with temperature {after.temperature:.3g}", after))
    yield "<h2>Calibration</h2>"
    error = f"{100 * before.error.value:.1f} points"
    scaled = "" if after is None else f", and by {100 * after.error.value:.1f} after temperature scaling"
    yield (
        f"<p>Confidence and accuracy differ by {error} on average{scaled}. Dots below the diagonal are images on which "
        "the model is too confident; above it, it is not confident enough.</p>"
    )
    label = "Reliability diagram: accuracy over confidence. " + " ".join(
        f"Calibration error {name}: {one.error.value:.2%}." for name, one in columns
    )
    chart = reliability_diagram(before.bins, None if after is None else after.bins, label=label)
    names = [name for name, _ in reversed(columns)]
    caption = f"Accuracy over confidence, with 95% intervals; a dot's area is its number of images{legend(names)}"
    rows = [
        ("expected calibration error", *(f"{one.error.value:.2%}" for _, one in columns)),
        ("cross-entropy, nats", *(f"{one.cross_entropy.value:.4f}" for _, one in columns)),
        ("Brier score", *(f"{one.brier.value:.4f}" for _, one in columns)),
    ]
    yield '<div class="beside">'
    yield f'<div class="charts"><figure>\n<figcaption>{caption}</figcaption>\n{chart}\n</figure></div>'
    yield table(("metric", *(name for name, _ in columns)), rows)
    yield "</div>"
    if after is not None:
        yield (
            '<p class="dim">The temperature was fitted on the validation split. It divides the logits, so no '
            "prediction changes.</p>"
        )


def mistakes_section(report: ClassificationReport, source: Source) -> Iterator[str]:
    """Yield the wrong predictions with the largest loss. Their pictures are read from `source`."""
    multi_label = report.multi_label is not None
    figures = [_mistake(one, source, multi_label=multi_label) for one in report.worst[:MAX_MISTAKES]]
    yield from largest_errors(figures, "The wrong predictions with the largest loss.", "All predictions are right.")


def largest_errors(figures: Sequence[str], explanation: str, without: str) -> Iterator[str]:
    """Yield the figures of the largest errors with an explanation, or the text `without` if there are no errors."""
    yield "<h2>Largest errors</h2>"
    if not figures:
        yield f"<p>{without}</p>"
        return
    yield f'<p class="dim">{explanation}</p>\n<div class="strip">'
    yield from figures
    yield "</div>"


def _mistake(mistake: Mistake, source: Source, *, multi_label: bool) -> str:
    lines = (
        f"true: {shorten(', '.join(mistake.labels) or 'none', MAX_NAME)}",
        f"predicted: {shorten(', '.join(mistake.predicted) or 'none', MAX_NAME)}",
        f"{mistake.probability:.1%}{' for the likeliest class' if multi_label else ''}",
        shorten(mistake.key, MAX_NAME),
    )
    return figure(thumbnail(picture_of(mistake.index, source), f"{lines[0]}, {lines[1]}"), lines)


def _percent(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:.1%}"
