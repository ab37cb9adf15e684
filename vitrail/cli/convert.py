"""`vitrail convert`: convert models between Vitrail's and other libraries' formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.weights.load import convert

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Options of `vitrail convert`."""

    source: Annotated[str, Positional("SRC")]
    """Folder or file of a model, or the name of a model on the Hugging Face hub."""
    destination: Annotated[Path, Positional("DST")]
    """File or folder to write: a new path or an empty folder."""
    to: str
    """Layout to write: one of the layouts named above."""
    layout: str | None = None
    """Layout of the source. By default it is recognised automatically."""
    heads: int | None = None
    """Number of attention heads. Needed only if the file does not contain it."""
    image_size: tuple[int, int] | None = None
    """Image height and width in pixels of the converted model. Position embeddings are resized if the converted model
    needs another patch grid."""
    mean: tuple[float, ...] = ()
    """Mean of the training pixels in [0, 1], for all channels or for each. Needed if the file does not contain its
    preprocessing, and the assumed value is wrong."""
    std: tuple[float, ...] = ()
    """Standard deviation of the training pixels, stated like `--mean`."""
    num_classes: int | None = None
    """Replace the head by a zero-initialised head with this many outputs. 0 removes the head."""
    drop_head_hidden: bool = False
    """Remove the head and the hidden layer before it."""
    overwrite: bool = False
    """Replace an earlier output at DST. A folder with any other files is never replaced."""
    json: bool = False
    """Print JSON instead of text."""


COMMAND = Command(
    name="convert",
    summary="""Write a model in another layout. The layout of the source is recognised automatically.

    Layouts: vitrail (folder), google and big-vision (.npz), bit (.npz), bit-torch (.pth), timm (folder or
    .safetensors), huggingface (folder), torchvision (.pth).""",
    examples=(
        Example("vitrail convert runs/flowers flowers-hf --to huggingface", "Write a model for transformers."),
        Example("vitrail convert runs/flowers flowers.safetensors --to timm", "Write a model for timm."),
        Example("vitrail convert ViT-B_16.npz vit-b --to vitrail", "Import a checkpoint published with the ViT paper."),
    ),
    options=(Convert,),
    essential={
        "Output": ("to", "overwrite", "json"),
        "Source": ("layout", "heads", "image_size", "mean", "std"),
        "Head": ("num_classes", "drop_head_hidden"),
    },
)


def main(call: Call) -> int:
    options = Convert(**call.options)
    found = convert(
        options.source,
        options.destination,
        options.to,
        overwrite=options.overwrite,
        layout=options.layout,
        heads=options.heads,
        image_size=options.image_size,
        num_classes=options.num_classes,
        drop_head_hidden=options.drop_head_hidden,
        mean=options.mean,
        std=options.std,
    )
    notes = [COMMAND.note(note) for note in found]
    if options.json:
        print(json.dumps({"written": str(options.destination), "layout": options.to, "notes": notes}))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for note in notes:
        console.print(note, style="yellow", markup=False, soft_wrap=not console.is_terminal)
    console.print(f"Written as {options.to}: {options.destination}", markup=False)
    return 0
