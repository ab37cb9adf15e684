"""The process of a cell: `python -m vitrail.studies.cell_run FOLDER`. It trains, measures, and writes the result."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from vitrail.bench.accuracy.cell import run_process
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import DataError, NonFiniteLoss, RunError
from vitrail.evaluation.evaluators import evaluators_of, measure
from vitrail.evaluation.outputs import Outputs
from vitrail.machine import describe, pick_device
from vitrail.studies.cell import Cell, CellResult, read_cell, read_result
from vitrail.training.config import TrainConfig
from vitrail.training.finish import RunResult
from vitrail.training.records.record import read_record
from vitrail.training.reporting.journal import kept_result
from vitrail.training.run import finished, resume, train
from vitrail.training.steps.phases import phases_of, run_flops

__all__ = ["DEVICE", "measure_cell"]

DEVICE = "VITRAIL_STUDY_DEVICE"
"""Environment variable with the device of the cells. It is not part of what a cell is."""

UNNEEDED = ("checkpoints", "examples")
"""Parts of a finished run's folder that a study does not need."""


def measure_cell(folder: Path, cell: Cell) -> CellResult:
    """Train the model of a cell in `folder / "run"`, and return its measurements.

    A run that was killed continues from its newest checkpoint. A run that diverges has a result without metrics.
    """
    device, begun = os.environ.get(DEVICE, "auto"), time.perf_counter()
    config = cell.train_config.override(run=str(folder / "run"), device=device)
    before = 0.0
    if cell.start is not None:
        source = folder.parent / cell.start
        started = read_result(source)
        if started is None:
            raise RunError(f"{source} has no result, but cell {cell.name} starts from its model; run the study again")
        before = started.flops
        if started.diverged:
            return _diverged(f"the cell {cell.start} that it starts from diverged", config, before)
        config = config.override(init=str(source / "run" / "model"))
    splits = config.data.open(unlabelled=not cell.by)
    try:
        result = _trained(config)
    except NonFiniteLoss as error:
        shutil.rmtree(folder / "run", ignore_errors=True)
        return _diverged(str(error).partition(":")[0], config, before)
    metrics = _measured(cell, result, splits)
    seconds = time.perf_counter() - begun
    for part in UNNEEDED:
        shutil.rmtree(folder / "run" / part, ignore_errors=True)
    record, network = read_record(folder / "run"), result.bundle.network
    steps = int(result.summary["steps"])
    flops = float(run_flops(phases_of(record.config, network.config, steps), network.config, record.config.task))
    return CellResult(
        metrics=metrics,
        steps=steps,
        flops=before + flops,
        seconds=seconds,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        machine=_machine(device, record.config.run.precision),
    )


def _trained(config: TrainConfig) -> RunResult:
    """Return the finished run of a cell: an earlier one, the rest of one that was killed, or a new one."""
    folder = Path(config.run.folder or "")
    if (folder / "run.json").exists():
        return finished(folder) or resume(folder, measure_test=False)
    shutil.rmtree(folder, ignore_errors=True)  # killed before the run was recorded
    return train(config, measure_test=False)


def _measured(cell: Cell, result: RunResult, splits: Splits) -> dict[str, float]:
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


if __name__ == "__main__":
    sys.exit(run_process(lambda folder: measure_cell(folder, read_cell(folder))))
