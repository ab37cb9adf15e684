"""Tests of the pool of cells, with real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from vitrail.errors import VitrailError
from vitrail.experiments.runner import CELLS, Pool, read_result
from vitrail.studies.cell import CellResult, StudyCell, make_cell, study_pool
from vitrail.studies.study import Settings, small_config
from vitrail.training.log import read_journal


def cell_of(**overrides: object) -> StudyCell:
    config = small_config(Settings(scale="quick"), images=100, epochs=1.0)
    config = config.override(depth=1, width=16, mlp_width=16, batch_size=20, precision="float32", **overrides)
    return make_cell(config, by=("accuracy",), measured="test")


def pool_of(folder: Path, jobs: int = 1, **fields: object) -> Pool[StudyCell, CellResult]:
    return study_pool(folder, jobs=jobs, threads=1, device="cpu", **fields)  # type: ignore[arg-type]


@pytest.mark.slow  # imports torch in two processes
def test_a_failure_is_told_after_the_other_cells_have_ended(tmp_path: Path) -> None:
    bad, good = cell_of(data="no-such-data[:100]"), cell_of()
    seen: list[str] = []
    pool = pool_of(tmp_path, 2, on_cell=lambda label, result: seen.append(label))
    with pytest.raises(
        VitrailError, match=r"cell \w{16} \(bad\) ended with exit code 2; the same command cont"
    ) as told:
        pool.run([("bad", bad), ("good", good)])
    assert "no-such-data" in str(told.value) and seen == ["good"]
    assert pool.repeat(good).metrics == pool.run([("good", good)])[good.name].metrics


@pytest.mark.slow
def test_a_cell_that_was_killed_continues_and_has_the_same_result(tmp_path: Path) -> None:
    cell = cell_of(epochs=60.0, checkpoints=30)
    folder = tmp_path / "killed" / CELLS / cell.name
    begun: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            if any((folder / "run" / "checkpoints").glob("step-*/manifest.json")):
                break
            time.sleep(0.02)
        for number in _processes_of(folder):
            begun.append(number)
            os.kill(number, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(VitrailError, match=r"\(the cell\) was ended by signal 9; the same command continues"):
        pool_of(tmp_path / "killed").run([("the cell", cell)])
    thread.join()
    assert len(begun) == 1 and read_result(folder, CellResult) is None
    result = pool_of(tmp_path / "killed").run([("the cell", cell)])[cell.name]
    events = [event["event"] for event in read_journal(folder / "run" / "journal.jsonl")]
    assert "resumed" in events  # from a checkpoint
    whole = pool_of(tmp_path / "whole").run([("the cell", cell)])[cell.name]
    assert result.metrics == whole.metrics and result.steps == whole.steps and result.flops == whole.flops


def _processes_of(folder: Path) -> list[int]:
    """Return the numbers of the processes whose command names a folder."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and folder.as_posix() in (process / "cmdline").read_text():
                found.append(int(process.name))
    return found
