"""A listener of the logs of runs, for tests that look at what a run shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console

from vitrail.cli.console import ConsoleDisplay


class Display(ConsoleDisplay):
    """Shows nothing. Tests override the methods whose events they look at, and need not call `__init__`."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        display = super().__new__(cls)
        ConsoleDisplay.__init__(display, Console(quiet=True))
        return display

    def __init__(self) -> None:
        """Do nothing, because `__new__` did."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show nothing, not even to a test that overrides `say`."""

    def tick(self, step: int, seconds_left: float) -> None:
        """Show nothing."""

    def evaluated(self, step: int, result: Mapping[str, Any], training: Mapping[str, float]) -> None:
        """Show nothing."""
