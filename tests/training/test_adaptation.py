"""Tests of the adaptation to cores: what a run says when other programs use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch

from tests.listening import Display
from vitrail.cores import SharedCores, Usage
from vitrail.training import after_step as adaptation
from vitrail.training.config import TrainConfig
from vitrail.training.log import Log, read_journal
from vitrail.training.run import train


def test_a_run_uses_fewer_threads_while_cores_are_taken(
    small: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = 0

    def read() -> Usage:
        """A second later at each call. Another program takes one of two cores during seconds 3 to 9 and 15 to 19."""
        nonlocal readings
        readings += 1
        taken = sum(3 <= second < 10 or 15 <= second < 20 for second in range(readings))
        return Usage(float(readings), float(readings), float(readings - taken))

    monkeypatch.setattr(SharedCores, "WINDOW", 0.0)
    monkeypatch.setattr(adaptation, "SharedCores", partial(SharedCores, read))
    used = [2]  # two real threads would make this test as slow as it says while other tests hold the second core
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1])
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    display = Display()
    train(small(tmp_path / "run", precision="bf16", steps=24), log=Log(display))
    # Evaluations and the run itself set the number that they found again.
    assert [number for number, _ in groupby(used)] == [2, 1, 2, 1, 2], "as many threads as before at the end"
    changes = [event for event in read_journal(tmp_path / "run" / "journal.jsonl") if event["event"] == "threads"]
    assert [event["threads"] for event in changes] == [1, 2, 1, 2] and {event["at_most"] for event in changes} == {2}
    assert display.notes == [
        "other programs use the cores, so 1 of 2 compute threads are used until cores are free again"
    ]
