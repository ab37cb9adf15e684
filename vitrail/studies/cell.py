"""A cell of a study: one training run, and what is measured of its model.

A cell is named by a hash of its whole resolved configuration, so equal cells of a study run once. Each cell has a
folder of that name with `cell.json` (what to run), `run/` (the training run), `log.txt` (the output of its process) and
`result.json` (written last).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitrail.bench.accuracy.cell import result_of
from vitrail.errors import RunError
from vitrail.files import saving, write_json
from vitrail.plain import from_plain
from vitrail.training.config import TrainConfig

__all__ = ["Cell", "CellResult", "Measured", "make_cell", "read_cell", "read_result", "write_cell"]

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
