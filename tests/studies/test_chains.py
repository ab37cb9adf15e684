"""Every arm of the studies with two stages can be trained: each chain of cells runs for a step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from vitrail.experiments.runner import read_result, write_result
from vitrail.studies.cell import DEVICE, CellResult, measure_cell
from vitrail.studies.engine import chain
from vitrail.studies.questions import STUDIES
from vitrail.studies.study import Point, Settings, Study

NAMES = ("optimizer", "transfer")
"""Studies with two stages, and with other tasks than classification."""


def first_points(study: Study) -> list[Point]:
    """The first point of each arm, with short stages."""
    points = {point.arm: point for point in reversed(study.points(Settings(scale="quick")))}
    return [
        replace(
            point,
            by=("accuracy",),
            evaluator_settings={"accuracy": {"bootstrap": 0}},
            stages=tuple(
                replace(stage, config=stage.config.override(steps=1, batch_size=16, checkpoints=1, precision="float32"))
                for stage in point.stages
            ),
        )
        for point in points.values()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_arm_can_be_trained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE, "cpu")
    for point in first_points(STUDIES[name]):
        for cell in chain(point, [stage.rates[0] for stage in point.stages], 0):
            folder = tmp_path / cell.name
            result = read_result(folder, CellResult)
            if result is None:  # arms can share a first stage
                folder.mkdir()
                result = measure_cell(folder, cell)
                write_result(folder, result)
        assert not result.diverged and 0 < result.metrics["accuracy"] < 1, point.name
        assert result.flops > 0 and math.isfinite(result.flops)
