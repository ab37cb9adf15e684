"""`journal.jsonl`: what happened in a run, an event a line, only ever added to."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from vitrail.files import saving

__all__ = ["Journal", "read_journal"]


class Journal:
    """Appends events to a file, each with the seconds since 1970."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values}, ensure_ascii=False)
        with saving("the journal", self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The events of the run as it counts: what a resumed run did again replaces what it did before.

    A last line that was cut short, as by a power failure, is left out. A run that wrote nothing has no events.
    """
    if not path.exists():
        return []
    events: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["event"] == "resumed":
            events = [old for old in events if old.get("step", 0) <= event["step"]]
        events.append(event)
    return events
