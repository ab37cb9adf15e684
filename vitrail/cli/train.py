"""`vitrail train`: a run from scratch or from a model, or the rest of one that was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.cli.options import Resume, given, parse, parse_run
from vitrail.errors import ConfigError, Stopped, nearest
from vitrail.models.config import ModelConfig
from vitrail.recipes import RECIPES
from vitrail.training.config import TrainConfig
from vitrail.training.monitoring.display import ConsoleDisplay
from vitrail.training.run import RunResult, resume, train
from vitrail.weights.bundle import Bundle, Prediction
from vitrail.weights.load import load

__all__ = ["main"]

USAGE = "vitrail train [RECIPE]"
DESCRIPTION = """Train a Vision Transformer from scratch, or from a model with --init.

RECIPE is one of {recipes}; the options below show its settings and replace them. Without one it is demo, on bundled
images, or folder where --data names something else. With --init the architecture is the model's, and so are image size
and normalisation unless given. Ctrl-C saves and stops; go on with: vitrail train --resume RUN."""


@dataclass(frozen=True)
class Train:
    """The options of the verb that are not settings of a run: none."""


def main(words: Sequence[str], started: float) -> int:
    console = Console()
    display = ConsoleDisplay(console)
    try:
        if given(words, "--resume") is not None:
            run = parse(Resume, words, usage="vitrail train", description=Resume.__doc__ or "").resume
            result = resume(run, display=display, started=started)
        else:
            config, initial = _config(words)
            result = train(config, initial=initial, display=display, started=started)
    except Stopped as stop:
        raise Stopped(f"{stop}\nGo on with: vitrail train --resume {stop.run}", stop.run) from None
    _report(console, result)
    return 0


def _config(words: Sequence[str]) -> tuple[TrainConfig, Bundle | None]:
    """The run, and the model to start it from, which decides what images have to be like where options do not."""
    name, rest = (words[0], words[1:]) if words and not words[0].startswith("-") else (_default_recipe(words), words)
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; {nearest(name, RECIPES)}")
    recipe, initial = RECIPES[name](), None
    if (init := given(rest, "--init")) is not None:
        initial = load(init, device="cpu")
        recipe = replace(recipe, start=replace(recipe.start, init=init), model=ModelConfig(), images=initial.preprocess)
    description = DESCRIPTION.format(recipes=", ".join(RECIPES))
    _, config = parse_run(Train, rest, usage=USAGE, description=description, default=recipe)
    return config, initial


def _default_recipe(words: Sequence[str]) -> str:
    """The recipe for data that was named without one."""
    data = given(words, "--data")
    return "demo" if data is None else {"bundled": "demo", "fashion-mnist": "fashion-mnist"}.get(data, "folder")


def _report(console: Console, result: RunResult) -> None:
    metrics, summary = result.metrics, result.summary
    table = Table(title="A few held-out images", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("image", "true", "predicted"):
        table.add_column(column)
    table.add_column("probability", justify="right")
    table.add_column("")
    for example in result.examples:
        guess = example.prediction
        if not isinstance(guess, Prediction):
            numbers = (f"{name} {value:.6g}" for name, value in zip(guess.names, guess.values, strict=True))
            table.add_row(escape(example.path.name), escape(example.label), escape(", ".join(numbers)), "", "")
            continue
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
    if summary["steps"] < (planned := result.bundle.provenance["steps"]):
        console.print(f"ended early, after {summary['steps']:,.0f} of {planned:,} steps", highlight=False)
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
