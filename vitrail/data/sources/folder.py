"""Folders of images per class, such as `daisy/1.jpg` and `rose/2.png`, and folders of images without classes."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

from vitrail.data.pixels.formats import SUFFIXES
from vitrail.data.sources.files import FileSource, inode_of
from vitrail.errors import DataError

__all__ = ["FolderSource", "class_folders", "has_images"]

ENDINGS = tuple(SUFFIXES)
"""The suffixes as the tuple that `str.endswith` expects."""


class FolderSource(FileSource):
    """The images in class folders and their subfolders, in the order of their paths.

    By default the classes are the sorted names of the folders. If `classes` of another split or a model is given, a
    folder with any other name is an error. If `unlabelled` is true, all images in `root` and its subfolders are samples
    without a target. Hidden files and folders are skipped. Files without an image suffix are skipped and counted in
    `ignored`. Links are followed, but each folder is read only once. Raises `DataError`.
    """

    def __init__(self, root: Path, classes: tuple[str, ...] | None = None, *, unlabelled: bool = False) -> None:
        self.ignored = 0
        if unlabelled:
            images = sorted(self._images(root, "", set()))
            if not images:
                raise DataError(
                    f"{root} has no images ({', '.join(sorted(SUFFIXES))}), neither in it nor in its folders"
                )
            super().__init__(root, [key for key, _ in images], None, [inode for _, inode in images], ())
            return
        folders = [entry.name for entry in class_folders(root)]
        if not folders:
            raise DataError(f"{root} has no class folders; it needs one folder of images for each class")
        if unprintable := [name for name in folders if not name.isprintable()]:
            raise DataError(f"{root} has class folders with unprintable names: {unprintable}; rename them")
        classes = tuple(folders) if classes is None else classes
        if unknown := [name for name in folders if name not in classes]:
            raise DataError(
                f"{root} has unknown classes: {', '.join(unknown)}; the known classes are: {', '.join(classes)}"
            )
        keys: list[str] = []
        labels, inodes = array("q"), array("Q")
        entered: set[tuple[int, int]] = set()
        for name in folders:
            found = sorted(self._images(root, name, entered))
            if not found:
                raise DataError(
                    f"class folder {root / name} has no images ({', '.join(sorted(SUFFIXES))}); add images or remove "
                    "the folder"
                )
            keys += [key for key, _ in found]
            inodes.extend(inode for _, inode in found)
            labels.extend([classes.index(name)] * len(found))
        super().__init__(root, keys, labels, inodes, classes)

    def _images(self, root: Path, folder: str, entered: set[tuple[int, int]]) -> list[tuple[str, int]]:
        """Return the relative paths and inodes of the images in a folder and its subfolders."""
        found: list[tuple[str, int]] = []
        status = (root / folder).stat()
        if (status.st_dev, status.st_ino) in entered:
            return found
        entered.add((status.st_dev, status.st_ino))
        folders = []
        start = f"{folder}/" if folder else ""
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(f"{start}{entry.name}")
                elif entry.name.lower().endswith(ENDINGS):
                    found.append((f"{start}{entry.name}", inode_of(entry)))
                else:
                    self.ignored += 1
        for inner in sorted(folders):  # sorted, so that every machine follows the same one of two equal links
            found += self._images(root, inner, entered)
        return found


def class_folders(root: Path) -> list[Path]:
    """Return the folders directly below `root` that are not hidden, sorted."""
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def has_images(root: Path) -> bool:
    """Return True if at least one image lies directly in `root`."""
    with os.scandir(root) as entries:
        return any(
            entry.name.lower().endswith(ENDINGS) and not entry.name.startswith(".") and entry.is_file()
            for entry in entries
        )
