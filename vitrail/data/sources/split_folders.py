"""A folder of class folders, with or without train/, val/ and test/, opened as one source per split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vitrail.data.faults import Fault, is_system_folder
from vitrail.data.sources.folder import FolderSource, class_folders, has_images, system_folders
from vitrail.data.splits import SPLITS, Split, Splits
from vitrail.errors import DataError, plural

__all__ = ["open_folders"]


def open_folders(root: Path, classes: tuple[str, ...] | None, unlabelled: bool) -> Splits:
    """Return the splits of a folder, with the faults in its structure. The classes of held-out splits are those of the
    training split; images of other classes are skipped, and are a fault. Raise `DataError` if there is no training
    image, or if a folder has a class that is not among `classes`.
    """
    found = class_folders(root)
    if not found and not (unlabelled and has_images(root)):
        if has_images(root):
            raise DataError(
                f"{root} has images but no class folders, so its images have no labels; put the images of each class "
                "into a folder of its own, or choose a task that needs no labels"
            )
        raise DataError(
            f"{root} has no class folders, and no train/, val/ or test/ with class folders; put the images of each "
            "class into a folder of its own"
        )
    places = {split: [f for f in found if f.name.lower() in names] for split, names in SPLITS.items()}
    if not any(places.values()):
        train = FolderSource(root, classes, unlabelled=unlabelled and not _has_classes(root))
        return Splits(train, None, None, _ignored(train), faults=train.faults)
    if not places["train"]:
        raise DataError(f"{root} has {', '.join(folder.name for folder in found)} but no train/ with training images")
    if not unlabelled and not class_folders(places["train"][0]) and has_images(places["train"][0]):
        raise DataError(
            f"{places['train'][0]} has images but no class folders; a folder of this name holds the class folders of "
            "the training split, so rename it if it is a class"
        )
    plain = unlabelled and not _has_classes(places["train"][0])
    train = FolderSource(places["train"][0], classes, unlabelled=plain)
    rest = {
        split: FolderSource(places[split][0], train.classes, unlabelled=plain, tolerant=True) if places[split] else None
        for split in ("validation", "test")
    }
    skipped = [folder.name for folder in found if not any(folder in folders for folders in places.values())]
    notes = [f"{root}: skipped {', '.join(skipped)}, because only train/, val/ and test/ are read"] if skipped else []
    sources = [source for source in (train, *rest.values()) if source is not None]
    for source in sources:
        notes += _ignored(source)
    named = {split: source if source is not None and len(source) else None for split, source in rest.items()}
    faults = [*_ambiguous(root, places), *_beside(root), *(fault for source in sources for fault in source.faults)]
    return Splits(train, named["validation"], named["test"], tuple(notes), faults=tuple(faults))


def _ambiguous(root: Path, places: dict[Split, list[Path]]) -> Iterator[Fault]:
    """Yield a fault for every split that several folders are named after. Only the first of these folders was read."""
    for split, folders in places.items():
        if len(folders) > 1:
            yield Fault(
                "ambiguous-split", "error", len(folders),
                f"{root} has {' and '.join(folder.name for folder in folders)}, but only one folder can be the "
                f"{split} split; rename or remove the others",
                f"Training refuses the data. This check reads {folders[0].name}/ only.",
                "Rename or remove all but one of these folders.",
            )  # fmt: skip


def _beside(root: Path) -> Iterator[Fault]:
    """Yield a fault if system folders lie beside the folders of the splits."""
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and is_system_folder(entry.name))
    if visible := [name for name in names if not name.startswith(".")]:
        yield system_folders(root, visible)


def _has_classes(root: Path) -> bool:
    """Return True if the folders in `root` can be classes: there are at least two folders, and `root` itself has no
    images."""
    return len(class_folders(root)) > 1 and not has_images(root)


def _ignored(source: FolderSource) -> tuple[str, ...]:
    if not source.ignored:
        return ()
    return (f"{source.root}: skipped {plural(source.ignored, 'file')} without a suffix of an image format",)
