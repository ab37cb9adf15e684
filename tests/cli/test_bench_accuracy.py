"""Tests of `vitrail bench accuracy`."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.make import wait_for
from vitrail.cli import main

TINY = ("--data", "fractals:3:24", "--evaluations", "3", "--targets", "0.05", "0.9")


@pytest.mark.slow
def test_a_missing_library_is_named_before_anything_runs(cli: Cli, tmp_path: Path) -> None:
    error = cli.refuses("bench", "accuracy", "demo", "--against", "timm", "--out", tmp_path / "out")
    assert "torchvision is not installed" in error and "--environment timm=PATH/bin/python" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_comparison_of_two_recipes(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    changed = "fashion-mnist:variant=ViT-Pico/8,image-size=16 24,flip=off"
    words = ["bench", "accuracy", "demo", changed, *TINY, "--seeds", "4", "--out", str(out)]
    shown = cli.shows(*words)
    assert "demo, seed 4: " in shown and f"{changed}, seed 4: " in shown
    with (out / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["entry"] for row in rows] == ["demo"] * 3 + [changed] * 3
    (folder,) = out.glob("cells/fashion-mnist-variant=ViT-Pico-8-image-size=16-24-flip=off-*-seed4")
    config = json.loads((folder / "run" / "run.json").read_text())["config"]
    assert config["images"]["image_size"] == [16, 24] and config["augment"]["flip"] is False
    with (out / "targets.csv").open(newline="") as file:
        assert [row["reached"] for row in csv.DictReader(file)][:2] == ["1", "1"]
    assert (out / "curves.svg").read_text().startswith("<svg")
    before = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/result.json")}
    plain = cli.json(*words)
    assert plain == json.loads((out / "results.json").read_text())
    assert plain["budget"] is None and list(plain["entries"]["demo"]) == ["4"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "holds a comparison with other settings: budget was None and is 2.0" in cli.refuses(*words, "--budget", "2s")


def has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return "State:\tZ" in Path(f"/proc/{process}/status").read_text()


def process_of(run: Path) -> int:
    """The process that trains a run, once it has begun."""
    wait_for((run / "run.lock").exists)
    wait_for(lambda: (run / "run.lock").stat().st_size > 0)
    return int(json.loads((run / "run.lock").read_text())["process"])


@pytest.mark.slow
def test_a_comparison_that_is_killed_continues_with_the_next_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [sys.executable, "-m", "vitrail", "bench", "accuracy", "demo", *TINY, "--seeds", "0", "1"]
    words += ["--out", str(out)]
    first, second = (out / f"cells/demo-seed{seed}" for seed in (0, 1))
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        try:
            child = process_of(second / "run")
        finally:
            process.kill()
    wait_for(lambda: has_ended(child))  # the run does not go on alone
    assert (first / "result.json").exists() and not (second / "result.json").exists()
    before = (first / "result.json").stat().st_mtime_ns
    subprocess.run(words, check=True, capture_output=True)
    assert (second / "result.json").exists() and (first / "result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_an_interrupted_comparison_says_how_to_continue(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    found: list[int] = []

    def interrupt() -> None:
        found.append(process_of(out / "cells/demo-seed0/run"))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main(["bench", "accuracy", "demo", *TINY, "--out", str(out)]) == 75
    thread.join()
    error = capsys.readouterr().err
    assert "the finished runs stay in" in error and "Continue with: vitrail bench accuracy demo" in error
    assert has_ended(found[0])
