"""Parts that several commands share: images that the user names, options for reduced tokens, and progress bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitrail.cli.options import flag
from vitrail.data.faults import is_own_output, is_system_folder, refuse
from vitrail.data.formats.folder import unread_images
from vitrail.data.pixels.decode import SUFFIXES
from vitrail.errors import ConfigError, DataError

if TYPE_CHECKING:
    from vitrail.models.reduction import TokenReduction


def image_paths(places: Sequence[Path]) -> list[Path]:
    """Return the image files. A folder is replaced by all images in it and its subfolders, sorted. If it has images
    with unusual suffixes, a note is printed. A table is replaced by the images that it names, which need no labels.

    Raise `DataError` if a path does not exist, a folder has no images or a table cannot be read.
    """
    paths: list[Path] = []
    for path in places:
        if not path.exists():
            raise DataError(f"image {str(path)!r} does not exist")
        if path.is_dir():
            found, others = _files_in(path)
            for fault in unread_images(path, others):
                print(f"vitrail: {fault.text}", file=sys.stderr)
            if not found:
                raise DataError(f"folder {str(path)!r} has no images ({', '.join(sorted(SUFFIXES))})")
        else:
            found = list(_images_of_table(path)) if path.suffix.lower() in (".csv", ".tsv", ".jsonl") else [path]
        paths += found
    return paths


def _files_in(root: Path) -> tuple[list[Path], list[str]]:
    """Return the images in a folder and its subfolders, sorted, and the relative paths of all other files. Neither has
    hidden files, files in folders of operating systems, or output of Vitrail."""
    images, others = [], []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if not is_system_folder(name) and not is_own_output(Path(folder, name))
        ]
        for path in (Path(folder) / file for file in files if not file.startswith(".")):
            if path.suffix.lower() in SUFFIXES:
                images.append(path)
            else:
                others.append(path.relative_to(root).as_posix())
    return sorted(images), sorted(others)


def _images_of_table(path: Path) -> Iterator[Path]:
    from vitrail.data.formats.table import open_table

    splits = open_table([path], None, unlabelled=True)
    refuse(splits.faults)
    for source in (splits.train, splits.validation, splits.test):
        for index in range(len(source) if source is not None else 0):
            assert source is not None
            yield path.parent / source.key(index)


# The options of commands that can merge or prune tokens.


def check_reduction(tokens: int | None, given: Collection[str]) -> None:
    """Raise `ConfigError` if the number of tokens is negative, or if an option of the reduction has no effect."""
    if tokens is not None and tokens < 0:
        raise ConfigError(f"reduce_tokens={tokens} is negative; 0 keeps all tokens")
    for name in ("reduce_by", "reduce_schedule"):
        if name in given and not tokens:
            raise ConfigError(f"{flag(name)}: it has an effect only with --reduce-tokens; add a number of tokens")


def reduction_of(
    tokens: int, by: Literal["merge", "prune"], schedule: Literal["constant", "decreasing"]
) -> TokenReduction | None:
    """Return the reduction, or None if no tokens are to be removed."""
    from vitrail.models.reduction import TokenReduction

    return TokenReduction(tokens=tokens, by=by, schedule=schedule) if tokens else None


# The progress bar that all commands use while they process images.


SPEED_SECONDS = 300.0
"""Seconds over which the speed is averaged for the remaining time. Batches can take many seconds."""


def images_bar(console: Console, *, transient: bool = False) -> Progress:
    """Return a progress bar with the number of images and the remaining time. It is shown only on terminals."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
        expand=True,
        speed_estimate_period=SPEED_SECONDS,
        transient=transient,
    )
