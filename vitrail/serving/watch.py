"""Replacement of models whose files change while they are served.

A model is read from a private copy of its files. Weights are mapped into memory when they are loaded, so a program that
writes over the files of a model in use would otherwise change its answers or end the server.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import BundleError, ConfigError
from vitrail.serving.monitoring import log_line
from vitrail.serving.service import Service
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import exported_file
from vitrail.weights.load import load
from vitrail.weights.locate import TOKENIZERS, find, looks_like_hub_name
from vitrail.weights.saved import DESCRIPTION, NAMES
from vitrail.weights.tensors import SUFFIXES

INTERVAL = 0.5
"""Seconds between two checks of the files. Files are read when two checks find the same state."""

State = tuple[tuple[str, int, int, int], ...]
"""Names, sizes, times of modification and inodes of the files of a model."""


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, which other programs may replace or write over at any time."""

    path: Path
    device: str = "auto"

    @classmethod
    def of(cls, model: str, device: str = "auto") -> ModelFiles:
        """Return the files of a model by its path. Raise `ConfigError` for a name on the hub."""
        if looks_like_hub_name(model):
            raise ConfigError(f"watch=True needs files, but {model!r} is a name on the hub; give a folder or a file")
        return cls(find(model)[0], device)

    def state(self) -> State:
        """Return the state of the files. It is empty if there are none."""
        try:
            files = self._files()
        except OSError:  # the folder was removed while it was listed
            return ()
        found = []
        for file in files:
            try:
                status = file.stat()
            except OSError:
                continue
            found.append((str(file.relative_to(self.path.parent)), status.st_size, status.st_mtime_ns, status.st_ino))
        return tuple(found)

    def load(self) -> Bundle:
        """Return the model in these files. Raise `VitrailError` for files that are no model, that do not agree with
        each other, or that change while they are read."""
        before = self.state()
        with tempfile.TemporaryDirectory(prefix="vitrail-serve-") as folder:
            for name, *_ in before:
                target = Path(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    shutil.copyfile(self.path.parent / name, target)
                except OSError as error:
                    raise BundleError(f"{self.path} cannot be read: {error.strerror or error}") from None
            if self.state() != before:
                raise BundleError(f"{self.path} changed while it was read")
            try:
                return load(Path(folder) / self.path.name if before else self.path, device=self.device)
            except BundleError as error:
                raise BundleError(str(error).replace(folder, str(self.path.parent))) from None

    def _files(self) -> list[Path]:
        path = self.path
        if not path.is_dir():
            return [path, path.with_suffix(".bin")] if path.suffix.lower() == ".xml" else [path]
        if exported_file(path):
            return sorted(file for file in path.rglob("*") if file.is_file())
        for folder in (path, path / "model"):
            if (folder / DESCRIPTION).exists():
                return [folder / name for name in NAMES if (folder / name).exists()]
        tokenizers = {name for files in TOKENIZERS for name in files}
        return sorted(
            file for file in path.iterdir() if file.name.endswith((*SUFFIXES, ".json")) or file.name in tokenizers
        )


class Watcher:
    """Replaces the models of a service when their files change.

    Files that are being written are left alone until they have stopped changing. The weights must have the hash that
    the description of a model states, so half of a new model is never served. If the new files cannot be served, the
    old model stays, and the log has the reason.
    """

    def __init__(self, service: Service, files: Mapping[str, ModelFiles], states: Mapping[str, State]) -> None:
        """`files` are the files of models by the models' names, and `states` their states before they were loaded."""
        self._service = service
        self._files = files
        self._known = dict(states)
        self._seen = dict(states)

    async def run(self) -> None:
        """Watch until the task is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            for name in self._files:
                await self.look(name)

    async def look(self, name: str) -> None:
        """Replace a model if its files have changed since they were last read, and not since the last check."""
        state = await asyncio.to_thread(self._files[name].state)
        is_settled = state == self._seen[name]
        self._seen[name] = state
        if not is_settled or state == self._known[name]:
            return
        self._known[name] = state
        before = self._service.models[name].sha256
        try:
            if not state:
                raise BundleError(f"{self._files[name].path} does not exist any more")
            bundle = await asyncio.to_thread(self._files[name].load)
            made = await self._service.replace(name, bundle)
        except Exception as error:  # whatever is wrong with the files, the old model answers
            log_line(event="model refused", model=name, sha256=before, error=f"{type(error).__name__}: {error}")
        else:
            engine = "torch" if made.bundle.engine is None else made.bundle.engine.name
            log_line(event="model replaced", model=name, sha256=made.sha256, before=before, engine=engine)
