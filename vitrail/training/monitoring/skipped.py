"""Images that cannot be decoded: each is reported once, and too many training images of this kind end the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from vitrail.data.batch import Skipped
from vitrail.errors import DataError
from vitrail.processes.group import Processes
from vitrail.training.reporting.display import Display
from vitrail.training.reporting.sinks import Sinks
from vitrail.training.state.state import TrainState

__all__ = ["HeldOutSkips", "SkippedImages"]

MOST_NAMED = 10
"""Largest number of held-out images of a split that the display names. The journal names all of them."""


class HeldOutSkips:
    """Shows each held-out image that cannot be decoded once, although every evaluation finds it."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self._shown: defaultdict[str, set[str]] = defaultdict(set)

    def of(self, split: str) -> Callable[[Skipped], None]:
        """Return the function that receives the images of a split."""

        def show(item: Skipped) -> None:
            shown = self._shown[split]
            if item.key in shown:
                return
            shown.add(item.key)
            if len(shown) <= MOST_NAMED:
                self.display.note(f"skipped {item.key} of the {split} split: {item.reason}")
            elif len(shown) == MOST_NAMED + 1:
                self.display.note(f"more images of the {split} split are skipped; journal.jsonl names all of them")

        return show


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
                self.sinks.journal.write(
                    "skipped", step=self.state.step, split="train", key=item.key, reason=item.reason
                )
                self.sinks.display.note(f"skipped {item.key}: {item.reason}")
        if len(known) > self.most:
            raise DataError(
                f"{len(known)} training images cannot be decoded, more than the {self.most} that --max-skipped "
                f"allows; the last one is {items[-1].key}: {items[-1].reason}. Find them with "
                "vitrail data check"
            )
