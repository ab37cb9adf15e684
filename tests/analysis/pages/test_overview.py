"""Tests of the report's map of embeddings in a real browser."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from tests.analysis.test_comparison import bundle_of, source_of
from tests.browser import CHROMIUM, Browser
from tests.make import make_colour_folder
from vitrail.analysis.overview import overview
from vitrail.analysis.pages.overview_page import write_overview
from vitrail.data.pixels.decode import to_pil
from vitrail.evaluation.outputs import Outputs


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
