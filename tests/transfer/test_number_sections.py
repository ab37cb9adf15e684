"""Tests of the sections of a page for predicted numbers, by reading the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.targets import number_targets
from tests.transfer.test_charts import Drawing, values_of
from tests.transfer.test_sections import pictures, section
from vitrail.evaluation.metrics.report import RegressionReport, regression_report
from vitrail.evaluation.outputs import Predictions
from vitrail.transfer import report as sections
from vitrail.transfer.report import headline, number_rows

NAMES = ("age", "<b>weight</b>")


def made(true: Any, predicted: Any, names: tuple[str, ...] = NAMES) -> Predictions:
    truth, outputs = np.asarray(true, np.float64), np.asarray(predicted, np.float32)
    keys = tuple(f"{number}.png" for number in range(len(truth)))
    return Predictions(outputs, number_targets(truth), keys, np.arange(len(truth)), names, scores="numbers")


@pytest.fixture
def two() -> RegressionReport:
    """Four images. The last has no weight, and the second one's age is 3 too large."""
    true = [[1, 100], [2, 200], [3, 300], [6, np.nan]]
    predicted = [[1, 110], [5, 190], [3, 310], [6, 0]]
    return regression_report(made(true, predicted), bootstrap=0)


def test_each_number_has_its_errors_in_its_own_units(two: RegressionReport) -> None:
    assert {name: value for name, value, _ in number_rows(two)} == {
        "mean R²": "0.671", "mean error, in standard deviations": "0.262",
        "age: R²": "0.357", "age: mean absolute error": "0.75", "age: root mean squared error": "1.5",
        "<b>weight</b>: R²": "0.985", "<b>weight</b>: mean absolute error": "10",
        "<b>weight</b>: root mean squared error": "10",
    }  # fmt: skip
    assert headline(two) == ("mean R² 0.671", "")


def test_a_number_that_is_never_known_has_no_metrics() -> None:
    found = regression_report(made([[1, np.nan], [2, np.nan]], [[1, 0], [2, 0]]), bootstrap=0)
    assert number_rows(found)[-1] == ("<b>weight</b>: no image has a known number", "-", "-")
    assert section("scatters", sections.scatters(found)).count("<svg") == 1


def test_scatter_plots_have_a_dot_per_image(two: RegressionReport, read_page: Callable[[str], Any]) -> None:
    text = section("scatters", sections.scatters(two))
    page = read_page(text)
    assert "age" in page.text and "<b>weight</b>" in page.text
    first, second = (Drawing(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S))
    dots = [dot[:2] for dot in first.dots("dot sample")]
    assert np.allclose(values_of(first, dots), [(1, 1), (2, 5), (3, 3), (6, 6)], atol=0.05)
    assert len(second.dots("dot sample")) == 3 and "true 2, predicted 5" in text
    values = np.arange(26.0).reshape(2, 13)
    found = regression_report(made(values, values, tuple("abcdefghijklm")), bootstrap=0)
    text = section("scatters", sections.scatters(found))
    assert text.count("<svg") == 12 and "and 1 more number<" in text


def test_residuals(two: RegressionReport, read_page: Callable[[str], Any]) -> None:
    cells = [text for text in read_page(section("residuals", sections.residuals(two))).text if text.strip()][2:]
    assert cells[:3] == ["number", "images", "mean"] and "5% quantile" in cells[3]
    assert cells[8:12] == ["age", "4", "0.75", "0"] and cells[16:19] == ["<b>weight</b>", "3", "3.333"]


def test_the_largest_errors_have_their_pictures(two: RegressionReport, read_page: Callable[[str], Any]) -> None:
    source = pictures({1: np.full((9, 30, 1), 200, np.uint8)})
    page = read_page(section("errors", sections.errors(two, source)))
    captions = [text for text in page.text if text.strip()][2:]
    assert captions[:4] == ["true age: 2", "predicted: 5", "1.6 standard deviations off", "1.png"]
    assert captions[4] == "no picture" and captions[5].startswith("true <b>weight</b>: ")
    shown = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert shown == ["true age: 2, predicted: 5", "true <b>weight</b>: 200, predicted: 190"]


def test_exact_predictions_have_no_errors_and_those_of_constant_numbers_no_deviations() -> None:
    found = regression_report(made([[5], [5]], [[5], [7]], ("age",)), bootstrap=0)
    text = section("errors", sections.errors(found, pictures({})))
    assert "true age: 5<br>predicted: 7<br>1.png" in text and "standard deviations off" not in text
    found = regression_report(made([[1], [2]], [[1], [2]], ("age",)), bootstrap=0)
    assert "<p>All numbers are predicted exactly.</p>" in section("errors", sections.errors(found, pictures({})))
    many = replace(found, worst=regression_report(made([[0]] * 30, [[1]] * 30, ("age",)), worst=30).worst)
    assert section("errors", sections.errors(many, pictures({}))).count("<figure>") == 20
