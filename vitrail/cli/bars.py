"""How far a verb is with its images: one look for all of them."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["images_bar"]


def images_bar(console: Console, *, transient: bool = False) -> Progress:
    """What is done to the images (a task's description), how many are done, and the time left; on a terminal alone."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
        expand=True,
        transient=transient,
    )
