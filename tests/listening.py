"""A listener of the logs of runs, for tests that look at what a run shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console

from vitrail.cli.console import ConsoleDisplay


class Display(ConsoleDisplay):
    """Keeps the messages, and shows nothing. Tests override the methods whose events they look at, and need not call
    `__init__`."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        display = super().__new__(cls)
        ConsoleDisplay.__init__(display, Console(quiet=True))
        display.said, display.notes = list[str](), list[str]()
        return display

    said: list[str]
    notes: list[str]

    def __init__(self) -> None:
        """Do nothing, because `__new__` did."""

    def say(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep nothing."""

    def tick(self, step: int, seconds_left: float) -> None:
        """Keep nothing."""

    def evaluated(self, step: int, result: Mapping[str, Any], training: Mapping[str, float]) -> None:
        """Keep nothing."""
