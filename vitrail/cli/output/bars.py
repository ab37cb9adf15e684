"""The progress bar that all commands use while they process images."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["images_bar"]


SPEED_SECONDS = 300.0
"""Seconds over which the speed is averaged for the remaining time. Batches can take many seconds."""


def images_bar(console: Console, *, transient: bool = False) -> Progress:
    """Return a progress bar with the number of images and the remaining time. It is shown only on terminals."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
        expand=True,
        speed_estimate_period=SPEED_SECONDS,
        transient=transient,
    )
