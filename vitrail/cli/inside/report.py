"""`vitrail report`: show how good a model is on a data set, what its layers do and where it errs, as one HTML page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console

from vitrail.analysis.cka import SMALLEST_BATCH
from vitrail.analysis.pages.overview import FILES, overview_as_plain, write_overview
from vitrail.analysis.summaries.overview import overview
from vitrail.cli.evaluating.data import open_for_head
from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.output.bars import images_bar
from vitrail.errors import ConfigError
from vitrail.evaluation.outputs import Outputs
from vitrail.files import check_new_folder, replacing_folder
from vitrail.weights.load import load

__all__ = ["Report", "main"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Options of `vitrail report`."""

    model: Annotated[str, Positional("MODEL")]
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub."""
    data: str = ""
    """Data set, in any form that `vitrail train` accepts."""
    split: Literal["held-out", "train", "validation", "test"] = "held-out"
    """Split to report on. held-out is the test split if there is one, else the images that training holds out."""
    out: Path = Path("report")
    """Folder to write to."""
    images: int = 64
    """Number of images whose features and attention are measured. All images of the split measure the accuracy."""
    probe_images: int = 500
    """Number of training images that the linear model of each layer learns from. 0 leaves out these models."""
    examples: int = 12
    """Number of errors on the page."""
    bootstrap: int = 1000
    """Number of bootstrap resamples for each 95 % confidence interval. 0 computes no intervals."""
    batch_size: int | None = None
    """Images per forward pass. The default follows from the model's cost."""
    device: str = "auto"
    """Device to run on: auto, cpu, cuda or cuda:N."""
    overwrite: bool = False
    """Replace an earlier report in the folder."""
    json: bool = False
    """Print all numbers as JSON."""


COMMAND = Command(
    name="report",
    summary="""Show how good a model is on a data set, what its layers do and where it errs: metrics, filters and
    positions, attention distance, similarity of layers, a linear model of each layer, a map of the embeddings, and the
    most certain errors. One HTML page and its figures and numbers are written.""",
    examples=(
        Example("vitrail report runs/flowers --data flowers", "Report on held-out images."),
        Example("vitrail report runs/flowers --data flowers --examples 50", "Show more errors."),
        Example("vitrail report vit.npz --data flowers --probe-images 0 --json", "Print the numbers."),
    ),
    options=(Report,),
    essential={
        "What to report": ("data", "split", "images", "probe_images", "examples", "bootstrap"),
        "Output": ("out", "overwrite", "json"),
        "Speed": ("batch_size", "device"),
    },
)


def main(call: Call) -> int:
    options = Report(**call.options)
    _check(options)
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    bundle = load(options.model, device=options.device)
    opened = open_for_head(bundle, options.data, options.split, "", None)
    for note in (*bundle.notes, *opened.notes):
        console.print(COMMAND.note(note), style="yellow", markup=False)
    with images_bar(console, transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        outputs = Outputs(
            bundle,
            batch_size=options.batch_size,
            precision=bundle.precision,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        found = overview(
            outputs,
            next(iter(opened.sources.values())),
            opened.train,
            Path(options.model).name or options.model,
            images=options.images,
            probe_images=options.probe_images,
            examples=options.examples,
            bootstrap=options.bootstrap,
        )
    with replacing_folder("the report", options.out, FILES) as partial:
        write_overview(found, partial)
    if options.json:
        print(json.dumps(overview_as_plain(found)))
        return 0
    accuracy = found.report.accuracy
    console.print(f"{accuracy.value:.2%} accuracy on {found.report.images:,} images", markup=False)
    console.print(str(options.out / "report.html"), markup=False)
    return 0


def _check(options: Report) -> None:
    """Raise `ConfigError` for options that are out of range, before a model or data is read."""
    if not options.data:
        raise ConfigError("--data is missing: name a data set that the model knows")
    least = {"images": SMALLEST_BATCH, "probe_images": 0, "examples": 0, "bootstrap": 0, "batch_size": 1}
    for name, bound in least.items():
        if (number := getattr(options, name)) is not None and number < bound:
            raise ConfigError(f"{name}={number}: give at least {bound}")
    check_new_folder(options.out, FILES, overwrite=options.overwrite, recognise=_is_ours)


def _is_ours(folder: Path) -> bool:
    return (folder / "report.json").is_file()
