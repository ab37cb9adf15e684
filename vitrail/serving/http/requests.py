"""Reading of requests: the service, JSON, base64 and data URIs, each refused with its reason."""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import Any

import numpy as np
from starlette.requests import Request

from vitrail.serving.answering.served import ServedModel
from vitrail.serving.answering.service import Refused, Service

__all__ = ["json_numbers", "model_headers", "parse_base64", "parse_data_uri", "parse_json", "parse_top", "service_of"]


def service_of(request: Request) -> Service:
    """Return the service that answers a request."""
    service: Service = request.app.state.service
    return service


def model_headers(model: ServedModel) -> dict[str, str]:
    """Return headers that name the model and its hash in an answer."""
    return {"X-Model": model.name.encode("ascii", "replace").decode(), "X-Model-SHA256": model.sha256}


def json_numbers(values: np.ndarray) -> list[float | None]:
    """Return all numbers of an array for JSON, which has no NaN and no infinity: those are None."""
    return [value if math.isfinite(value) else None for value in values.ravel().tolist()]


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
    """Return the bytes of a base64 text. Raise `Refused`, with the name of the field, for anything else."""
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise Refused(400, f"{name}: the image is not base64") from None


def parse_data_uri(uri: Any, name: str) -> bytes:
    """Return the content of a data URI. Raise `Refused` for other addresses, because none is ever fetched."""
    if not isinstance(uri, str) or not uri.startswith("data:"):
        raise Refused(400, f"{name}: images must be data URIs (data:image/png;base64,...), because no URL is fetched")
    head, _, text = uri.partition(",")
    if not head.endswith(";base64"):
        raise Refused(400, f"{name}: the data URI must be in base64")
    return parse_base64(text, name)


def parse_top(value: Any) -> int:
    """Return a number of classes. Raise `Refused` unless it is a whole number of 1 or more."""
    try:
        top = int(value)
    except (TypeError, ValueError, OverflowError):
        top = 0
    if top < 1:
        raise Refused(400, f"top: {value!r} is not a number of classes, which is 1 or more")
    return top
