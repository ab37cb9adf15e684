"""Training images that cannot be decoded: each is reported once, and too many of them end the run."""

from __future__ import annotations

from collections.abc import Iterable

from vitrail.data.batch import Skipped
from vitrail.errors import DataError
from vitrail.processes.group import Processes
from vitrail.training.reporting.sinks import Sinks
from vitrail.training.state.state import TrainState

__all__ = ["SkippedImages"]


class SkippedImages:
    """Collects the images of all processes that could not be decoded, of which `most` are allowed."""

    def __init__(self, state: TrainState, sinks: Sinks, most: int, processes: Processes) -> None:
        self.state = state
        self.sinks = sinks
        self.most = most
        self.processes = processes
        self._found: list[Skipped] = []

    def add(self, items: Iterable[Skipped]) -> None:
        """Add the images of a batch. A process that is alone reports them at once. Raises `DataError` for too many."""
        self._found += items
        if self._found and not self.processes.are_several:
            self._tell()

    def exchange(self) -> None:
        """Tell of the images that all processes have found since the last call. All processes call this method
        together. Raises `DataError` for too many."""
        if self.processes.are_several:
            self._found = [item for items in self.processes.gather(self._found) for item in items]
            self._tell()

    def _tell(self) -> None:
        known, items, self._found = self.state.skipped, self._found, []
        for item in items:
            if item.key not in known:
                known.add(item.key)
                self.sinks.journal.write("skipped", step=self.state.step, key=item.key, reason=item.reason)
                self.sinks.display.note(f"skipped {item.key}: {item.reason}")
        if len(known) > self.most:
            raise DataError(
                f"{len(known)} training images cannot be decoded, more than the {self.most} that --max-skipped "
                f"allows; the last one is {items[-1].key}: {items[-1].reason}. Find them with "
                "vitrail data check"
            )
