"""`vitrail report`: report the metrics, layers and errors of a model on a data set, as one HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vitrail.analysis.pages.overview import FILES, headline, overview_as_plain, write_overview
from vitrail.analysis.summaries.overview import overview
from vitrail.cli.inside.summaries import SummaryOptions
from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.output.bars import images_bar
from vitrail.files import replacing_folder
from vitrail.training.records.folder import run_of
from vitrail.training.records.inside import INSIDE, link_inside
from vitrail.weights.load import load

__all__ = ["Report", "main"]


@dataclass(frozen=True, kw_only=True)
class Report(SummaryOptions):
    """Options of `vitrail report`."""

    model: Annotated[str, Positional("MODEL")]
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub."""
    out: Path = Path("report")
    """Folder to write to. The default is inside/ in the folder of a run, whose report then links to the page, and
    report/ for any other model."""
    probe_images: int = 500
    """Number of training images that the linear model of each layer learns from. 0 skips these models."""
    saliency_images: int = 16
    """Number of images on which saliency maps are measured: by deleting and inserting patches, and with random weights.
    0 skips this."""
    examples: int = 12
    """Number of errors on the page."""


COMMAND = Command(
    name="report",
    summary="""Report the metrics, layers and errors of a model on a data set: filters and positions, attention
    distance, similarity of layers, a linear model of each layer, measurements of saliency maps, a map of the
    embeddings, and the most certain errors. A model without a head has no metrics and no errors. One HTML page and its
    figures and numbers are written.""",
    examples=(
        Example("vitrail report runs/flowers --data flowers", "Report on held-out images, in runs/flowers/inside."),
        Example("vitrail report runs/flowers --data flowers --examples 50", "Show more errors."),
        Example("vitrail report vit.npz --data flowers --probe-images 0 --json", "Print the numbers."),
    ),
    options=(Report,),
    defaults=lambda given: {"out": "RUN/inside or report"},
    essential={
        "Measurements": ("data", "split", "images", "probe_images", "saliency_images", "examples", "bootstrap"),
        "Output": ("out", "overwrite", "json"),
        "Speed": ("batch_size", "device"),
    },
)


def main(call: Call) -> int:
    run = run_of(Path(call.options["model"]))
    options = Report(**{**({} if run is None else {"out": run / INSIDE}), **call.options})
    options.check(FILES, probe_images=0, saliency_images=0)
    console = options.console()
    name = (Path(options.model) if run is None else run.resolve()).name or options.model
    (opened,) = options.open({name: load(options.model, device=options.device)}, COMMAND, console)
    with images_bar(console, transient=True) as bar:
        found = overview(
            options.outputs(opened, bar),
            opened.source,
            opened.train,
            name,
            images=options.images,
            probe_images=options.probe_images,
            saliency_images=options.saliency_images,
            examples=options.examples,
            bootstrap=options.bootstrap,
        )
    linked = run if run is not None and options.out.resolve() == (run / INSIDE).resolve() else None
    with replacing_folder("the report", options.out, FILES) as partial:
        has_report = linked is not None and (linked / "report.html").is_file()
        notes = write_overview(found, partial, "../report.html" if has_report else None)
    if linked is not None:
        link_inside(linked)
    for note in notes:
        console.print(note, style="yellow", markup=False, soft_wrap=not console.is_terminal)
    options.show(console, headline(found), "report.html", overview_as_plain(found), found.skipped)
    return 0
