"""The application: the paths of all protocols, the probes, the metrics, the page, and the answers to errors."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from vitrail import __version__
from vitrail.serving.answering.served import ServedModel
from vitrail.serving.answering.service import Refused, Service
from vitrail.serving.answering.watch import Watcher
from vitrail.serving.http.guard import PROBE_PATHS, App, Guard
from vitrail.serving.http.protocol_v2 import HEADER
from vitrail.serving.http.requests import Operation, service_of
from vitrail.serving.http.routes_explain import routes_explain
from vitrail.serving.http.routes_images import routes_images
from vitrail.serving.http.routes_v2 import routes_v2

EXPOSED = ("X-Model", "X-Model-SHA256", HEADER, "Retry-After")
"""Headers of answers that pages of other origins may read."""

PAGE = Path(__file__).with_name("page.html")

INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)
"""The style and the script of the page."""


def make_app(service: Service, watcher: Watcher | None = None) -> App:
    """Return the application for a service, with its limits. Its lifespan starts and stops the service, and the
    watcher that replaces models."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        watching = None if watcher is None else asyncio.create_task(watcher.run())
        yield
        if watching is not None:
            watching.cancel()
        await service.stop()

    async def describe(request: Request) -> Response:
        return JSONResponse(_openapi(operations))

    operations = [
        Operation("/", "Show the page", _page_route()),
        Operation("/models", "Describe all models, for the page", _models),
        Operation("/v1/models", "List all models, in OpenAI's shape", _model_list),
        Operation("/v1/models/{name}", "Describe a model, in OpenAI's shape", _model_card),
        Operation("/metrics", "Return metrics for Prometheus", _metrics),
        Operation("/openapi.json", "Describe all paths by OpenAPI", describe),
        *(Operation(path, "Tell the state of the server", _probe) for path in PROBE_PATHS),
        *routes_images(),
        *routes_explain(),
        *routes_v2(),
    ]
    handlers: Any = {Refused: _refused, HTTPException: _not_found, Exception: _crashed}
    routes = [operation.route() for operation in operations]
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.state.service = service
    guard = Guard(app, service)
    origins = service.settings.allow_origin
    if not origins:
        return guard
    return CORSMiddleware(  # outside, because browsers send no token with the request that asks for permission
        guard, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=EXPOSED
    )


def _openapi(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI description of operations."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = operation.described()
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Vitrail", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Error": error}},
    }


def _page_headers(page: str) -> dict[str, str]:
    """Return the headers of the page, which may run its own script and ask its own server only."""
    allowed: dict[str, str] = {}
    for name, text in INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[name] = f"'sha256-{digest}'"
    policy = {
        "default-src": "'none'", "img-src": "blob: data:", "style-src": allowed["style"],
        "script-src": allowed["script"], "connect-src": "'self'",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


def _page_route() -> Any:
    text = PAGE.read_text(encoding="utf-8")
    headers = _page_headers(text)

    async def page(request: Request) -> Response:
        return HTMLResponse(text, headers=headers)

    return page


async def _models(request: Request) -> Response:
    """Describe all models, for the page."""
    service = service_of(request)
    cards = [{**_card(model), "no_overlays": service.overlay_refusal(model)} for model in service.models.values()]
    return JSONResponse({"version": __version__, "models": cards})


def _card(model: ServedModel) -> dict[str, Any]:
    bundle = model.bundle
    return {
        "name": model.name,
        "sha256": model.sha256,
        "architecture": bundle.network.config.architecture,
        "image_size": list(bundle.preprocess.image_size),
        "output": bundle.output,
        "classes": len(bundle.classes),
        "precision": model.precision,
        "max_batch": model.largest,
        "batch_threads": model.threads,
        "metrics": {name: value for name, value in bundle.metrics.items() if math.isfinite(value)},
    }


async def _model_list(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_listed(model) for model in service_of(request).models.values()]})


async def _model_card(request: Request) -> Response:
    return JSONResponse(_listed(service_of(request).model(request.path_params["name"])))


def _listed(model: ServedModel) -> dict[str, Any]:
    """Return a model in OpenAI's shape. Its time of creation is not known, so it is 0."""
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "vitrail"}


async def _metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4")


async def _probe(request: Request) -> Response:
    """Answer a probe. The server listens after its models are loaded, so `live` and `startup` are always true. A path
    without the name of a probe asks if the server is ready."""
    service, probe = service_of(request), request.url.path.rsplit("/", 1)[1]
    is_fine = probe in ("live", "startup") or (service.is_ready and not service.is_draining)
    return JSONResponse({probe: is_fine}, 200 if is_fine else 503)


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    return JSONResponse({"error": str(refused)}, refused.status, refused.headers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; docs/serving.md lists the paths of this server"
    return JSONResponse({"error": message}, error.status_code, error.headers)


async def _crashed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server failed on this request; its log has the reason"}, 500)
