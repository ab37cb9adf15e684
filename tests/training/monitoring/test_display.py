"""Tests of the display's lines and progress bar."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from vitrail.tasks import TASKS
from vitrail.training.monitoring import display as display_module
from vitrail.training.monitoring.display import ConsoleDisplay

REPORTS = ((20.0, 10), (30.0, 20), (90.0, 30), (91.0, 31))
"""Seconds and steps: a start-up of 20 s, then 1 s per step, and an evaluation of 50 s."""
LEFT = (180, 80, 245, 233)
"""Seconds left of 100 steps. The first is the mean of everything, the others exclude the start-up."""


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    file = io.StringIO()
    display = ConsoleDisplay(Console(file=file, force_terminal=terminal, width=120))
    display.LINE_SECONDS = 0.0
    monkeypatch.setattr(display_module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    display.begin(0, 100, TASKS["classification"]())
    for seconds, step in REPORTS:
        monkeypatch.setattr(display_module, "time", SimpleNamespace(perf_counter=lambda seconds=seconds: seconds))
        display.step(step, {"loss": 1.25, "accuracy": 0.5, "images_per_second": 894.4})
        if display._progress is not None:
            display._progress.refresh()
    display.end()
    return file.getvalue()


def test_the_time_left_is_a_mean_without_the_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, terminal=False).splitlines()
    assert [line.split("  ")[-1] for line in lines] == [f"{left} s left" for left in LEFT]
    assert lines[0].startswith("step 10/100  loss 1.250  ") and "  894 images/s  " in lines[0]


def test_a_terminal_shows_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=True)
    found = re.findall(r"(\d):(\d\d):(\d\d) left", text)
    times = [int(hours) * 3600 + int(minutes) * 60 + int(seconds) for hours, minutes, seconds in found]
    assert tuple(dict.fromkeys(times)) == LEFT
