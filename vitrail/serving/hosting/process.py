"""One process of the server: it loads models, and serves them on a socket."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from vitrail.errors import ConfigError, VitrailError
from vitrail.machine import Precision, keep_freed_memory
from vitrail.serving.answering.served import OverlayMaker
from vitrail.serving.answering.service import Service
from vitrail.serving.answering.settings import ServeSettings
from vitrail.serving.answering.watch import ModelFiles, Watcher
from vitrail.serving.http.server import Server
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load, model_name


@dataclass(frozen=True, kw_only=True)
class Job:
    """The models to serve, and the settings of the server."""

    models: Mapping[str, str]
    """Paths of the models, or their names on the hub, by the names under which they are served."""
    settings: ServeSettings
    device: str = "auto"
    precision: Precision | None = None
    overlays: OverlayMaker | None = None
    """Function that draws the relevance of an image's parts. It can be pickled."""


def named_models(models: Sequence[str]) -> dict[str, str]:
    """Return the paths of models by the names under which they are served. Raise `ConfigError` for two models of the
    same name."""
    paths: dict[str, str] = {}
    for text in models:
        name, equals, path = text.partition("=")
        if not equals or "/" in name or Path(text).exists():
            name, path = model_name(text), text
        if not name or not path:
            raise ConfigError(f"MODEL: {text!r} lacks a name or a path; give NAME=MODEL")
        if name in paths:
            raise ConfigError(f"MODEL: two models are called {name!r}; give another name to one of them: NAME=MODEL")
        paths[name] = path
    return paths


def serve(
    job: Job,
    listening: socket.socket,
    *,
    on_start: Callable[[], None],
    on_note: Callable[[str], None],
    supervisor: int | None = None,
) -> None:
    """Load the models, and serve them until a signal stops the process. Raise `VitrailError` for a model that cannot be
    loaded or served. `on_note` is called with each note on loading, and `on_start` when the server listens.
    `supervisor` is the process of a worker's supervisor."""
    keep_freed_memory()  # otherwise each batch gets its memory from the system anew
    files, states = {}, {}
    if job.settings.watch:
        files = {name: ModelFiles.of(path, job.device) for name, path in job.models.items()}
        states = {name: one.state() for name, one in files.items()}
    service = Service(_load(job, files, on_note), job.settings, job.precision, job.overlays)
    watcher = Watcher(service, files, states) if files else None
    Server(service, on_start, watcher=watcher, supervisor=supervisor).run(sockets=[listening])


@dataclass(frozen=True)
class Worker:
    """The function of one of several processes that serve the same models, for `Supervisor`."""

    job: Job
    on_note: Callable[[str], None]

    def __call__(self, number: int, listening: socket.socket, told: Connection) -> None:
        """Serve with a part of the compute threads. The first worker alone reports notes, which are the same for
        all."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the server has its own rule
        torch.set_num_threads(max(1, torch.get_num_threads() // self.job.settings.workers))
        try:
            serve(
                self.job,
                listening,
                on_start=lambda: told.send(None),
                on_note=self.on_note if number == 0 else lambda _: None,
                supervisor=os.getppid(),
            )
        except VitrailError as error:
            told.send(error)
            raise SystemExit(error.exit_code) from None


def _load(job: Job, files: Mapping[str, ModelFiles], on_note: Callable[[str], None]) -> dict[str, Bundle]:
    bundles = {}
    for name, path in job.models.items():
        bundles[name] = files[name].load() if name in files else load(path, device=job.device)
        for note in bundles[name].notes:
            on_note(note)
    return bundles
