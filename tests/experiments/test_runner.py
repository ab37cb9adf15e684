"""Tests of the runner of cells, with processes that do not train."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from vitrail.errors import RunError, VitrailError
from vitrail.experiments.accuracy import AccuracyCell, Curve, CurvePoint
from vitrail.experiments.runner import Pool, experiment, read_cell, read_result, write_result
from vitrail.files import replaced_path, write_json
from vitrail.training.folder import locked

CELL = AccuracyCell(entry="demo", seed=1, settings={"sizes": (3, 4)}, budget=2.5, evaluations=2, device="cpu")

RESULT = Curve(
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


def pool(folder: Path, code: int = 0, script: str = SCRIPT) -> Pool[AccuracyCell, Curve]:
    """Return a pool whose cells run a script. Their result is that in the folder of all cells."""
    (folder / "cells").mkdir(exist_ok=True)
    write_result(folder / "cells", RESULT)
    command = (sys.executable, "-S", "-c", script.replace("{code}", str(code)))
    return Pool(folder=folder, cell=AccuracyCell, result=Curve, command=lambda cell: command, restarts=True)


def run(folder: Path, cell: AccuracyCell = CELL, code: int = 0, script: str = SCRIPT) -> Curve:
    """Run a cell by a script, and return its result."""
    return pool(folder, code, script).run([("demo, seed 1", cell)])[cell.name]


def test_a_finished_cell_is_not_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "cells" / CELL.name
    assert run(tmp_path) == RESULT
    assert folder.name == "demo-seed1" and read_cell(folder, AccuracyCell) == CELL
    (folder / "runs").unlink()
    assert run(tmp_path, code=9) == RESULT
    assert not (folder / "runs").exists()


def test_an_unfinished_cell_starts_again(tmp_path: Path) -> None:
    folder = tmp_path / "cells" / CELL.name
    with pytest.raises(VitrailError, match=r"cell demo-seed1 \(demo, seed 1\) ended with exit code 7; the") as caught:
        run(tmp_path, code=7)
    assert "a line of the log" in str(caught.value) and str(folder / "log.txt") in str(caught.value)
    (folder / "rest").write_text("of the killed run")
    assert run(tmp_path) == RESULT and not (folder / "rest").exists()


def test_a_result_of_other_settings_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    other = replace(CELL, settings={"sizes": (3, 5)})
    message = r"other settings of demo, seed 1: sizes was \[3, 4\] and is \[3, 5\]; delete this folder"
    with pytest.raises(RunError, match=message):
        run(tmp_path, other)


def test_entries_that_differ_only_in_other_characters_have_cells_of_their_own() -> None:
    entries = ("demo:weight_decay=1e-2", "demo:weight_decay=1e+2", "demo:weight-decay=1e-2")
    names = {replace(CELL, entry=entry).name for entry in entries}
    assert len(names) == 3 and all(re.fullmatch(r"[\w=.-]+", name) for name in names)


def test_two_cells_of_one_name_are_refused(tmp_path: Path) -> None:
    cells = [("first", CELL), ("second", replace(CELL, settings={}))]
    with pytest.raises(RunError, match="second and first are different cells of one name"):
        pool(tmp_path).run(cells)
    assert not (tmp_path / "cells" / CELL.name).exists(), "nothing has run"
    assert len(pool(tmp_path).run([("first", CELL), ("again", CELL)])) == 1


@pytest.mark.parametrize("code", [0, 7])
def test_a_repeated_cell_keeps_its_result_until_it_has_a_new_one(tmp_path: Path, code: int) -> None:
    folder = tmp_path / "cells" / CELL.name
    run(tmp_path)
    (folder / "earlier").touch()
    again = pool(tmp_path, code)
    if code:
        with pytest.raises(VitrailError, match="exit code 7"):
            again.repeat(again.cell_named(CELL.name))
        assert "a line of the log" in (folder / "log.txt").read_text()
    else:
        assert again.repeat(again.cell_named(CELL.name)) == RESULT
    assert read_result(folder, Curve) == RESULT and (folder / "earlier").exists() == bool(code)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [CELL.name]


@pytest.mark.parametrize("ended", [False, True])
def test_a_cell_whose_repetition_was_killed_has_a_whole_result(tmp_path: Path, ended: bool) -> None:
    run(tmp_path)
    place = tmp_path / "cells" / CELL.name
    place.rename(replaced_path(place))
    if ended:
        run(tmp_path)
    else:
        place.mkdir()
        (place / "rest").write_text("of the repetition")
    (replaced_path(place) / "earlier").touch()
    write_json(tmp_path / "record.json", {})
    with experiment(tmp_path / "record.json", {}, "cells", "--out"):
        assert read_result(place, Curve) == RESULT
        assert (place / "earlier").exists() != ended and not (place / "rest").exists()
        assert not replaced_path(place).exists()


def test_a_damaged_cell_or_result_is_named(tmp_path: Path) -> None:
    run(tmp_path)
    for name, message in (
        ("cell", r"has no readable cell: .*; delete"),
        ("result", r"result\.json is damaged: .*; del"),
    ):
        (tmp_path / "cells" / CELL.name / f"{name}.json").write_text("{")
        with pytest.raises(RunError, match=message):
            run(tmp_path)


def test_an_interrupted_cell_ends_its_process(tmp_path: Path) -> None:
    script = """
import os, pathlib, sys, time
partial = pathlib.Path(sys.argv[1], "partial")
partial.write_text(str(os.getpid()))
partial.rename(partial.with_name("pid"))
time.sleep(99)
"""
    folder = tmp_path / "cells" / CELL.name

    def interrupt() -> None:
        until = time.monotonic() + 60
        while not (folder / "pid").exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, script=script)
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)
    assert read_result(folder, Curve) is None


def test_the_folder_of_an_experiment_is_held_by_one_process(tmp_path: Path) -> None:
    with experiment(tmp_path / "new" / "x.json", {"a": 1}, "a study", "--out"):
        assert (tmp_path / "new" / "x.json").is_file()
        with (
            pytest.raises(RunError, match="is in use"),
            experiment(tmp_path / "new" / "x.json", {"a": 1}, "a study", "--out"),
        ):
            pass
    with experiment(tmp_path / "new" / "x.json", {"a": 1}, "a study", "--out"):
        pass


def test_an_experiment_that_is_refused_leaves_the_record_of_the_first_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    path.parent.mkdir()
    with (
        locked(path.parent),  # by a process that has not written its settings yet
        pytest.raises(RunError, match="is in use"),
        experiment(path, {"a": 1}, "a study", "--out"),
    ):
        pass
    assert not path.exists()
