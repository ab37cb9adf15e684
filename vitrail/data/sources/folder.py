"""Class folders: `daisy/1.jpg`, `rose/2.png`. The folder's name is the class."""

from __future__ import annotations

import os
from pathlib import Path

from vitrail.data.decode import SUFFIXES
from vitrail.data.source import Sample
from vitrail.errors import DataError

__all__ = ["FolderSource"]


class FolderSource:
    """Images below class folders, in the order of their paths. Files are read when asked for, not before.

    `classes` indexes the folders by the classes of another split or of a model; a folder that is not among them is an
    error. Without it the classes are the folders' names, sorted. Hidden files and folders are left out, and files with
    other suffixes than images have are counted in `ignored`.
    """

    def __init__(self, root: Path, classes: tuple[str, ...] | None = None) -> None:
        self.root = root
        self.ignored = 0
        folders = [entry.name for entry in class_folders(root)]
        if not folders:
            raise DataError(f"{root} has no class folders; it needs one folder of images for each class")
        if unwritable := [name for name in folders if not name.isprintable()]:
            raise DataError(f"{root} has class folders whose names cannot be written down: {unwritable}; rename them")
        self.classes = tuple(folders) if classes is None else classes
        if unknown := [name for name in folders if name not in self.classes]:
            raise DataError(
                f"{root} has classes that are not known: {', '.join(unknown)}; known are: {', '.join(self.classes)}"
            )
        self._keys: list[str] = []
        self._labels: list[int] = []
        for name in folders:
            found = self._images(name)
            if not found:
                raise DataError(
                    f"class folder {root / name} has no images ({', '.join(sorted(SUFFIXES))}); add some or remove it"
                )
            self._keys += found
            self._labels += [self.classes.index(name)] * len(found)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Sample:
        key = self._keys[index]
        try:
            data = (self.root / key).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {self.root / key}: {error.strerror}") from error
        return Sample(key, data, self._labels[index])

    def key(self, index: int) -> str:
        return self._keys[index]

    def label(self, index: int) -> int:
        return self._labels[index]

    def _images(self, name: str) -> list[str]:
        """Keys of all images at or below a class folder, sorted."""
        found = []
        for folder, subfolders, files in os.walk(self.root / name):
            subfolders[:] = [entry for entry in subfolders if not entry.startswith(".")]
            for file in files:
                if file.startswith("."):
                    continue
                if Path(file).suffix.lower() in SUFFIXES:
                    found.append((Path(folder) / file).relative_to(self.root).as_posix())
                else:
                    self.ignored += 1
        return sorted(found)


def class_folders(root: Path) -> list[Path]:
    """Folders directly below `root` that are not hidden, sorted."""
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
