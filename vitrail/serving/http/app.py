"""The application: the paths of all protocols, the probes, the metrics, and the answers to errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitrail.serving.http.guard import PROBE_PATHS, Guard
from vitrail.serving.http.requests import service_of
from vitrail.serving.http.routes_images import routes_images
from vitrail.serving.http.routes_v2 import routes_v2
from vitrail.serving.http.service import Refused, Service

__all__ = ["make_app"]


def make_app(service: Service) -> Guard:
    """Return the application for a service, with its limits. Its lifespan starts and stops the service."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    routes = [
        Route("/metrics", _metrics),
        *(Route(path, _probe) for path in PROBE_PATHS),
        *routes_images(),
        *routes_v2(),
    ]
    handlers: Any = {Refused: _refused, HTTPException: _not_found, Exception: _crashed}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.state.service = service
    return Guard(app, service)


async def _metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4")


async def _probe(request: Request) -> Response:
    """Answer a probe. The server listens after its models are loaded, so `live` and `startup` are always true."""
    service, probe = service_of(request), request.url.path.rsplit("/", 1)[1]
    is_fine = probe != "ready" or (service.is_ready and not service.is_draining)
    return JSONResponse({probe: is_fine}, 200 if is_fine else 503)


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    return JSONResponse({"error": str(refused)}, refused.status, refused.headers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; docs/serving.md lists the paths of this server"
    return JSONResponse({"error": message}, error.status_code, error.headers)


async def _crashed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server failed on this request; its log says why"}, 500)
