"""`vitrail convert`: a model in another library's layout, or another's in ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from vitrail.cli.options import parse
from vitrail.weights.load import convert

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a model in another layout.

    Layouts: vitrail (a folder), google and big-vision (.npz), bit (.npz), bit-torch (.pth), timm (a folder, or
    .safetensors), huggingface (a folder), torchvision (.pth). The source's layout is recognised.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """Folder or file of a model, or its name on the hub: google/vit-base-patch16-224."""
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """File or folder to write: a new path or an empty folder."""
    to: str
    """The layout to write."""
    layout: str | None = None
    """The layout of the source, where it is not to be found out."""
    heads: int | None = None
    """Attention heads, where the source does not say."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels that the source was made for; of another grid, positions are resized to it."""
    num_classes: int | None = None
    """Outputs of a new head of zeros; 0 for a model without one."""
    drop_head_hidden: bool = False
    """Leave out the hidden layer before the head, and the head with it."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace an earlier output at DST. A folder with other files in it is never replaced."""
    json: bool = False
    """Print JSON instead of text."""


def main(words: Sequence[str], started: float) -> int:
    options = parse(Convert, words, usage="vitrail convert", description=Convert.__doc__ or "")
    notes = convert(
        options.source,
        options.destination,
        options.to,
        overwrite=options.overwrite,
        layout=options.layout,
        heads=options.heads,
        image_size=options.image_size,
        num_classes=options.num_classes,
        drop_head_hidden=options.drop_head_hidden,
    )
    if options.json:
        print(json.dumps({"written": str(options.destination), "layout": options.to, "notes": notes}))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for note in notes:
        console.print(note, style="yellow", markup=False)
    console.print(f"Written as {options.to}: {options.destination}", markup=False)
    return 0
