"""The pool of cells: each unfinished cell runs in a process of its own, a number of them at a time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vitrail.bench.accuracy.cell import end_process, last_lines, start_process
from vitrail.errors import ConfigError, VitrailError, nearest
from vitrail.studies.cell import Cell, CellResult, read_cell, read_result, write_cell
from vitrail.studies.cell_run import DEVICE

__all__ = ["CELLS", "CellPool"]

CELLS, LOG = "cells", "log.txt"

POLL_SECONDS = 0.05

COMMAND = (sys.executable, "-m", "vitrail.studies.cell_run")


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
