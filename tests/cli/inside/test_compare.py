"""Tests of `vitrail compare`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.analysis.summaries.test_comparison import BIT, bundle_of
from vitrail.cli import main


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    bundle_of(seed=3).save(tmp_path / "a-vit")
    bundle_of(size=(16, 16), **BIT).save(tmp_path / "a-resnet")
    return [str(tmp_path / "a-vit"), str(tmp_path / "a-resnet")]


def test_a_page_figures_and_numbers_are_written(
    models: list[str], colour_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "compared"
    assert main(["compare", *models, "--data", str(colour_folder), "--split", "train", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "a-vit" in shown.out and "points, 95% interval" in shown.out and shown.out.endswith("compare.html\n")
    found = json.loads((out / "compare.json").read_text())
    assert [one["name"] for one in found["models"]] == ["a-vit", "a-resnet"]
    assert found["verdict"] in shown.out
    page = (out / "compare.html").read_text()
    assert found["verdict"].replace("<", "&lt;") in page and "effective receptive field, mean over images" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    for name in ("similarity.svg", "distance.svg"):
        assert ElementTree.parse(out / name).getroot().tag.endswith("svg")
    rows = list(csv.DictReader((out / "classes.csv").read_text().splitlines()))
    assert {row["class"] for row in rows} == {"blue", "green", "red"}
    assert float(rows[0]["accuracy of a-vit"]) <= 1
    assert (
        main(["compare", *models, "--data", str(colour_folder), "--split", "train", "--out", str(out), "--json"]) == 2
    )
    assert "exists already; choose another folder, or replace it with --overwrite" in capsys.readouterr().err
    again = ["compare", *models, "--data", str(colour_folder), "--split", "train", "--out", str(out), "--overwrite"]
    assert main([*again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_files_of_the_user_are_never_replaced(
    models: list[str], colour_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    given = ["compare", *models, "--data", str(colour_folder), "--out", str(tmp_path / "mine"), "--overwrite"]
    assert main(given) == 2
    assert "holds files that Vitrail did not write (thesis.txt)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "x", "--images", "3"], "--images 3: give at least 4"),
        (["--data", "x", "--examples", "-1"], "--examples -1: give at least 0"),
        ([], "--data is missing: name a data set that both models know"),
    ],
)
def test_options_are_checked_before_models_are_read(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "no-model", "no-other", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("models", [["a"], ["a", "a"], ["a", "b", "c"]])
def test_two_models_are_named(models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *models, "--data", "x"]) == 2
    assert "cannot be compared; name two of them" in capsys.readouterr().err
