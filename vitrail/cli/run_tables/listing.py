"""`vitrail runs`: list runs with their state, metrics and the settings in which they differ."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional, flag
from vitrail.errors import ConfigError
from vitrail.evaluation.predictions.streaming import merit
from vitrail.training.records.summary import (
    RunSummary,
    differing_settings,
    find_runs,
    notes_on_data,
    summarise,
)
from vitrail.transfer.protocol import is_trial

__all__ = ["main", "rows_of", "setting_text", "summaries_in"]

STYLES = {"training": "cyan", "finished": "green", "failed": "red", "unreadable": "red"}

MOST_SETTINGS = 6
"""Largest number of settings that are printed for a run. JSON has all of them."""

MOST_LETTERS = 200
"""Largest number of letters of a problem that are printed."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Options of `vitrail runs`."""

    folder: Annotated[Path, Positional("[FOLDER]")] = Path("runs")
    """Folder that holds the runs."""
    trials: bool = False
    """Include the short trials that chose the settings of other runs."""
    sort: Literal["name", "metric", "time"] = "name"
    """Order of the runs: by name, from the best to the worst metric on the validation split, or from the newest to the
    oldest."""
    json: bool = False
    """Print JSON instead of a table."""


COMMAND = Command(
    name="runs",
    summary="""List the runs in a folder: state, steps, metrics, and the settings in which a run differs from most of
    the others.

    To continue a run that is stopped or interrupted, use vitrail train --resume RUN.""",
    examples=(
        Example("vitrail runs", "List the runs in the folder runs."),
        Example("vitrail runs --sort metric", "Show the best run first."),
        Example("vitrail runs experiments --json", "Print everything as JSON, for other programs."),
    ),
    options=(Runs,),
    essential={"Runs": ("trials", "sort"), "Output": ("json",)},
)


def main(call: Call) -> int:
    options = Runs(**call.options)
    found = summaries_in(options.folder, trials=options.trials)
    found.sort(key=_order(options.sort))
    settings = _settings(found)
    if options.json:
        print(json.dumps(rows_of(found, settings)))
        return 0
    console = Console(highlight=False)
    console.print(_table(found, options.folder))
    for run, differing in zip(found, settings, strict=True):
        name = _name(run, options.folder)
        if run.problem:
            problem = textwrap.shorten(run.problem, MOST_LETTERS, placeholder=" ...")
            console.print(f"{name}: {problem}", style="yellow", markup=False, soft_wrap=True)
        if texts := [setting_text(name, value) for name, value in differing.items() if value is not None]:
            rest = f" and {len(texts) - MOST_SETTINGS} more" if len(texts) > MOST_SETTINGS else ""
            console.print(f"{name}: {', '.join(texts[:MOST_SETTINGS])}{rest}", markup=False, soft_wrap=True)
    for note in notes_on_data(found):
        console.print(note, style="yellow", markup=False)
    return 0


def summaries_in(folder: Path, *, trials: bool) -> list[RunSummary]:
    """Return the summaries of the runs in a folder. Raise `ConfigError` if it does not exist or holds no run."""
    if not folder.is_dir():
        raise ConfigError(f"folder={str(folder)!r} is not a folder; give the folder that holds your runs")
    found = [summarise(path) for path in find_runs(folder) if trials or not is_trial(path)]
    if not found:
        raise ConfigError(f"folder={str(folder)!r} holds no run: no folder in it has a run.json")
    return found


def rows_of(runs: Sequence[RunSummary], settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs as plain JSON values. `settings` are those that differ, one dictionary per run."""
    return [
        {
            "run": str(run.folder),
            "state": run.state,
            "problem": run.problem,
            "step": run.step,
            "steps": run.steps,
            "started": run.started,
            "changed": run.changed,
            "metrics": run.metrics or {},
            "data_fingerprint": run.fingerprint,
            "settings": dict(differing),
        }
        for run, differing in zip(runs, settings, strict=True)
    ]


def setting_text(name: str, value: Any) -> str:
    """Return a setting as the words of the command line."""
    if isinstance(value, bool):
        return flag(name) if value else flag(name).replace("--", "--no-", 1)
    words = value if isinstance(value, tuple | list) else (value,)
    return f"{flag(name)} {shlex.join(map(str, words))}"


def _settings(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return the settings of each run that differ from those of most runs. Runs that cannot be read have none."""
    found = iter(differing_settings([run.config for run in runs if run.config is not None]))
    return [{} if run.config is None else next(found) for run in runs]


def _order(sort: str) -> Any:
    """Return the sorting key of runs."""
    if sort == "name":
        return lambda run: str(run.folder)
    if sort == "time":
        return lambda run: -(run.changed or 0.0)
    return lambda run: tuple(-part for part in _merit(run))


def _merit(run: RunSummary) -> tuple[float, float]:
    """Return the `merit` of a run by the task's first metric that the validation split has."""
    if run.config is not None and run.metrics:
        for metric in run.config.task.metrics:
            if (value := run.metrics.get(f"validation_{metric.name}")) is not None:
                loss = run.metrics.get(f"validation_{run.config.task.loss_metric}")
                return merit(value, loss, higher_is_better=metric.higher_is_better)
    return merit(None, None)


def _name(run: RunSummary, folder: Path) -> str:
    return str(run.folder if run.folder == folder else run.folder.relative_to(folder))


def _table(runs: Sequence[RunSummary], folder: Path) -> Table:
    splits = [split for split in ("validation", "test") if any(run.texts(split) for run in runs)]
    texts = [[text for split in splits for text in run.texts(split)[:1]] for run in runs]
    names = {text.rpartition(" ")[0] for found in texts for text in found}
    shared = names.pop() if len(names) == 1 else ""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("steps", justify="right", overflow="fold")
    for split in splits:
        table.add_column(f"{split} {shared}".strip() + ", images", justify="right", overflow="fold")
    table.add_column("changed", justify="right", no_wrap=True)
    for run in runs:
        style = STYLES.get(run.state, "yellow")
        table.add_row(
            escape(_name(run, folder)),
            f"[{style}]{run.state}[/]",
            f"{run.step:,}" if run.step == run.steps else f"{run.step:,} of {run.steps:,}",
            *(escape(_measured(run, split, shared)) for split in splits),
            "" if run.changed is None else f"{datetime.fromtimestamp(run.changed):%m-%d %H:%M}",
        )
    return table


def _measured(run: RunSummary, split: str, shared: str) -> str:
    """Return the main metric of a split without its name if that is `shared`, and the number of images."""
    if not (texts := run.texts(split)):
        return ""
    images = run.images(split)
    return texts[0].removeprefix(shared).strip() + ("" if images is None else f" on {images:,}")
