"""Tests of the interactive page in a real browser: mouse, touch, keys, files, and its look."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tests.analysis.pages.interactive.conftest import coded
from tests.browser import CHROMIUM, Browser
from vitrail.analysis.pages.interactive import AttentionMaps, make_page

pytestmark = [pytest.mark.slow, pytest.mark.browser]

MAX_BYTES = 5_000_000
MakeMaps = Callable[..., AttentionMaps]
PICTURE = np.random.default_rng(1).integers(0, 255, (30, 50, 3), dtype=np.uint8)
PREFIX, ROWS, COLUMNS = 3, 3, 5


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as started:
        yield started


@pytest.fixture(scope="module")
def maps(make_maps: MakeMaps) -> AttentionMaps:
    return make_maps()


@pytest.fixture(scope="module")
def page(maps: AttentionMaps, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "a rose.html"
    made, _ = make_page(maps, PICTURE, title="a rose.jpg", predictions=[("cat", "91 %")], max_bytes=MAX_BYTES)
    path.write_text(made, encoding="utf-8")
    return path


@pytest.fixture
def shown(browser: Browser, page: Path) -> Iterator[Browser]:
    """The page in a wide window. Afterwards, there must be no message, and nothing may have been requested."""
    browser.show(1280, 900)
    show(browser, page)
    yield browser
    assert browser.faults() == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [page.as_uri()]


def show(browser: Browser, path: Path, fragment: str = "") -> None:
    browser.open("about:blank")
    browser.open(path.as_uri() + fragment)
    browser.events[:] = [event for event in browser.events if "about:blank" not in str(event)]
    browser.wait("shown !== null")


def readout(browser: Browser) -> str:
    settle(browser)
    return str(browser.value("document.getElementById('readout').textContent"))


def settle(browser: Browser) -> None:
    """Wait until what was changed is drawn."""
    browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def choose(browser: Browser, name: str, value: str | int) -> None:
    """Choose an option of a list."""
    browser.value(f"byId('{name}').value = '{value}'; byId('{name}').dispatchEvent(new Event('input'))")
    settle(browser)


def centre(browser: Browser, row: int, column: int) -> tuple[float, float]:
    """Return the centre of a patch in the window. The patches cover 40 x 24 of 50 x 30 pixels, from (5, 3)."""
    browser.value("canvas.scrollIntoView({ block: 'center' })")
    left, top, width, height = browser.value(
        "(({ left, top, width, height }) => [left, top, width, height])(canvas.getBoundingClientRect())"
    )
    return left + width * (5 + 8 * (column + 0.5)) / 50, top + height * (3 + 8 * (row + 0.5)) / 30


def click(browser: Browser, row: int, column: int, *, shift: bool = False) -> None:
    x, y = centre(browser, row, column)
    for kind in ("move", "press", "release"):
        browser.mouse(kind, x, y, shift=shift)
    settle(browser)


def value_in(text: str) -> tuple[float, int]:
    """Return the value and the rank of the patch under the pointer."""
    found = re.search(r": (-?[\d.e-]+), rank (\d+) of 15\.", text)
    assert found is not None, text
    return float(found[1]), int(found[2])


def near(maps: AttentionMaps, layer: int, head: int, query: int, key: int) -> float:
    """Return the attention, which the page may miss by one step of its codes and by the digits that it shows."""
    row = maps.attention[layer, head, query].astype(np.float64)
    step = 2 * np.sqrt(row.max() * row[key]) / 255 + row.max() / 255**2
    return pytest.approx(row[key], abs=step + 5e-4 * row[key])


def test_all_values_are_numpys(shown: Browser, maps: AttentionMaps) -> None:
    wanted = coded(maps.attention).reshape(6, 18, 18)
    script = "Array.from({ length: 18 }, (_, one) => Array.from(weights.values(MAP, [one], REVERSED)))"
    for number in range(6):
        found = np.array(shown.value(script.replace("MAP", str(number)).replace("REVERSED", "false")))
        np.testing.assert_allclose(found, wanted[number], rtol=1e-12)
        found = np.array(shown.value(script.replace("MAP", str(number)).replace("REVERSED", "true")))
        np.testing.assert_allclose(found, wanted[number].T, rtol=1e-12)


def test_hovering_previews_a_patch_and_reads_a_pinned_one(shown: Browser, maps: AttentionMaps) -> None:
    assert readout(shown).startswith("Layer 1, head 0. Attention of class token. Largest: row ")
    for row, column in ((0, 0), (2, 4), (1, 2)):
        shown.mouse("move", *centre(shown, row, column))
        text, place = readout(shown), PREFIX + row * COLUMNS + column
        name = f"row {row}, column {column}"
        assert text.startswith(f"Layer 1, head 0. Attention of {name} to {name}: ")
        patches = maps.attention[1, 0, place, PREFIX:]
        assert value_in(text)[0] == near(maps, 1, 0, place, place)
        best = divmod(int(patches.argmax()), COLUMNS)
        assert f"Largest: row {best[0]}, column {best[1]}, " in text
    click(shown, 1, 2)
    for row, column in ((0, 3), (2, 1)):
        shown.mouse("move", *centre(shown, row, column))
        text, key = readout(shown), PREFIX + row * COLUMNS + column
        assert text.startswith(f"Layer 1, head 0. Attention of row 1, column 2 to row {row}, column {column}: ")
        value, rank = value_in(text)
        patches = maps.attention[1, 0, PREFIX + 7, PREFIX:]
        assert value == near(maps, 1, 0, PREFIX + 7, key)
        assert rank == 1 + (patches > patches[key - PREFIX]).sum()
    click(shown, 1, 2)
    shown.mouse("move", 5, 5)
    assert "Attention of class token." in readout(shown)


def test_regions_directions_and_differences(shown: Browser, maps: AttentionMaps) -> None:
    shown.mouse("move", *centre(shown, 0, 1))
    shown.mouse("press", *centre(shown, 0, 1))
    shown.mouse("move", *centre(shown, 1, 3))
    assert "Attention of rows 0 to 1, columns 1 to 3 (mean of 6)" in readout(shown)
    shown.mouse("release", *centre(shown, 1, 3))
    shown.mouse("move", *centre(shown, 2, 0))
    region = PREFIX + np.array([1, 2, 3, 6, 7, 8])
    weights = coded(maps.attention[1, 0])
    assert value_in(readout(shown))[0] == pytest.approx(weights[region, PREFIX + 10].mean(), rel=1e-3)
    shown.press("d")
    text = readout(shown)
    assert "Attention of row 2, column 0 to rows 0 to 1, columns 1 to 3 (mean of 6): " in text
    assert value_in(text)[0] == pytest.approx(weights[PREFIX + 10, region].mean(), rel=1e-3)
    shown.press("d")
    click(shown, 2, 4, shift=True)
    shown.mouse("move", *centre(shown, 1, 0))
    text, difference = readout(shown), weights[region].mean(axis=0) - weights[PREFIX + 14]
    assert "to row 1, column 0 less that of row 2, column 4 to row 1, column 0: " in text
    assert value_in(text) == (
        pytest.approx(difference[PREFIX + 5], rel=1e-3), 1 + (difference[PREFIX:] > difference[PREFIX + 5]).sum()
    )  # fmt: skip
    assert shown.value("document.getElementById('low').textContent").startswith("-")
    assert shown.value("document.querySelectorAll('#pins button').length") == 2
    shown.value("document.querySelector('#pins button').click()")
    assert "Attention of row 2, column 4" in readout(shown)


def test_tokens_before_the_patches(shown: Browser, maps: AttentionMaps) -> None:
    names = shown.value("tokenButtons.map(({ button }) => button.textContent)")
    assert names == ["class token", "register 0", "register 1", "all patches"]
    weights = coded(maps.attention[1, 0])
    shown.value("tokenButtons[2].button.click()")
    shown.mouse("move", *centre(shown, 0, 4))
    assert "Attention of register 1 to row 0, column 4: " in readout(shown)
    assert value_in(readout(shown))[0] == pytest.approx(weights[2, PREFIX + 4], rel=1e-3)
    assert float(shown.value("tokenButtons[1].button.title")) == pytest.approx(weights[2, 1], rel=1e-3)
    shown.value("tokenButtons[3].button.click()")
    assert "Attention of all patches (mean) to row 0" in readout(shown)


def test_rollout_and_relevance(shown: Browser, maps: AttentionMaps) -> None:
    for view, number, values, title in (
        ("rollout", 0, maps.rollout, "Attention rollout"),
        ("relevance", 0, maps.relevance[0][1], "Relevance for </script>a & b"),
        ("relevance", 1, maps.relevance[1][1], "Relevance for cat"),
    ):
        for name, chosen in (("class", number), ("view", view)):
            choose(shown, name, chosen)
        shown.mouse("move", *centre(shown, 2, 3))
        text = readout(shown)
        assert text.startswith(f"{title}. row 2, column 3: ")
        value, rank = value_in(text)
        assert value == pytest.approx(values[2, 3], rel=1e-3) and rank == 1 + (values > values[2, 3]).sum()
    assert shown.value("byId('class').options.length") == 2


def test_keys(shown: Browser) -> None:
    shown.value("stage.focus({ focusVisible: true })")
    said = "document.getElementById('said').textContent"
    assert "Attention of row 1, column 2 to" in readout(shown)
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowLeft"):  # the last one stays at the edge
        shown.press(key)
    assert "Attention of row 0, column 0 to" in readout(shown) and shown.value(said) == readout(shown)
    shown.press("ArrowRight", shift=True)
    shown.press("ArrowDown", shift=True)
    assert "Attention of rows 0 to 1, columns 0 to 1 (mean of 4)" in readout(shown)
    shown.press("p")
    shown.press("ArrowDown")
    assert "(mean of 4) to row 2, column 1: " in readout(shown)
    shown.press("P", shift=True)
    assert " less that of row 2, column 1" in readout(shown)
    shown.press("Escape")
    for keys, start in (("[[", "Layer 0, head 0."), ("..", "Layer 0, head 2."), (",]", "Layer 1, head 1.")):
        for key in keys:
            shown.press(key)
        assert readout(shown).startswith(start)
    shown.press("c")
    shown.press("d")
    assert "Attention of row 2, column 1 to class token: " in readout(shown)
    shown.press("Enter")
    assert "to row 2, column 1: " in readout(shown)
    shown.press("?")
    assert shown.value("byId('keys').open")
    shown.press("Escape")
    assert not shown.value("byId('keys').open") and "to row 2, column 1: " in readout(shown)
    shown.value("byId('has-keys').checked = false")
    shown.press("[")
    assert readout(shown).startswith("Layer 1, ")


def test_the_scale(shown: Browser, maps: AttentionMaps) -> None:
    weights = coded(maps.attention)[:, :, 0, PREFIX:].reshape(6, 15)
    ends = "[byId('low').textContent, byId('high').textContent]"
    settle(shown)
    assert [float(text) for text in shown.value(ends)] == pytest.approx([weights[3].min(), weights[3].max()], rel=1e-3)
    for name, value in (("scale", "all"), ("form", "log")):
        choose(shown, name, value)
    settle(shown)
    low, high = shown.value(ends)
    assert high.endswith(" (logarithmic)")
    assert [float(low), float(high.split()[0])] == pytest.approx([weights.min(), weights.max()], rel=1e-3)
    found = np.array(shown.value("Array.from(shown.values, shown.scale)"))
    start = max(weights.min(), weights.max() / 10_000)
    np.testing.assert_allclose(found, np.log(weights[3].clip(start) / start) / np.log(weights.max() / start), atol=1e-9)
    levels = np.array(
        shown.value("cells.map(({ canvas }) => [...canvas.getContext('2d').getImageData(0, 0, 5, 3).data])")
    )
    brightest = levels.reshape(6, 15, 4)[:, :, :3].sum(axis=2)
    assert np.unravel_index(brightest.argmax(), (6, 15)) == np.unravel_index(weights.argmax(), (6, 15))


def test_the_address_keeps_the_state(shown: Browser, page: Path) -> None:
    assert shown.value("location.hash") == ""
    click(shown, 0, 2)
    click(shown, 2, 4, shift=True)
    shown.press("[")
    shown.press("d")
    shown.wait("location.hash === '#layer=0&a=0.2&b=2.4&direction=from'")
    settle(shown)
    before = shown.value("[...shown.values]")
    show(shown, page, "#layer=0&a=0.2&b=2.4&direction=from")
    assert shown.value("[...shown.values]") == before
    shown.value("location.hash = '#layer=7&head=1&a=t9&b=0.1-1.3&view=nothing&strength=101&class=x'")
    assert readout(shown).startswith("Layer 1, head 1. Attention of class token. ")
    shown.press("Escape")
    shown.press(",")
    shown.wait("location.hash === ''")


def test_files(shown: Browser, maps: AttentionMaps, tmp_path: Path) -> None:
    shown.download_to(tmp_path)
    click(shown, 1, 1)
    names = [f"a rose-layer-1-head-0.{kind}" for kind in ("png", "svg", "csv")]
    for kind, name in zip(("png", "svg", "csv"), names, strict=True):
        shown.value(f"byId('{kind}').click()")
        while not (tmp_path / name).exists():
            settle(shown)
    with Image.open(tmp_path / names[0]) as picture:
        assert picture.size == (550, 330)
    weights = coded(maps.attention[1, 0, PREFIX + 6])
    rows = list(csv.DictReader(io.StringIO((tmp_path / names[2]).read_text())))
    assert rows[1]["token"] == "register 0" and rows[3 + 7] == {
        "map": "Layer 1, head 0", "direction": "to", "query": "row 1, column 1", "less": "", "token": "patch",
        "row": "1", "column": "2", "value": rows[10]["value"],
    }  # fmt: skip
    np.testing.assert_allclose([float(row["value"]) for row in rows], weights, rtol=1e-12)
    drawn = ElementTree.fromstring((tmp_path / names[1]).read_text())
    titles = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "a rose: Layer 1, head 0" and len(titles) == 16
    boxes = [element.attrib for element in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(boxes) == 15 + 2
    assert [float(boxes[7][name]) for name in ("x", "y", "width", "height")] == [5 + 16, 3 + 8, 8, 8]


def test_the_table(shown: Browser, maps: AttentionMaps) -> None:
    shown.value("byId('table').open = true")
    settle(shown)
    shown.wait("byId('table').querySelectorAll('tr').length === 1 + 3 + 3")
    cells = shown.value(
        "[...byId('table').querySelectorAll('tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    )
    weights = coded(maps.attention[1, 0, 0])
    found = [float(text) for row in cells[1:4] for text in row[1:]]
    np.testing.assert_allclose(found, weights[PREFIX:], rtol=1e-3)
    assert cells[0] == ["", "0", "1", "2", "3", "4"] and cells[5][0] == "register 0"
    assert float(cells[5][1]) == pytest.approx(weights[1], rel=1e-3)


def test_touch(shown: Browser) -> None:
    shown.show(360, 740)
    settle(shown)
    shown.touch(centre(shown, 2, 3))
    assert "Attention of row 2, column 3" in readout(shown)
    shown.touch(*(centre(shown, 1, column) for column in range(1, 5)))
    assert "Attention of rows 1 to 1, columns 1 to 4 (mean of 4)" in readout(shown)


def test_a_model_without_class_token_and_head(browser: Browser, make_maps: MakeMaps, tmp_path: Path) -> None:
    maps = make_maps(prefix=(), relevance=(), area=(-5.0, 3.0, 60.0, 24.0))
    (tmp_path / "a.html").write_text(make_page(maps, PICTURE, title="a", max_bytes=MAX_BYTES)[0], encoding="utf-8")
    browser.show(1280, 900)
    show(browser, tmp_path / "a.html")
    assert readout(browser).startswith("Layer 1, head 0. Attention of all patches (mean). Largest: ")
    assert browser.value("[...byId('view').options].map((one) => one.value)") == ["attention", "rollout"]
    browser.value("stage.focus()")
    browser.press("p")
    browser.press("c")
    assert "Attention of all patches (mean)" in readout(browser)
    # The patches are wider than the picture, so that the drawing is as wide as the patches.
    assert browser.value("frameOf(about)") == {"x": -5, "y": 0, "width": 60, "height": 30}
    assert browser.faults() == []


def test_a_page_without_attention_of_heads(browser: Browser, make_maps: MakeMaps, tmp_path: Path) -> None:
    page, _ = make_page(make_maps(), PICTURE, title="a", max_bytes=0)
    (tmp_path / "a.html").write_text(page, encoding="utf-8")
    show(browser, tmp_path / "a.html")
    assert readout(browser).startswith("Attention rollout. Largest: ")
    browser.press("c")
    assert browser.value("document.querySelectorAll('.attention:not([hidden])').length") == 0
    assert browser.faults() == []
