"""The best model in a run's folder, and earlier best models to which checkpoints still refer.

A run that goes back to a checkpoint also goes back to the best model of that time. Otherwise, its result could be a
model of steps that no longer count.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from torch import nn

from vitrail.files import saving
from vitrail.tasks.own_model import BESIDE, without_adapters, write_beside, write_weights
from vitrail.weights.bundle import Bundle

__all__ = ["BestModel"]

MODEL = "model"
KEPT = ".best-"
"""Beginning of the names of folders with earlier best models. The number of their step follows."""


class BestModel:
    """The folder of the best model of a run, and copies of earlier ones."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the folder of the run."""
        self.folder = folder
        self.path = folder / MODEL

    def keep(self, step: int, referenced: Collection[int]) -> None:
        """Keep a copy of the best model of a step before another one replaces it, if its step is `referenced` by a
        checkpoint. Other copies that no checkpoint refers to are deleted. Raises `SaveError`.

        The copy consists of links where the file system has them, because files of models are replaced and never
        changed.
        """
        for kept in self._kept():
            if kept.name.removeprefix(KEPT) not in map(str, referenced):
                shutil.rmtree(kept, ignore_errors=True)
        copy = self._copy(step)
        if step not in referenced or copy.exists() or not self.path.is_dir():
            return
        with saving("the best model so far", copy):
            partial = copy.with_name(f"{copy.name}.vitrail-partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self.path, partial / MODEL, copy_function=_link)
            if (self.folder / BESIDE).exists():
                _link(self.folder / BESIDE, partial / BESIDE)
            partial.rename(copy)

    def save(self, bundle: Bundle, objective: nn.Module) -> None:
        """Save a model as the best one, with the weights that its objective trains beside the network. Raises
        `SaveError`."""
        write_beside(objective, self.folder / BESIDE)
        write_weights(without_adapters(bundle), self.path)

    def put_back(self, step: int) -> None:
        """Make the kept model of this step the best one again. Without a copy, the best model stays."""
        copy = self._copy(step)
        if not copy.is_dir():
            return
        with saving("the best model", self.path):
            for entry in list(copy.iterdir()):
                target = self.folder / entry.name
                shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
                entry.rename(target)
            copy.rmdir()

    def forget(self) -> None:
        """Delete the copies of earlier models, because the run is complete."""
        for kept in self._kept():
            shutil.rmtree(kept, ignore_errors=True)

    def _kept(self) -> list[Path]:
        return list(self.folder.glob(f"{KEPT}*"))

    def _copy(self, step: int) -> Path:
        return self.folder / f"{KEPT}{step}"


def _link(source: str | Path, target: str | Path) -> None:
    """Link a file, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
