"""Tests of the page of a data check: it is complete and valid, and no name can become markup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.data.check.report import check_data, page
from vitrail.data.sources import open_data
from vitrail.data.splits import Splits

EVIL = "<script>alert('1 & 2')<"


@pytest.fixture
def evil(tmp_path: Path) -> Splits:
    """Class folders whose names are markup, with a copy and with a file that is not an image."""
    random = np.random.default_rng(0)
    for name in (EVIL, "b\"'>"):
        (tmp_path / name).mkdir()
        for number in range(6):
            pixels = random.integers(0, 256, (20 + 100 * number, 31, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"<b>{number}.png")
    (tmp_path / EVIL / "copy&.png").write_bytes((tmp_path / EVIL / "<b>0.png").read_bytes())
    (tmp_path / EVIL / "broken.png").write_text("<img src=x>")
    return open_data(str(tmp_path), validation_share=0.0)


def test_names_are_never_markup_and_findings_say_what_to_do(evil: Splits, read_page: Callable[[str], Any]) -> None:
    report = check_data(evil)
    reader = read_page(page(report, evil, "<h1>evil</h1>"))
    assert {*reader.names} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "article", "span", "div", "table",
        "thead", "tbody", "tr", "th", "td", "figure", "img", "figcaption", "br", "strong", "wbr",
    }  # fmt: skip
    assert reader.names.count("h1") == 1
    assert EVIL in reader.text and "Check of <h1>evil</h1>" in reader.text
    assert f"train: {EVIL}/<b>0.png" in reader.text
    shown = " ".join(reader.text)
    for finding in report.findings:
        assert finding.text in shown and finding.training in shown and finding.advice in shown
    assert {"undecodable-in-train", "duplicates"} <= {finding.kind for finding in report.findings}
    assert "no picture" in shown


def test_a_clean_set_has_a_page_too(colour_folder: Path, read_page: Callable[[str], Any]) -> None:
    splits = open_data(str(colour_folder), validation_share=0.1)
    text = page(check_data(splits), splits, "colours")
    reader = read_page(text)
    assert "no problem found" in text and "prefers-color-scheme: dark" in text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in reader.tags
    assert reader.names.count("img") == 15


@pytest.mark.slow
def test_pictures_are_bounded(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:02}").mkdir()
        for name in ("a", "b", "c"):
            Image.new("L", (4, 4), number).save(tmp_path / f"{number:02}" / f"{name}.png")
    splits = open_data(str(tmp_path), validation_share=0.0)
    text = page(check_data(splits), splits, "many")
    assert text.count("<img") == 24 * 3 + 12 * 3 + 12
    assert "and 48 more of this kind" in text and "and 36 more classes<" in text
