"""Tests of cells: their names and files, and their process with real runs of a tiny network."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.make import make_idx_folder
from tests.studies.measured import cell_result
from vitrail.data.formats import idx
from vitrail.errors import RunError
from vitrail.experiments.runner import read_cell, write_result
from vitrail.files import write_json
from vitrail.studies.cell import DEVICE, CellResult, StudyCell, make_cell, measure_cell
from vitrail.studies.study import Settings, small_config
from vitrail.training.config import TrainConfig
from vitrail.training.job import phases_of, run_flops
from vitrail.weights.bundle import load_bundle


@pytest.fixture
def config() -> TrainConfig:
    return small_config(Settings(), images=100, epochs=2.0)


def test_the_machine_is_not_part_of_a_name(config: TrainConfig) -> None:
    cell = make_cell(config, by=("accuracy",), measured="test")
    other = config.override(run="elsewhere", name="x", device="cpu", threads=3, processes=1, compute_threads=2)
    assert make_cell(other, by=("accuracy",), measured="test").name == cell.name
    assert len(cell.name) == 16 and cell.train_config.run.folder is None


def test_every_setting_and_what_is_measured_is_part_of_a_name(config: TrainConfig) -> None:
    cell = make_cell(config, by=("accuracy",), measured="test")
    changes: list[dict[str, Any]] = [{"seed": 1}, {"learning_rate": 2e-3}, {"depth": 5}, {"data": "bundled[:101]"}]
    others = [make_cell(config.override(**change), by=("accuracy",), measured="test") for change in changes]
    others += [
        replace(cell, by=("linear",)), replace(cell, measured="validation"), replace(cell, start="0" * 16),
        replace(cell, evaluator_settings={"fewshot": {"shots": [5]}}),
    ]  # fmt: skip
    assert len({cell.name, *(other.name for other in others)}) == 9


def test_a_changed_cell_is_refused(tmp_path: Path, config: TrainConfig) -> None:
    cell = make_cell(config, by=(), measured="test")
    folder = tmp_path / cell.name
    folder.mkdir()
    write_json(folder / "cell.json", asdict(replace(cell, measured="validation")))
    with pytest.raises(RunError, match=r"has the cell \w{16}, which is not the name of the folder: cell\.json was"):
        read_cell(folder, StudyCell)


@pytest.fixture(scope="module")
def some_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idx_folder(tmp_path_factory.mktemp("bundled") / "images", train=400, test=100)


@pytest.fixture(autouse=True)
def on_the_cpu(some_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the CPU, and a part of the bundled images."""
    monkeypatch.setenv(DEVICE, "cpu")
    monkeypatch.setattr(idx, "BUNDLED", some_images)


def tiny(**overrides: object) -> TrainConfig:
    """A run of two steps on 40 images."""
    config = small_config(Settings(scale="quick"), images=40, epochs=1.0)
    config = config.override(depth=1, width=16, mlp_width=16, batch_size=20, precision="float32", checkpoints=1)
    return config.override(**overrides)


def cell_of(config: TrainConfig, **fields: object) -> StudyCell:
    return make_cell(config, **{"by": ("accuracy",), "measured": "test", **fields})  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_cell_is_trained_and_measured_on_the_test_split(tmp_path: Path) -> None:
    cell = cell_of(tiny(), by=("accuracy", "fewshot"), evaluator_settings={"fewshot": {"shots": [1], "seeds": 1}})
    result = make(tmp_path, cell)
    assert result.metrics["images"] == 100 and {"accuracy", "fewshot_1"} <= set(result.metrics)
    assert not any(name.startswith("validation") for name in result.metrics)
    run = tmp_path / cell.name / "run"
    network = load_bundle(run / "model").network.config
    config = cell.train_config
    assert result.steps == 2 and result.flops == run_flops(phases_of(config, network, 2), network, config.task)
    assert result.parameters == network.parameters() and result.machine["precision"] == "float32"
    assert not (run / "checkpoints").exists()


@pytest.mark.slow
def test_a_trial_measures_only_the_cut(tmp_path: Path) -> None:
    cell = cell_of(tiny(), by=(), measured="validation")
    result = make(tmp_path, cell)
    assert 0 <= result.metrics["validation_accuracy"] <= 1 and result.metrics["validation_cross_entropy"] > 0
    assert not any("test" in name for name in result.metrics)


def test_a_cell_that_diverges_has_a_reason(tmp_path: Path) -> None:
    cell = cell_of(tiny(learning_rate=1e20, clip=0.0, warmup=0.0, batch_size=5))
    result = make(tmp_path, cell)
    assert result.metrics == {} and result.diverged == "loss is nan at step 2"
    assert not (tmp_path / cell.name / "run").exists()


@pytest.mark.slow
def test_a_second_stage_starts_from_the_model_of_the_first(tmp_path: Path) -> None:
    first = cell_of(tiny(), by=(), measured="validation")
    second = cell_of(tiny().override(variant=None, **dict.fromkeys(tiny().model.overrides)), start=first.name)
    with pytest.raises(RunError, match=f"{first.name} has no result, but cell {second.name} starts from its model"):
        measure_cell(tmp_path / second.name, second)
    before = make(tmp_path, first)
    result = make(tmp_path, second)
    assert result.flops == 2 * before.flops and result.parameters == before.parameters
    moved = shutil.copytree(tmp_path, tmp_path / "moved")
    (tmp_path / first.name / "run/model").rename(tmp_path / "away")
    (moved / second.name / "run/journal.jsonl").unlink()  # as of a run that was killed before its first checkpoint
    assert measure_cell(moved / second.name, second).metrics == result.metrics
    write_result(tmp_path / first.name, cell_result({}, diverged="nan"))
    shutil.rmtree(tmp_path / second.name)
    assert "starts from diverged" in make(tmp_path, second).diverged


def make(folder: Path, cell: StudyCell) -> CellResult:
    """Measure a cell in its folder, and write the result."""
    (folder / cell.name).mkdir()
    result = measure_cell(folder / cell.name, cell)
    write_result(folder / cell.name, result)
    return result


@pytest.mark.slow
def test_a_finished_run_is_only_measured_again(tmp_path: Path) -> None:
    cell = cell_of(tiny())
    first = make(tmp_path, cell)
    again = measure_cell(tmp_path / cell.name, cell)
    assert asdict(again)["metrics"] == asdict(first)["metrics"] and again.seconds < first.seconds
