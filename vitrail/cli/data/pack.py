"""`vitrail data pack`: write a data set as tar shards."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.output.bars import images_bar
from vitrail.data.packing.manifest import Manifest
from vitrail.data.packing.pack import pack
from vitrail.data.source import has_soft_targets
from vitrail.data.sources import open_data
from vitrail.data.splits import Splits
from vitrail.errors import Stopped, plural
from vitrail.plain import byte_count
from vitrail.training.monitoring.stop import StopRequest

__all__ = ["Pack", "main"]

SHOWN = 10
"""Maximum number of unreadable images that are printed. The file dataset.json lists all of them."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Options of `vitrail data pack`."""

    data: Annotated[str, Positional("SPEC")]
    """Data set, in any form that `vitrail train --data` accepts."""
    destination: Annotated[Path, Positional("DST")]
    """Folder for the shards. It must be new, empty, or left by the same command when it was stopped."""
    numbers: tuple[str, ...] = ()
    """Numeric columns of a table to store as the targets, instead of classes."""
    unlabelled: bool = False
    """Accept data without classes, such as a folder of photographs."""
    shard_size: str = "256MB"
    """Largest size of a shard, such as 256MB, 1GiB or 250000000."""
    max_side: int | None = None
    """Largest side in pixels. Larger images are scaled down and saved as JPEG of quality 95; all other images are
    copied unchanged. By default images keep their size."""
    workers: int = min(16, os.cpu_count() or 1)
    """Number of threads that read and encode images. It does not change the shards."""


COMMAND = Command(
    name="data pack",
    summary="""Write a data set as tar shards in the WebDataset convention: few large files instead of many small
    ones. If the command is stopped, run the same command again to continue.""",
    examples=(
        Example("vitrail data pack photos shards", "Copy a folder of images into shards."),
        Example("vitrail data pack photos shards --max-side 512", "Scale large images down to 512 pixels."),
        Example("vitrail train --data shards", "Train on the shards."),
    ),
    options=(Pack,),
    essential={"Data": ("numbers", "unlabelled"), "Settings": ("shard_size", "max_side", "workers")},
)


def main(call: Call) -> int:
    options = Pack(**call.options)
    shard_size = byte_count(options.shard_size, "shard_size")
    console = Console()
    splits = open_data(options.data, validation_share=0.0, numbers=options.numbers, unlabelled=options.unlabelled)
    for note in splits.notes:
        console.print(note, style="yellow", highlight=False, markup=False, soft_wrap=not console.is_terminal)
    if has_soft_targets(splits.train):
        console.print(
            "The pseudo labels are soft, but shards store classes: only the most likely class of each image is packed. "
            "To train on the probabilities, use the folder of labels itself.",
            style="yellow", highlight=False, soft_wrap=not console.is_terminal,
        )  # fmt: skip
    manifest = _pack(splits, options, shard_size, console, call.arguments)
    _report(manifest, options, console)
    return 0


def _pack(splits: Splits, options: Pack, shard_size: int, console: Console, arguments: Sequence[str]) -> Manifest:
    total = sum(len(source) for source in (splits.train, splits.validation, splits.test) if source is not None)
    bar = images_bar(console)
    with StopRequest() as request, bar:
        task = bar.add_task("packing", total=total)
        try:
            return pack(
                splits,
                options.destination,
                shard_size=shard_size,
                max_side=options.max_side,
                workers=options.workers,
                progress=lambda done: bar.update(task, completed=done),
                stop=lambda: request.requested,
            )
        except Stopped as stop:
            raise Stopped(f"{stop}\nContinue with: vitrail data pack {shlex.join(arguments)}", stop.run) from None


def _report(manifest: Manifest, options: Pack, console: Console) -> None:
    unreadable: dict[str, str] = {}
    for split, records in manifest.shards.items():
        size = sum(record.size for record in records)
        rescaled = sum(record.rescaled for record in records)
        scaled = f", {rescaled:,} of them scaled down" if options.max_side else ""
        console.print(
            f"{split}: {plural(manifest.samples[split], 'image')}{scaled}, in {plural(len(records), 'shard')} of "
            f"{size / 1e6:,.1f} MB in all",
            highlight=False,
            soft_wrap=True,
        )
        for record in records:
            unreadable |= record.unreadable
    if unreadable:
        text = f"{len(unreadable):,} of the images cannot be read and were copied as they are:"
        lines = [f"  {key}: {reason}" for key, reason in list(unreadable.items())[:SHOWN]]
        more = [f"  and {len(unreadable) - SHOWN:,} more, in dataset.json"] if len(unreadable) > SHOWN else []
        console.print("\n".join([text, *lines, *more]), style="yellow", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"The shards are in {options.destination}. Train on them: vitrail train --data "
        f"{shlex.quote(str(options.destination))}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
