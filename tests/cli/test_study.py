"""Tests of `vitrail study`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.studies.measured import cell_result
from tests.studies.test_pool import cell_of
from vitrail.experiments.runner import CELLS, read_result, write_result
from vitrail.files import write_json
from vitrail.settings import to_plain
from vitrail.studies.cell import CellResult
from vitrail.studies.engine import chain
from vitrail.studies.questions import STUDIES
from vitrail.studies.study import open_study_data


@pytest.mark.slow
def test_the_plan_has_the_cost_of_both_sizes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.studies.engine._flops_per_second", lambda network, batch, device: 1e10)
    text = cli.shows("study", "head", "--quick", "--plan", "--jobs", 2, "--device", "cpu")
    assert "9 trials of learning rates and 9 other cells (3 seeds)" in text and "with 2 at a time" in text
    assert "published size: 9 trials and 9 other cells" in text and "TPUv3 core-days" in text
    plan = cli.json("study", "head", "--quick", "--plan", "--jobs", 2, "--device", "cpu")
    assert plan["seconds"] == pytest.approx((18 * 6 + plan["flops"] / 1e10) / 2) and plan["published"]["flops"] > 1e22


def write_cells(folder: Path) -> None:
    """Write the results of two arms and one seed, as if they had been trained."""
    data = open_study_data("bundled", "quick")
    for point in STUDIES["head"].points(data)[:2]:
        for rate in point.stages[0].rates:
            write(folder, chain(point, [rate], 0, is_trial=True)[-1].name, {"validation_accuracy": rate})
        write(folder, chain(point, [point.stages[0].rates[-1]], 0)[-1].name, {"accuracy": 0.875})


def write(folder: Path, name: str, metrics: dict[str, float]) -> None:
    place = folder / CELLS / name
    place.mkdir(parents=True)
    write_result(place, cell_result(metrics))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((words, f"{words[0]} and --cell exclude") for words in (("--plan",), ("--seeds", "1"), ("--arms", "mean"))),
        (("--device", "cpu"), "'abc' cannot be repeated"),
    ],
)
def test_a_cell_that_cannot_be_repeated_is_refused_before_a_folder_is_made(
    words: tuple[str, ...], message: str, tmp_path: Path, cli: Cli
) -> None:
    assert message in cli.refuses("study", "head", "--quick", "--out", tmp_path / "new", "--cell", "abc", *words)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow  # imports torch in a process
def test_a_cell_that_is_repeated_is_printed_as_json(tmp_path: Path, cli: Cli) -> None:
    cell, data = cell_of(), open_study_data("bundled", "quick")
    (tmp_path / CELLS / cell.name).mkdir(parents=True)
    write_json(tmp_path / CELLS / cell.name / "cell.json", asdict(cell))
    record = {"format": 1, "study": "head", "scale": "quick", "data": "bundled", "fingerprint": data.fingerprint}
    (tmp_path / "study.json").write_text(json.dumps(record))
    shown = cli.json("study", "head", "--quick", "--out", tmp_path, "--device", "cpu", "--cell", cell.name)
    result = read_result(tmp_path / CELLS / cell.name, CellResult)
    assert result is not None and shown == to_plain(result) and shown["metrics"].keys() >= {"accuracy"}


@pytest.mark.slow
def test_a_finished_study_is_shown_without_training(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "study"
    place = ("--quick", "--out", folder, "--device", "cpu")
    arguments = ("study", "head", *place, "--arms", "class-token,mean", "--seeds", 0)
    data = open_study_data("bundled", "quick")
    write_cells(folder)
    record = {"format": 1, "study": "head", "scale": "quick", "data": "bundled", "fingerprint": data.fingerprint}
    (folder / "study.json").write_text(json.dumps(record))
    text = cli.shows(*arguments)
    assert "class-token" in text and "87.50" in text and "not shown: The mean of the patches works as well" in text
    assert f"written to {folder}: study.html" in text and (folder / "figure.svg").exists()
    assert [row["accuracy_mean"] for row in cli.json(*arguments)["points"]] == [0.875, 0.875]
    error = cli.refuses("study", "positions", *place)
    assert "holds a study with other settings: study was 'head' and is 'positions'" in error
    assert "cell 'abc' is not in" in cli.refuses("study", "head", *place, "--cell", "abc")
