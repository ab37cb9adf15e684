"""`vitrail explain`: show what a model looked at in images, as PNG files and one interactive page per image."""

from __future__ import annotations

import glob
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vitrail.analysis.pages.explanation import MAX_BYTES, Explainer, write_explanation
from vitrail.analysis.tracing import transformer_of
from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.options.images import image_paths
from vitrail.errors import ConfigError, UndecodableImage, nearest
from vitrail.files import check_new_folder, replacing_folder, write_json
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load
from vitrail.weights.prediction import read_image

__all__ = ["main"]

CONTENTS = "explain.json"
"""File of a folder of explanations that lists its other files."""


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Options of `vitrail explain`."""

    model: Annotated[str, Positional("MODEL")]
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub."""
    images: Annotated[tuple[Path, ...], Positional("IMAGE...")]
    """Image files, folders that are searched for images, or tables of paths. They need no labels."""
    out: Path = Path("explained")
    """Folder to write to."""
    label: str | None = None
    """Class to explain. The default is the most probable class of each image."""
    layers: tuple[int, ...] = (-1,)
    """Blocks whose heads are written as PNG files, from 0, or backward from -1. The default is the last one."""
    heads: tuple[int, ...] | None = None
    """Heads that are written as PNG files, from 0, or backward from -1. The default is all of them."""
    top: int = 5
    """Number of the likeliest classes on the page. The first 10 have their relevance."""
    page_size: float = MAX_BYTES / 1e6
    """Largest size of a page in MB. A page that would be larger has coarser attention, or fewer layers or heads."""
    image_size: tuple[int, int] | None = None
    """Image height and width in pixels. The default is the model's size. A larger size gives finer maps."""
    device: str = "auto"
    """Device to run on: auto, cpu, cuda or cuda:N."""
    overwrite: bool = False
    """Replace earlier explanations in the folder."""


COMMAND = Command(
    name="explain",
    summary="""Show which parts of an image a Vision Transformer attends to, and which parts support a class. One
    interactive HTML page and several PNG files are written for each image.""",
    examples=(
        Example("vitrail explain runs/flowers rose.jpg", "Explain the prediction for one image."),
        Example("vitrail explain runs/flowers rose.jpg --label tulip", "Show which parts support another class."),
        Example("vitrail explain runs/flowers photos/ --out maps --layers 0 -1", "Write the heads of two layers."),
    ),
    options=(Explain,),
    essential={
        "Maps": ("label", "layers", "heads", "image_size"),
        "Output": ("out", "top", "page_size", "overwrite"),
        "Speed": ("device",),
    },
)


def main(call: Call) -> int:
    options = Explain(**call.options)
    if options.top < 1:
        raise ConfigError(f"top={options.top} is less than 1; choose the number of classes to show")
    if not 0 < options.page_size < math.inf:
        raise ConfigError(f"page_size={options.page_size} is not above 0; choose a number of MB, such as 5")
    paths = image_paths(options.images)
    earlier = _earlier(options.out)
    check_new_folder(options.out, (CONTENTS, *earlier), overwrite=options.overwrite, recognise=_is_ours)
    bundle = load(options.model, device=options.device, image_size=options.image_size)
    transformer_of(bundle.network)
    target = _target(options, bundle)
    for note in bundle.notes:
        print(f"vitrail: {COMMAND.note(note)}", file=sys.stderr)
    explainer = Explainer(bundle, target=target, layers=options.layers, heads=options.heads, top=options.top)
    broken, names = [], _names(paths)
    with replacing_folder("explanations", options.out, (CONTENTS, *earlier)) as partial:
        files: list[str] = []
        pages: list[tuple[Path, str]] = []
        for path, name in zip(paths, names, strict=True):
            try:
                explanation = explainer.explain(read_image(path))
            except UndecodableImage as error:
                broken.append(f"{path} {error}")
                continue
            written = write_explanation(
                explanation, partial, name, title=path.name, max_bytes=round(1e6 * options.page_size)
            )
            files += written.files
            pages.append((path, written.files[0]))
            for note in written.notes:
                print(f"vitrail: {written.files[0]}: {note}", file=sys.stderr)
        write_json(partial / CONTENTS, {"files": files})
    for path, name in pages:
        print(f"{path}: {options.out / name}")
    for message in broken:
        print(f"vitrail: {message}", file=sys.stderr)
    return UndecodableImage.exit_code if broken else 0


def _target(options: Explain, bundle: Bundle) -> int | None:
    """Return the number of the class to explain, or None for the most probable class. Raise `ConfigError`."""
    if options.label is None:
        return None
    if options.label not in bundle.classes:
        choices = nearest(options.label, bundle.classes) if bundle.classes else "it has no head"
        raise ConfigError(f"label={options.label!r} is not a class of this model; {choices}")
    return bundle.classes.index(options.label)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a different name for each image, which its files start with."""
    names: list[str] = []
    for path in paths:
        name, number = path.stem, 2
        while name.lower() in {one.lower() for one in names}:
            name, number = f"{path.stem}-{number}", number + 1
        names.append(name)
    return names


def _earlier(folder: Path) -> list[str]:
    """Return shell patterns of the files that an earlier command wrote into a folder. Each pattern matches one name."""
    try:
        files = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [glob.escape(name) for name in files if isinstance(name, str)] if isinstance(files, list) else []


def _is_ours(folder: Path) -> bool:
    return (folder / CONTENTS).is_file()
