"""The path that shows which parts of a picture support a class."""

from __future__ import annotations

import base64

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vitrail.errors import nearest
from vitrail.serving.answering.served import ServedModel
from vitrail.serving.answering.service import Refused
from vitrail.serving.http.requests import Operation, model_headers, service_of


def routes_explain() -> list[Operation]:
    """Return the path. The model is chosen by `?model=NAME`, and the class by `?label=CLASS`."""
    return [
        Operation(
            "/explain", "Draw the parts of an image that support a class", _explain, "POST", ("model", "label"),
            ("image/*", "application/octet-stream"),
        )
    ]  # fmt: skip


async def _explain(request: Request) -> Response:
    """Answer the bytes of an image with an overlay, as a data URI."""
    service = service_of(request)
    model = service.model(request.query_params.get("model"))
    target = _target(model, request.query_params.get("label"))
    content = await service.overlay(model, await request.body(), target)
    answer = {
        "model": model.name,
        "sha256": model.sha256,
        "map": "rollout" if target is None else "relevance",
        "label": None if target is None else model.bundle.classes[target],
        "image": "data:image/jpeg;base64," + base64.b64encode(content).decode(),
    }
    return JSONResponse(answer, headers=model_headers(model))


def _target(model: ServedModel, label: str | None) -> int | None:
    """Return the number of a class, or None for no class. Raise `Refused` for an unknown class."""
    if label is None:
        return None
    classes = model.bundle.classes
    if label not in classes:
        hint = nearest(label, classes) if classes else "it has no classes"
        raise Refused(400, f"label: {label!r} is not a class of model {model.name!r}; {hint}")
    return classes.index(label)
