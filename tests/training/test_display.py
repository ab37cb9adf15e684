"""Tests of the display's lines and progress bar."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from vitrail.cli import console as display_module
from vitrail.cli.console import ConsoleDisplay
from vitrail.tasks import TASKS

METRICS = {
    "loss": 1.25, "accuracy": 0.5, "images_per_second": 894.4, "learning_rate": 5.17e-4,
    "memory_bytes": 1.5 * 2**30, "waiting_share": 0.04,
}  # fmt: skip


class Screen:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, terminal: bool = False, width: int = 120) -> None:
        self.file, self.now = io.StringIO(), 0.0
        monkeypatch.setattr(display_module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        color = {"color_system": None} if terminal else {}
        self.display = ConsoleDisplay(Console(file=self.file, force_terminal=terminal, width=width, **color))

    def begin(self, steps: int = 100) -> ConsoleDisplay:
        self.display.begin(0, steps, TASKS["classification"]())
        return self.display

    def refresh(self) -> None:
        """Draw the bar of a terminal at once."""
        if self.display._progress is not None:
            self.display._progress.refresh()

    @property
    def text(self) -> str:
        return self.file.getvalue()


def shown(screen: Screen) -> str:
    display = screen.begin()
    for screen.now, step, left in ((4.0, 10, None), (13.9, 11, 80.0), (14.1, 20, 245.4), (30.0, 31, 233.0)):
        display.step(step, METRICS | ({} if left is None else {"seconds_left": left}))
        screen.refresh()
    display.end()
    return screen.text


def test_lines_are_ten_seconds_apart_and_the_first_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(Screen(monkeypatch)).splitlines() == [
        f"step {step}/100  loss 1.250  accuracy 50.0%  {left}894 images/s  learning rate 0.00052  1.5 GiB of memory"
        for step, left in ((10, ""), (20, "245 s left  "), (31, "233 s left  "))
    ]


@pytest.mark.parametrize(("width", "shown"), [(100, 5), (80, 4), (60, 3), (44, 2), (30, 1)])
def test_a_narrow_terminal_shows_what_is_most_important(
    width: int, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(monkeypatch, terminal=True, width=width)
    display = screen.begin(1200)
    display.step(1000, METRICS | {"seconds_left": 7384.0, "waiting_share": 0.37, "limit_fraction": 0.38})
    screen.refresh()
    display.end()
    texts = ("step 1,000/1,200", "loss 1.250", "accuracy 50.0%", "2:03:04 left", "waiting", "images/s", "products")
    assert [one in screen.text for one in texts] == [number < shown for number in range(len(texts))]
    assert "…" not in screen.text
