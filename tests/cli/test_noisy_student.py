"""Tests of `vitrail noisy-student` and `vitrail data label`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from vitrail.data.sources import open_data

TINY = (
    "--width", "16", "--depth", "2", "--heads", "2", "--mlp-width", "32", "--steps", "2", "--batch-size", "8",
    "--evaluations", "1", "--checkpoints", "1", "--device", "cpu", "--threads", "0", "--precision", "float32",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_bundled", "here")
def test_the_command_alone_runs_and_continues(cli: Cli) -> None:
    shown = cli.shows("noisy-student", *TINY, "--confidence", "0.05", "--rounds", "1")
    assert "round 1: runs/noisy-student/round-0/run labels images" in shown
    assert "is best on the validation split. Its model is" in shown
    again = cli.shows("noisy-student", *TINY, "--confidence", "0.05", "--rounds", "1")
    assert "labels images" not in again and again.splitlines()[-1] == shown.splitlines()[-1]
    printed = cli.call("noisy-student", *TINY, "--confidence", "0.06", code=2)
    assert "holds rounds of Noisy Student with other settings: confidence was 0.05 and" in printed.err


@pytest.mark.slow
def test_labels_are_written_shown_and_replaced_on_request(
    model: Path, some_images: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "labels"
    command = ["data", "label", f"{some_images}[:100]", "--teacher", str(model), "--out", str(out), "--device", "cpu"]
    shown = cli.shows(*command, "--confidence", "0")
    assert "100 of 100 images have a class of probability 0 or more. Chosen: " in shown and "confident" in shown
    assert f"Train on them: vitrail train --data LABELLED --mix 0.75:{out}" in shown
    assert len(open_data(str(out), validation_share=0.0).train) >= 10
    assert "exists already; choose another folder, or replace it with --overwrite" in cli.refuses(*command)
    info = cli.json(*command, "--confidence", "0", "--overwrite", "--no-balance")
    assert info["images"] == 100 and sum(count["chosen"] for count in info["counts"]) == 100
    (out / "mine.txt").write_text("mine")
    assert "holds files that Vitrail did not write (mine.txt)" in cli.refuses(*command, "--overwrite")
