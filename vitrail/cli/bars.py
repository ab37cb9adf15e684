"""The progress bar over images that the verbs share."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["images_bar"]


def images_bar(console: Console, *, transient: bool = False) -> Progress:
    """Return a bar with a description, the images done and the time left. It appears on terminals only."""
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
