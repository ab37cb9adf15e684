"""`vitrail compare`: compare two models on the same images, as one HTML page with its numbers and figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vitrail.analysis.pages.comparison import FILES, comparison_as_plain, verdict, write_comparison
from vitrail.analysis.summaries.comparison import check_comparable, compare
from vitrail.cli.inside.summaries import SummaryOptions
from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.output.bars import images_bar
from vitrail.errors import ConfigError
from vitrail.files import replacing_folder
from vitrail.weights.load import load

__all__ = ["Compare", "main"]


@dataclass(frozen=True, kw_only=True)
class Compare(SummaryOptions):
    """Options of `vitrail compare`."""

    models: Annotated[tuple[str, ...], Positional("MODEL...")]
    """Two models: each a folder of a model or a run, a file or folder of another library's model, or a name on the
    Hugging Face hub. Both must have the same classes."""
    out: Path = Path("compared")
    """Folder to write to."""
    examples: int = 6
    """Number of images on the page on which one model alone is right."""


COMMAND = Command(
    name="compare",
    summary="""Compare two models on the same images: their accuracy with a paired test, the images on which they
    disagree, the similarity of their layers, and their cost. One HTML page and its figures and numbers are written.""",
    examples=(
        Example("vitrail compare runs/vit runs/bit --data flowers", "Compare two trained models on held-out images."),
        Example("vitrail compare runs/a runs/b --data flowers --out a-b --examples 20", "Show more images."),
        Example("vitrail compare vit.npz runs/flowers --data flowers --json", "Print the numbers."),
    ),
    options=(Compare,),
    essential={
        "Measurements": ("data", "split", "images", "examples", "bootstrap"),
        "Output": ("out", "overwrite", "json"),
        "Speed": ("batch_size", "device"),
    },
)


def main(call: Call) -> int:
    options = Compare(**call.options)
    if len(options.models) != 2 or options.models[0] == options.models[1]:
        raise ConfigError(f"MODEL: name two different models to compare, not {' '.join(options.models)}")
    options.check(FILES)
    console = options.console()
    bundles = [load(name, device=options.device) for name in options.models]
    check_comparable(bundles[0], bundles[1])
    opened = options.open(dict(zip(_names(options.models), bundles, strict=True)), COMMAND, console)
    first, second = opened
    with images_bar(console, transient=True) as bar:
        found = compare(
            (options.outputs(first, bar), options.outputs(second, bar)),
            (first.source, second.source),
            (first.name, second.name),
            images=options.images,
            examples=options.examples,
            bootstrap=options.bootstrap,
        )
    with replacing_folder("the comparison", options.out, FILES) as partial:
        write_comparison(found, partial)
    options.show(console, verdict(found), "compare.html", comparison_as_plain(found), found.skipped)
    return 0


def _names(models: tuple[str, ...]) -> tuple[str, str]:
    """Return short names of both models: the last parts of their paths, if these differ."""
    first, second = (Path(name).name or name for name in models)
    return (models[0], models[1]) if first == second else (first, second)
