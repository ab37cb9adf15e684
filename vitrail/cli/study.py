"""`vitrail study`: answer a question of the paper by a grid of training runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import message_console, print_json
from vitrail.cli.options import Call, Command, DeviceOption, JsonOption, names_in
from vitrail.errors import check_known, plural
from vitrail.machine import pick_device
from vitrail.settings import setting, to_plain
from vitrail.studies.cell import CellResult, study_pool
from vitrail.studies.claims import Results
from vitrail.studies.engine import (
    TPU_FLOPS,
    TRIAL_SEED,
    StudyRun,
    check_jobs,
    cost_of,
    default_jobs,
    forecast,
    sizes_for,
)
from vitrail.studies.page import estimate_text, write_study
from vitrail.studies.questions import STUDIES
from vitrail.studies.study import Point, Study, check_subsets, open_study_data
from vitrail.training.stop import interrupted_by_signals


@dataclass(frozen=True, kw_only=True)
class StudyOptions(DeviceOption, JsonOption):
    """Options of `vitrail study`."""

    name: str = setting(argument="NAME")
    """Study to run. `vitrail study --help` lists all."""
    quick: bool = False
    """Run a small version, which takes at most 8 minutes on two cores. By default a study takes at most 90 minutes."""
    plan: bool = setting(False, excludes="cell")
    """Print the cost of the study and of its published size (cells, FLOPs and time), and run nothing."""
    data: str = setting("bundled", metavar="SPEC")
    """Data set of classification with a test split, in any form that `vitrail train` accepts. By default the bundled
    images."""
    arms: str = setting("", excludes="cell")
    """Arms to measure, separated by commas. By default all."""
    seeds: tuple[int, ...] = setting(
        (0, 1, 2), commas=True, least=0, below=TRIAL_SEED, advice=f"the trials have the seed {TRIAL_SEED}",
        distinct=True, excludes="cell",
    )  # fmt: skip
    """Random seeds. Every point is measured once with each of them. More seeds can be added to a finished study."""
    jobs: int | None = setting(None, least=1)
    """Number of cells that run at a time, each in a process of its own. By default one per core, as far as memory
    allows."""
    cell: str = ""
    """Name of a cell of the folder to run again, alone. The name is that of its folder below cells/."""
    out: Path | None = None
    """Folder of the study, by default runs/study-NAME, or runs/study-NAME-quick with --quick. Cells that it already has
    are not repeated."""


COMMAND = Command(
    name="study",
    summary=f"""Answer a question of the Vision Transformer paper on your own machine: a grid of training runs (cells),
    a table, a figure and a verdict that is computed from the numbers.

    Studies: {", ".join(STUDIES)}. The learning rate is chosen for each arm on a cut of the training split, and the test
    split is measured with each seed at the end. If the command is stopped, the same command continues. docs/studies.md
    has the results.""",
    examples=(
        ("vitrail study positions --quick", "Compare position embeddings on the bundled images."),
        ("vitrail study head --plan", "Print what a study costs before it starts."),
        ("vitrail study head --arms class-token,mean --seeds 0 1 2 3 4", "Compare two arms with five seeds."),
    ),
    options=(StudyOptions,),
    essential={
        "Study": ("quick", "plan", "data", "arms", "seeds"),
        "Running": ("jobs", "device", "cell"),
        "Output": ("out", "json"),
    },
)


def main(call: Call, options: StudyOptions) -> None:
    check_known(options.name, STUDIES, f"study {options.name!r} does not exist")
    study = STUDIES[options.name]
    console = message_console(options.json)
    device = pick_device(options.device)
    folder = options.out or Path(f"runs/study-{study.name}{'-quick' if options.quick else ''}")
    settings = open_study_data(options.data, "quick" if options.quick else "default")
    points = _chosen(study.points(settings), options.arms)
    check_subsets(points, settings)
    cost = cost_of(points, options.seeds, sizes_for(points, settings))
    jobs = options.jobs or default_jobs(cost, torch.get_num_threads(), device)
    threads = max(1, torch.get_num_threads() // jobs)
    if options.plan:
        published = study.published()
        whole = cost_of(published, options.seeds, sizes_for(published, settings))
        plan = {
            "trials": cost.trials,
            "cells": cost.cells,
            "flops": cost.flops,
            "seconds": forecast(cost, jobs=jobs, threads=threads, device=device),
            "jobs": jobs,
            "bytes_per_job": cost.bytes,
            "published": {
                "trials": whole.trials,
                "cells": whole.cells,
                "flops": whole.flops,
                "tpuv3_core_days": whole.flops / TPU_FLOPS / 86400,
            },
        }
        if options.json:
            print_json(plan)
        else:
            print(*plan_lines(study, plan, len(options.seeds)), sep="\n")
        return
    check_jobs(jobs, cost, device)
    run = StudyRun(
        study=study, settings=settings, points=tuple(points), seeds=options.seeds, folder=folder,
    )  # fmt: skip
    numbers = itertools.count(1)

    def show(label: str, result: CellResult) -> None:
        """Print a line for a cell that has ended."""
        accuracy = result.metrics.get("accuracy", result.metrics.get("validation_accuracy"))
        found = plural(result.steps, "step") if accuracy is None else f"accuracy {accuracy:.2%}"
        text = f"diverged ({result.diverged})" if result.diverged else f"{found}, {result.seconds:,.0f} s"
        console.print(f"{next(numbers):4} of at most {len(cost.costs)}  {label}: {text}", markup=False)

    pool = study_pool(folder, jobs=jobs, threads=threads, device=options.device, on_cell=show)
    repeated = pool.cell_named(options.cell) if options.cell else None
    with interrupted_by_signals(f"stopped; the finished cells stay in {folder}"), run.held():
        if repeated is not None:
            result = pool.repeat(repeated)
            if options.json:
                print_json(to_plain(result))
            return
        results = run.measure(pool)
        plain = write_study(folder, run, results)
    if options.json:
        print_json(plain)
        return
    console.print()
    for part in result_parts(study, results, plain):
        console.print(part, soft_wrap=False)
    files = "study.html, figure.svg, points.csv, cells.csv, trials.csv, results.json"
    console.print(f"\nwritten to {folder}: {files}", markup=False)


def _chosen(points: Sequence[Point], text: str) -> list[Point]:
    """Return the points of the arms in a list of names. Raise `ConfigError` for an unknown arm."""
    arms = list(dict.fromkeys(point.arm for point in points))
    names = names_in(text, "arms", arms)
    return [point for point in points if not names or point.arm in names]


# Tables of `vitrail study`: its cost before it starts, and its results.


def plan_lines(study: Study, plan: Mapping[str, Any], seeds: int) -> Iterator[str]:
    """Yield sentences about the cost of a study."""
    published = plan["published"]
    yield f"{study.name}: {study.question}"
    yield (
        f"here: {plan['trials']} trials of learning rates and {plan['cells']} other cells ({plural(seeds, 'seed')}), "
        f"{plan['flops'] / 1e12:,.3g} TFLOP in training steps, about {duration_text(plan['seconds'])} with "
        f"{plan['jobs']} at a time, up to {plan['bytes_per_job'] / 1e9:.1f} GB of memory each"
    )
    yield (
        f"published size: {published['trials']} trials and {published['cells']} other cells, "
        f"{published['flops'] / 1e18:,.0f} exaFLOP, about {published['tpuv3_core_days']:,.0f} TPUv3 core-days at "
        "the speed of the paper's ViT-H/14"
    )


def result_parts(study: Study, results: Results, plain: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the table of the results, and the verdict on every claim."""
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for number, heading in enumerate(("", "learning rate", *study.metrics.values(), "TFLOP", "diverged")):
        table.add_column(heading, justify="right" if number else "left", header_style="dim", no_wrap=bool(number))
    for point in results.points:
        table.add_row(
            Text(point.name),
            ", ".join(f"{rate:g}" for rate in point.rates),
            *(estimate_text(point.estimate(metric)) for metric in study.metrics),
            f"{point.flops / 1e12:,.3g}",
            f"{len(point.diverged)} of {len(point.cells)}" if point.diverged else "",
        )
    yield table
    for finding in plain["verdict"]:
        yield Text(f"\n{finding['outcome']}: {finding['claim']}", style="bold")
        yield from (Text(f"  {text}") for text in finding["evidence"])
    for note in plain["notes"]:
        yield Text(f"\n{note}")


def duration_text(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    for unit, length in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"
