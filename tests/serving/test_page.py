"""Tests of the page: its policy, and its use in a real browser."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.browser import CHROMIUM, Browser
from tests.make import dense_bundle, make_masks_folder
from tests.serving.running import Running, serving
from tests.words import model_with_words
from vitrail.cli import main
from vitrail.evaluation.features.index import FeatureIndex
from vitrail.report.drawing import colour_of
from vitrail.weights.answers import USUAL_THRESHOLD, MaskPrediction
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import load


def test_the_page_asks_its_own_server_only(server: Running) -> None:
    answer = server.ask("GET", "/")
    page, policy = answer.body.decode(), answer.headers["content-security-policy"]
    assert answer.status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.findall(r"https?:|//\w|@import|url\(", page.replace("createObjectURL(", ""))
    assert not re.findall(r"\son\w+=|\sstyle=|innerHTML", page)


def test_the_models_of_the_page(server: Running, bundle: Bundle) -> None:
    models = server.ask("GET", "/models").json["models"]
    assert [model["name"] for model in models] == ["flowers", "numbers", "features"]
    assert models[0].pop("batch_threads") >= 1  # measured at the start
    assert models[0] == {
        "name": "flowers", "sha256": weights_sha256(bundle.network), "architecture": "ViT", "image_size": [12, 10],
        "output": "softmax", "classes": 3, "precision": "float32", "metrics": {}, "no_overlays": None,
        "max_batch": 4,
    }  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as started:
        yield started


@pytest.fixture
def files(images: list[bytes], tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for path, image in zip(paths, (images[0], images[1][:60], images[2]), strict=True):
        path.write_bytes(image)
    return paths


PASTE = """
(() => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob("IMAGE"), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], "NAME.png", { type: "image/png" }));
  document.dispatchEvent(new EVENT);
})()
"""
"""Script that pastes or drops an image."""


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_in_a_browser(
    browser: Browser, server: Running, bundles: dict[str, Bundle], files: list[Path], images: list[bytes]
) -> None:
    browser.open(server.url)
    browser.wait("document.querySelectorAll('#card dt').length > 5")
    browser.choose_files("#file", *files)
    browser.wait("document.getElementById('status').textContent === 'Predicted 3 images'")
    shown = browser.value("[...document.querySelectorAll('article')].map((one) => one.innerText)")
    for place in (0, 2):
        (wanted,) = bundles["flowers"].predict([images[place]])
        lines = [line for line in shown[place].splitlines() if line.strip()]
        ranking = [word for label, value in wanted.ranking for word in (label, f"{100 * value:.1f} %")]
        assert lines[:-1] == [f"{place}.png", *ranking] and lines[-1].startswith("Press a name to see")
    assert "the file" in shown[1] and "%" not in shown[1]
    text = base64.b64encode(images[3]).decode()
    events = {
        "pasted": "ClipboardEvent('paste', { clipboardData: data })",
        "dropped": "DragEvent('drop', { dataTransfer: data, cancelable: true })",
    }
    for name, event in events.items():
        browser.value(PASTE.replace("IMAGE", text).replace("NAME", name).replace("EVENT", event))
        browser.wait(f"document.querySelector('article').innerText.startsWith('{name}.png')")
        browser.wait("document.querySelectorAll('article:first-child li').length === 3")
    browser.value("document.getElementById('model').selectedIndex = 1")
    browser.value("document.getElementById('model').dispatchEvent(new Event('change'))")
    assert "3 numbers" in browser.value("document.getElementById('card').innerText")
    assert {url.split("/")[2] for url in browser.requests() if url.startswith("http")} == {f"127.0.0.1:{server.port}"}
    assert browser.faults() == []
    assert browser.value("fetch('http://localhost:1/').then(() => 'sent', () => 'refused')") == "refused"
    assert any("Content Security Policy" in str(fault) for fault in browser.faults())


@pytest.mark.slow
@pytest.mark.browser
def test_overlays_on_the_page(browser: Browser, server: Running, files: list[Path]) -> None:
    browser.show(1000, 700)
    browser.open(server.url)
    browser.wait("document.querySelectorAll('#card dt').length > 5")
    browser.choose_files("#file", files[0], files[1])
    browser.wait("document.getElementById('status').textContent === 'Predicted 2 images'")
    assert browser.value("document.querySelectorAll('article button').length") == 3  # the broken file has none
    shown = "document.querySelector('article img').src"
    caption = "document.querySelector('figcaption').textContent"
    labels = browser.value("[...document.querySelectorAll('li button')].map((one) => one.textContent)")
    pictures = [browser.value(shown)]
    for number in (1, 0):
        browser.value(f"document.querySelectorAll('li button')[{number}].click()")
        browser.wait(f"{caption} === 'The bright parts support {labels[number]} most.'")
        browser.wait(f"{shown}.startsWith('data:image/jpeg')")
        assert browser.value("document.querySelectorAll('[aria-pressed=true]').length") == 1
        pictures.append(browser.value(shown))
    assert len({*pictures}) == 3
    browser.value("document.querySelector('[aria-pressed=true]').click()")
    browser.wait(f"{shown} === '{pictures[0]}' && {caption} === ''")
    browser.value("document.getElementById('model').selectedIndex = 2")
    browser.choose_files("#file", files[2])
    browser.wait("document.querySelector('article button')?.textContent === 'Show attention'")
    browser.value("document.querySelector('article button').click()")
    browser.wait(f"{caption} === 'The model attends to the bright parts.'")
    assert browser.faults() == []


@pytest.mark.slow
@pytest.mark.browser
def test_boxes_and_masks_are_drawn(browser: Browser, tmp_path: Path) -> None:
    folder = make_masks_folder(tmp_path / "drawn", train=2, validation=0, test=0)
    picture = folder / "images/train/001.png"
    bundles = {"boxes": dense_bundle(), "masks": dense_bundle("patches")}
    found: Any = {name: one.predict([picture])[0] for name, one in bundles.items()}
    names = {
        "boxes": [one.label for one in found["boxes"].above(USUAL_THRESHOLD)], "masks": [*found["masks"].shares()]
    }  # fmt: skip
    with serving(bundles) as running:
        browser.open(running.url)
        browser.wait("document.querySelectorAll('#card dt').length > 5")
        for number, name in enumerate(bundles):
            browser.value(f"document.getElementById('model').selectedIndex = {number}")
            browser.choose_files("#file", picture)
            browser.wait(f"document.querySelectorAll('article').length === {number + 1}")
            browser.wait("document.querySelector('article:first-child button')?.textContent === 'Show attention'")
            shown = "[...document.querySelectorAll('article:first-child li b')].map((one) => one.textContent)"
            assert browser.value(shown) == names[name] != []
            drawn = browser.value("document.querySelector('article:first-child img').src").partition(",")[2]
            with Image.open(io.BytesIO(base64.b64decode(drawn))) as image:
                levels = np.asarray(image.convert("RGB")).astype(int)
            assert levels.shape == (round(600 * 43 / 57), 600, 3)
            colours = [colour_of(bundles[name].classes.index(label)) for label in {*names[name]}]
            plain = np.asarray(Image.open(picture).resize((600, levels.shape[0]))).astype(int)
            assert (np.abs(levels - plain).max(axis=2) > 60).mean() > 0.01, "something is drawn"
            if name == "boxes":
                distances = [np.abs(levels - colour).max(axis=2).min() for colour in colours]
                assert max(distances) < 60, "each class has its colour"
    assert browser.faults() == []


@pytest.mark.slow
@pytest.mark.browser
def test_pictures_that_the_browser_cannot_show_and_a_model_that_is_replaced(browser: Browser, tmp_path: Path) -> None:
    folder = make_masks_folder(tmp_path / "drawn", train=1, validation=0, test=0)
    (picture,) = (folder / "images/train").iterdir()
    with Image.open(picture) as image:
        image.save(tmp_path / "scan.tiff")
    before = dense_bundle("patches")
    after = replace(dense_bundle("patches", width=24), metrics={"validation_mean_iou": 0.5})
    renamed = replace(after, classes=("north", "east", "south"))
    with serving({"masks": before}) as running:
        browser.open(running.url)
        browser.wait("document.querySelectorAll('#card dt').length > 5")
        shown = "[...document.querySelectorAll('article:first-child li b')].map((one) => one.textContent)"
        for number, bundle in enumerate((before, after, renamed)):
            asyncio.run(running.service.replace("masks", bundle))
            browser.choose_files("#file", tmp_path / "scan.tiff")
            browser.wait(f"document.querySelectorAll('article').length === {number + 1}")
            browser.wait("document.querySelector('article:first-child button')?.textContent === 'Show attention'")
            (found,) = bundle.predict([picture])
            assert isinstance(found, MaskPrediction) and browser.value(shown) == [*found.shares()]
            hint = browser.value("document.querySelector('article:first-child p.hint').textContent")
            assert hint == "The browser cannot show this kind of file."
        assert "validation mean iou" in browser.value("document.getElementById('card').textContent")
    assert [one for one in browser.faults() if "scan.tiff" not in str(one)] == []


@pytest.mark.slow
@pytest.mark.browser
def test_the_search_on_the_page(browser: Browser, tmp_path: Path) -> None:
    folder, draws = tmp_path / "photos", np.random.default_rng(4)
    for number in range(5):
        (folder / f"class {number % 2}").mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (40, 61, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"class {number % 2}" / f"{number}.png")
    saved, features = model_with_words().save(tmp_path / "model"), tmp_path / "features"
    options = ["--out", str(features), "--no-cache", "--split", "train", "--device", "cpu"]
    assert main(["embed", str(saved), "--data", str(folder), *options]) == 0
    found = "document.querySelectorAll('#found figure').length === 5"
    loaded = "[...document.querySelectorAll('#found img')].every((one) => one.naturalWidth === 61)"
    with serving({"words": load(saved, device="cpu")}, FeatureIndex.open(features)) as running:
        browser.open(running.url)
        browser.wait("!document.getElementById('search').hidden")
        browser.value("document.getElementById('query').value = 'a red wall'")
        browser.value("document.querySelector('#ask button').click()")
        browser.wait(f"{found} && {loaded}")
        browser.choose_files("#file", folder / "class 1" / "3.png")
        browser.wait("document.querySelector('article div > button:last-child')?.textContent === 'Find similar images'")
        browser.value("document.querySelector('article div > button:last-child').click()")
        first = "document.querySelector('#found figcaption')?.textContent"
        browser.wait(f"{first}?.includes('3.png') && {found} && {loaded}")
        assert browser.value(first).startswith("1.000")
    assert browser.faults() == []


@pytest.mark.slow
@pytest.mark.browser
def test_keyboard_dark_and_phone(browser: Browser, server: Running, files: list[Path]) -> None:
    browser.show(360, 640)
    browser.open(server.url)
    browser.wait("document.querySelectorAll('#card dt').length > 5")
    focus = []
    for _ in range(2):
        browser.press("Tab")
        focus.append(browser.value("document.activeElement.id"))
    assert focus == ["model", "file"]
    assert browser.value("getComputedStyle(document.getElementById('drop')).outlineStyle") == "solid"
    browser.choose_files("#file", files[0])
    browser.wait("document.getElementById('status').textContent === 'Predicted 1 image'")
    assert browser.value("document.documentElement.scrollWidth") <= 360
    colours = []
    for scheme in ("light", "dark"):
        browser.show(360, 640, scheme)
        colours.append(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(22, 24, 28)"]
    browser.show(1000, 700)


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_asks_for_the_token(browser: Browser, bundle: Bundle) -> None:
    with serving({"flowers": bundle}, token="secret") as running:
        browser.open(running.url)
        browser.wait("!document.getElementById('access').hidden")
        browser.value("document.getElementById('token').value = 'secret'")
        browser.value("document.getElementById('access').requestSubmit()")
        browser.wait("document.querySelectorAll('#card dt').length > 5")
        assert browser.value("document.getElementById('access').hidden")
