"""`vitrail train`: a run from scratch, or the rest of one that was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.cli.options import parse
from vitrail.errors import ConfigError, Stopped, nearest
from vitrail.recipes import RECIPES
from vitrail.training.config import TrainConfig
from vitrail.training.display import ConsoleDisplay
from vitrail.training.run import RunResult, resume, train

__all__ = ["main"]

USAGE = "vitrail train [RECIPE]"
DESCRIPTION = """Train a Vision Transformer from scratch.

RECIPE is one of {recipes}; the options below show its settings and replace them. Without one it is demo, on bundled
images, or folder where --data names something else. Ctrl-C saves and stops; go on with: vitrail train --resume RUN."""


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was stopped or killed, from its newest whole checkpoint."""

    resume: Path
    """The run's folder."""


def main(words: Sequence[str], started: float) -> int:
    console = Console()
    display = ConsoleDisplay(console)
    try:
        if any(word == "--resume" or word.startswith("--resume=") for word in words):
            run = parse(Resume, words, usage="vitrail train", description=Resume.__doc__ or "").resume
            result = resume(run, display=display, started=started)
        else:
            result = train(_config(words), display=display, started=started)
    except Stopped as stop:
        raise Stopped(f"{stop}\nGo on with: vitrail train --resume {stop.run}", stop.run) from None
    _report(console, result)
    return 0


def _config(words: Sequence[str]) -> TrainConfig:
    name, rest = (words[0], words[1:]) if words and not words[0].startswith("-") else (_default_recipe(words), words)
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; {nearest(name, RECIPES)}")
    description = DESCRIPTION.format(recipes=", ".join(RECIPES))
    return parse(TrainConfig, rest, usage=USAGE, description=description, default=RECIPES[name]())


def _default_recipe(words: Sequence[str]) -> str:
    """The recipe for data that was named without one."""
    for word, following in pairwise([*words, ""]):
        if word == "--data" or word.startswith("--data="):
            data = word.partition("=")[2] or following
            return {"bundled": "demo", "fashion-mnist": "fashion-mnist"}.get(data, "folder")
    return "demo"


def _report(console: Console, result: RunResult) -> None:
    metrics, summary = result.metrics, result.summary
    table = Table(title="A few held-out images", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("image", "true", "predicted"):
        table.add_column(column)
    table.add_column("probability", justify="right")
    table.add_column("")
    for example in result.examples:
        guess = example.prediction
        mark = "[green]right[/]" if example.right else "[red]wrong[/]"
        table.add_row(
            escape(example.path.name), escape(example.label), escape(guess.label), f"{guess.probability:.1%}", mark
        )
    console.print(table)
    for split, meaning in (("validation", "held out of training"), ("test", "held out of everything")):
        if (accuracy := metrics.get(f"{split}_accuracy")) is not None:
            chosen = (
                ", and used to choose the weights"
                if split == "validation" and result.bundle.provenance["kept"] == "best"
                else ""
            )
            console.print(f"{split} accuracy [bold]{accuracy:.2%}[/] ({meaning}{chosen})", highlight=False)
    console.print(
        f"{summary['images_per_second']:,.0f} images/s; waiting for data {summary['waiting_share']:.1%} of a step; "
        f"first step after {summary['seconds_to_first_step']:.1f} s; peak memory "
        f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB; {summary['seconds']:,.0f} s in all",
        highlight=False,
    )
    console.print(f"The model is in {result.folder / 'model'}. Try it:", highlight=False, soft_wrap=True)
    console.print(
        f"  vitrail predict {result.folder / 'model'} {result.folder / 'examples'}", highlight=False, soft_wrap=True
    )
