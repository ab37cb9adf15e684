"""Tests of `vitrail compare`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.analysis.test_comparison import BIT, bundle_of
from tests.cli.conftest import Cli


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    bundle_of(seed=3).save(tmp_path / "a-vit")
    bundle_of(size=(16, 16), **BIT).save(tmp_path / "a-resnet")
    return [str(tmp_path / "a-vit"), str(tmp_path / "a-resnet")]


@pytest.mark.slow
def test_a_page_figures_and_numbers_are_written(
    models: list[str], colour_folder: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "compared"
    words = ["compare", *models, "--data", str(colour_folder), "--split", "train", "--out", str(out)]
    shown = cli.call(*words)
    assert "a-vit" in shown.out and "points, 95% interval" in shown.out and shown.out.endswith("compare.html\n")
    found = json.loads((out / "compare.json").read_text())
    assert [one["name"] for one in found["models"]] == ["a-vit", "a-resnet"]
    assert found["verdict"] in shown.out
    page = (out / "compare.html").read_text()
    assert found["verdict"].replace("<", "&lt;") in page and "http" not in page.replace("http://www.w3.org", "")
    for name in ("similarity.svg", "distance.svg"):
        assert ElementTree.parse(out / name).getroot().tag.endswith("svg")
    rows = list(csv.DictReader((out / "classes.csv").read_text().splitlines()))
    assert {row["class"] for row in rows} == {"blue", "green", "red"}
    assert float(rows[0]["accuracy of a-vit"]) <= 1
    assert "exists already; choose another folder, or replace it with --overwrite" in cli.refuses(*words, "--json")
    assert cli.json(*words, "--overwrite") == found
    (out / "thesis.txt").write_text("years of work")
    assert "holds files that Vitrail did not write (thesis.txt)" in cli.refuses(*words, "--overwrite")


@pytest.mark.slow
def test_all_compares_models_that_held_out_no_image_in_common(
    models: list[str], colour_folder: Path, tmp_path: Path, cli: Cli
) -> None:
    for name in models:
        file = Path(name) / "model.json"
        known = json.loads(file.read_text()) | {"provenance": {"data": str(colour_folder), "validation_share": 0.0}}
        file.write_text(json.dumps(known))
    given = ["compare", *models, "--data", str(colour_folder), "--out", str(tmp_path / "compared"), "--bootstrap", "0"]
    assert "no image that all models held out of training" in cli.refuses(*given)
    shown = cli.shows(*given, "--split", "all")
    assert "36 images" in shown and "that no model learned from" not in shown
