"""The server as a class for Ray Serve, which starts, scales and restarts its replicas on several machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vitrail.evaluation.features.index import FeatureIndex
from vitrail.machine import Precision
from vitrail.models.predictor import EngineChoice
from vitrail.serving.app import make_app
from vitrail.serving.guard import CLIENT_GONE, Message
from vitrail.serving.server import ServeJob, load_models, named_models
from vitrail.serving.service import OverlayMaker, Service, log_line
from vitrail.serving.settings import TOKEN_VARIABLE, ServeSettings
from vitrail.settings import raise_problems

OF_FRAMEWORK = ("port", "workers", "watch", "max_connections", "keep_alive_seconds", "drain_seconds")
"""Settings of a process that listens by itself. Here the framework listens and starts the processes."""


class ModelDeployment:
    """A replica that answers the requests of `vitrail serve`: all paths, batches, limits and errors.

    `ray.serve.deployment(ModelDeployment).bind("runs/flowers")` is an application of Ray Serve. Any framework that
    calls an object with Starlette's requests can use it; this class itself needs no Ray.
    """

    def __init__(
        self,
        *models: str,
        device: str = "auto",
        precision: Precision | None = None,
        engine: EngineChoice = "torch",
        overlays: OverlayMaker | None = None,
        index: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Load models, which are given as on the command line: MODEL, or NAME=MODEL. `settings` are those of
        `ServeSettings` without `OF_FRAMEWORK`. The log has the notes on loading. Raise `VitrailError`."""
        raise_problems(
            f"{name}={settings[name]!r} has no effect here; set what the framework has in its place"
            for name in OF_FRAMEWORK
            if name in settings
        )
        # The framework listens, so its address is not known here. Names of hosts are checked only if some are
        # given.
        chosen = ServeSettings(**{"host": "0.0.0.0", "token": os.environ.get(TOKEN_VARIABLE) or None, **settings})
        job = ServeJob(models=named_models(models), settings=chosen, device=device, precision=precision, engine=engine)
        bundles = load_models(job, {}, lambda note: log_line(event="note", note=note))
        self._service = Service(
            bundles, chosen, precision, overlays, None if index is None else FeatureIndex.open(index)
        )
        self._app = make_app(self._service)

    async def __call__(self, request: Request) -> Response:
        """Return the answer to a request. All calls must be made in one event loop."""
        if not self._service.is_ready:
            await self._service.start()
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        prefix = request.scope.get("root_path", "")  # the path of the application among others
        path = request.scope["path"].removeprefix(prefix) or "/"
        await self._app({**request.scope, "path": path, "root_path": ""}, request.receive, send)
        if not sent:
            return Response(status_code=CLIENT_GONE)
        response = Response(b"".join(message.get("body", b"") for message in sent[1:]), sent[0]["status"])
        response.raw_headers = list(sent[0]["headers"])
        return response
