"""Formats of data, one module each, which is imported at first use. `vitrail.data.sources.FORMATS` is their table."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail.data.formats import (
        coco,
        folder,
        fractals,
        hub,
        idx,
        masks,
        parquet,
        pseudo_labels,
        scenes,
        table,
        tar,
        voc,
        yolo,
    )

__all__ = (
    "annotated", "coco", "folder", "fractals", "hub", "idx", "masks", "parquet", "pseudo_labels", "scenes", "table",
    "tar", "voc", "yolo",
)  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
