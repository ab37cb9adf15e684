"""A cell of a study: one training run, and what is measured of its model.

A cell is named by a hash of its whole resolved configuration, so equal cells of a study run once. Each cell has a
folder of that name with `cell.json` (what to run), `run/` (the training run), `log.txt` (the output of its process) and
`result.json` (written last).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, NonFiniteLoss, RunError, VitrailError, nearest
from vitrail.evaluation.evaluators import evaluators_of, measure
from vitrail.evaluation.outputs import Outputs
from vitrail.experiments.cells import end_process, last_lines, result_of, run_process, start_process
from vitrail.files import saving, write_json
from vitrail.machine import describe, pick_device
from vitrail.settings import from_plain
from vitrail.training.config import TrainConfig
from vitrail.training.folder import read_record
from vitrail.training.job import phases_of, run_flops
from vitrail.training.log import kept_result
from vitrail.training.run import RunResult, finished, resume, train

CELL = "cell.json"

Measured = Literal["validation", "test"]
"""The split that a cell measures its model on. "validation" is the cut of the training split on which settings are
chosen. "test" is measured only by cells whose settings are already chosen."""

OF_THE_MACHINE: dict[str, Any] = {
    "run": None, "name": "", "overwrite": False, "device": "auto", "threads": 0, "processes": 0,
    "compute_threads": None, "float32_products": "auto",
}  # fmt: skip
"""Settings that do not belong to the content of a cell, with the values that all cells have."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run of a study, as JSON values."""

    config: Mapping[str, Any]
    """The resolved `TrainConfig`, without settings of the machine."""
    by: tuple[str, ...] = ()
    """Evaluators that measure the finished model."""
    evaluator_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of evaluators, by the name of the evaluator."""
    measured: Measured = "test"
    start: str | None = None
    """Name of the cell whose model this cell starts from."""

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
) -> Cell:
    """Return the cell that trains with a config, on any machine."""
    plain = config.override(**OF_THE_MACHINE).to_plain()
    return Cell(
        config=json.loads(json.dumps(plain)),  # tuples become lists, as when the cell is read again
        by=by,
        evaluator_settings=dict(evaluator_settings or {}),
        measured=measured,
        start=start,
    )


def write_cell(folder: Path, cell: Cell) -> None:
    """Write what a cell runs into its folder, which is made if it does not exist."""
    with saving("the cell", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CELL, asdict(cell))


def read_cell(folder: Path) -> Cell:
    """Read the cell of a folder. Raises `RunError` if the name of the folder is not the name of its cell."""
    try:
        cell = from_plain(Cell, json.loads((folder / CELL).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} has no readable cell: {error}; delete the folder to run the cell again") from error
    if cell.name != folder.name:
        raise RunError(
            f"{folder} has the cell {cell.name}, which is not the name of the folder: {CELL} was changed; delete the "
            "folder to run the cell again"
        )
    return cell


def read_result(folder: Path) -> CellResult | None:
    """Return the result of a finished cell, or None. Raises `RunError` if its file is damaged."""
    return result_of(folder, CellResult)


# The process of a cell: `python -m vitrail.studies.grid FOLDER`. It trains, measures, and writes the result.


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


# The pool of cells: each unfinished cell runs in a process of its own, a number of them at a time.


CELLS, LOG = "cells", "log.txt"

POLL_SECONDS = 0.05

COMMAND = (sys.executable, "-m", "vitrail.studies.grid")


class CellPool:
    """Runs cells in the folder of a study. A finished cell is not run again."""

    def __init__(
        self,
        folder: Path,
        *,
        jobs: int,
        threads: int,
        device: str,
        on_cell: Callable[[str, CellResult], None] = lambda label, result: None,
    ) -> None:
        """`jobs` is the number of processes at a time, and `threads` the number of compute threads of each.

        `on_cell` is called with the label of every cell that is run, and its result.
        """
        self.folder = folder / CELLS
        self.jobs = jobs
        self.variables = {DEVICE: device, "OMP_NUM_THREADS": str(threads)}
        self.on_cell = on_cell

    def run(self, cells: Sequence[tuple[str, Cell]]) -> dict[str, CellResult]:
        """Return the result of each cell by name. `cells` are pairs of a label and a cell. Equal cells run once. A cell
        runs after the cell that it starts from, which is in `cells` or has run before.

        Raises `VitrailError` if a process fails, after the other running cells have ended.
        """
        results: dict[str, CellResult] = {}
        waiting: dict[str, tuple[str, Cell]] = {}
        for label, cell in cells:
            found = read_result(self.folder / cell.name)
            if found is None:
                waiting.setdefault(cell.name, (label, cell))
            else:
                results[cell.name] = found
        running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        failure = ""
        try:
            while running or (waiting and not failure):
                for name in [] if failure else [*waiting]:
                    label, cell = waiting[name]
                    if len(running) < self.jobs and cell.start not in waiting and cell.start not in running:
                        del waiting[name]
                        running[name] = label, self._start(cell)
                ended = [name for name, (_, process) in running.items() if process.poll() is not None]
                for name in ended:
                    label, process = running.pop(name)
                    end_process(process)
                    result = read_result(self.folder / name)
                    if process.returncode or result is None:
                        failure = failure or self._failure(label, name, process.returncode)
                        continue
                    results[name] = result
                    self.on_cell(label, result)
                if not ended:
                    time.sleep(POLL_SECONDS)
        finally:
            for _, process in running.values():
                end_process(process)
        if failure:
            raise VitrailError(failure)
        return results

    def repeat(self, name: str) -> CellResult:
        """Run a cell of the folder again, alone, and return its new result. Raise `ConfigError` for an unknown name."""
        folder = self.folder / name
        names = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        if name not in names:
            raise ConfigError(f"cell {name!r} is not in {self.folder}; {nearest(name, names)}")
        cell = read_cell(folder)
        shutil.rmtree(folder)
        return self.run([(f"cell {name}", cell)])[name]

    def _start(self, cell: Cell) -> subprocess.Popen[bytes]:
        folder = self.folder / cell.name
        write_cell(folder, cell)
        return start_process([*COMMAND, str(folder)], folder / LOG, **self.variables)

    def _failure(self, label: str, name: str, code: int) -> str:
        log = self.folder / name / LOG
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return (
            f"the process of cell {name} ({label}) {how}; the same command continues with this cell. The whole "
            f"output is in {log}:\n{last_lines(log)}"
        )


if __name__ == "__main__":
    sys.exit(run_process(lambda folder: measure_cell(folder, read_cell(folder))))
