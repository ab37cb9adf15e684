"""Tests of the sentences and numbers of the page that compares two models, and of the images that a page skips."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.analysis.test_comparison import bundle_of, compared
from tests.make import make_colour_folder
from vitrail.analysis.comparison import ModelComparison
from vitrail.analysis.pages.comparison_page import verdict
from vitrail.evaluation.metrics.intervals import Metric, PairedDifference
from vitrail.report.page import environment


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ModelComparison:
    folder = make_colour_folder(tmp_path_factory.mktemp("data") / "colours", images=2)
    return compared(folder, bundle_of(seed=3), bundle_of(seed=4), bootstrap=0, examples=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("difference", "p", "better", "size"),
    [
        (Metric(0.05, 0.01, 0.09), 0.03, "one", "+5.00 points, 95% interval +1.00 to +9.00, p = 0.030"),
        (Metric(-0.05, -0.09, -0.01), 0.0001, "two", "+5.00 points, 95% interval +1.00 to +9.00, p < 0.001"),
        (Metric(-0.02, -0.05, 0.00001), 0.5, None, "+2.00 points, 95% interval +0.00 to +5.00, p = 0.500"),
        (Metric(0.0), 1.0, None, "+0.00 points, p = 1.000"),
    ],
)
def test_the_verdict_is_about_the_more_accurate_model(
    found: ModelComparison, difference: Metric, p: float, better: str | None, size: str
) -> None:
    sentence = verdict(replace(found, paired=PairedDifference(5, 2, 1, 1, difference, p)))
    assert sentence.endswith(f" ({size}).")
    if better is None:
        assert sentence.startswith("9 images do not show that ")
    else:
        other = {"one": "two", "two": "one"}[better]
        assert sentence.startswith(f"{better} is more accurate than {other} on 9 images ")


def skipped(images: list[tuple[str, str]]) -> str:
    return environment().get_template("report/parts.html").module.skipped(images)


def test_the_first_skipped_images_are_listed_with_their_reasons() -> None:
    assert not skipped([])
    text = skipped([("a<b>.jpg", "is cut off"), *((f"{number}.jpg", "is empty") for number in range(20))])
    assert "21 images could not be decoded" in text and "a&lt;b&gt;.jpg" in text and "is cut off" in text
    assert text.count("is empty") == 19
