"""Tests of the engine: the cells of a study, the choice of learning rates, and its folder.

Results are written as files before the engine runs, so no cell is trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.studies.measured import cell_result
from vitrail.errors import RunError
from vitrail.experiments.runner import CELLS, Pool, write_result
from vitrail.studies.cell import CellResult, StudyCell, study_pool
from vitrail.studies.engine import TRIAL_SEED, StudyRun, chain, planned_cells, tuned_points
from vitrail.studies.questions import STUDIES
from vitrail.studies.study import Point, Settings, Stage, point, small_config

CONFIG = small_config(Settings(scale="quick"), images=100, epochs=1.0)
ARMS = (
    point("a", CONFIG.override(pool="cls"), (1e-3, 2e-3)), point("b", CONFIG.override(pool="gap"), (1e-3, 2e-3)),
)  # fmt: skip
PRETRAINED = Point(
    arm="pre-trained",
    stages=(
        Stage(config=CONFIG, rates=(1e-3, 3e-3)),
        Stage(config=small_config(Settings(), images=50, epochs=1.0).override(width=None), rates=(1e-4, 2e-4)),
    ),
)


def run_of(folder: Path, points: Sequence[Point] = ARMS, seeds: tuple[int, ...] = (0, 1)) -> StudyRun:
    settings = Settings(scale="quick")
    return StudyRun(study=STUDIES["head"], settings=settings, points=tuple(points), seeds=seeds, folder=folder)


def no_process(folder: Path) -> Pool[StudyCell, CellResult]:
    """A pool that only finds the results that are there."""
    return study_pool(folder, jobs=0, threads=1, device="cpu")


def test_a_trial_measures_the_cut_and_not_the_test_split() -> None:
    (trial,) = chain(ARMS[0], [2e-3], 7, is_trial=True)
    config = trial.train_config
    assert (trial.measured, trial.by, config.run.seed) == ("validation", (), TRIAL_SEED)
    (cell,) = chain(ARMS[0], [2e-3], 7)
    config = cell.train_config
    assert (cell.measured, cell.by, config.run.seed, config.optimizer.learning_rate) == ("test", ("accuracy",), 7, 2e-3)


def test_a_later_stage_starts_from_the_earlier_one() -> None:
    first, second = chain(PRETRAINED, [3e-3, 1e-4], 5)
    assert second.start == first.name and first.start is None
    assert (first.measured, second.measured) == ("validation", "test") and first.by == ()
    before, trial = chain(PRETRAINED, [3e-3, 1e-4], 5, is_trial=True)
    assert before == first and trial.train_config.run.seed == TRIAL_SEED


def test_points_that_share_a_tuning_are_tuned_once() -> None:
    points = [point("a", CONFIG, (1e-3, 2e-3), label=str(x), x=x, tuned="a") for x in (10.0, 20.0)]
    assert list(tuned_points(points).values()) == points[:1]
    assert points[0].name == "a at 10.0" and points[0].tuning == "a" and ARMS[0].tuning == "a"


def test_planned_cells_are_counted() -> None:
    trials, cells = planned_cells(ARMS, (0, 1, 2))
    assert (len(trials), len(cells)) == (4, 6)
    trials, cells = planned_cells([PRETRAINED], (0, 1, 2))
    assert (len(trials), len(cells)) == (4, 6)  # two trials for each stage; two stages for each seed


def test_the_best_rate_of_each_arm_is_measured(tmp_path: Path) -> None:
    accuracies = {("a", 1e-3): 0.5, ("a", 2e-3): 0.7, ("b", 1e-3): 0.6, ("b", 2e-3): 0.4}
    for arm, rate in itertools.product(ARMS, (1e-3, 2e-3)):
        metrics = {"validation_accuracy": accuracies[arm.name, rate]}
        write(tmp_path, chain(arm, [rate], 0, is_trial=True)[-1].name, metrics)
    for seed in (0, 1):
        write(tmp_path, chain(ARMS[0], [2e-3], seed)[-1].name, {"accuracy": 0.8 + seed / 10})
        write(tmp_path, chain(ARMS[1], [1e-3], seed)[-1].name, {"accuracy": 0.9})
    results = run_of(tmp_path).measure(no_process(tmp_path))
    assert [one.rates for one in results.points] == [(2e-3,), (1e-3,)]
    assert results.points[0].values("accuracy") == {0: 0.8, 1: 0.9}
    assert [(one.point, one.learning_rate, one.validation_accuracy) for one in results.trials if one.chosen] == [
        ("a", 2e-3, 0.7), ("b", 1e-3, 0.6),
    ]  # fmt: skip
    assert results.machines == ["a test, 1 thread for each cell, float32"]


def test_the_loss_decides_between_equal_trials_and_a_diverged_one_loses(tmp_path: Path) -> None:
    for rate, loss in ((1e-3, 2.0), (2e-3, 1.5)):
        metrics = {"validation_accuracy": 0.5, "validation_cross_entropy": loss}
        write(tmp_path, chain(ARMS[0], [rate], 0, is_trial=True)[-1].name, metrics)
    write(tmp_path, chain(ARMS[1], [1e-3], 0, is_trial=True)[-1].name, {}, diverged="the loss is nan")
    write(tmp_path, chain(ARMS[1], [2e-3], 0, is_trial=True)[-1].name, {"validation_accuracy": 0.1})
    for arm in ARMS:
        write(tmp_path, chain(arm, [2e-3], 0)[-1].name, {"accuracy": 0.3}, diverged="" if arm.arm == "a" else "nan")
    results = run_of(tmp_path, seeds=(0,)).measure(no_process(tmp_path))
    assert [one.rates for one in results.points] == [(2e-3,), (2e-3,)]
    assert results.points[1].diverged == {0: "nan"} and results.points[1].metrics == {}
    assert [one.validation_accuracy for one in results.trials] == [0.5, 0.5, None, 0.1]


def test_stages_are_tuned_one_after_the_other(tmp_path: Path) -> None:
    for rate in (1e-3, 3e-3):
        write(tmp_path, chain(PRETRAINED, [rate], 0, is_trial=True)[-1].name, {"validation_accuracy": rate})
    write(tmp_path, chain(PRETRAINED, [3e-3, 1e-4], 0)[0].name, {})
    for rate in (1e-4, 2e-4):
        metrics = {"validation_accuracy": 1 - rate}
        write(tmp_path, chain(PRETRAINED, [3e-3, rate], 0, is_trial=True)[-1].name, metrics)
    write(tmp_path, chain(PRETRAINED, [3e-3, 1e-4], 0)[-1].name, {"accuracy": 0.25})
    results = run_of(tmp_path, [PRETRAINED], (0,)).measure(no_process(tmp_path))
    assert results.points[0].rates == (3e-3, 1e-4) and results.points[0].values("accuracy") == {0: 0.25}
    assert [one.stage for one in results.trials] == [1, 1, 2, 2]


def write(folder: Path, name: str, metrics: dict[str, float], diverged: str = "") -> None:
    place = folder / CELLS / name
    place.mkdir(parents=True, exist_ok=True)
    write_result(place, cell_result({} if diverged else metrics, diverged=diverged))


def hold(run: StudyRun) -> None:
    with run.held():
        pass


def test_a_folder_of_another_study_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    hold(run_of(folder))
    hold(run_of(folder, seeds=(5,)))  # more seeds and other arms belong to the same study
    other = StudyRun(study=STUDIES["head"], settings=Settings(fingerprint="g"), points=ARMS, seeds=(0,), folder=folder)
    with pytest.raises(RunError, match="scale was 'quick' and is 'default'; the images, labels or splits have changed"):
        hold(other)
    (folder / "study.json").write_text("{")
    with pytest.raises(RunError, match=r"study\.json is damaged"):
        hold(run_of(folder))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(RunError, match=r"exists and does not hold a study: it has no study\.json; choose"):
        hold(run_of(tmp_path))
