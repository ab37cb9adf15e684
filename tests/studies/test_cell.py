"""Tests of cells: their names and files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.studies.measured import cell_result
from vitrail.errors import RunError
from vitrail.experiments.runner import read_cell, read_result, write_result
from vitrail.files import write_json
from vitrail.studies.cell import CellResult, StudyCell, make_cell
from vitrail.studies.study import Settings, small_config
from vitrail.training.config import TrainConfig


@pytest.fixture
def config() -> TrainConfig:
    return small_config(Settings(), images=100, epochs=2.0)


def test_the_machine_is_not_part_of_a_name(config: TrainConfig) -> None:
    cell = make_cell(config, by=("accuracy",), measured="test")
    other = config.override(run="elsewhere", name="x", device="cpu", threads=3, processes=1, compute_threads=2)
    assert make_cell(other, by=("accuracy",), measured="test").name == cell.name
    assert len(cell.name) == 16 and cell.train_config.run.folder is None


@pytest.mark.parametrize("change", [{"seed": 1}, {"learning_rate": 2e-3}, {"depth": 5}, {"data": "bundled[:101]"}])
def test_every_setting_is_part_of_a_name(config: TrainConfig, change: dict[str, object]) -> None:
    cell = make_cell(config, by=(), measured="test")
    assert make_cell(config.override(**change), by=(), measured="test").name != cell.name


def test_what_is_measured_is_part_of_a_name(config: TrainConfig) -> None:
    cell = make_cell(config, by=("accuracy",), measured="test")
    others = (
        replace(cell, by=("linear",)), replace(cell, measured="validation"), replace(cell, start="0" * 16),
        replace(cell, evaluator_settings={"fewshot": {"shots": [5]}}),
    )  # fmt: skip
    assert len({cell.name, *(other.name for other in others)}) == 5


def test_a_cell_is_read_as_it_was_written(tmp_path: Path, config: TrainConfig) -> None:
    cell = make_cell(config, by=("fewshot",), measured="test", evaluator_settings={"fewshot": {"shots": [1, 5]}})
    folder = tmp_path / cell.name
    folder.mkdir()
    write_json(folder / "cell.json", asdict(cell))
    found = read_cell(folder, StudyCell)
    assert found.name == cell.name and found.train_config == cell.train_config and found.by == ("fewshot",)


def test_a_changed_cell_is_refused(tmp_path: Path, config: TrainConfig) -> None:
    cell = make_cell(config, by=(), measured="test")
    folder = tmp_path / cell.name
    folder.mkdir()
    write_json(folder / "cell.json", asdict(cell))
    values = json.loads((folder / "cell.json").read_text())
    values["measured"] = "validation"
    (folder / "cell.json").write_text(json.dumps(values))
    with pytest.raises(RunError, match=r"has the cell \w{16}, which is not the name of the folder: cell\.json was"):
        read_cell(folder, StudyCell)
    (folder / "cell.json").write_text("{")
    with pytest.raises(RunError, match=r"has no readable cell: .*; delete the folder to run the cell again"):
        read_cell(folder, StudyCell)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_result(tmp_path, CellResult) is None
    result = cell_result({"accuracy": 0.5})
    write_result(tmp_path, result)
    assert read_result(tmp_path, CellResult) == result
    (tmp_path / "result.json").write_text('{"metrics": 3}')
    with pytest.raises(RunError, match=r"result\.json is damaged: .*; delete the folder"):
        read_result(tmp_path, CellResult)
