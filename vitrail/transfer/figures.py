"""What a page shows of a model's figures: what is taken for what, each class, calibration, the worst mistakes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source
from vitrail.errors import DataError, plural
from vitrail.evaluation.predictions.bootstrap import LEVEL, Figure
from vitrail.evaluation.predictions.report import Calibration, ClassificationReport, ClassRow, Mistake
from vitrail.page import figure, table, thumbnail
from vitrail.transfer.charts import heat_map, key, reliability_diagram, shorten

__all__ = ["calibration_section", "classes_section", "confusion_section", "mistakes_section", "summary_section"]

MOST_IN_MATRIX = 40
"""Classes that a confusion matrix shows. Of more, the pairs that are confused most often are listed."""

MOST_PAIRS = 40
PAIRS_BESIDE_MATRIX = 10
MOST_CLASSES = 200
MOST_MISTAKES = 20

LONGEST = 60
"""Letters of a name under a picture."""

UNKNOWN = "-"
"""Where a figure would be 0 / 0, or was not asked for."""


def summary_section(report: ClassificationReport, split: str) -> Iterator[str]:
    """The figures of all images together, with their intervals."""
    several = report.multi_label
    rows: list[tuple[str, Figure | None, str]] = [
        ("accuracy" if several is None else "likeliest class is a label", report.accuracy, ".2%"),
        ("balanced accuracy", report.balanced_accuracy, ".2%"),
        ("top-5 accuracy", report.top5, ".2%"),
    ]
    if several is not None:
        for name, value in (
            ("mean average precision", several.mean_average_precision),
            ("F1 over all answers", several.micro_f1),
            ("F1, mean over classes", several.macro_f1),
        ):
            rows.append((name, None if value is None else Figure(value), ".2%"))
        rows.append(("all labels right", several.exact_match, ".2%"))
    rows.append(("cross-entropy, nats", report.cross_entropy, ".4f"))
    yield table(
        ("figure", split, f"{LEVEL:.0%} interval"),
        [
            (name, f"{one.value:{form}}", UNKNOWN if one.low is None else f"{one.low:{form}} to {one.high:{form}}")
            for name, one, form in rows
            if one is not None
        ],
    )


def confusion_section(report: ClassificationReport) -> Iterator[str]:
    """The matrix of the classes that any image has or was taken for, and the pairs that are confused most often."""
    if report.multi_label is not None:
        return
    places = {row.index: place for place, row in enumerate(report.per_class)}
    names = [row.name for row in report.per_class]
    cells = [(places[true], places[predicted], images) for true, predicted, images in report.confusion]
    wrong = [cell for cell in cells if cell[0] != cell[1]]
    wrong.sort(key=lambda cell: (-cell[2], -cell[2] / report.per_class[cell[0]].images))
    fits = len(names) <= MOST_IN_MATRIX
    yield "<h2>What is taken for what</h2>"
    if fits:
        yield '<p class="dim">Images of each class, by what they were taken for. A shade is a share of its row.</p>'
        label = f"Confusion matrix of {plural(len(names), 'class')}; the table below lists what is confused most often."
        yield f'<div class="scroll">\n{heat_map(cells, names, label=label)}\n</div>'
    if not wrong:
        yield "<p>No image was taken for another class.</p>"
        return
    most = PAIRS_BESIDE_MATRIX if fits else MOST_PAIRS
    rows = [
        (names[true], names[predicted], f"{images:,}", f"{images / report.per_class[true].images:.1%}")
        for true, predicted, images in wrong[:most]
    ]
    yield f'<div class="texts">{table(("class", "taken for", "images", "of the class"), rows)}</div>'
    if len(wrong) > most:
        yield f'<p class="dim">and {plural(len(wrong) - most, "rarer pair")}</p>'


def classes_section(report: ClassificationReport) -> Iterator[str]:
    """At most the 200 worst. Where images can have several labels, by average precision."""
    several = report.multi_label is not None

    def goodness(row: ClassRow) -> tuple[float, int]:
        value = row.average_precision if several else row.accuracy
        return (math.inf if value is None else value), -row.images

    shown = sorted(report.per_class, key=goodness)
    rows = [
        (
            row.name,
            f"{row.images:,}",
            *([_percent(row.average_precision)] if several else []),
            _percent(row.accuracy),
            _percent(row.precision),
            _percent(row.f1),
        )
        for row in shown[:MOST_CLASSES]
    ]
    first = ["average precision", "recall"] if several else ["accuracy"]
    yield "<h2>Each class, the worst first</h2>"
    yield table(("class", "images", *first, "precision", "F1"), rows)
    if len(shown) > MOST_CLASSES:
        yield f'<p class="dim">and {plural(len(shown) - MOST_CLASSES, "better class")}</p>'


def calibration_section(report: ClassificationReport) -> Iterator[str]:
    before, after = report.calibration, report.scaled
    if before is None:
        return
    columns: list[tuple[str, Calibration]] = [("as it is", before)]
    if after is not None:
        columns.append((f"with temperature {after.temperature:.3g}", after))
    yield "<h2>How far to trust its probabilities</h2>"
    off = f"{100 * before.error.value:.1f} points off on average"
    then = "" if after is None else f", and {100 * after.error.value:.1f} with a temperature of {after.temperature:.3g}"
    yield (
        f"<p>What it claims is {off}{then}. A dot above the diagonal is of images that were right more often than it "
        "claimed, one below of images that were right less often.</p>"
    )
    label = "Reliability diagram: accuracy over confidence. " + " ".join(
        f"Calibration error {name}: {one.error.value:.2%}." for name, one in columns
    )
    drawn = reliability_diagram(before.bins, None if after is None else after.bins, label=label)
    names = [name for name, _ in reversed(columns)]
    caption = f"Accuracy over confidence; areas are numbers of images{key(names)}"
    yield f'<div class="charts"><figure>\n<figcaption>{caption}</figcaption>\n{drawn}\n</figure></div>'
    rows = [
        ("expected calibration error", *(f"{one.error.value:.2%}" for _, one in columns)),
        ("cross-entropy, nats", *(f"{one.cross_entropy.value:.4f}" for _, one in columns)),
        ("Brier score", *(f"{one.brier.value:.4f}" for _, one in columns)),
    ]
    yield table(("figure", *(name for name, _ in columns)), rows)
    if after is not None:
        yield (
            '<p class="dim">The temperature was fitted on other images. Logits are divided by it, which changes no '
            "prediction.</p>"
        )


def mistakes_section(report: ClassificationReport, source: Source) -> Iterator[str]:
    yield "<h2>The worst mistakes</h2>"
    if not report.worst:
        yield "<p>There are none.</p>"
        return
    yield '<p class="dim">Those with the largest loss: where it was surest of something else.</p>\n<div class="strip">'
    yield from (_mistake(one, source, several=report.multi_label is not None) for one in report.worst[:MOST_MISTAKES])
    yield "</div>"


def _mistake(mistake: Mistake, source: Source, *, several: bool) -> str:
    try:
        picture = to_pil(source[mistake.index].image, 3)
    except DataError:
        picture = None
    lines = (
        f"true: {shorten(', '.join(mistake.labels) or 'none', LONGEST)}",
        f"predicted: {shorten(', '.join(mistake.predicted) or 'none', LONGEST)}",
        f"{mistake.probability:.1%}{' for its likeliest class' if several else ''}",
        shorten(mistake.key, LONGEST),
    )
    return figure(thumbnail(picture, f"{lines[0]}, {lines[1]}"), lines)


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"
