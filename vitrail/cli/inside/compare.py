"""`vitrail compare`: compare two models on the same images, as one HTML page with its numbers and figures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.progress import Progress

from vitrail.analysis.cka import SMALLEST_BATCH
from vitrail.analysis.pages.comparison import FILES, comparison_as_plain, verdict, write_comparison
from vitrail.analysis.summaries.comparison import check_comparable, compare
from vitrail.cli.evaluating.common import common_images
from vitrail.cli.evaluating.data import open_for_head
from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.output.bars import images_bar
from vitrail.errors import ConfigError, plural
from vitrail.evaluation.outputs import Outputs
from vitrail.files import check_new_folder, replacing_folder
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

__all__ = ["Compare", "main"]


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Options of `vitrail compare`."""

    models: Annotated[tuple[str, ...], Positional("MODEL...")]
    """Two models: each a folder of a model or a run, a file or folder of another library's model, or a name on the
    Hugging Face hub. Both must have the same classes."""
    data: str = ""
    """Data set, in any form that `vitrail train` accepts."""
    split: Literal["held-out", "train", "validation", "test"] = "held-out"
    """Split to compare on. held-out is the test split if there is one, else images that no model learned from."""
    out: Path = Path("compared")
    """Folder to write to."""
    images: int = 64
    """Number of images whose features and attention are compared. All images of the split measure the accuracy."""
    examples: int = 6
    """Number of images on the page on which one model alone is right."""
    bootstrap: int = 1000
    """Number of bootstrap resamples for each 95 % confidence interval. 0 computes no intervals."""
    batch_size: int | None = None
    """Images per forward pass. The default follows from the model's cost."""
    device: str = "auto"
    """Device to run on: auto, cpu, cuda or cuda:N."""
    overwrite: bool = False
    """Replace an earlier comparison in the folder."""
    json: bool = False
    """Print all numbers as JSON instead of a sentence."""


COMMAND = Command(
    name="compare",
    summary="""Compare two models on the same images: which one is more accurate and if chance explains it, on which
    images they disagree and where they look there, how similar their layers are, and what they cost. One HTML page
    and its figures and numbers are written.""",
    examples=(
        Example("vitrail compare runs/vit runs/bit --data flowers", "Compare two trained models on held-out images."),
        Example("vitrail compare runs/a runs/b --data flowers --out a-b --examples 20", "Show more images."),
        Example("vitrail compare vit.npz runs/flowers --data flowers --json", "Print the numbers."),
    ),
    options=(Compare,),
    essential={
        "What to compare": ("data", "split", "images", "examples", "bootstrap"),
        "Output": ("out", "overwrite", "json"),
        "Speed": ("batch_size", "device"),
    },
)


def main(call: Call) -> int:
    options = Compare(**call.options)
    _check(options)
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    bundles = [load(name, device=options.device) for name in options.models]
    check_comparable(bundles[0], bundles[1])
    common = common_images(dict(zip(options.models, bundles, strict=True)), options.data, options.split, None)
    opened = [open_for_head(bundle, options.data, options.split, "", None, common) for bundle in bundles]
    (first, second), names = (next(iter(each.sources.values())) for each in opened), _names(options.models)
    notes = [f"{name}: {COMMAND.note(note)}" for name, one in zip(names, bundles, strict=True) for note in one.notes]
    for note in (*notes, *filter(None, [common.note])):
        console.print(note, style="yellow", markup=False)
    with images_bar(console, transient=True) as bar:
        one, two = (_outputs(bundle, options, bar, name) for bundle, name in zip(bundles, names, strict=True))
        found = compare(
            (one, two),
            (first, second),
            names,
            images=options.images,
            examples=options.examples,
            bootstrap=options.bootstrap,
        )
    with replacing_folder("the comparison", options.out, FILES) as partial:
        write_comparison(found, partial)
    if options.json:
        print(json.dumps(comparison_as_plain(found)))
        return 0
    console.print(verdict(found), markup=False)
    console.print(str(options.out / "compare.html"), markup=False)
    return 0


def _check(options: Compare) -> None:
    """Raise `ConfigError` for options that are out of range, before a model or data is read."""
    if len(options.models) != 2 or options.models[0] == options.models[1]:
        raise ConfigError(f"MODEL: {plural(len(set(options.models)), 'model')} cannot be compared; name two of them")
    if not options.data:
        raise ConfigError("--data is missing: name a data set that both models know")
    for name, least in (("images", SMALLEST_BATCH), ("examples", 0), ("bootstrap", 0), ("batch_size", 1)):
        if (number := getattr(options, name)) is not None and number < least:
            raise ConfigError(f"{name}={number}: give at least {least}")
    check_new_folder(
        options.out, FILES, overwrite=options.overwrite, recognise=lambda path: (path / FILES[0]).is_file()
    )


def _names(models: tuple[str, ...]) -> tuple[str, str]:
    """Return short names of both models: the last parts of their paths, if these differ."""
    first, second = (Path(name).name or name for name in models)
    return (models[0], models[1]) if first == second else (first, second)


def _outputs(bundle: Bundle, options: Compare, bar: Progress, name: str) -> Outputs:
    task = bar.add_task(name, total=None)
    return Outputs(
        bundle,
        batch_size=options.batch_size,
        precision=bundle.precision,
        on_progress=lambda done, total: bar.update(task, completed=done, total=total),
    )
