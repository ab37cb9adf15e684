"""Messages of the Open Inference Protocol v2 over REST, with the binary extension of Triton's clients, and images in
base64 and in data URIs."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np

from vitrail.serving.batching import Row
from vitrail.serving.service import Refused

HEADER = "inference-header-content-length"
"""HTTP header with the length of the JSON part of a message that has binary tensors behind it."""

DTYPES: dict[str, Any] = {"UINT8": np.uint8, "FP32": np.float32}
"""Number formats of image tensors, by the protocol's names."""

URL_SAFE = str.maketrans("-_", "+/")
"""Characters of the base64 for addresses, and those of the usual one."""

LENGTH_BYTES = 4
"""Bytes of the length before each element of a binary tensor of type BYTES."""


@dataclass(frozen=True)
class InferRequest:
    """Content of a request: encoded images or an array of pixels, and the outputs to return."""

    id: str
    images: list[bytes] | np.ndarray
    """Encoded images, or an array of the shape and the number format that the request states."""
    outputs: dict[str, bool]
    """Requested outputs, with True for outputs that are sent in binary. Empty for the usual outputs of the model."""
    is_binary: bool
    """True if outputs that the request does not name are sent in binary."""


def parse_request(body: bytes, header: str | None) -> InferRequest:
    """Return the content of a request. `header` is the value of `HEADER`. Raise `Refused` for a request that breaks the
    protocol."""
    try:
        length = len(body) if header is None else int(header)
        if not 0 <= length <= len(body):
            raise Refused(400, f"{HEADER}: {header} does not lie within the body of {len(body)} bytes")
        message = read_json(body[:length])
        inputs = message["inputs"]
        check_names(message, ("id", "inputs", "outputs", "parameters"), "the request")
        check_names(message.get("parameters") or {}, ("binary_data_output",), "parameters of the request")
        if len(inputs) != 1:
            raise Refused(400, f"inputs: {len(inputs)} tensors were sent, but a model takes one")
        outputs: dict[str, bool] = {}
        for item in message.get("outputs") or ():
            check_names(item, ("name", "parameters"), "an output")
            check_names(item.get("parameters") or {}, ("binary_data",), "parameters of an output")
            name = str(item["name"])
            if name in outputs:
                raise Refused(400, f"outputs: {name!r} is requested twice; name it once")
            outputs[name] = _flag(item.get("parameters"), "binary_data")
        is_binary = _flag(message.get("parameters"), "binary_data_output")
        number = "" if message.get("id") is None else str(message["id"])
        return InferRequest(number, _tensor(inputs[0], body[length:]), outputs, is_binary)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise Refused(400, f"the body is not a request of the Open Inference Protocol v2 ({why})") from None


def read_json(text: bytes) -> Any:
    """Return the content of a JSON text. Raise `Refused` if an object has a name twice, and `ValueError`."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise Refused(400, f"{name}: the body gives it more than once; give one value")
            found[name] = value
        return found

    return json.loads(text, object_pairs_hook=unique)


def format_answer(model: str, version: str, request: InferRequest, rows: Sequence[Row]) -> tuple[bytes, int | None]:
    """Return the body of the answer, and the length of its JSON part if binary tensors follow. `rows` has the outputs
    of each image, all those among them that the request names."""
    wanted = request.outputs or dict.fromkeys(rows[0], request.is_binary)
    described, binary = [], []
    for name, is_binary in wanted.items():
        values = np.stack([row[name] for row in rows]).astype("<f4")
        item: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(values.shape)}
        if is_binary:
            binary.append(values.tobytes())
            item["parameters"] = {"binary_data_size": values.nbytes}
        else:
            item["data"] = values.ravel().tolist()
        described.append(item)
    message: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": described}
    if request.id:
        message["id"] = request.id
    text = json.dumps(message).encode()
    return b"".join([text, *binary]), len(text) if binary else None


def _tensor(item: Mapping[str, Any], binary: bytes) -> list[bytes] | np.ndarray:
    check_names(item, ("name", "shape", "datatype", "data", "parameters"), "an input")
    check_names(item.get("parameters") or {}, ("binary_data_size",), "parameters of an input")
    if item["name"] != "images":
        raise Refused(400, f"inputs: {item['name']!r} does not exist; the input of a model is images")
    shape, datatype = tuple(item["shape"]), item["datatype"]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise Refused(400, f"shape: {list(shape)} is not a list of whole numbers from 0 on")
    sent = (item.get("parameters") or {}).get("binary_data_size")
    if sent is not None and (type(sent) is not int or sent != len(binary)):
        raise Refused(400, f"binary_data_size: {sent!r} was stated, but {len(binary)} bytes were sent")
    if sent is None and binary:
        raise Refused(400, f"binary_data_size: {len(binary)} bytes follow the JSON text, but no input states them")
    if sent is not None and item.get("data") is not None:
        raise Refused(400, "data: the input has binary data, too; send one of them")
    if datatype == "BYTES":
        images = _elements(binary) if sent is not None else [parse_base64(text, "data") for text in item["data"]]
        if len(images) != math.prod(shape):
            raise Refused(400, f"shape: {list(shape)} does not fit {len(images)} elements")
        return images
    if datatype not in DTYPES:
        raise Refused(400, f"datatype: {datatype!r} is not one of BYTES, {', '.join(DTYPES)}")
    kind = np.dtype(DTYPES[datatype]).newbyteorder("<")
    values = np.frombuffer(binary, kind) if sent is not None else np.asarray(item["data"], np.float64)
    if values.ndim > 1 and values.shape != shape:
        raise Refused(400, f"data: nested lists of {list(values.shape)} do not fit the shape {list(shape)}")
    values = values.ravel()
    if sent is None and datatype == "UINT8" and not ((values >= 0) & (values <= 255) & (values % 1 == 0)).all():
        raise Refused(400, "data: UINT8 values must be whole numbers from 0 to 255")
    if not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise Refused(400, "data: FP32 values must be finite")
    if values.size != math.prod(shape):
        raise Refused(400, f"shape: {list(shape)} has {math.prod(shape)} values, but {values.size} were sent")
    return values.reshape(shape).astype(DTYPES[datatype])


def _elements(binary: bytes) -> list[bytes]:
    """Return the elements of a binary tensor of type BYTES: each one follows its length."""
    found, first = [], 0
    while first < len(binary):
        size = int.from_bytes(binary[first : first + LENGTH_BYTES], "little")
        first += LENGTH_BYTES
        if first + size > len(binary):
            raise Refused(400, "inputs: the last element of the binary tensor is cut off")
        found.append(binary[first : first + size])
        first += size
    return found


def _flag(parameters: Mapping[str, Any] | None, name: str) -> bool:
    """Return a parameter that is true or false, and False without it. Raise `Refused` for another value."""
    value = (parameters or {}).get(name)
    if not isinstance(value, bool | None):
        raise Refused(400, f"{name}: {value!r} is not true or false")
    return bool(value)


def check_names(given: Mapping[str, Any], known: Collection[str], place: str) -> None:
    """Raise `Refused` for a name that the server does not act on. In JSON, null is the same as no value."""
    choices = f"it may have {', '.join(known)}" if known else "it has no parameters"
    for name, value in given.items():
        if name not in known and value is not None:
            raise Refused(400, f"{name}: the server does not act on this name in {place}; {choices}")


def parse_base64(text: Any, name: str) -> bytes:
    """Return the bytes of a base64 text in either alphabet, with or without padding and line breaks, or of a data URI.
    Raise `Refused`, with the name of the field, for anything else."""
    return parse_data_uri(text, name) if is_data_uri(text) else _plain_base64(text, name)


def is_data_uri(text: Any) -> bool:
    """Return True for a text that begins as a data URI does."""
    return isinstance(text, str) and text[:5].lower() == "data:"


def parse_data_uri(uri: str, name: str) -> bytes:
    """Return the content of a data URI. Raise `Refused` unless it is in base64."""
    head, _, text = uri.partition(",")
    if not head.lower().endswith(";base64"):
        raise Refused(400, f"{name}: the data URI must be in base64")
    return _plain_base64(unquote(text) if "%" in text else text, name)


def _plain_base64(text: Any, name: str) -> bytes:
    if not isinstance(text, str):
        raise Refused(400, f"{name}: this must be the text of one image in base64" + " and is missing" * (text is None))
    if text[:8].lower().startswith(("http://", "https://")):
        raise Refused(400, f"{name}: no URL is fetched; send the image itself, in base64")
    try:
        plain = re.sub(r"\s+", "", text).translate(URL_SAFE).rstrip("=")
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError:
        raise Refused(400, f"{name}: the image is not base64") from None
