"""Paths of the Open Inference Protocol v2: metadata, readiness and inference of each model."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vitrail import __version__
from vitrail.data.pixels.preprocess import Pixels
from vitrail.serving.answering.served import ServedModel, Task
from vitrail.serving.answering.service import Refused
from vitrail.serving.http.protocol_v2 import HEADER, BadRequest, InferRequest, format_answer, parse_request
from vitrail.serving.http.requests import Operation, model_headers, service_of

BODIES = ("application/json", "application/octet-stream")


def routes_v2() -> list[Operation]:
    """Return the paths of the protocol. A model has one version, its hash, and may be named without it."""
    operations = [Operation("/v2", "Describe the server", _server)]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        operations += [
            Operation(model, "Describe a model's tensors", _metadata),
            Operation(f"{model}/ready", "Tell if a model is ready", _ready),
            Operation(f"{model}/infer", "Compute outputs of tensors or images", _infer, "POST", (), BODIES),
        ]
    return operations


async def _server(request: Request) -> Response:
    return JSONResponse({"name": "vitrail", "version": __version__, "extensions": ["binary_tensor_data"]})


async def _metadata(request: Request) -> Response:
    model = _model(request)
    preprocess = model.bundle.preprocess
    shape = [-1, *preprocess.image_size, preprocess.channels]
    outputs = [(name, size) for task in model.tasks for name, size in model.outputs(task).items()]
    return JSONResponse(
        {
            "name": model.name,
            "versions": [model.sha256],
            "platform": "vitrail",
            "inputs": [{"name": "images", "datatype": _datatype(model), "shape": shape}],
            "outputs": [{"name": name, "datatype": "FP32", "shape": [-1, size]} for name, size in outputs],
            "parameters": {"classes": list(model.bundle.classes), "encoded_images": "BYTES"},
        },
        headers=model_headers(model),
    )


async def _ready(request: Request) -> Response:
    is_ready = service_of(request).is_ready
    return JSONResponse({"name": _model(request).name, "ready": is_ready}, 200 if is_ready else 503)


async def _infer(request: Request) -> Response:
    service, model = service_of(request), _model(request)
    body, header = await request.body(), request.headers.get(HEADER)
    try:
        asked = await service.parse(parse_request, body, header)
        tasks = _tasks(model, asked)
        if isinstance(asked.images, list):
            rows = await service.all_file_outputs(model, tasks, asked.images)
        else:
            rows = await service.pixel_outputs(model, tasks, _pixels(model, asked.images))
        if not rows:
            raise BadRequest("shape: the request has no images")
    except BadRequest as error:
        raise Refused(400, str(error)) from None
    content, length = format_answer(model.name, model.sha256, asked, rows)
    headers = model_headers(model)
    if length is None:
        return Response(content, media_type="application/json", headers=headers)
    return Response(content, media_type="application/octet-stream", headers={**headers, HEADER: str(length)})


def _model(request: Request) -> ServedModel:
    model = service_of(request).model(request.path_params["name"])
    version = request.path_params.get("version", model.sha256)
    if version != model.sha256:
        raise Refused(404, f"model {model.name!r} has no version {version!r} here; its version is {model.sha256}")
    return model


def _tasks(model: ServedModel, asked: InferRequest) -> list[Task]:
    """Return the tasks that compute the requested outputs. Raise `BadRequest` for an unknown output."""
    makers = {name: task for task in model.tasks for name in model.outputs(task)}
    for name in asked.outputs:
        if name not in makers:
            raise BadRequest(f"outputs: {name!r} does not exist; choose from {', '.join(makers)}")
    needed: list[Task] = [task for task in model.tasks if any(makers[name] == task for name in asked.outputs)]
    return needed or [model.tasks[0]]


def _pixels(model: ServedModel, images: np.ndarray) -> list[Pixels]:
    """Return the images of a tensor. Raise `BadRequest` if its number format or its shape does not fit the model."""
    preprocess = model.bundle.preprocess
    shape = (*preprocess.image_size, preprocess.channels)
    if images.ndim != 4 or images.shape[1:] != shape or images.dtype != model.dtype:
        raise BadRequest(
            f"images: {images.dtype} of {list(images.shape)} does not fit model {model.name!r}, which takes "
            f"{_datatype(model)} of {[-1, *shape]} (batch, height, width, channels), or encoded images as BYTES"
        )
    return list(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def _datatype(model: ServedModel) -> str:
    names: dict[Any, str] = {np.float32: "FP32", np.uint8: "UINT8"}
    return names[model.dtype]
