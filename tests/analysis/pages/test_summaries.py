"""Tests of the verdict of a comparison, and of the report's map of embeddings in a real browser."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.analysis.test_comparison import bundle_of, compared, source_of
from tests.browser import CHROMIUM, Browser
from tests.make import make_colour_folder
from vitrail.analysis.comparison import ModelComparison
from vitrail.analysis.overview import overview
from vitrail.analysis.pages.summaries import verdict, write_overview
from vitrail.data.pixels.decode import to_pil
from vitrail.evaluation.metrics.intervals import Metric, PairedDifference
from vitrail.evaluation.outputs import Outputs
from vitrail.report.page import environment


@pytest.mark.slow
@pytest.mark.browser
def test_the_map_shows_the_image_of_a_dot(tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    folder, bundle = make_colour_folder(tmp_path / "a </script> folder", images=5), bundle_of(seed=3)
    source = source_of(folder, bundle)
    found = overview(Outputs(bundle), source, None, "it", bootstrap=0, images=4, probe_images=0)
    write_overview(found, tmp_path)
    mapped = found.embedding
    assert sorted(mapped.shown) == list(range(len(source)))
    with Browser(tmp_path / "profile") as browser:
        browser.show(1280, 900)
        browser.open((tmp_path / "report.html").as_uri())
        near, dots = "document.querySelector('#near {}')", "document.querySelectorAll('#embedding svg .dot')"
        assert browser.value(near.format("img") + ".hidden")
        for number in (0, 7, 2):
            row = mapped.shown[number]
            browser.value(f"{dots}[{number}].scrollIntoView({{block: 'center'}})")
            left, top, side = (
                browser.value(f"{dots}[{number}].getBoundingClientRect().{name}") for name in ("left", "top", "width")
            )
            browser.mouse("move", left + side / 2, top + side / 2)
            caption = browser.value(near.format("figcaption") + ".textContent")
            shown = mapped.keys.index(caption.split(": ")[0])
            assert abs(mapped.points[shown] - mapped.points[row]).max() < 0.05 * abs(mapped.points).max()
            assert caption == f"{mapped.keys[shown]}: {mapped.labels[shown]}"
            url = browser.value(near.format("img") + ".src")
            with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as picture:
                colour = picture.convert("RGB").resize((1, 1)).getpixel((0, 0))
            wanted = to_pil(source[shown].image, 3).resize((1, 1)).getpixel((0, 0))
            assert max(abs(a - b) for a, b in zip(colour, wanted, strict=True)) < 12, "the picture of that image"
        browser.value("document.querySelector('#dots').focus()")
        browser.press("ArrowRight")
        following = mapped.shown[(list(mapped.shown).index(shown) + 1) % len(source)]
        assert browser.value(near.format("figcaption") + ".textContent").startswith(mapped.keys[following])
        assert browser.faults() == []


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
