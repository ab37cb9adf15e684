"""`journal.jsonl`: the events of a run, one per line. Lines are only ever appended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitrail.files import saving

__all__ = ["Journal", "kept_result", "read_journal"]


class Journal:
    """Appends events to a file, each with its time in seconds since 1970. If `is_kept` is False, nothing is written:
    one of several processes keeps the journal of all."""

    def __init__(self, path: Path, *, is_kept: bool = True) -> None:
        self.path = path
        self.is_kept = is_kept
        self.readers: list[Callable[[dict[str, Any]], None]] = []
        """Functions that receive each event after it is written."""

    def write(self, event: str, **values: Any) -> None:
        """Append an event. Raises `SaveError`."""
        if not self.is_kept:
            return
        content = {"event": event, "time": round(time.time(), 3), **values}
        data = (json.dumps(content, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        with saving("the journal", self.path), self.path.open("ab+") as file:
            if file.tell() and file.seek(-1, os.SEEK_END) is not None and file.read(1) != b"\n":
                data = b"\n" + data  # the previous line is incomplete; it stays in the file
            file.write(data)
        for reader in self.readers:
            reader(content)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run. If a run that was resumed or rolled back repeated steps, only the events of the
    repetition are returned. If a finished run was extended, the events of its earlier end are not returned.

    Incomplete lines, which a power failure can leave, are skipped. A run without a journal has no events.
    """
    if not path.exists():
        return []
    events: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["event"] in ("resumed", "rolled back"):
            events = [old for old in events if _stays(old, event)]
        events.append(event)
    return events


def kept_result(path: Path) -> dict[str, float]:
    """Return all metrics of the finished model on the validation split, with its loss. Return an empty dictionary if
    the run has not measured its finished model on any validation image."""
    for event in reversed(read_journal(path)):
        if event.get("kept") and event["split"] == "validation" and event["images"]:
            return {name: value for name, value in event.items() if isinstance(value, float)}
    return {}


def _stays(event: dict[str, Any], resumed: dict[str, Any]) -> bool:
    """Return True if an event still holds after the run was resumed. An extended run has a new end."""
    ends = ("finished", "ended early") if "extends" in resumed else ("finished",)
    return event.get("step", 0) <= resumed["step"] and not event.get("kept") and event["event"] not in ends
