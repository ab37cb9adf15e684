"""Summaries of runs, from the files in their folders: state, metrics, and the settings in which they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import RunError
from vitrail.models.config import ModelConfig
from vitrail.settings import bare_names
from vitrail.training.config import TrainConfig
from vitrail.training.records.lock import is_locked
from vitrail.training.records.record import read_record
from vitrail.training.reporting.journal import read_journal

__all__ = [
    "RunState",
    "RunSummary",
    "differing_settings",
    "find_runs",
    "notes_on_data",
    "settings_beside",
    "settings_of",
    "summarise",
]

RunState = Literal["training", "finished", "stopped", "failed", "interrupted", "unreadable"]
"""State of a run. A run that was stopped saved its state on request. A run that was interrupted ended without recording
why, for example because the machine was switched off."""

ENDS: dict[str, RunState] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
"""State of a run whose last event is the key, while no process trains it."""

RECORD = "run.json"

PARTS = ("model", "checkpoints", "examples")
"""Folders inside a run's folder, which hold no runs."""

DEPTH = 3
"""Number of levels of folders in which runs are looked for."""

OF_THE_MACHINE = (
    "run", "name", "overwrite", "threads", "processes", "compute_threads", "float32_products", "device", "compile",
    "checkpoints", "max_time",
)  # fmt: skip
"""Settings that do not change what a run learns."""


@dataclass(frozen=True)
class RunSummary:
    """A run as its folder describes it."""

    folder: Path
    state: RunState
    problem: str = ""
    """Reason why the run cannot be read, or why it failed."""
    config: TrainConfig | None = None
    step: int = 0
    """Optimizer steps that were done."""
    steps: int = 0
    """Optimizer steps of the whole run."""
    started: float | None = None
    """Time of the first event, in seconds since 1970."""
    changed: float | None = None
    """Time of the last event, in seconds since 1970."""
    metrics: dict[str, float] | None = None
    """Metrics of the saved model such as "validation_accuracy", or of the best evaluation so far, with the number of
    images that were measured, such as "validation_images". None without any."""
    fingerprint: str = ""
    """Hash of the names and targets of all images, or "" if it is unknown."""

    def texts(self, split: str) -> list[str]:
        """Return the metrics of a split as texts with their names."""
        if self.config is None or self.metrics is None:
            return []
        start = f"{split}_"
        values = {name.removeprefix(start): value for name, value in self.metrics.items() if name.startswith(start)}
        return self.config.task.texts(values)

    def images(self, split: str) -> int | None:
        """Return the number of images of a split on which the metrics were measured, or None if it is unknown."""
        found = (self.metrics or {}).get(f"{split}_images")
        return None if found is None else int(found)


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the folders of runs in a folder, in alphabetical order. The folder itself can be a run.

    Folders inside a run, hidden folders and folders that cannot be opened hold no runs.
    """
    if (folder / RECORD).is_file():
        yield folder
        return
    if depth == 0:
        return
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return
    for path in inside:
        if path.name not in PARTS:
            yield from find_runs(path, depth - 1)


def summarise(folder: Path) -> RunSummary:
    """Return the summary of the run in a folder. A run that cannot be read has the state "unreadable"."""
    try:
        record = read_record(folder)
        events = read_journal(folder / "journal.jsonl")
    except (RunError, OSError) as error:
        return RunSummary(folder, "unreadable", str(error))
    last = events[-1] if events else {}
    state = "training" if is_locked(folder) else ENDS.get(last.get("event", ""), "interrupted")
    begun = [event for event in events if event["event"] in ("started", "resumed")]
    return RunSummary(
        folder,
        state,
        str(last.get("reason", "")) if state == "failed" else "",
        record.config,
        step=max((int(event.get("step", 0)) for event in events), default=0),
        steps=int(begun[-1]["steps"]) if begun else record.config.total_steps(record.images),
        started=events[0]["time"] if events else None,
        changed=last.get("time"),
        metrics=_metrics(events),
        fingerprint=record.fingerprint,
    )


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Return the settings of a config by their bare names, with the values that are in effect. Settings of the machine,
    and fields of the network that the config leaves to the variant, are not included."""
    found = ["task"]
    for section in fields(config):
        value = getattr(config, section.name)
        found += ["variant", *value.overrides] if isinstance(value, ModelConfig) else bare_names(type(value))
    return {name: config.in_effect(name) for name in found if name not in OF_THE_MACHINE}


def settings_beside(configs: Sequence[TrainConfig]) -> list[dict[str, Any]]:
    """Return the settings of each config that one of them has (`settings_of`), by their bare names. A setting that a
    config does not have is None."""
    names = dict.fromkeys(name for config in configs for name in settings_of(config))
    return [{name: config.in_effect(name) for name in names} for config in configs]


def differing_settings(configs: Sequence[TrainConfig]) -> list[dict[str, Any]]:
    """Return the settings of each config that are not the most frequent ones among the configs, by their bare names.

    Of equally frequent values, the first one counts as the usual value. A setting that a config does not have is None.
    """
    settings = settings_beside(configs)
    names = settings[0] if settings else ()
    usual = {name: Counter(repr(one[name]) for one in settings).most_common(1)[0][0] for name in names}
    return [{name: value for name, value in one.items() if repr(value) != usual[name]} for one in settings]


def notes_on_data(runs: Sequence[RunSummary]) -> Iterator[str]:
    """Yield a note for each data set that had other images, labels or splits in some of the runs, although its name
    and the settings of its splits are the same."""
    groups: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        if run.config is not None and run.fingerprint:
            groups.setdefault(repr(run.config.data), {}).setdefault(run.fingerprint, []).append(run.folder.name)
    specs = {repr(run.config.data): run.config.data.spec for run in runs if run.config is not None}
    for data, found in groups.items():
        if len(found) > 1:
            runs_of_each = "; ".join(", ".join(names) for names in found.values())
            yield (
                f"the images, labels or splits of data {specs[data]!r} changed between these runs, so their metrics "
                f"are not comparable: {runs_of_each}"
            )


def _metrics(events: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Return the metrics of the saved model, or those of the best evaluation on the validation split so far."""
    for event in reversed(events):
        if event["event"] == "finished":
            return {f"{one['split']}_images": one["images"] for one in events if one.get("kept")} | event["metrics"]
        if event["event"] == "evaluation" and event.get("best"):
            return {f"validation_{name}": value for name, value in event.items() if isinstance(value, float)}
    return None
