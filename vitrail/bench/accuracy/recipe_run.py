"""The process of a cell that trains a recipe: `python -m vitrail.bench.accuracy.recipe_run FOLDER`."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.bench.accuracy.cell import Cell, CellResult, Point, read_cell, run_process
from vitrail.machine import describe
from vitrail.tasks import Task
from vitrail.training.config import TrainConfig
from vitrail.training.optimization.optimizer import make_optimizer
from vitrail.training.pilot import training_speeds
from vitrail.training.records.record import read_record
from vitrail.training.reporting.display import Display
from vitrail.training.run import train
from vitrail.training.steps.phases import first_steps, phases_of, run_flops

__all__ = ["measure_recipe", "optimizer_flops"]

TIMED_FRACTION = 0.02
"""Fraction of the budget that the measurement of the speed takes, beside the budget."""

USED_FRACTION = 0.97
"""Fraction of the budget that a shortened run should take by its measured speed."""


def measure_recipe(folder: Path, cell: Cell) -> CellResult:
    """Train the recipe of a cell in `folder / "run"`, and return its measurements."""
    config = TrainConfig.from_plain(cell.settings).override(
        seed=cell.seed, device=cell.device, evaluations=cell.evaluations, checkpoints=1, run=str(folder / "run")
    )
    splits = config.data.open()
    own = config.total_steps(len(splits.train))
    if cell.budget is not None:
        (speed,) = training_speeds([config], splits, TIMED_FRACTION * cell.budget, cell.budget)
        fits = max(1, int(USED_FRACTION * cell.budget * speed / config.mean_batch_size))
        if fits < own:
            config = config.override(steps=fits)
    recorder = _Recorder()
    result = train(config, display=recorder)
    network, record = result.bundle.network, read_record(folder / "run")
    phases = phases_of(record.config, network.config, record.config.total_steps(record.images))
    update, task = optimizer_flops(network, record.config), record.config.task
    machine = describe(torch.device("cpu"))
    steps = int(result.summary["steps"])

    def flops(step: int) -> float:
        return float(run_flops(first_steps(phases, step), network.config, task) + step * update)

    return CellResult(
        points=tuple(
            Point(step=step, seconds=wall, cpu_seconds=cpu, flops=flops(step), accuracy=accuracy)
            for step, wall, cpu, accuracy in recorder.points
        ),
        validation_accuracy=result.metrics["validation_accuracy"],
        test_accuracy=result.metrics.get("test_accuracy"),
        steps=steps,
        own_steps=own,
        epochs=sum(phase.steps * phase.batch_size for phase in first_steps(phases, steps)) / record.images,
        batch_size=config.run.batch_size,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        precision=record.config.run.precision,
        threads=machine["threads"],
        versions=machine["versions"],
    )


def optimizer_flops(network: nn.Module, config: TrainConfig) -> int:
    """Return the operations of the products in one update of the weights. Only Muon has any."""
    network = copy.deepcopy(network)
    optimizer = make_optimizer(network, config.optimizer, config.run.precision)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    return counter.get_total_flops()


class _Recorder(Display):
    """Records each evaluation with the times of the training before it."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float, float, float]] = []
        """Step, seconds, processor seconds and accuracy of each evaluation."""
        self._clocks: tuple[Callable[[], float], ...] = (time.perf_counter, time.process_time)
        self._spent = [0.0, 0.0]
        self._since = [0.0, 0.0]

    def begin(self, step: int, steps: int, task: Task) -> None:
        self._since = [clock() for clock in self._clocks]

    def step(self, step: int, metrics: dict[str, float]) -> None:
        # An evaluation follows directly after this call, so its time does not count.
        now = [clock() for clock in self._clocks]
        self._spent = [spent + end - start for spent, start, end in zip(self._spent, self._since, now, strict=True)]
        self._since = now

    def evaluated(self, step: int, result: dict[str, float], best: bool) -> None:
        self.points.append((step, self._spent[0], self._spent[1], result["accuracy"]))
        self._since = [clock() for clock in self._clocks]


if __name__ == "__main__":
    sys.exit(run_process(lambda folder: measure_recipe(folder, read_cell(folder))))
