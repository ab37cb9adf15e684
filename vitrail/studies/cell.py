"""A cell of a study: one training run, and what is measured of its model.

A cell is named by a hash of its whole resolved configuration, so equal cells of a study run once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import DataError, NonFiniteLoss, RunError
from vitrail.evaluation.evaluators import evaluators_of, measure
from vitrail.evaluation.outputs import Outputs
from vitrail.experiments.runner import Cell, Pool, complete_run, read_cell, read_result, run_process
from vitrail.machine import describe, pick_device
from vitrail.training.config import TrainConfig
from vitrail.training.folder import read_record
from vitrail.training.job import phases_of, run_flops
from vitrail.training.log import kept_result
from vitrail.training.run import RunResult, finished

Measured = Literal["validation", "test"]
"""The split that a cell measures its model on. "validation" is the cut of the training split on which settings are
chosen. "test" is measured only by cells whose settings are already chosen."""

OF_THE_MACHINE: dict[str, Any] = {
    "run": None, "name": "", "overwrite": False, "device": "auto", "threads": 0, "processes": 0,
    "compute_threads": None, "float32_products": "auto",
}  # fmt: skip
"""Settings that do not belong to the content of a cell, with the values that all cells have."""


@dataclass(frozen=True, kw_only=True)
class StudyCell(Cell):
    """One training run of a study, as JSON values."""

    config: Mapping[str, Any]
    """The resolved `TrainConfig`, without settings of the machine."""
    by: tuple[str, ...] = ()
    """Evaluators that measure the finished model."""
    evaluator_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of evaluators, by the name of the evaluator."""
    measured: Measured = "test"

    @property
    def name(self) -> str:
        """A hash of everything that the cell runs, which is the name of its folder."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def train_config(self) -> TrainConfig:
        return TrainConfig.from_plain(self.config)


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The measurements of a finished cell."""

    metrics: Mapping[str, float]
    """Metrics of the model on the measured split, such as "accuracy" and "fewshot_5". Empty if training diverged."""
    diverged: str = ""
    """Reason why training diverged, or an empty text."""
    steps: int
    flops: float
    """FLOPs of the training steps by closed form, with those of the cells that this cell starts from."""
    seconds: float
    """Seconds of the process, with opening the data and measuring the model. The time of earlier processes of the cell,
    which were killed, is not known."""
    parameters: int
    machine: Mapping[str, Any]
    """Device, threads and versions."""


def make_cell(
    config: TrainConfig,
    *,
    by: tuple[str, ...],
    measured: Measured,
    start: str | None = None,
    evaluator_settings: Mapping[str, Any] | None = None,
) -> StudyCell:
    """Return the cell that trains with a config, on any machine."""
    plain = config.override(**OF_THE_MACHINE).to_plain()
    return StudyCell(
        config=json.loads(json.dumps(plain)),  # tuples become lists, as when the cell is read again
        by=by,
        evaluator_settings=dict(evaluator_settings or {}),
        measured=measured,
        start=start,
    )


# The process of a cell: `python -m vitrail.studies.cell FOLDER`. It trains, measures, and writes the result.


DEVICE = "VITRAIL_STUDY_DEVICE"
"""Environment variable with the device of the cells. It is not part of what a cell is."""

UNNEEDED = ("checkpoints", "examples")
"""Parts of a finished run's folder that a study does not need."""


def measure_cell(folder: Path, cell: StudyCell) -> CellResult:
    """Train the model of a cell in `folder / "run"`, and return its measurements.

    A run that was killed continues from its newest checkpoint. A run that diverges has a result without metrics.
    """
    device, begun = os.environ.get(DEVICE, "auto"), time.perf_counter()
    config = cell.train_config.override(run=str(folder / "run"), device=device)
    before = 0.0
    if cell.start is not None:
        source = folder.parent / cell.start
        started = read_result(source, CellResult)
        if started is None:
            raise RunError(f"{source} has no result, but cell {cell.name} starts from its model; run the study again")
        before = started.flops
        if started.diverged:
            return _diverged(f"the cell {cell.start} that it starts from diverged", config, before)
        config = config.override(init=str(source / "run" / "model"))
        # After the folder of the study was moved, a run would look for its initial model at the old path.
        if (folder / "run/run.json").is_file() and read_record(folder / "run").config.start != config.start:
            shutil.rmtree(folder / "run")
    splits = config.data.open(unlabelled=not cell.by)
    try:
        result = complete_run(config, measure_test=False)[1] or finished(folder / "run")
    except NonFiniteLoss as error:
        shutil.rmtree(folder / "run", ignore_errors=True)
        return _diverged(str(error).partition(":")[0], config, before)
    assert result is not None, "the run is complete"
    metrics = _measured(cell, result, splits)
    seconds = time.perf_counter() - begun
    for part in UNNEEDED:
        shutil.rmtree(folder / "run" / part, ignore_errors=True)
    trained, network = read_record(folder / "run").config, result.bundle.network
    phases = phases_of(trained, network.config, steps := int(result.summary["steps"]))
    flops = run_flops(phases, network.config, trained.task, trained.start.train_blocks)
    return CellResult(
        metrics=metrics,
        steps=steps,
        flops=before + flops,
        seconds=seconds,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        machine=_machine(device, trained.run.precision),
    )


def _measured(cell: StudyCell, result: RunResult, splits: Splits) -> dict[str, float]:
    """Return the metrics of a finished run's model on the split of the cell."""
    held_out: Source | None = splits.test if cell.measured == "test" else splits.validation
    metrics: dict[str, float] = {}
    if cell.by:
        if held_out is None:
            raise DataError(f"data {cell.train_config.data.spec!r} has no {cell.measured} split to measure a cell on")
        outputs = Outputs(result.bundle, precision="float32")
        metrics = measure(evaluators_of(",".join(cell.by), cell.evaluator_settings), outputs, splits.train, held_out)
    if cell.measured == "validation":
        found, names = kept_result(result.folder / "journal.jsonl"), {metric.name for metric in result.task.metrics}
        metrics |= {f"validation_{name}": found[name] for name in found.keys() & names}
    return metrics


def _diverged(reason: str, config: TrainConfig, flops: float) -> CellResult:
    return CellResult(
        metrics={}, diverged=reason, steps=0, flops=flops, seconds=0.0, parameters=0,
        machine=_machine(config.run.device, config.run.precision),
    )  # fmt: skip


def _machine(device: str, precision: str) -> dict[str, object]:
    machine = describe(pick_device(device))
    return {name: machine[name] for name in ("device", "threads", "versions")} | {"precision": precision}


def study_pool(
    folder: Path,
    *,
    jobs: int,
    threads: int,
    device: str,
    on_cell: Callable[[str, CellResult], None] = lambda label, result: None,
) -> Pool[StudyCell, CellResult]:
    """Return the pool of a study's cells. `threads` is the number of compute threads of each process."""
    return Pool(
        folder=folder, cell=StudyCell, result=CellResult,
        command=lambda cell: (sys.executable, "-m", "vitrail.studies.cell"), jobs=jobs,
        variables={DEVICE: device, "OMP_NUM_THREADS": str(threads)}, on_cell=on_cell,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_process(lambda folder: measure_cell(folder, read_cell(folder, StudyCell))))
