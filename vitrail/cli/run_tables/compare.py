"""`vitrail runs compare`: the settings and metrics in which a few runs differ, side by side."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional, flag
from vitrail.cli.run_tables.listing import rows_of
from vitrail.cli.run_tables.overlay import write_overlay
from vitrail.errors import ConfigError, RunError
from vitrail.files import check_new_file
from vitrail.training.config import TrainConfig
from vitrail.training.records.summary import RunSummary, notes_on_data, settings_beside, summarise

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class CompareRuns:
    """Options of `vitrail runs compare`."""

    runs: Annotated[tuple[Path, ...], Positional("RUN...")]
    """Folders of two or more runs."""
    page: Path | None = None
    """HTML file for the curves of all runs in the same charts."""
    overwrite: bool = False
    """Replace the file that --page names if it exists."""
    json: bool = False
    """Print JSON instead of a table."""


COMMAND = Command(
    name="runs compare",
    summary="""Compare runs: the settings in which they differ, their lengths and their metrics, with a column for each
    run.""",
    examples=(
        Example("vitrail runs compare runs/flowers runs/flowers-2", "Compare two runs."),
        Example("vitrail runs compare runs/* --page curves.html", "Also draw the curves of all runs."),
        Example("vitrail runs compare runs/* --json", "Print the comparison as JSON."),
    ),
    options=(CompareRuns,),
    essential={"Output": ("page", "json")},
)


def main(call: Call) -> int:
    options = CompareRuns(**call.options)
    if len(options.runs) < 2:
        raise ConfigError("RUN: a comparison needs two runs or more; give the folders of both")
    found = [summarise(folder) for folder in options.runs]
    for run in found:
        if run.config is None:
            raise RunError(run.problem)
    if options.page is not None:
        check_new_file(options.page, overwrite=options.overwrite)
        metrics = (metric.name for run in found if run.config is not None for metric in run.config.task.metrics)
        write_overlay(options.page, options.runs, metrics=list(dict.fromkeys(metrics)))
    settings = _different([run.config for run in found if run.config is not None])
    if options.json:
        print(json.dumps(rows_of(found, settings)))
        return 0
    console = Console(highlight=False)
    console.print(_table(found, settings))
    for note in notes_on_data(found):
        console.print(note, style="yellow", markup=False)
    return 0


def _different(configs: Sequence[TrainConfig]) -> list[dict[str, Any]]:
    """Return the settings of each run whose values are not the same in all runs. A missing setting is None."""
    settings = settings_beside(configs)
    names = [name for name in settings[0] if len({repr(one[name]) for one in settings}) > 1]
    return [{name: one[name] for name in names} for one in settings]


def _table(runs: Sequence[RunSummary], settings: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for run in runs:
        table.add_column(escape(str(run.folder)), overflow="fold")
    for name in settings[0]:
        table.add_row(flag(name), *(escape(_text(one[name])) for one in settings))
    if settings[0]:
        table.add_section()
    table.add_row("state", *(run.state for run in runs))
    table.add_row("steps", *(f"{run.step:,} of {run.steps:,}" for run in runs))
    for split in ("validation", "test"):
        texts = itertools.zip_longest(*(run.texts(split) for run in runs), fillvalue="")
        for number, row in enumerate(texts):
            table.add_row("" if number else split, *map(escape, row))
        images = [run.images(split) for run in runs]
        if any(images):
            table.add_row(f"{split} images", *("" if count is None else f"{count:,}" for count in images))
    return table


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
