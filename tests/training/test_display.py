"""Tests of the display's lines and progress bar."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from vitrail.cli import console as display_module
from vitrail.cli.console import ConsoleDisplay
from vitrail.tasks import TASKS

REPORTS = ((4.0, 10, None), (13.9, 11, 80.0), (14.1, 20, 245.4), (30.0, 31, 233.0))
"""Seconds, steps and seconds left."""

METRICS = {
    "loss": 1.25, "accuracy": 0.5, "images_per_second": 894.4, "learning_rate": 5.17e-4,
    "memory_bytes": 1.5 * 2**30, "waiting_share": 0.04,
}  # fmt: skip


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    file = io.StringIO()
    display = ConsoleDisplay(Console(file=file, force_terminal=terminal, width=120))
    monkeypatch.setattr(display_module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    display.begin(0, 100, TASKS["classification"]())
    for seconds, step, left in REPORTS:
        monkeypatch.setattr(display_module, "time", SimpleNamespace(perf_counter=lambda seconds=seconds: seconds))
        known = {} if left is None else {"seconds_left": left}
        display.step(step, METRICS | known)
        if display._progress is not None:
            display._progress.refresh()
    display.end()
    return file.getvalue()


def test_lines_are_ten_seconds_apart_and_the_first_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=False).splitlines() == [
        f"step {step}/100  loss 1.250  accuracy 50.0%  {left}894 images/s  learning rate 0.00052  1.5 GiB of memory"
        for step, left in ((10, ""), (20, "245 s left  "), (31, "233 s left  "))
    ]


def test_a_terminal_shows_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=True)
    found = re.findall(r"(\d):(\d\d):(\d\d) left", text)
    times = [int(hours) * 3600 + int(minutes) * 60 + int(seconds) for hours, minutes, seconds in found]
    assert tuple(dict.fromkeys(times)) == (80, 245, 233)


@pytest.mark.parametrize("terminal", [False, True])
def test_notes_wrap_at_words_on_a_terminal_and_are_one_line_elsewhere(*, terminal: bool) -> None:
    file, note = io.StringIO(), "the folder of photographs has images that nobody can read; " * 5
    ConsoleDisplay(Console(file=file, force_terminal=terminal, color_system=None, width=31)).note(note)
    lines = file.getvalue().splitlines()
    assert " ".join(line.strip() for line in lines) == note.strip(), "no word is divided"
    assert max(map(len, lines)) <= 31 if terminal else len(lines) == 1


def test_waiting_and_the_fraction_of_the_limit_are_shown() -> None:
    file = io.StringIO()
    display = ConsoleDisplay(Console(file=file, width=120))
    display.begin(0, 100, TASKS["classification"]())
    display.step(100, METRICS | {"limit_fraction": 0.384, "waiting_share": 0.37})
    assert (
        "accuracy 50.0%  waiting for images 37%  894 images/s  38% of the speed of matrix products  learning rate"
        in file.getvalue()
    )


@pytest.mark.parametrize(("width", "shown"), [(100, 5), (80, 4), (60, 3), (44, 2), (30, 1)])
def test_a_narrow_terminal_shows_what_is_most_important(width: int, shown: int) -> None:
    file = io.StringIO()
    display = ConsoleDisplay(Console(file=file, force_terminal=True, color_system=None, width=width))
    display.begin(0, 1200, TASKS["classification"]())
    display.step(1000, METRICS | {"seconds_left": 7384.0, "waiting_share": 0.37, "limit_fraction": 0.38})
    assert display._progress is not None
    display._progress.refresh()
    display.end()
    texts = ("step 1,000/1,200", "loss 1.250", "accuracy 50.0%", "2:03:04 left", "waiting", "images/s", "products")
    text = file.getvalue()
    assert [one in text for one in texts] == [number < shown for number in range(len(texts))]
    assert "…" not in text


@pytest.mark.slow
def test_a_week_has_some_hundred_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    display = ConsoleDisplay(Console(file=file, width=120))
    monkeypatch.setattr(display_module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    display.begin(0, 10**6, TASKS["classification"]())
    for step in range(1, 60_481):
        monkeypatch.setattr(display_module, "time", SimpleNamespace(perf_counter=lambda step=step: 10.0 * step))
        display.tick(step, 60.0)
    assert 650 < len(file.getvalue().splitlines()) < 780


@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_left_is_shown_before_the_first_report(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
    file = io.StringIO()
    display = ConsoleDisplay(Console(file=file, force_terminal=terminal, width=120))
    monkeypatch.setattr(display_module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    display.begin(0, 100, TASKS["classification"]())
    monkeypatch.setattr(display_module, "time", SimpleNamespace(perf_counter=lambda: 4.0))
    display.tick(2, 196.0)
    if display._progress is not None:
        display._progress.refresh()
    display.end()
    expected = ("step 2/100", "0:03:16 left") if terminal else ("step 2/100  196 s left\n",)
    assert all(text in file.getvalue() for text in expected)


def test_slow_features_are_counted_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    display = ConsoleDisplay(Console(file=file, width=120))
    calls = ((0.0, 8, 40), (5.0, 16, 40), (10.1, 24, 40), (20.3, 32, 40), (31.0, 40, 40), (32.0, 8, 16), (43.0, 16, 16))
    for seconds, done, total in calls:
        monkeypatch.setattr(display_module, "time", SimpleNamespace(perf_counter=lambda seconds=seconds: seconds))
        display.extracting(done, total)
    assert file.getvalue().splitlines() == ["features of 24 of 40 images", "features of 32 of 40 images"]


def test_training_accuracy_stands_beside_that_of_validation() -> None:
    file = io.StringIO()
    display = ConsoleDisplay(Console(file=file, width=120))
    display.begin(0, 100, TASKS["classification"]())
    result = {"best": False, "accuracy": 0.5, "cross_entropy": 1.25, "images": 40.0, "skipped": 0.0}
    display.evaluated(10, result, {})
    display.evaluated(20, result | {"best": True}, {"accuracy": 0.75, "loss": 0.9})
    assert file.getvalue().splitlines() == [
        "step 10: validation accuracy 50.00% on 40 images",
        "step 20: validation accuracy 50.00% on 40 images; training accuracy 75.00%  (best so far)",
    ]


def test_skipped_images_are_counted_beside_those_that_were_measured() -> None:
    file = io.StringIO()
    display = ConsoleDisplay(Console(file=file, width=120))
    display.begin(0, 100, TASKS["classification"]())
    result = {"best": False, "accuracy": 0.5, "cross_entropy": 1.25, "images": 40.0, "skipped": 2.0}
    display.evaluated(10, result, {})
    assert file.getvalue() == "step 10: validation accuracy 50.00% on 40 images (2 skipped)\n"
