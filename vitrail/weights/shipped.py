"""Models that are part of the package, and need no download."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "shipped_models"

SHIPPED = ("small",)
"""Names of the models. docs/pretraining.md says how each was trained, and what it is worth."""


def shipped_folder(name: str | Path) -> Path | None:
    """Return the folder of the model of this name, or None. A file or folder of that name on disk comes first."""
    text = str(name)
    return FOLDER / text if text in SHIPPED and not os.path.lexists(text) else None
