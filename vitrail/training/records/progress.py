"""`progress.html`: a run on one page, which is updated during the run."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from PIL import Image

from vitrail.charts.lines import STYLE
from vitrail.errors import plural
from vitrail.files import partial_path, saving
from vitrail.page import document, escape, figure, table, thumbnail
from vitrail.tasks.task import TaskMetric
from vitrail.training.config import TrainConfig
from vitrail.training.records.curves import health_figures, training_figures
from vitrail.training.records.summary import settings_of
from vitrail.training.reporting.journal import read_journal

__all__ = ["ProgressPage"]

SECONDS = 30.0
"""Least time between two versions of the page during a run."""

ENDS = ("finished", "stopped", "failed", "ended early")
"""Events after which the page is written at once."""

MAX_SKIPPED = 50


class ProgressPage:
    """Writes the page of a run again after evaluations and checkpoints, and when the run ends."""

    def __init__(self, folder: Path, config: TrainConfig, metric: TaskMetric, steps: int) -> None:
        self.folder = folder
        self.config = config
        self.metric = metric
        self.steps = steps
        self._written = -SECONDS

    def receive(self, event: Mapping[str, Any]) -> None:
        """Write the page if this event of the journal changes it and the last version is old enough. Raises
        `SaveError`."""
        is_end = event["event"] in ENDS
        now = time.perf_counter()
        if is_end or (event["event"] in ("evaluation", "checkpoint") and now - self._written >= SECONDS):
            self._written = now
            self.write()

    def write(self) -> Path:
        """Write the page, and return its path. Raises `SaveError`."""
        events = read_journal(self.folder / "journal.jsonl")
        page = document(f"Run {self.folder.resolve().name}", self._parts(events), style=STYLE)
        path = self.folder / "progress.html"
        with saving("the page of the run", path):
            partial = partial_path(path)
            partial.write_text(page, encoding="utf-8")
            partial.replace(path)
        return path

    def _parts(self, events: Sequence[dict[str, Any]]) -> Iterator[str]:
        yield f"<p>{escape(self._state(events))}</p>"
        rows = [
            (split, text)
            for split in ("validation", "test")
            for text in self.config.task.texts(_last_evaluation(events, split))
        ]
        if rows:
            yield table(("split", "result"), rows)
        saved = "finished" if self.config.run.keep == "last" else "best"
        saved_steps = [event["step"] for event in events if event["event"] == saved or event.get(saved)]
        figures = [
            *training_figures(self.config, events, self.metric, saved_steps[-1] if saved_steps else None),
            *health_figures(events),
        ]
        if figures:
            yield '<h2>Curves</h2>\n<div class="charts">'
            yield from figures
            yield "</div>"
        yield from self._examples()
        yield "<h2>Settings</h2>"
        defaults = settings_of(TrainConfig()) | {one.name: one.default for one in fields(self.config.task)}
        changed = {
            name: value for name, value in settings_of(self.config).items() if value not in (None, defaults.get(name))
        }
        yield table(("setting", "value"), [(name.replace("_", " "), str(value)) for name, value in changed.items()])
        note = "The table lists only settings that are not the default. The file run.json lists all settings."
        yield f'<p class="dim">{note}</p>'
        skipped = [
            (event["key"], event["reason"], event.get("split", "")) for event in events if event["event"] == "skipped"
        ]
        if skipped:
            yield f"<h2>{plural(len(skipped), 'image')} that could not be decoded</h2>"
            yield table(("image", "reason", "split"), skipped[:MAX_SKIPPED])

    def _state(self, events: Sequence[dict[str, Any]]) -> str:
        """Return a sentence about how far the run is."""
        step = max((event.get("step", 0) for event in events), default=0)
        done = f"{step:,} of {self.steps:,} steps"
        for event in reversed(events):
            if event["event"] == "resumed":  # the ends before do not count
                break
            if event["event"] == "failed":
                return f"The run failed after {done}: {event['reason']}."
            if event["event"] == "finished":
                return f"The run is finished, after {done}."
            if event["event"] == "stopped":
                again = f"vitrail train --resume {shlex.quote(str(self.folder))}"
                return f"The run was stopped after {done}. Continue it with {again}."
        return f"The run is in progress: {done} were done when this page was written. Reload the page to see more."

    def _examples(self) -> Iterator[str]:
        files = sorted((self.folder / "examples").glob("*.png"))
        if files:
            yield '<h2>Examples</h2>\n<p class="dim">Held-out images with their labels.</p>'
            yield '<div class="strip">'
            for file in files:
                with Image.open(file) as picture:
                    yield figure(thumbnail(picture.convert("RGB"), file.stem), [file.stem])
            yield "</div>"


def _last_evaluation(events: Sequence[dict[str, Any]], split: str) -> dict[str, float]:
    """Return the numbers of the last evaluation on a split."""
    found = [event for event in events if event["event"] == "evaluation" and event["split"] == split]
    return {} if not found else {name: value for name, value in found[-1].items() if isinstance(value, float)}
