"""`vitrail runs` lists runs, and `vitrail runs compare` shows where their settings and metrics differ."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from vitrail.analysis.charts import STYLE, series_chart
from vitrail.cli.console import message_console, print_json, print_notes
from vitrail.cli.options import Call, Command, JsonOption, flag
from vitrail.cli.run_options import setting_text
from vitrail.errors import ConfigError, RunError, plural
from vitrail.evaluation.metrics.numbers import merit
from vitrail.files import check_new_file, saving
from vitrail.report.charts import UNBOUNDED, Series
from vitrail.report.page import write_page
from vitrail.settings import setting
from vitrail.tasks.task import TaskMetric
from vitrail.training.folder import (
    DEPTH,
    RunSummary,
    differing_settings,
    find_runs,
    notes_on_data,
    settings_beside,
    summarise,
    value_text,
)
from vitrail.training.log import read_journal
from vitrail.training.page import averaged
from vitrail.transfer.trials import is_trial

STYLES = {"training": "cyan", "finished": "green", "failed": "red", "unreadable": "red"}

MOST_SETTINGS = 6
"""Largest number of settings that are printed for a run. JSON has all of them."""

MOST_LETTERS = 200
"""Largest number of letters of a problem that are printed."""


@dataclass(frozen=True, kw_only=True)
class Runs(JsonOption):
    """Options of `vitrail runs`."""

    folder: Path = setting(Path("runs"), argument="[FOLDER]")
    """Folder that holds the runs."""
    trials: bool = False
    """Include the short trials that chose the settings of other runs."""
    sort: Literal["name", "metric", "time"] = "name"
    """Order of the runs: by name, from the best to the worst metric on the validation split, or from the newest to the
    oldest."""


COMMAND = Command(
    name="runs",
    summary=f"""List the runs in a folder, down to {DEPTH} levels: state, steps, metrics, and the settings in which a
    run differs from most of the others.

    To continue a run that is stopped or interrupted, use vitrail train --resume RUN.""",
    examples=(
        ("vitrail runs", "List the runs in the folder runs."),
        ("vitrail runs --sort metric", "Show the best run first."),
        ("vitrail runs experiments --json", "Print everything as JSON, for other programs."),
    ),
    options=(Runs,),
    essential={"Runs": ("trials", "sort"), "Output": ("json",)},
)


def main(call: Call, options: Runs) -> None:
    folders = _folders(options.folder, is_json=options.json)
    shown = [folder for folder in folders if options.trials or not is_trial(folder)]
    if len(shown) < len(folders):
        print_notes(message_console(options.json), f"{plural(len(folders) - len(shown), 'trial')} not shown (--trials)")
    orders: dict[str, Callable[[RunSummary], Any]] = {
        "name": lambda run: str(run.folder),
        "time": lambda run: -(run.changed or 0.0),
        "metric": lambda run: tuple(-part for part in _merit(run)),
    }
    found = sorted(map(summarise, shown), key=orders[options.sort])
    readable = iter(differing_settings([run.config for run in found if run.config is not None]))
    settings = [{} if run.config is None else next(readable) for run in found]
    if options.json:
        print_json(rows_of(found, settings))
        return
    console = Console(highlight=False)
    console.print(_table(found, options.folder))
    for run, differing in zip(found, settings, strict=True):
        name = _name(run, options.folder)
        if run.problem:
            problem = textwrap.shorten(run.problem, MOST_LETTERS, placeholder=" ...")
            print_notes(console, f"{name}: {problem}")
        if texts := [setting_text(name, value) for name, value in differing.items() if value is not None]:
            rest = f" and {len(texts) - MOST_SETTINGS} more" if len(texts) > MOST_SETTINGS else ""
            console.print(f"{name}: {', '.join(texts[:MOST_SETTINGS])}{rest}", markup=False, soft_wrap=True)
    print_notes(console, *notes_on_data(found))


def _folders(folder: Path, *, is_json: bool) -> list[Path]:
    """Return the folders of the runs in a folder, and print notes on deeper ones. Raise `ConfigError` if the folder
    does not exist or holds no run."""
    if not folder.is_dir():
        raise ConfigError(f"folder={str(folder)!r} is not a folder; give the folder that holds your runs")
    unsearched = list[Path]()
    levels = {one: len(one.relative_to(folder).parts) for one in find_runs(folder, 2 * DEPTH, unsearched)}
    found, deeper = [one for one in levels if levels[one] <= DEPTH], [one for one in levels if levels[one] > DEPTH]
    for places, what in (
        (deeper, f"not listed: {plural(len(deeper), 'run')} deeper than {DEPTH} levels"),
        (unsearched, f"not searched: {plural(len(unsearched), 'folder')} deeper than {2 * DEPTH} levels"),
    ):
        if places:
            print_notes(message_console(is_json), f"{what}, such as {places[0]}; give a folder nearer to them")
    if not found:
        raise ConfigError(
            f"folder={str(folder)!r} holds no run: no folder in it, down to {DEPTH} levels, has a run.json"
        )
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
            escape_markup(_name(run, folder)),
            f"[{style}]{run.state}[/]",
            f"{run.step:,}" if run.step == run.steps else f"{run.step:,} of {run.steps:,}",
            *(escape_markup(_measured(run, split, shared)) for split in splits),
            "" if run.changed is None else f"{datetime.fromtimestamp(run.changed):%m-%d %H:%M}",
        )
    return table


def _measured(run: RunSummary, split: str, shared: str) -> str:
    """Return the main metric of a split without its name if that is `shared`, and the number of images."""
    if not (texts := run.texts(split)):
        return ""
    images = run.images(split)
    return texts[0].removeprefix(shared).strip() + ("" if images is None else f" on {images:,}")


# `vitrail runs compare`: the settings and metrics in which a few runs differ, side by side.


@dataclass(frozen=True, kw_only=True)
class CompareRuns(JsonOption):
    """Options of `vitrail runs compare`."""

    runs: tuple[Path, ...] = setting(argument="RUN...", distinct=True)
    """Folders of two or more runs."""
    page: Path | None = None
    """HTML file for the curves of all runs in the same charts."""
    overwrite: bool = setting(False, needs=("page", "only the file that --page names is replaced; leave it out"))
    """Replace the file that --page names if it exists."""


COMPARE = Command(
    name="runs compare",
    summary="""Compare runs: the settings in which they differ, their lengths and their metrics, with a column for each
    run.""",
    examples=(
        ("vitrail runs compare runs/flowers runs/flowers-2", "Compare two runs."),
        ("vitrail runs compare runs/* --page curves.html", "Also draw the curves of all runs."),
        ("vitrail runs compare runs/* --json", "Print the comparison as JSON."),
    ),
    options=(CompareRuns,),
    essential={"Output": ("page", "json")},
)


def run_compare(call: Call, options: CompareRuns) -> None:
    if len(options.runs) < 2:
        raise ConfigError("RUN: a comparison needs two runs or more; give the folders of both")
    found = [summarise(folder) for folder in options.runs]
    for run in found:
        if run.config is None:
            raise RunError(run.problem)
    if options.page is not None:
        check_new_file(options.page, overwrite=options.overwrite)
        metrics = (metric for run in found if run.config is not None for metric in run.config.task.metrics)
        write_overlay(options.page, options.runs, metrics=metrics)
    beside = settings_beside([run.config for run in found if run.config is not None])
    names = [name for name in beside[0] if len({repr(one[name]) for one in beside}) > 1]
    settings = [{name: one[name] for name in names} for one in beside]
    if options.json:
        print_json(rows_of(found, settings))
    else:
        console = Console(highlight=False)
        console.print(_comparison_table(found, settings))
        print_notes(console, *notes_on_data(found))


def _comparison_table(runs: Sequence[RunSummary], settings: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for run in runs:
        table.add_column(escape_markup(str(run.folder)), overflow="fold")
    for name in settings[0]:
        table.add_row(flag(name), *(escape_markup(value_text(one[name])) for one in settings))
    if settings[0]:
        table.add_section()
    table.add_row("state", *(run.state for run in runs))
    table.add_row("steps", *(f"{run.step:,} of {run.steps:,}" for run in runs))
    for split in ("validation", "test"):
        texts = itertools.zip_longest(*(run.texts(split) for run in runs), fillvalue="")
        for number, row in enumerate(texts):
            table.add_row("" if number else split, *map(escape_markup, row))
        images = [run.images(split) for run in runs]
        if any(images):
            table.add_row(f"{split} images", *("" if count is None else f"{count:,}" for count in images))
    return table


# The curves of several runs in the same charts, as one HTML page.


CURVES = {
    "loss": "training loss",
    "learning_rate": "learning rate",
    "gradient_norm": "norm of the gradients",
    "update_ratio": "relative update of the weights",
    "images_per_second": "images per second",
}
"""Numbers of the events `step` that are drawn, with the names of their axes."""


def write_overlay(path: Path, folders: Sequence[Path], *, metrics: Iterable[TaskMetric]) -> None:
    """Write a page with these validation metrics, of which fractions are drawn in percent, and the training curves of
    all runs. Raises `SaveError`."""
    journals = {str(folder): read_journal(folder / "journal.jsonl") for folder in folders}
    drawn = {f"validation {metric.label}": ("evaluation", metric.name, metric.is_fraction) for metric in metrics}
    drawn |= {name: ("step", field, False) for field, name in CURVES.items()}
    with saving("the page", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_page(
        "the page",
        path,
        "cli/curves.html",
        title="Curves of " + ", ".join(journals),
        style=Markup(STYLE),
        charts={name: _chart(journals, name, *details) for name, details in drawn.items()},
    )


def _chart(
    journals: Mapping[str, Sequence[dict[str, Any]]], name: str, kind: str, field: str, is_fraction: bool
) -> Markup:
    """Return a chart of a number of the events of a kind, with a line for each run, or "" if no run has the number.
    Evaluations are those of the weights that would be saved, without that of the finished model."""
    lines = []
    scale, unit, bounds = (100.0, ", %", (0.0, 100.0)) if is_fraction else (1.0, "", UNBOUNDED)
    for run, events in journals.items():  # also those without the number, so that a run has one colour on the page
        points = [
            (float(event["step"]), scale * event[field])
            for event in events
            if event["event"] == kind and (kind == "step" or "best" in event) and event.get(field) is not None
        ]
        lines.append(Series(run, averaged(points)[0]))
    return series_chart(lines, label=f"{name} of each run over steps", x_name="step", y_name=name + unit, bounds=bounds)
