"""Images that the user names on the command line: files, folders of images, and tables of paths."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitrail.data.faults import is_own_output, is_system_folder
from vitrail.data.pixels.formats import SUFFIXES
from vitrail.errors import DataError

__all__ = ["image_paths"]


def image_paths(places: Sequence[Path]) -> list[Path]:
    """Return the image files. A folder is replaced by all images in it and its subfolders, sorted. A table is replaced
    by the images that it names, which need no labels.

    Raise `DataError` if a path does not exist, a folder has no images or a table cannot be read.
    """
    paths: list[Path] = []
    for path in places:
        if not path.exists():
            raise DataError(f"image {str(path)!r} does not exist")
        if path.is_dir():
            found = sorted(_images_in(path))
            if not found:
                raise DataError(f"folder {str(path)!r} has no images ({', '.join(sorted(SUFFIXES))})")
        else:
            found = list(_images_of_table(path)) if path.suffix.lower() in (".csv", ".tsv", ".jsonl") else [path]
        paths += found
    return paths


def _images_in(root: Path) -> Iterator[Path]:
    """Yield the images in a folder and its subfolders, without hidden files, the folders of operating systems
    and the output of Vitrail."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if not is_system_folder(name) and not is_own_output(Path(folder, name))
        ]
        for file in files:
            if Path(file).suffix.lower() in SUFFIXES and not file.startswith("."):
                yield Path(folder) / file


def _images_of_table(path: Path) -> Iterator[Path]:
    from vitrail.data.sources.tables.table import open_table  # most calls name no table

    splits = open_table([path], None, unlabelled=True)
    for source in (splits.train, splits.validation, splits.test):
        for index in range(len(source) if source is not None else 0):
            assert source is not None
            yield path.parent / source.key(index)
