"""Tests of `vitrail report`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.analysis.summaries.test_comparison import BIT, bundle_of
from vitrail.cli import main


def test_a_page_figures_and_numbers_are_written(
    colour_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle_of(seed=3).save(tmp_path / "model")
    out = tmp_path / "report"
    given = ["report", str(tmp_path / "model"), "--data", str(colour_folder), "--out", str(out), "--images", "8"]
    assert main(given) == 0
    shown = capsys.readouterr().out
    found = json.loads((out / "report.json").read_text())
    assert f"{found['accuracy']['value']:.2%} accuracy on {found['images']} images" in shown
    assert len(found["probes"]) == len(found["similarity"]) == 2
    page = (out / "report.html").read_text()
    assert all(f"<h2>{head}" in page for head in ("What the first layer", "Layers", "Patches", "Embeddings", "Classes"))
    assert "http" not in page.replace("http://www.w3.org", "")
    names = ("distance", "embedding", "entropy", "norms", "probes", "similarity")
    assert sorted(path.stem for path in out.glob("*.svg")) == list(names)
    assert all(ElementTree.parse(out / f"{name}.svg").getroot().tag.endswith("svg") for name in names)
    for name in ("filters", "positions", "patches"):
        with Image.open(out / f"{name}.png") as picture:
            assert min(picture.size) > 4
    assert len(list(csv.reader((out / "embedding.csv").read_text().splitlines()))) == 1 + found["images"]
    assert main([*given, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_a_resnet_has_no_pictures_of_attention(colour_folder: Path, tmp_path: Path) -> None:
    bundle_of(size=(16, 16), **BIT).save(tmp_path / "model")
    out = tmp_path / "report"
    given = ["report", str(tmp_path / "model"), "--data", str(colour_folder), "--out", str(out), "--images", "4"]
    assert main([*given, "--probe-images", "0"]) == 0
    assert sorted(path.name for path in out.iterdir() if path.suffix in (".svg", ".png")) == [
        "distance.svg", "embedding.svg", "patches.png", "similarity.svg",
    ]  # fmt: skip
    assert "Not shown: a network of the architecture" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "x", "--images", "3"], "--images 3: give at least 4"),
        (["--data", "x", "--probe-images", "-1"], "--probe-images -1: give at least 0"),
        ([], "--data is missing: name a data set that the model knows"),
    ],
)
def test_options_are_checked_before_the_model_is_read(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "no-model", *options]) == 2
    assert message in capsys.readouterr().err
