"""Tests of what a study writes, and of its figures."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.studies.measured import measured, results_of
from vitrail.analysis.charts import standalone
from vitrail.report.page import is_our_page
from vitrail.studies.claims import Results, TuningTrial
from vitrail.studies.engine import StudyRun
from vitrail.studies.page import arms_chart, lines_chart, write_study
from vitrail.studies.questions import STUDIES
from vitrail.studies.study import Settings

RESULTS = Results(
    results_of({"class-token": (0.8, 0.81, 0.82), "mean": (0.8, 0.811, 0.82), "attention": (0.7, None, 0.72)}).points,
    [
        TuningTrial("mean", 1, rate, value, rate == 4e-3, f"{rate}")
        for rate, value in ((5e-4, 0.5), (1.5e-3, None), (4e-3, 0.75))
    ],
    ["a machine"],
)


def written(tmp_path: Path, results: Results) -> Path:
    settings = Settings(scale="quick", data="bundled")
    run = StudyRun(
        study=STUDIES["head"], settings=settings, points=tuple(STUDIES["head"].points(settings)), seeds=(0, 1, 2),
        folder=tmp_path,
    )  # fmt: skip
    with run.held():
        pass
    write_study(tmp_path, run, results)
    return tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path, RESULTS)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_numbers_are_in_csv_and_json(folder: Path) -> None:
    points = rows(folder / "points.csv")
    assert [row["arm"] for row in points] == ["class-token", "mean", "attention"]
    assert float(points[0]["accuracy_mean"]) == pytest.approx(0.81) and points[2]["diverged"] == "1"
    cells = rows(folder / "cells.csv")
    assert len(cells) == 9 and cells[7]["diverged"] == "the loss is nan" and cells[7]["accuracy"] == ""
    assert [row["chosen"] for row in rows(folder / "trials.csv")] == ["False", "False", "True"]
    plain = json.loads((folder / "results.json").read_text())
    assert plain["study"] == "head" and plain["scale"] == "quick" and plain["machines"] == ["a machine"]
    assert [one["outcome"] for one in plain["verdict"]] == ["shown", "not shown", "not shown"]


def test_the_page_has_the_verdict_the_figure_and_the_table(folder: Path) -> None:
    page = (folder / "study.html").read_text()
    HTMLParser().feed(page)
    assert is_our_page(folder / "study.html") and page.count("<svg ") == 1
    assert "This is the quick version of the study" in page and "81.00 ± 1.00" in page and "1 of 3" in page
    assert '<span class="tag">shown</span>: The mean of the patches works as well as the class token' in page
    assert "attention diverged with 1 of 3 seeds" in page and "a better one may lie beyond: mean." in page
    assert (folder / "figure.svg").read_text().startswith("<svg xmlns=")


def test_the_page_tells_the_trials_of_stages_apart(folder: Path, tmp_path: Path) -> None:
    page = (folder / "study.html").read_text()
    assert "<td>mean</td><td>0.004</td><td>75.00</td><td>chosen</td>" in page
    trials = [*RESULTS.trials, replace(RESULTS.trials[0], stage=2, chosen=True)]
    page = (written(tmp_path / "stages", replace(RESULTS, trials=trials)) / "study.html").read_text()
    assert "<td>mean</td><td>1</td><td>0.004</td><td>75.00</td><td>chosen</td>" in page
    assert "<td>mean</td><td>2</td><td>0.0005</td><td>50.00</td><td>chosen</td>" in page


def titles(chart: str) -> list[str]:
    root = ElementTree.fromstring(standalone(chart))
    return [element.text or "" for element in root.iter() if element.tag.endswith("title")]


def test_every_seed_and_mean_is_a_dot() -> None:
    results = results_of({"one <arm>": (0.5, 0.52, 0.54), "two": (0.7, None), "gone": (None,)})
    chart = arms_chart(results, "accuracy", "top-1")
    assert titles(chart) == [
        "one <arm>, seed 0: 50.00%", "one <arm>, seed 1: 52.00%", "one <arm>, seed 2: 54.00%",
        "one <arm>: mean 52.00%, 95 % interval 47.03% to 56.97% (3 seeds)",
        "two, seed 0: 70.00%", "two: 70.00% with one seed",
    ]  # fmt: skip
    assert ">diverged<" in chart


def test_without_a_finished_point_there_is_no_figure() -> None:
    results = Results([measured("a", (None,), x=10.0, label="10")])
    assert lines_chart(results, "accuracy", "accuracy", "images") == "" == arms_chart(results, "accuracy", "accuracy")
