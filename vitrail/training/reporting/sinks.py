"""The files and the display that receive the reports of a run."""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.training.reporting.display import Display
from vitrail.training.reporting.journal import Journal
from vitrail.training.state.checkpoint import Checkpoints

__all__ = ["Sinks"]


@dataclass(frozen=True)
class Sinks:
    """The files and the display that receive the reports of a run."""

    journal: Journal
    checkpoints: Checkpoints
    display: Display
