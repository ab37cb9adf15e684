"""Tests of `vitrail noisy-student`."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Cli

TINY = (
    "--width", "16", "--depth", "2", "--heads", "2", "--mlp-width", "32", "--steps", "2", "--batch-size", "8",
    "--evaluations", "1", "--checkpoints", "1", "--device", "cpu", "--threads", "0", "--precision", "float32",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_bundled", "here")
def test_the_command_alone_runs_and_continues(cli: Cli) -> None:
    shown = cli.shows("noisy-student", *TINY, "--confidence", "0.05", "--rounds", "1")
    assert "round 0: the first teacher learns" in shown and "round 1: the student learns" in shown
    assert "round 1: runs/noisy-student/round-0/run labels images" in shown
    assert "0 (teacher)" in shown and "validation" in shown and "is best on the validation split. Its model is" in shown
    again = cli.shows("noisy-student", *TINY, "--confidence", "0.05", "--rounds", "1")
    assert "labels images" not in again and again.splitlines()[-1] == shown.splitlines()[-1]
    printed = cli.call("noisy-student", *TINY, "--confidence", "0.06", code=2)
    message = "vitrail: runs/noisy-student holds rounds of Noisy Student with other settings: confidence was 0.05 and"
    assert message in printed.err
