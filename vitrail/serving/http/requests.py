"""Operations of the server, and reading of their requests: JSON, base64 and data URIs, refused with the reason."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vitrail.serving.answering.served import ServedModel
from vitrail.serving.answering.service import Refused, Service

URL_SAFE = str.maketrans("-_", "+/")
"""Characters of the base64 for addresses, and those of the usual one."""


@dataclass(frozen=True)
class Operation:
    """One path with one method. The routes of the server and its OpenAPI description are made from operations."""

    path: str
    summary: str
    answer: Callable[[Request], Awaitable[Response]]
    method: str = "GET"
    query: tuple[str, ...] = ()
    """Names that the query of the address may have."""
    body: tuple[str, ...] = ()
    """Media types of the body."""

    def route(self) -> Route:
        """Return the route, which refuses unknown names in the query of a request with a body."""

        async def checked(request: Request) -> Response:
            if self.method == "POST":  # tools add their own names to other addresses, to get around caches
                check_names(request.query_params, self.query, "the address")
            return await self.answer(request)

        return Route(self.path, checked, methods=[self.method])

    def described(self) -> dict[str, Any]:
        """Return the operation object of OpenAPI."""
        in_path = [(name, "path") for name in re.findall(r"{(\w+)}", self.path)]
        parameters = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for name, place in (*in_path, *((name, "query") for name in self.query))
        ]
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        described: dict[str, Any] = {
            "summary": self.summary,
            "parameters": parameters,
            "responses": {
                "200": {"description": "The answer."},
                "default": {"description": "An error.", "content": error},
            },
        }
        if self.body:
            described["requestBody"] = {"required": True, "content": {kind: {} for kind in self.body}}
        return described


def service_of(request: Request) -> Service:
    """Return the service that answers a request."""
    service: Service = request.app.state.service
    return service


def model_headers(model: ServedModel) -> dict[str, str]:
    """Return headers that name the model and its hash in an answer."""
    return {"X-Model": model.name.encode("ascii", "replace").decode(), "X-Model-SHA256": model.sha256}


def parse_json(body: bytes) -> dict[str, Any]:
    """Return a JSON object. Raise `Refused` for anything else."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refused(400, "the body must be a JSON object")
    return content


def parse_base64(text: Any, name: str) -> bytes:
    """Return the bytes of a base64 text in either alphabet, with or without padding and line breaks, or of a data URI.
    Raise `Refused`, with the name of the field, for anything else."""
    if isinstance(text, str) and text[:5].lower() == "data:":
        return parse_data_uri(text, name)
    return _plain_base64(text, name)


def parse_data_uri(uri: Any, name: str) -> bytes:
    """Return the content of a data URI. Raise `Refused` for other addresses, because none is ever fetched."""
    if not isinstance(uri, str) or uri[:5].lower() != "data:":
        raise Refused(400, f"{name}: images must be data URIs (data:image/png;base64,...), because no URL is fetched")
    head, _, text = uri.partition(",")
    if not head.lower().endswith(";base64"):
        raise Refused(400, f"{name}: the data URI must be in base64")
    return _plain_base64(unquote(text) if "%" in text else text, name)


def _plain_base64(text: Any, name: str) -> bytes:
    try:
        plain = re.sub(r"\s+", "", text).translate(URL_SAFE).rstrip("=")
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (TypeError, ValueError):
        raise Refused(400, f"{name}: the image is not base64") from None


def parse_top(value: Any, name: str = "top") -> int:
    """Return a number of classes. Raise `Refused` unless it is a whole number of 1 or more."""
    try:
        top = 0 if isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        top = 0
    if top < 1 or (isinstance(value, float) and top != value):
        raise Refused(400, f"{name}: {value!r} is not a number of classes, which is 1 or more")
    return top


def check_names(given: Mapping[str, Any], known: Collection[str], place: str) -> None:
    """Raise `Refused` for a name that the server does not act on. In JSON, null is the same as no value."""
    choices = f"it may have {', '.join(known)}" if known else "it has no parameters"
    for name, value in given.items():
        if name not in known and value is not None:
            raise Refused(400, f"{name}: the server does not act on this name in {place}; {choices}")
