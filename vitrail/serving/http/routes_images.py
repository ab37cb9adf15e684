"""Paths that take images in other shapes: Hugging Face's, files of a form, and OpenAI's embeddings."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vitrail.errors import UndecodableImage
from vitrail.serving.answering.served import ServedModel, Task
from vitrail.serving.answering.service import Refused
from vitrail.serving.http.requests import (
    Operation,
    check_names,
    model_headers,
    parse_base64,
    parse_data_uri,
    parse_json,
    parse_top,
    service_of,
)

JSON = "application/json"

IMAGES = ("image/*", "application/octet-stream")
"""Media types of the bytes of an image."""

TOP = 5
"""Default number of classes in an answer."""

FUNCTIONS = ("softmax", "sigmoid", "none")
"""Functions that turn logits into scores, by Hugging Face's names."""


def routes_images() -> list[Operation]:
    """Return the paths of all shapes. The model is chosen by `?model=NAME`, or by the field `model` of embeddings."""
    return [
        Operation(
            "/", "Classify an image, in Hugging Face's shape", _hugging_face, "POST", ("model",), (*IMAGES, JSON)
        ),
        Operation(
            "/predict", "Classify the files of a form", _upload, "POST", ("model", "top"), ("multipart/form-data",)
        ),
        Operation("/v1/embeddings", "Compute embeddings, in OpenAI's shape", _embeddings, "POST", (), (JSON,)),
    ]


async def _hugging_face(request: Request) -> Response:
    """Answer in the shape of Hugging Face's inference API: image classification, or feature extraction for a model
    without classes."""
    service, body = service_of(request), await request.body()
    model = service.model(request.query_params.get("model"))
    image, top, function = body, TOP, None
    if request.headers.get("content-type", "").lower().startswith("application/json"):
        image, top, function = await service.parse(_parse_hugging_face, body, model)
    (row,) = await service.all_file_outputs(model, [model.tasks[0]], [image])
    answer = (
        [row["embedding"].tolist()] if model.tasks[0] == "embedding" else _ranking(model, _scored(row, function), top)
    )
    return JSONResponse(answer, headers=model_headers(model))


async def _upload(request: Request) -> Response:
    """Answer the files of a form. Each file has a result of its own. The status is 422 only if all files fail."""
    service = service_of(request)
    model = service.model(request.query_params.get("model"))
    top = parse_top(request.query_params.get("top", TOP))
    files = await _form_files(request, service.settings.max_images)
    task: Task = model.tasks[0]
    rows = await service.file_outputs(model, [task], [content for _, content in files])
    answers: list[dict[str, Any]] = []
    for (name, _), row in zip(files, rows, strict=True):
        if isinstance(row, UndecodableImage):
            answers.append({"file": name, "error": f"the file {row}"})
        elif task == "embedding":
            answers.append({"file": name, "embedding": row["embedding"].tolist()})
        else:
            answers.append({"file": name, "predictions": _ranking(model, row, top)})
    status = 422 if all("error" in item for item in answers) else 200
    content = {"model": model.name, "sha256": model.sha256, "results": answers}
    return JSONResponse(content, status, model_headers(model))


async def _embeddings(request: Request) -> Response:
    """Answer in the shape of OpenAI's embeddings. Images are data URIs."""
    service = service_of(request)
    name, images, encoding, dimensions = await service.parse(_parse_embeddings, await request.body())
    model = service.model(name)
    width = model.bundle.network.config.embed_width
    if dimensions not in (None, width):
        raise Refused(400, f"dimensions: {dimensions!r} cannot be computed; embeddings of {model.name!r} have {width}")
    data = []
    for number, row in enumerate(await service.all_file_outputs(model, ["embedding"], images)):
        values = row["embedding"]
        text = base64.b64encode(values.astype("<f4").tobytes()).decode() if encoding == "base64" else None
        data.append({"object": "embedding", "index": number, "embedding": text or values.tolist()})
    answer = {"object": "list", "data": data, "model": model.name, "usage": {"prompt_tokens": 0, "total_tokens": 0}}
    return JSONResponse(answer, headers=model_headers(model))


def _parse_hugging_face(body: bytes, model: ServedModel) -> tuple[bytes, int, str | None]:
    """Return the image of a JSON body, the number of classes to answer, and the function of the scores or None. Raise
    `Refused` for other bodies."""
    content = parse_json(body)
    check_names(content, ("inputs", "parameters", "options"), "the body")
    parameters, options = ({} if content.get(name) is None else content[name] for name in ("parameters", "options"))
    if not isinstance(parameters, dict) or not isinstance(options, dict):
        raise Refused(400, "parameters and options: these must be JSON objects")
    check_names(options, ("use_cache", "wait_for_model"), "options")  # all models are loaded, and no answer is cached
    is_ranking = model.tasks[0] == "classes" and model.bundle.output != "numbers"
    check_names(parameters, ("top_k", "function_to_apply") if is_ranking else (), f"a request to model {model.name!r}")
    top, function = parameters.get("top_k"), parameters.get("function_to_apply")
    if function is not None and function not in FUNCTIONS:
        raise Refused(400, f"function_to_apply: {function!r} is not one of {', '.join(FUNCTIONS)}")
    return parse_base64(content.get("inputs"), "inputs"), TOP if top is None else parse_top(top, "top_k"), function


def _scored(row: Mapping[str, np.ndarray], function: str | None) -> Mapping[str, np.ndarray]:
    """Return the outputs of an image with other scores for the ranking. By default they are the probabilities."""
    if function is None:
        return row
    logits = torch.from_numpy(row["logits"])
    scores = logits.softmax(0) if function == "softmax" else logits.sigmoid() if function == "sigmoid" else logits
    return {**row, "probabilities": scores.numpy()}


def _parse_embeddings(body: bytes) -> tuple[str | None, list[bytes], str, Any]:
    """Return the name of the model or None, the images, the encoding of the answer, and the length of embeddings that
    the client expects or None. Raise `Refused`."""
    content = parse_json(body)
    check_names(content, ("input", "model", "encoding_format", "dimensions", "user"), "the body")
    name, given = content.get("model"), content.get("input")
    if name is not None and not isinstance(name, str):
        raise Refused(400, "model: this must be the name of a model")
    images = [parse_data_uri(uri, "input") for uri in (given if isinstance(given, list) else [given])]
    if not images:
        raise Refused(400, "input: the request has no images")
    encoding = content.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise Refused(400, f"encoding_format: {encoding!r} is not one of 'float', 'base64'")
    return name, images, encoding, content.get("dimensions")


async def _form_files(request: Request, most: int) -> list[tuple[str, bytes]]:
    """Return the names and contents of the files of a form. Raise `Refused` for other bodies."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Refused(415, "the body is not a form; send images as multipart/form-data")
    parser = MultiPartParser(request.headers, request.stream(), max_files=most, max_fields=8)
    parser.spool_max_size = 1 << 40  # the body is in memory already, so its files are not written to disk
    try:
        form = await parser.parse()
    except MultiPartException as error:
        status = 413 if error.message.startswith("Too many files") else 400
        raise Refused(status, f"the form cannot be read: {error.message}") from None
    files = []
    try:
        for field, item in form.multi_items():
            if not isinstance(item, UploadFile):
                raise Refused(400, f"the form's field {field!r} is not a file; options belong into the address: ?top=3")
            files.append((item.filename or "", await item.read()))
    finally:
        await form.close()
    if not files:
        raise Refused(400, "the form has no file; send images as multipart/form-data")
    return files


def _ranking(model: ServedModel, row: Mapping[str, np.ndarray], top: int) -> list[dict[str, Any]]:
    """Return the likeliest classes, or all numbers of a regression, as Hugging Face's labels and scores."""
    names = model.bundle.classes
    if model.bundle.output == "numbers":
        numbers = row["numbers"].tolist()
        return [{"label": name, "score": number} for name, number in zip(names, numbers, strict=True)]
    order = np.argsort(-row["probabilities"], kind="stable")[:top]
    scores = row["probabilities"][order].tolist()
    return [{"label": names[place], "score": score} for place, score in zip(order, scores, strict=True)]
