"""Tests of cells and their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vitrail.errors import RunError, VitrailError
from vitrail.experiments.cells import Cell, CellResult, CurvePoint, read_cell, read_result, run_cell, write_result

CELL = Cell(entry="demo", seed=1, settings={"sizes": (3, 4)}, budget=2.5, evaluations=2, device="cpu")

RESULT = CellResult(
    points=(CurvePoint(step=3, seconds=0.5, cpu_seconds=0.7, flops=1e9, accuracy=0.25),), validation_accuracy=0.5,
    test_accuracy=None, steps=3, own_steps=3, epochs=1.0, batch_size=2, parameters=5, precision="float32", threads=1,
    versions={"torch": "2"},
)  # fmt: skip

SCRIPT = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "runs").write_text("x")
print("a line of the log")
if {code}:
    sys.exit({code})
(folder / "result.json").write_text((folder.parent / "result.json").read_text())
"""


def command(code: int = 0) -> list[str]:
    return [sys.executable, "-c", SCRIPT.format(code=code)]


def test_a_finished_cell_is_not_run_again(tmp_path: Path) -> None:
    write_result(tmp_path, RESULT)
    folder = tmp_path / CELL.name
    assert run_cell(folder, CELL, command()) == RESULT
    assert folder.name == "demo-seed1" and read_cell(folder) == CELL
    (folder / "runs").unlink()
    assert run_cell(folder, CELL, command(9)) == RESULT
    assert not (folder / "runs").exists()


def test_an_unfinished_cell_starts_again(tmp_path: Path) -> None:
    write_result(tmp_path, RESULT)
    folder = tmp_path / CELL.name
    with pytest.raises(VitrailError, match="demo with seed 1 ended with exit code 7") as caught:
        run_cell(folder, CELL, command(7))
    assert "a line of the log" in str(caught.value) and str(folder / "log.txt") in str(caught.value)
    (folder / "rest").write_text("of the killed run")
    assert run_cell(folder, CELL, command()) == RESULT and not (folder / "rest").exists()


def test_a_result_of_other_settings_is_refused(tmp_path: Path) -> None:
    write_result(tmp_path, RESULT)
    folder = tmp_path / CELL.name
    run_cell(folder, CELL, command())
    other = Cell(entry="demo", seed=1, settings={"sizes": (3, 5)}, budget=2.5, evaluations=2, device="cpu")
    with pytest.raises(RunError, match="was measured with other settings of demo; delete this folder"):
        run_cell(folder, other, command())
    assert read_result(folder) == RESULT


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(RunError, match=r"result\.json is damaged: .*; delete the folder"):
        read_result(tmp_path)


def test_an_interrupted_cell_ends_its_process(tmp_path: Path) -> None:
    script = """
import os, pathlib, sys, time
partial = pathlib.Path(sys.argv[1], "partial")
partial.write_text(str(os.getpid()))
partial.rename(partial.with_name("pid"))
time.sleep(99)
"""
    folder = tmp_path / CELL.name

    def interrupt() -> None:
        until = time.monotonic() + 60
        while not (folder / "pid").exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_cell(folder, CELL, [sys.executable, "-S", "-c", script])
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)
    assert read_result(folder) is None


def test_a_process_ends_with_the_one_that_started_it() -> None:
    script = """
import time
from vitrail.experiments.cells import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(99)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n" and process.poll() is None
        process.stdin.close()
        assert process.wait(60) == 1
