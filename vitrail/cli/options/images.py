"""Images that the user names on the command line: files, folders of images, and tables of paths."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitrail.data.faults import is_own_output, is_system_folder, refuse
from vitrail.data.pixels.formats import SUFFIXES
from vitrail.data.sources.folder import unread_images
from vitrail.errors import DataError

__all__ = ["image_paths"]


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
    from vitrail.data.sources.tables.table import open_table  # most calls name no table

    splits = open_table([path], None, unlabelled=True)
    refuse(splits.faults)
    for source in (splits.train, splits.validation, splits.test):
        for index in range(len(source) if source is not None else 0):
            assert source is not None
            yield path.parent / source.key(index)
