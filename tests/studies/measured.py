"""Results that tests write themselves, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vitrail.studies.cell import CellResult
from vitrail.studies.claims import PointResult, Results

MACHINE = {"device": "a test", "threads": 1, "precision": "float32", "versions": {}}


def measured(
    arm: str, values: Sequence[float | None], *, x: float | None = None, label: str = "", metric: str = "accuracy",
    flops: float = 1e12,
) -> PointResult:  # fmt: skip
    """Return a point with these metrics of the seeds 0, 1 and so on. None stands for a seed that diverged."""
    known = {seed: {metric: value} for seed, value in enumerate(values) if value is not None}
    return PointResult(
        arm=arm, x=x, label=label, rates=(1e-3,), metrics=known,
        diverged={seed: "the loss is nan" for seed, value in enumerate(values) if value is None},
        cells={seed: f"{arm}-{label}-{seed}" for seed in range(len(values))}, flops=flops,
        seconds=dict.fromkeys(range(len(values)), 2.5), parameters=1234,
    )  # fmt: skip


def results_of(points: Mapping[str, Sequence[float | None]]) -> Results:
    """Return results of arms without an axis."""
    return Results([measured(arm, values) for arm, values in points.items()])


def cell_result(metrics: Mapping[str, float], *, diverged: str = "") -> CellResult:
    """Return the result of a cell."""
    return CellResult(
        metrics=metrics, diverged=diverged, steps=3, flops=2e9, seconds=1.5, parameters=77, machine=MACHINE
    )
