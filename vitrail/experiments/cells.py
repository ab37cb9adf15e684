"""A cell of the comparison: one entry with one seed. Each cell has a folder and a process of its own.

The folder of a cell has `cell.json` (what to run), `result.json` (written last) and `log.txt` (the output of the
process). A cell without a result is run again from the beginning, so that its times are those of one run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from vitrail.errors import RunError, VitrailError
from vitrail.files import saving, write_json
from vitrail.settings import from_plain

R = TypeVar("R")

CELL, RESULT, LOG = "cell.json", "result.json", "log.txt"

SHOWN_LINES = 8
"""Number of lines of the log that the message of a failed cell shows."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Settings that the process of the cell trains with, as JSON values."""

    entry: str
    """Name of the entry: a recipe, or settings of another library."""
    seed: int
    settings: Mapping[str, Any]
    """A recipe's `TrainConfig`, or the settings of another library."""
    budget: float | None
    """Seconds of training. A run that would take longer is shortened."""
    evaluations: int
    """Number of evaluations on the validation split during the run."""
    device: str

    @property
    def name(self) -> str:
        """The name of the cell's folder. Characters that some file systems do not allow are replaced."""
        return f"{re.sub(r'[^A-Za-z0-9=.-]', '-', self.entry)}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The accuracy on the validation split after some training."""

    step: int
    seconds: float
    """Seconds of training before this evaluation, without earlier evaluations."""
    cpu_seconds: float
    """Seconds that the cores spent on it. They do not include worker processes that read images."""
    flops: float
    """Counted floating-point operations of the matrix products and convolutions of all steps before, with those of the
    optimizer."""
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The measurements of a finished cell."""

    points: tuple[CurvePoint, ...]
    validation_accuracy: float
    """Accuracy of the finished model on the validation split."""
    test_accuracy: float | None
    """Accuracy of the finished model on the test split, which is measured once. None if the data has no test split."""
    steps: int
    own_steps: int
    """Number of steps that the settings ask for. It is larger than `steps` if the budget shortened the run."""
    epochs: float
    batch_size: int
    parameters: int
    precision: str
    threads: int
    versions: Mapping[str, str]


def read_cell(folder: Path) -> Cell:
    """Read the cell of a folder."""
    return from_plain(Cell, json.loads((folder / CELL).read_text(encoding="utf-8")))


def read_result(folder: Path) -> CellResult | None:
    """Return the result of a finished cell, or None. Raises `RunError` if its file is damaged."""
    return result_of(folder, CellResult)


def result_of(folder: Path, kind: type[R]) -> R | None:
    """Return the result of a finished cell as an object of this class, or None. Raises `RunError` if its file is
    damaged."""
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        return from_plain(kind, json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}; delete the folder {folder} to run the cell again") from error


def write_result(folder: Path, result: Any) -> None:
    """Write the result, a dataclass, which marks the cell as finished. Raises `SaveError`."""
    with saving("the result", folder):
        write_json(folder / RESULT, asdict(result))


def run_cell(folder: Path, cell: Cell, command: Sequence[str]) -> CellResult:
    """Return the result of a cell in its folder, by running `command` with the folder as its last argument.

    A finished cell is not run again. Raises `RunError` if the folder holds another cell, and `VitrailError` with the
    end of the log if the process fails.
    """
    # through JSON, because tuples become lists
    if (folder / CELL).exists() and json.loads((folder / CELL).read_text(encoding="utf-8")) != _plain(cell):
        if (folder / RESULT).exists():
            raise RunError(
                f"{folder} was measured with other settings of {cell.entry}; delete this folder, or measure into "
                "another one with --out"
            )
    elif (result := read_result(folder)) is not None:
        return result
    with saving("the cell", folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(folder / CELL, _plain(cell))
    code = _run([*command, str(folder)], folder / LOG)
    result = read_result(folder)
    if code or result is None:
        raise VitrailError(
            f"{cell.entry} with seed {cell.seed} ended with exit code {code}; the whole output is in {folder / LOG}:\n"
            f"{last_lines(folder / LOG)}"
        )
    return result


def _plain(cell: Cell) -> Any:
    return json.loads(json.dumps(asdict(cell)))


def _run(command: Sequence[str], log: Path) -> int:
    """Run a command until it ends, and return its exit code. If this process is interrupted, the command ends too."""
    process = start_process(command, log)
    try:
        return process.wait()
    finally:
        end_process(process)


def start_process(command: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start a command that writes its output into `log`. `variables` are added to the environment.

    The command has a session of its own, so Ctrl-C reaches only this process. The command is expected to call
    `end_with_parent`: it then ends as soon as this process closes its standard input or dies.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **variables},
        )  # fmt: skip


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process that `start_process` started, unless it has ended already."""
    if process.poll() is None:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()


def last_lines(log: Path) -> str:
    """Return the end of a log, indented for a message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    return "\n".join(f"  {line}" for line in lines)


def run_process(measure: Callable[[Path], Any]) -> int:
    """Measure the cell of the folder that is the last argument of this process, and write its result. Return the exit
    code. The process ends with its parent."""
    end_with_parent()
    folder = Path(sys.argv[-1])
    try:
        write_result(folder, measure(folder))
    except VitrailError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def end_with_parent() -> None:
    """End this process at once when the process that started it closes this process's standard input, or dies."""

    def watch() -> None:
        while os.read(0, 1):  # sys.stdin has a lock, which would be held when Python ends
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
