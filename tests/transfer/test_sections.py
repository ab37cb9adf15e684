"""Tests of the sections of a page for a classification report, by reading the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.make import MemorySource
from tests.targets import multi_labels, single_labels
from vitrail.evaluation.metrics.report import ClassificationReport, report
from vitrail.evaluation.outputs import Predictions
from vitrail.report.page import environment
from vitrail.transfer import report as sections
from vitrail.transfer.report import headline, summary_rows


def section(name: str, found: dict[str, Any] | None) -> str:
    """Return the HTML of a section."""
    return getattr(environment().get_template("transfer/sections.html").module, name)(found)


def made(guesses: Sequence[tuple[int, int]], classes: int = 4, sure: float = 3.0) -> Predictions:
    """Return predictions from pairs of label and predicted class. Each is a little more certain than the one before."""
    labels = np.asarray([label for label, _ in guesses])
    logits = np.zeros((len(guesses), classes), np.float32)
    for row, (_, guess) in enumerate(guesses):
        logits[row, guess] = sure + row / 100
    keys = tuple(f"{number}.png" for number in range(len(guesses)))
    names = tuple(f"class {number}" for number in range(classes))
    return Predictions(logits, single_labels(labels, len(names)), keys, np.arange(len(guesses)), names)


def several() -> Predictions:
    targets = np.asarray([[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0]], np.uint8)
    logits = np.asarray([[2, 3, -1], [1, -2, -3], [-1, -2, -4], [2, -1, -5]], np.float32)
    return replace(made([(0, 0)] * 4, 3), logits=logits, truth=multi_labels(targets), scores="sigmoid")


def rows(page: Any) -> list[list[str]]:
    """Return the texts of the cells in each row of the page's tables."""
    cells = [text for text in page.text if text.strip()]
    widths: list[int] = []
    for tag in page.names:
        if tag == "tr":
            widths.append(0)
        if tag in ("th", "td"):
            widths[-1] += 1
    start = len(cells) - sum(widths)
    found = []
    for width in widths:
        found.append(cells[start : start + width])
        start += width
    return found


Table = Callable[[str], list[list[str]]]


@pytest.fixture
def table_of(read_page: Callable[[str], Any]) -> Table:
    """Return the rows of the last table in a section."""

    def read(text: str) -> list[list[str]]:
        read_page(text)
        return rows(read_page(text[text.rindex("<table>") : text.rindex("</table>") + 8]))

    return read


def test_the_summary_and_the_headline_have_intervals_if_there_are_any() -> None:
    found = report(made([(0, 0)] * 3 + [(1, 0)], 6), bootstrap=100)
    accuracy = found.metrics["accuracy"]
    assert summary_rows(found)[0] == ("accuracy", "75.00%", f"{accuracy.low:.2%} to {accuracy.high:.2%}")
    assert headline(found) == ("75.00% accuracy", f"{accuracy.low:.1%} to {accuracy.high:.1%}")
    without = report(made([(0, 0), (1, 0)]), bootstrap=0)
    assert summary_rows(without)[0] == ("accuracy", "50.00%", "-") and headline(without) == ("50.00% accuracy", "")


def test_pairs_are_listed_by_how_often_they_are_confused(table_of: Table) -> None:
    guesses = [(0, 0)] * 6 + [(0, 1)] * 2 + [(1, 0)] * 3 + [(1, 1)] + [(2, 0)] * 2 + [(3, 3)]
    text = section("confusion", sections.confusion(report(made(guesses), bootstrap=0)))
    assert table_of(text) == [
        ["true class", "predicted as", "images", "of the class"],
        ["class 1", "class 0", "3", "75.0%"],
        ["class 2", "class 0", "2", "100.0%"],
        ["class 0", "class 1", "2", "25.0%"],
    ]
    assert text.count('<rect class="heat"') == 6 and 'aria-label="Confusion matrix of 4 classes;' in text
    assert "class 0 → class 1: 2 of 8 (25.0%)" in text


def test_classes_that_nothing_is_or_was_taken_for_have_no_row() -> None:
    text = section("confusion", sections.confusion(report(made([(2, 2), (30, 2)], 50), bootstrap=0)))
    assert re.findall(r"<title>(class \d+)</title>", text) == ["class 2", "class 2", "class 30", "class 30"]
    assert "class 30 → class 2: 1 of 1 (100.0%)" in text


def test_of_several_labels_there_is_neither_matrix_nor_calibration() -> None:
    found = report(several(), bootstrap=0, temperature=2.0)
    assert sections.confusion(found) is None and sections.calibration(found) is None


def test_the_worst_class_comes_first(table_of: Table) -> None:
    guesses = [(0, 0)] * 3 + [(1, 0)] + [(1, 1)] * 3 + [(2, 3)] * 2
    assert table_of(section("classes", sections.classes(report(made(guesses, 6), bootstrap=0)))) == [
        ["class", "images", "accuracy", "precision", "F1"],
        ["class 2", "2", "0.0%", "-", "0.0%"],
        ["class 1", "4", "75.0%", "100.0%", "85.7%"],
        ["class 0", "3", "100.0%", "75.0%", "85.7%"],
        ["class 3", "0", "-", "0.0%", "0.0%"],
    ]
    text = section("classes", sections.classes(report(made([(at, at) for at in range(203)], 203), bootstrap=0)))
    assert len(table_of(text)) == 201 and "and 3 better classes" in text


def test_classes_of_several_labels_go_by_average_precision(table_of: Table) -> None:
    found = report(several(), bootstrap=0)
    shown = table_of(section("classes", sections.classes(found)))
    assert shown[0] == ["class", "images", "average precision", "recall", "precision", "F1"]
    wanted = sorted((row.average_precision, row.name) for row in found.per_class if row.average_precision is not None)
    assert [(row[2], row[0]) for row in shown[1:]] == [(f"{value:.1%}", name) for value, name in wanted]


def test_calibration_before_and_after(table_of: Table) -> None:
    found = report(made([(0, 0)] * 5 + [(1, 0)] * 5), bootstrap=0, temperature=3.0)
    before, after = found.calibration, found.scaled
    text = section("calibration", sections.calibration(found))
    assert table_of(text) == [
        ["metric", "uncalibrated", "with temperature 3"],
        ["expected calibration error", f"{before.error.value:.2%}", f"{after.error.value:.2%}"],
        ["cross-entropy, nats", f"{before.cross_entropy.value:.4f}", f"{after.cross_entropy.value:.4f}"],
        ["Brier score", f"{before.brier.value:.4f}", f"{after.brier.value:.4f}"],
    ]
    assert text.count('class="dot one"') == sum(one.images > 0 for one in after.bins)
    assert text.count('class="dot two"') == sum(one.images > 0 for one in before.bins)
    text = section("calibration", sections.calibration(report(made([(0, 0), (1, 0)]), bootstrap=0)))
    assert table_of(text)[0] == ["metric", "uncalibrated"] and 'class="dot two"' not in text


def pictures(images: dict[int, np.ndarray]) -> MemorySource:
    """Return a source in which all other images are missing."""
    return MemorySource([images.get(number, b"") for number in range(30)], labels=[0] * 30)


def test_mistakes_have_their_pictures(read_page: Callable[[str], Any]) -> None:
    found = report(made([(0, 0), (1, 2), (3, 0)]), bootstrap=0)
    source = pictures({2: np.full((9, 30, 1), 200, np.uint8)})
    page = read_page(section("errors", sections.mistakes(found, source)))
    first, second = (f"{one.probability:.1%}" for one in found.worst)
    assert [text for text in page.text if text.strip()][2:] == [
        "true: class 3", "predicted: class 0", first, "2.png",
        "no picture",
        "true: class 1", "predicted: class 2", second, "1.png",
    ]  # fmt: skip
    (image,) = [attributes for tag, attributes in page.tags if tag == "img"]
    assert image["alt"] == "true: class 3, predicted: class 0"
    many: ClassificationReport = report(made([(0, 1)] * 30), bootstrap=0, worst=30)
    assert section("errors", sections.mistakes(many, pictures({}))).count("<figure>") == 20 < len(many.worst)


def test_mistakes_of_several_labels_and_long_names(read_page: Callable[[str], Any]) -> None:
    long = "x" * 200
    predictions = replace(several(), classes=(long, "<b>", "c"), keys=("a/" + "y" * 200 + ".png", "b", "c", "d"))
    found = report(predictions, bootstrap=0)
    text = section("errors", sections.mistakes(found, pictures({})))
    assert f"true: &lt;b&gt;<br>predicted: {'x' * 30}…{'x' * 29}<br>73.1% for the likeliest class<br>b<" in text
    read_page(text)
