"""Folders of images per class, such as `daisy/1.jpg` and `rose/2.png`, and folders of images without classes."""

from __future__ import annotations

import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vitrail.data.faults import OWN_RECORDS, Fault, is_own_output, is_system_folder
from vitrail.data.labels import check_names, class_name
from vitrail.data.pixels.formats import SUFFIXES
from vitrail.data.pixels.signature import HEAD, is_image
from vitrail.data.sources.files import FileSource, inode_of
from vitrail.errors import DataError, listed, plural

ENDINGS = tuple(SUFFIXES)
"""The suffixes as the tuple that `str.endswith` expects."""

ALL = ", ".join(sorted(SUFFIXES))
"""The suffixes in messages."""

LOOKS = 3
"""Number of files of one suffix in one folder that are opened to see if they are images."""


class FolderSource(FileSource):
    """The images in class folders and their subfolders, in the order of their paths.

    By default the classes are the sorted names of the folders that hold images, as `class_name` writes them. If
    `classes` of another split or a model is given, a folder with any other name is an error; with `tolerant`, the
    folder is left out, and is a fault. If `unlabelled` is true, all images in `root` and its subfolders are samples
    without a target. Hidden files, hidden folders, the folders of operating systems and the output of Vitrail are
    skipped. Files without an image suffix are skipped and counted in `ignored`. `faults` describes these folders,
    folders without images, images outside of class folders, and skipped files whose content is an image. Links are
    followed, but each folder is read only once. Raises `DataError`.
    """

    def __init__(
        self, root: Path, classes: tuple[str, ...] | None = None, *, unlabelled: bool = False, tolerant: bool = False
    ) -> None:
        self._others: list[str] = []
        self.faults: tuple[Fault, ...] = ()
        self._system: list[str] = []
        self._own: list[str] = []
        if unlabelled:
            images = sorted(self._images(root, "", set()))
            if not images:
                raise DataError(f"{root} has no images ({ALL}), neither in it nor in its folders")
            others = _other_folders(root, self._system, self._own)
            self.faults = (*others, *unread_images(root, self._others))
            super().__init__(root, [key for key, _ in images], None, [inode for _, inode in images], ())
            return
        self._system, self._own = _never_data(root)
        never = {*self._system, *self._own}
        folders = [name for name in _subfolders(root) if name not in never and not name.startswith(".")]
        if not folders:
            raise DataError(f"{root} has no class folders; it needs one folder of images for each class")
        named = {name: class_name(name) for name in folders}
        check_names(str(root), named.values())
        entered: set[tuple[int, int]] = set()
        found = {name: sorted(self._images(root, name, entered)) for name in folders}
        empty = [name for name, images in found.items() if not images]
        if len(empty) == len(folders) and not tolerant:
            raise DataError(f"{root} has no images ({ALL}) in its class folders: {listed(empty)}; add images")
        present = dict.fromkeys(sorted(named[name] for name in folders if found[name]))
        classes = tuple(present) if classes is None else classes
        numbers = {name: number for number, name in enumerate(classes)}
        unknown = [name for name in folders if found[name] and named[name] not in numbers]
        strange = f"{root} has unknown classes: {listed(unknown, 20)}; the known classes are: {listed(classes, 20)}"
        if unknown and not tolerant:
            raise DataError(strange)
        kept = {name: images for name, images in found.items() if images and named[name] in numbers}
        labels, inodes = array("q"), array("Q")
        for name, images in kept.items():
            inodes.extend(inode for _, inode in images)
            labels.extend([numbers[named[name]]] * len(images))
        self.faults = (
            *(_unknown(strange, sum(len(found[name]) for name in unknown), root) for _ in unknown[:1]),
            *(_empty(root, empty) for _ in empty[:1]),
            *_joined(root, {name: named[name] for name in kept}),
            *_other_folders(root, self._system, self._own),
            *_loose(root),
            *unread_images(root, self._others, empty),
        )
        super().__init__(root, [key for images in kept.values() for key, _ in images], labels, inodes, classes)

    @property
    def ignored(self) -> int:
        """Number of files without a suffix of an image format."""
        return len(self._others)

    def _images(self, root: Path, folder: str, entered: set[tuple[int, int]]) -> list[tuple[str, int]]:
        """Return the relative paths and inodes of the images in a folder and its subfolders."""
        found: list[tuple[str, int]] = []
        status = (root / folder).stat()
        if (status.st_dev, status.st_ino) in entered:
            return found
        entered.add((status.st_dev, status.st_ino))
        folders = []
        system, names = [], set()
        start = f"{folder}/" if folder else ""
        try:
            scanned = os.scandir(root / folder)
        except OSError as error:
            raise DataError(f"folder {root / folder} cannot be read: {error.strerror}") from None
        with scanned as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if _is_folder(entry):
                    if is_system_folder(entry.name):
                        system.append(f"{start}{entry.name}")
                    else:
                        folders.append(f"{start}{entry.name}")
                elif entry.name.lower().endswith(ENDINGS):
                    found.append((f"{start}{entry.name}", inode_of(entry)))
                else:
                    names.add(entry.name)
        if folder and not names.isdisjoint(OWN_RECORDS) and is_own_output(root / folder):
            self._own.append(folder)
            return []
        self._others += [f"{start}{name}" for name in sorted(names)]
        self._system += system
        for inner in sorted(folders):  # sorted, so that every machine follows the same one of two equal links
            found += self._images(root, inner, entered)
        return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _unknown(text: str, images: int, root: Path) -> Fault:
    return Fault(
        "unknown-class", "error", images, text,
        "Training refuses the data, because a network cannot learn a class without training images. This check leaves "
        f"out {plural(images, 'image')} of {root.name}/.",
        "Add training images of these classes, or remove their folders.",
    )  # fmt: skip


def _joined(root: Path, names: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault if the names of several folders are written differently and mean the same class."""
    classes = Counter(names.values())
    if alike := [name for name, one in names.items() if classes[one] > 1]:
        yield Fault(
            "joined-folders", "note", len(alike),
            f"{root}: the names {listed(list(map(repr, alike)))} differ only in spaces at their ends or in the form of "
            "Unicode, so folders of the same name are one class",
            "Folders of the same name are one class.",
            "Give all folders of a class the same name.",
        )  # fmt: skip


def _empty(root: Path, names: list[str]) -> Fault:
    return Fault(
        "empty-folder", "warning", len(names),
        f"{root}: skipped {plural(len(names), 'class folder')} without images: {listed(names)}",
        "These folders are skipped, so they are not classes.",
        f"Add images ({ALL}), or remove the folders.",
    )  # fmt: skip


def unread_images(root: Path, others: Sequence[str], empty: Sequence[str] = ()) -> Iterator[Fault]:
    """Yield a fault if some of the skipped files `others`, which are paths relative to `root`, are images by their
    content. It is an error if they are the only images of a class, whose folder is then among those in `empty`."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for other in others:
        folder, _, name = other.rpartition("/")
        groups[folder, os.path.splitext(name)[1].lower()].append(other)  # noqa: PTH122 (thousands of names)
    unread = {place: names for place, names in groups.items() if any(_looks(root / name) for name in names[:LOOKS])}
    if not unread:
        return
    files = [name for names in unread.values() for name in names]
    counts: Counter[str] = Counter()
    for (_, suffix), names in unread.items():
        counts[suffix or "no suffix"] += len(names)
    lost = sorted({name.partition("/")[0] for name in files} & set(empty))
    only = f", and the class folders {listed(lost)} have no other images" if lost else ""
    yield Fault(
        "unread-images", "error" if lost else "warning", len(files),
        f"{root}: skipped {plural(len(files), 'file')} with images whose suffixes are not those of image formats that "
        f"are read ({listed([f'{suffix}: {count:,}' for suffix, count in counts.most_common()])}), such as "
        f"{files[0]}{only}",
        "Training refuses the data, because classes would be missing." if lost else "These images are skipped.",
        f"Rename or convert the images to files with the suffixes {ALL}, or remove them.",
    )  # fmt: skip


def _looks(path: Path) -> bool:
    """Return True if a file is an image by its content."""
    try:
        with path.open("rb") as file:
            return is_image(file.read(HEAD))
    except OSError:
        return False


def other_folders(root: Path) -> Iterator[Fault]:
    """Yield the faults of folders directly in `root` that are never data."""
    return _other_folders(root, *_never_data(root))


def _never_data(root: Path) -> tuple[list[str], list[str]]:
    """Return the names of the visible folders in `root` that are those of systems, and those that Vitrail wrote."""
    visible = [name for name in _subfolders(root) if not name.startswith(".")]
    system = [name for name in visible if is_system_folder(name)]
    return system, [name for name in visible if name not in system and is_own_output(root / name)]


def _other_folders(root: Path, system: list[str], own: list[str]) -> Iterator[Fault]:
    if system:
        yield Fault(
            "system-folder", "note", len(system),
            f"{root}: skipped {plural(len(system), 'folder')} of the system or of other programs: "
            f"{listed(sorted(system), 3)}",
            "These folders are skipped, with the copies and thumbnails of images in them.",
            "Nothing needs to be done.",
        )  # fmt: skip
    if own:
        yield Fault(
            "own-output", "note", len(own),
            f"{root}: skipped {plural(len(own), 'folder')} that Vitrail wrote: {listed(sorted(own), 3)}",
            "These folders are skipped, with the pictures of runs and reports in them.",
            "Nothing needs to be done. Outside of the data, such folders are easier to find.",
        )  # fmt: skip


def _loose(root: Path) -> Iterator[Fault]:
    """Yield a fault if images lie beside the class folders."""
    with os.scandir(root) as entries:
        count = sum(_is_image(entry) for entry in entries)
    if count:
        yield Fault(
            "loose-images", "warning", count,
            f"{root}: skipped {plural(count, 'image')} outside of the class folders",
            "These images have no label, so they are skipped.",
            "Move the images into the folders of their classes, or remove them.",
        )  # fmt: skip


def _subfolders(root: Path) -> list[str]:
    """Return the names of the folders directly in `root`, sorted. Raise `DataError` if it may not be read."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if _is_folder(entry))
    except OSError as error:
        raise DataError(f"folder {root} cannot be read: {error.strerror}") from error


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(ENDINGS) and not entry.name.startswith(".") and entry.is_file()


def class_folders(root: Path) -> list[Path]:
    """Return the folders directly below `root`, sorted, without those that are never data: hidden folders, those of
    operating systems, and the output of Vitrail."""
    folders = [root / name for name in _subfolders(root) if not is_system_folder(name)]
    return [folder for folder in folders if not is_own_output(folder)]


def has_images(root: Path) -> bool:
    """Return True if at least one image lies directly in `root`."""
    with os.scandir(root) as entries:
        return any(map(_is_image, entries))


def holds_images(root: Path, depth: int = 4) -> bool:
    """Return True if at least one image lies in `root` or in a folder at most `depth` levels below it."""
    return has_images(root) or (depth > 0 and any(holds_images(inner, depth - 1) for inner in class_folders(root)))
