"""`vitrail report`: show how good a model is on a data set, what its layers do and where it errs, as one HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vitrail.analysis.pages.overview import FILES, overview_as_plain, write_overview
from vitrail.analysis.summaries.overview import overview
from vitrail.cli.inside.summaries import SummaryOptions
from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.output.bars import images_bar
from vitrail.errors import plural
from vitrail.files import replacing_folder
from vitrail.weights.load import load

__all__ = ["Report", "main"]


@dataclass(frozen=True, kw_only=True)
class Report(SummaryOptions):
    """Options of `vitrail report`."""

    model: Annotated[str, Positional("MODEL")]
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub."""
    out: Path = Path("report")
    """Folder to write to."""
    probe_images: int = 500
    """Number of training images that the linear model of each layer learns from. 0 skips these models."""
    examples: int = 12
    """Number of errors on the page."""


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
        "Measurements": ("data", "split", "images", "probe_images", "examples", "bootstrap"),
        "Output": ("out", "overwrite", "json"),
        "Speed": ("batch_size", "device"),
    },
)


def main(call: Call) -> int:
    options = Report(**call.options)
    options.check(FILES, probe_images=0)
    console = options.console()
    name = Path(options.model).name or options.model
    (opened,) = options.open({name: load(options.model, device=options.device)}, COMMAND, console)
    with images_bar(console, transient=True) as bar:
        found = overview(
            options.outputs(opened, bar),
            opened.source,
            opened.train,
            name,
            images=options.images,
            probe_images=options.probe_images,
            examples=options.examples,
            bootstrap=options.bootstrap,
        )
    with replacing_folder("the report", options.out, FILES) as partial:
        write_overview(found, partial)
    sentence = f"{found.report.accuracy.value:.2%} accuracy on {plural(found.report.images, 'image')}"
    options.show(console, sentence, "report.html", overview_as_plain(found), found.skipped)
    return 0
