"""The application: the paths of all protocols, the probes, the metrics, the page, and the answers to errors."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from vitrail import __version__
from vitrail.data.pixels.decode import image_size_of, small_picture
from vitrail.data.pixels.preprocess import Pixels
from vitrail.errors import UndecodableImage, nearest
from vitrail.report.drawing import colour_of
from vitrail.report.page import jpeg, picture_file
from vitrail.serving.batching import Row
from vitrail.serving.guard import PROBE_PATHS, App, Guard, JsonAnswer
from vitrail.serving.protocol_v2 import (
    DTYPES,
    HEADER,
    InferRequest,
    check_names,
    format_answer,
    is_data_uri,
    parse_base64,
    parse_data_uri,
    parse_request,
    read_json,
)
from vitrail.serving.service import Refused, ServedModel, Service, Task
from vitrail.weights.answers import DENSE, Detections, MaskPrediction, rank

EXPOSED = ("X-Model", "X-Model-SHA256", HEADER, "Retry-After")
"""Headers of answers that pages of other origins may read."""

PAGE = Path(__file__).with_name("page.html")

INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)
"""The style and the script of the page."""


@dataclass(frozen=True)
class Operation:
    """One path with one method. The routes of the server and its OpenAPI description are made from operations."""

    path: str
    summary: str
    answer: Callable[[Request, Service], Awaitable[Response]]
    method: str = "GET"
    query: tuple[str, ...] = ()
    """Names that the query of the address may have."""
    body: tuple[str, ...] = ()
    """Media types of the body."""

    def route(self, service: Service) -> Route:
        """Return the route for a service. It refuses unknown and repeated names in the query of a request with a
        body."""

        async def checked(request: Request) -> Response:
            if self.method == "POST":  # tools add their own names to other addresses, to get around caches
                check_names(request.query_params, self.query, "the address")
                names = [name for name, _ in request.query_params.multi_items()]
                if repeated := next((name for name in names if names.count(name) > 1), None):
                    raise Refused(400, f"{repeated}: the address gives it more than once; give one value")
            return await self.answer(request, service)

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


def make_app(service: Service, watch: Callable[[], Coroutine[Any, Any, None]] | None = None) -> App:
    """Return the application for a service, with its limits. Its lifespan starts and stops the service, and
    `watch()`, which replaces models."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        watching = None if watch is None else asyncio.create_task(watch())
        yield
        if watching is not None:
            watching.cancel()
        await service.stop()

    handlers: Any = {Refused: _refused, HTTPException: _not_found, Exception: _crashed}
    routes = [operation.route(service) for operation in _operations(service)]
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    guard = Guard(app, service)
    # Browsers send origins in lower case, and without the usual port of their scheme.
    origins = [
        form
        for origin in map(str.lower, service.settings.allow_origin)
        for form in (origin, re.sub(r"^(http:.*):80$|^(https:.*):443$", r"\1\2", origin))
    ]
    if not origins:
        return guard
    return CORSMiddleware(  # outside, because browsers send no token with the request that asks for permission
        guard, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=EXPOSED
    )


def _operations(service: Service) -> list[Operation]:
    """Return all paths of the server of a service. `?model=NAME` chooses the model of an image, and the field `model`
    that of embeddings."""

    async def describe(request: Request, service: Service) -> Response:
        return JsonAnswer(_openapi(operations))

    operations = [
        Operation("/", "Show the page", _page_route()),
        Operation("/models", "Describe all models, for the page", _models),
        Operation("/v1/models", "List all models, in OpenAI's shape", _model_list),
        Operation("/v1/models/{name}", "Describe a model, in OpenAI's shape", _model_card),
        Operation("/metrics", "Return metrics for Prometheus", _metrics),
        Operation("/openapi.json", "Describe all paths by OpenAPI", describe),
        *(Operation(path, "Tell the state of the server", _probe) for path in PROBE_PATHS),
        Operation(
            "/", "Predict an image, in Hugging Face's shapes", _hugging_face, "POST", ("model",), (*IMAGES, JSON)
        ),
        Operation(
            "/predict", "Predict the files of a form", _upload, "POST", ("model", "top", "threshold"),
            ("multipart/form-data",),
        ),
        Operation("/v1/embeddings", "Compute embeddings, in OpenAI's shape", _embeddings, "POST", (), (JSON,)),
        Operation(
            "/explain", "Draw the parts of an image that support a class", _explain, "POST", ("model", "label"), IMAGES
        ),
    ]  # fmt: skip
    if service.index is not None:
        operations += [
            Operation(
                "/search", "Find the images of the index that resemble an image or a text", _search, "POST", ("top",),
                (*IMAGES, JSON),
            ),
            Operation("/search/pictures/{row}", "Return a small JPEG picture of an image of the index", _picture),
        ]  # fmt: skip
    operations.append(Operation("/v2", "Describe the server", _server))
    # A model has one version, its hash, and may be named without it.
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        operations += [
            Operation(model, "Describe a model's tensors", _metadata),
            Operation(f"{model}/ready", "Tell if a model is ready", _ready),
            Operation(f"{model}/infer", "Compute outputs of tensors or images", _infer, "POST", (), (JSON, BYTES)),
        ]
    return operations


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


def _page_route() -> Any:
    """Return the handler of the page, which may run its own script and ask its own server only."""
    text = PAGE.read_text(encoding="utf-8")
    digests = {name: hashlib.sha256(content.encode()).digest() for name, content in INLINE.findall(text)}
    allowed = {name: f"'sha256-{base64.b64encode(digest).decode()}'" for name, digest in digests.items()}
    policy = {
        "default-src": "'none'", "img-src": "blob: data:", "style-src": allowed["style"],
        "script-src": allowed["script"], "connect-src": "'self'",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def page(request: Request, service: Service) -> Response:
        return HTMLResponse(text, headers=headers)

    return page


async def _models(request: Request, service: Service) -> Response:
    """Describe all models, for the page."""
    cards = [{**_card(model), "no_overlays": service.overlay_refusal(model)} for model in service.models.values()]
    index = None
    if service.index is not None:
        model = service.searched_by()
        index = {"images": len(service.index), "model": model.name, "reads_texts": model.bundle.words is not None}
    return JsonAnswer({"version": __version__, "models": cards, "index": index})


def _card(model: ServedModel) -> dict[str, Any]:
    bundle = model.bundle
    colours = {}
    if bundle.output in DENSE:
        colours = {"colours": {name: colour_of(number) for number, name in enumerate(bundle.classes)}}
    return colours | {
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


async def _model_list(request: Request, service: Service) -> Response:
    return JsonAnswer({"object": "list", "data": [_listed(model) for model in service.models.values()]})


async def _model_card(request: Request, service: Service) -> Response:
    return JsonAnswer(_listed(service.model(request.path_params["name"])))


def _listed(model: ServedModel) -> dict[str, Any]:
    """Return a model in OpenAI's shape. Its time of creation is not known, so it is 0."""
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "vitrail"}


async def _metrics(request: Request, service: Service) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def _probe(request: Request, service: Service) -> Response:
    """Answer a probe. The server listens after its models are loaded, so `live` and `startup` are always true. A path
    without the name of a probe asks if the server is ready."""
    probe = request.url.path.rsplit("/", 1)[1]
    is_fine = probe in ("live", "startup") or (service.is_ready and not service.is_draining)
    return JsonAnswer({probe: is_fine}, 200 if is_fine else 503)


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    return JsonAnswer({"error": str(refused)}, refused.status, refused.headers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; docs/serving.md lists the paths of this server"
    return JsonAnswer({"error": message}, error.status_code, error.headers)


async def _crashed(request: Request, error: Exception) -> Response:
    return JsonAnswer({"error": "the server failed on this request; its log has the reason"}, 500)


# --- paths that take images in other shapes: Hugging Face's, files of a form, and OpenAI's embeddings


JSON = "application/json"

BYTES = "application/octet-stream"

IMAGES = ("image/*", BYTES)
"""Media types of the bytes of an image."""

TOP = 5
"""Default number of classes in an answer."""

BASE64_IMAGES = ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD")
"""Beginnings of PNG, JPEG, WEBP and GIF files in base64."""

FUNCTIONS = ("softmax", "sigmoid", "none")
"""Functions that turn logits into scores, by Hugging Face's names."""


async def _body_of(request: Request) -> bytes:
    """Return a body that is one image or JSON. Raise `Refused` for a form."""
    if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Refused(415, "the body is a form; send it to /predict, or send the bytes of one image")
    return await request.body()


async def _hugging_face(request: Request, service: Service) -> Response:
    """Answer in the shape of Hugging Face's inference API: image classification, object detection, image segmentation,
    or feature extraction for a model without classes."""
    body = await _body_of(request)
    model = service.model(request.query_params.get("model"))
    image, asked, kind = body, _Asked(), request.headers.get("content-type", "").lower()
    if kind.startswith(JSON):
        image, asked = await service.parse(_parse_hugging_face, body, model)
    elif body[:1] == b"{":
        raise Refused(415, f"the body looks like JSON; send it with the header Content-Type: {JSON}")

    def answer(row: Row, content: bytes) -> list[Any]:
        if model.tasks[0] == "embedding":
            return [row["embedding"].tolist()]
        if model.bundle.output in DENSE:
            return _placed_hugging_face(model, row, content, asked)
        return _ranking(model, _scored(row, asked.function), asked.top)

    (made,) = await service.all_file_outputs(model, [model.tasks[0]], [image], answer)
    return JsonAnswer(made, headers=model_headers(model))


async def _upload(request: Request, service: Service) -> Response:
    """Answer the files of a form. Each file has a result of its own. The status is 422 only if all files fail."""
    model = service.model(request.query_params.get("model"))
    asked = _asked_in_address(request, model)
    files = await _form_files(request, service.settings.max_images)

    def answer(row: Row, content: bytes) -> dict[str, Any]:
        if model.tasks[0] == "embedding":
            return {"embedding": row["embedding"].tolist()}
        if model.bundle.output in DENSE:
            return _placed(model, row, content, asked)
        return {"predictions": _ranking(model, row, asked.top)}

    made = await service.file_outputs(model, [model.tasks[0]], [content for _, content in files], answer)
    answers = [
        {"file": name, **({"error": f"the file {one}"} if isinstance(one, UndecodableImage) else one)}
        for (name, _), one in zip(files, made, strict=True)
    ]
    status = 422 if all("error" in item for item in answers) else 200
    whole = {"model": model.name, "sha256": model.sha256, "results": answers}
    return JsonAnswer(whole, status, model_headers(model))


async def _embeddings(request: Request, service: Service) -> Response:
    """Answer in the shape of OpenAI's embeddings. Images are data URIs, and for a model that reads texts all other
    inputs are texts. Such a model answers with embeddings of length 1, whose products are cosines."""
    name, given, encoding, dimensions = await service.parse(_parse_embeddings, await request.body())
    model = service.model(name)
    reads_texts = model.bundle.words is not None
    texts = {place: text for place, text in enumerate(given) if reads_texts and not is_data_uri(text)}
    if not reads_texts and not all(map(is_data_uri, given)):
        raise Refused(
            400, f"input: model {model.name!r} reads no texts, and images must be data URIs; no URL is fetched"
        )
    if any(text.startswith(BASE64_IMAGES) for text in texts.values()):
        raise Refused(400, "input: a text begins as an image in base64 does; send it as data:image/png;base64,...")
    images = [parse_data_uri(uri, "input") for place, uri in enumerate(given) if place not in texts]
    width = model.bundle.network.config.embed_width
    if dimensions not in (None, width):
        raise Refused(400, f"dimensions: {dimensions!r} cannot be computed; embeddings of {model.name!r} have {width}")
    of_images = iter(await service.all_file_outputs(model, ["embedding"], images))
    of_texts = iter(await service.text_outputs(model, list(texts.values())) if texts else ())
    data = []
    for number in range(len(given)):
        values = next(of_texts if number in texts else of_images)["embedding"]
        if reads_texts:
            values = values / np.linalg.norm(values)
        text = base64.b64encode(values.astype("<f4").tobytes()).decode() if encoding == "base64" else None
        data.append({"object": "embedding", "index": number, "embedding": text or values.tolist()})
    answer = {"object": "list", "data": data, "model": model.name, "usage": {"prompt_tokens": 0, "total_tokens": 0}}
    return JsonAnswer(answer, headers=model_headers(model))


@dataclass(frozen=True)
class _Asked:
    """The choices of a request, without its images."""

    top: int = TOP
    """Number of classes to answer."""
    function: str | None = None
    """Function of the scores of classes, one of `FUNCTIONS`. By default the scores are the probabilities."""
    threshold: float | None = None
    """Lowest score of objects to answer. By default that of the model."""


def _asked_in_address(request: Request, model: ServedModel) -> _Asked:
    """Return what the address of a request asks for. Raise `Refused` for a setting that does not fit the model."""
    top, threshold = (request.query_params.get(name) for name in ("top", "threshold"))
    output = model.bundle.output if model.tasks[0] == "classes" else "embedding"
    for name, value, fitting in (("top", top, ("softmax", "sigmoid")), ("threshold", threshold, ("boxes",))):
        if value is not None and output not in fitting:
            raise Refused(400, f"{name}: it does not fit model {model.name!r}, whose output is {output}; leave it out")
    return _Asked(TOP if top is None else parse_top(top), None, _parse_threshold(threshold))


def _parse_threshold(value: Any) -> float | None:
    """Return a score. Raise `Refused` unless it is a number from 0 to 1."""
    if value is None:
        return None
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not 0 <= score <= 1:
        raise Refused(400, f"threshold: {value!r} is not a score, which is a number from 0 to 1")
    return score


def _shown(model: ServedModel, row: Row, image: bytes, asked: _Asked) -> Detections | MaskPrediction:
    """Return the mask of an image, or its objects with scores above the threshold."""
    found = model.bundle.shown(model.found(row, image), asked.threshold)
    assert isinstance(found, Detections | MaskPrediction)
    return found


def _placed(model: ServedModel, row: Row, image: bytes, asked: _Asked) -> dict[str, Any]:
    """Return the objects of an image as COCO's results, or its mask as a PNG file of indices of classes."""
    found = _shown(model, row, image, asked)
    if isinstance(found, Detections):
        height, width = found.size
        return {"height": height, "width": width, "objects": found.coco(model.bundle.class_ids)}
    height, width = found.indices.shape
    mask = "data:image/png;base64," + _png(found.indices)
    return {"height": height, "width": width, "classes": found.names, "fractions": found.shares(), "mask": mask}


def _placed_hugging_face(model: ServedModel, row: Row, image: bytes, asked: _Asked) -> list[dict[str, Any]]:
    """Return the objects of an image with their boxes or masks, or a mask for each class in it, in Hugging Face's
    shapes."""
    found = _shown(model, row, image, asked)
    if isinstance(found, Detections) and model.bundle.finds_masks:
        return [
            {"label": one.label, "score": one.score, "mask": _png(255 * runs.mask().astype(np.uint8))}
            for one, runs in zip(found, found.masks, strict=True)
        ]
    if isinstance(found, Detections):
        sides = ("xmin", "ymin", "xmax", "ymax")
        return [
            {"label": one.label, "score": one.score, "box": dict(zip(sides, map(round, one.box), strict=True))}
            for one in found
        ]
    return [
        {
            "label": name,
            "score": None,
            "mask": _png(np.where(found.indices == found.names.index(name), 255, 0).astype(np.uint8)),
        }
        for name in found.shares()
    ]


def _png(levels: np.ndarray) -> str:
    """Return a grey picture as a PNG file in base64."""
    return base64.b64encode(picture_file(Image.fromarray(levels), "PNG")).decode()


def _parse_hugging_face(body: bytes, model: ServedModel) -> tuple[bytes, _Asked]:
    """Return the image of a JSON body, and what the body asks for. Raise `Refused` for other bodies."""
    content = parse_json(body)
    check_names(content, ("inputs", "parameters", "options"), "the body")
    parameters, options = ({} if content.get(name) is None else content[name] for name in ("parameters", "options"))
    if not isinstance(parameters, dict) or not isinstance(options, dict):
        raise Refused(400, "parameters and options: these must be JSON objects")
    check_names(options, ("use_cache", "wait_for_model"), "options")  # all models are loaded, and no answer is cached
    fitting: dict[str, tuple[str, ...]] = {
        **dict.fromkeys(("softmax", "sigmoid"), ("top_k", "function_to_apply")), "boxes": ("threshold",),
    }  # fmt: skip
    known = fitting.get(model.bundle.output, ()) if model.tasks[0] == "classes" else ()
    check_names(parameters, known, f"a request to model {model.name!r}")
    top, function = parameters.get("top_k"), parameters.get("function_to_apply")
    if function is not None and function not in FUNCTIONS:
        raise Refused(400, f"function_to_apply: {function!r} is not one of {', '.join(FUNCTIONS)}")
    count = TOP if top is None else parse_top(top, "top_k")
    asked = _Asked(count, function, _parse_threshold(parameters.get("threshold")))
    return parse_base64(content.get("inputs"), "inputs"), asked


def _scored(row: Mapping[str, np.ndarray], function: str | None) -> Mapping[str, np.ndarray]:
    """Return the outputs of an image with other scores for the ranking. By default they are the probabilities."""
    if function is None:
        return row
    logits = torch.from_numpy(row["logits"])
    scores = logits.softmax(0) if function == "softmax" else logits.sigmoid() if function == "sigmoid" else logits
    return {**row, "probabilities": scores.numpy()}


def _parse_embeddings(body: bytes) -> tuple[str | None, list[str], str, Any]:
    """Return the name of the model or None, the images and texts, the encoding of the answer, and the length of
    embeddings that the client expects or None. Raise `Refused`."""
    content = parse_json(body)
    check_names(content, ("input", "model", "encoding_format", "dimensions", "user"), "the body")
    name, given = content.get("model"), content.get("input")
    if name is not None and not isinstance(name, str):
        raise Refused(400, "model: this must be the name of a model")
    inputs: list[Any] = given if isinstance(given, list) else [given]
    if not inputs:
        raise Refused(400, "input: the request has no images and no texts")
    if not all(isinstance(one, str) for one in inputs):
        raise Refused(400, "input: this must be a text or a list of texts; lists of tokens are not read")
    encoding = "float" if content.get("encoding_format") is None else content["encoding_format"]
    if encoding not in ("float", "base64"):
        raise Refused(400, f"encoding_format: {encoding!r} is not one of 'float', 'base64'")
    return name, inputs, encoding, content.get("dimensions")


class _Form(MultiPartParser):
    """A parser of forms that knows if a form has its end."""

    is_whole = False

    def on_end(self) -> None:
        self.is_whole = True


async def _form_files(request: Request, most: int) -> list[tuple[str, bytes]]:
    """Return the names and contents of the files of a form. Raise `Refused` for other bodies."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Refused(415, "the body is not a form; send images as multipart/form-data, or the bytes of one image to /")

    async def whole() -> AsyncGenerator[bytes, None]:
        async for chunk in request.stream():
            yield chunk
        if not parser.is_whole:  # an error here closes the files
            raise MultiPartException("it is cut off, because its last boundary, which ends with --, is missing")

    parser = _Form(request.headers, whole(), max_files=most, max_fields=8)
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
    (found,) = rank(torch.from_numpy(row["probabilities"])[None], names, min(top, len(names)))
    return [{"label": name, "score": score} for name, score in found.ranking]


# --- the path that shows which parts of a picture support a class


async def _explain(request: Request, service: Service) -> Response:
    """Answer the bytes of an image with an overlay, as a data URI. `?label=CLASS` chooses the class."""
    model = service.model(request.query_params.get("model"))
    target = _target(model, request.query_params.get("label"))
    content = await service.overlay(model, await _body_of(request), target)
    answer = {
        "model": model.name,
        "sha256": model.sha256,
        "map": "rollout" if target is None else "relevance",
        "label": None if target is None else model.bundle.classes[target],
        "image": "data:image/jpeg;base64," + base64.b64encode(content).decode(),
    }
    return JsonAnswer(answer, headers=model_headers(model))


def _target(model: ServedModel, label: str | None) -> int | None:
    """Return the number of a class, or None for no class. Raise `Refused` for an unknown class."""
    if label is None:
        return None
    if model.bundle.output in DENSE:
        raise Refused(
            400, f"label: model {model.name!r} predicts no classes of whole images; leave it out to see the attention"
        )
    classes = model.bundle.classes
    if label not in classes:
        hint = nearest(label, classes) if classes else "it has no classes"
        raise Refused(400, f"label: {label!r} is not a class of model {model.name!r}; {hint}")
    if (count := classes.count(label)) > 1:
        raise Refused(400, f"label: {label!r} is the name of {count} classes of model {model.name!r}")
    return classes.index(label)


# --- the paths that search the images of an index


THUMBNAIL = 512
"""Longest side of the picture of a stored image, in pixels."""


async def _search(request: Request, service: Service) -> Response:
    """Answer with the nearest images, their cosines and labels, and the paths of their pictures. The body is an image,
    or JSON with a text: `{"text": "a red car", "top": 5}`."""
    body = await _body_of(request)
    model, top = service.searched_by(), parse_top(request.query_params.get("top", TOP), what="images")
    if request.headers.get("content-type", "").lower().startswith(JSON):
        text, stated = await service.parse(_parse_search, body)
        if stated is not None and "top" in request.query_params:
            raise Refused(400, "top: the address and the body give it; give one value")
        (query,) = await service.text_outputs(model, [text])
        top = top if stated is None else stated
    else:
        (query,) = await service.all_file_outputs(model, ["embedding"], [body])
    found = await service.search(query, top)
    results = [
        {
            "image": one.image, "cosine": one.cosine, "label": one.label,
            "picture": f"search/pictures/{one.row}" if Path(one.image).is_file() else None,
        }
        for one in found
    ]  # fmt: skip
    return JsonAnswer({"model": model.name, "sha256": model.sha256, "results": results}, headers=model_headers(model))


def _parse_search(body: bytes) -> tuple[str, int | None]:
    """Return the text of a search, and the number of images to find or None. Raise `Refused` for other bodies."""
    content = parse_json(body)
    check_names(content, ("text", "top"), "the body")
    if not isinstance(text := content.get("text"), str):
        raise Refused(400, "text: this must be the text to search by")
    return text, None if content.get("top") is None else parse_top(content["top"], what="images")


async def _picture(request: Request, service: Service) -> Response:
    """Answer with a JPEG picture of a stored image that is a file."""
    service.searched_by()
    index, row = service.index, request.path_params["row"]
    is_number = row.isascii() and row.isdecimal() and len(row) < 20  # int() refuses thousands of digits
    if index is None or not is_number or int(row) >= len(index):
        raise Refused(404, f"row {row!r} is not a row of the index")
    try:
        content = await service.draw(_thumbnail, Path(index.images[int(row)]), service.settings.max_pixels)
    except (OSError, UndecodableImage):
        raise Refused(404, f"image {index.images[int(row)]!r} cannot be read any more") from None
    return Response(content, media_type="image/jpeg")


def _thumbnail(path: Path, most: int) -> bytes:
    """Return an image file as a JPEG file of at most `THUMBNAIL` pixels on each side. Raise `OSError` for a file that
    cannot be read, and `UndecodableImage` for one that is no image or has more than `most` pixels."""
    content = path.read_bytes()
    height, width = image_size_of(content)
    if height * width > most:
        raise UndecodableImage(f"claims {width} x {height} pixels")
    return jpeg(small_picture(content, THUMBNAIL))


# --- paths of the Open Inference Protocol v2


async def _server(request: Request, service: Service) -> Response:
    return JsonAnswer({"name": "vitrail", "version": __version__, "extensions": ["binary_tensor_data"]})


async def _metadata(request: Request, service: Service) -> Response:
    model = _model(request, service)
    preprocess = model.bundle.preprocess
    taken = [-1, *preprocess.image_size, preprocess.channels]
    outputs = [one for task in model.tasks for one in model.outputs[task].items()]
    return JsonAnswer(
        {
            "name": model.name,
            "versions": [model.sha256],
            "platform": "vitrail",
            "inputs": [{"name": "images", "datatype": _datatype(model), "shape": taken}],
            "outputs": [{"name": name, "datatype": "FP32", "shape": [-1, *shape]} for name, shape in outputs],
            "parameters": {"classes": list(model.bundle.classes), "encoded_images": "BYTES"},
        },
        headers=model_headers(model),
    )


async def _ready(request: Request, service: Service) -> Response:
    is_ready = service.is_ready
    return JsonAnswer({"name": _model(request, service).name, "ready": is_ready}, 200 if is_ready else 503)


async def _infer(request: Request, service: Service) -> Response:
    model = _model(request, service)
    body, header = await request.body(), request.headers.get(HEADER)
    asked = await service.parse(parse_request, body, header)
    tasks = _tasks(model, asked)
    if isinstance(asked.images, list):
        rows = await service.all_file_outputs(model, tasks, asked.images)
    else:
        rows = await service.pixel_outputs(model, tasks, _pixels(model, asked.images))
    if not rows:
        raise Refused(400, "shape: the request has no images")
    content, length = format_answer(model.name, model.sha256, asked, rows)
    headers = model_headers(model)
    if length is None:
        return Response(content, media_type=JSON, headers=headers)
    return Response(content, media_type=BYTES, headers={**headers, HEADER: str(length)})


def _model(request: Request, service: Service) -> ServedModel:
    model = service.model(request.path_params["name"])
    version = request.path_params.get("version", model.sha256)
    if version != model.sha256:
        raise Refused(404, f"model {model.name!r} has no version {version!r} here; its version is {model.sha256}")
    return model


def _tasks(model: ServedModel, asked: InferRequest) -> list[Task]:
    """Return the tasks that compute the requested outputs. Raise `Refused` for an unknown output."""
    makers = {name: task for task in model.tasks for name in model.outputs[task]}
    for name in asked.outputs:
        if name not in makers:
            raise Refused(400, f"outputs: {name!r} does not exist; choose from {', '.join(makers)}")
    needed: list[Task] = [task for task in model.tasks if any(makers[name] == task for name in asked.outputs)]
    return needed or [model.tasks[0]]


def _pixels(model: ServedModel, images: np.ndarray) -> list[Pixels]:
    """Return the images of a tensor. Raise `Refused` if its number format or its shape does not fit the model."""
    preprocess = model.bundle.preprocess
    shape = (*preprocess.image_size, preprocess.channels)
    if images.ndim != 4 or images.shape[1:] != shape or images.dtype != model.dtype:
        raise Refused(
            400,
            f"images: {images.dtype} of {list(images.shape)} does not fit model {model.name!r}, which takes "
            f"{_datatype(model)} of {[-1, *shape]} (batch, height, width, channels), or encoded images as BYTES",
        )
    return list(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def _datatype(model: ServedModel) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == model.dtype)


# --- reading of requests


def model_headers(model: ServedModel) -> dict[str, str]:
    """Return headers that name the model and its hash in an answer."""
    return {"X-Model": model.name.encode("ascii", "replace").decode(), "X-Model-SHA256": model.sha256}


def parse_json(body: bytes) -> dict[str, Any]:
    """Return a JSON object. Raise `Refused` for anything else."""
    try:
        content = read_json(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refused(400, "the body must be a JSON object")
    return content


def parse_top(value: Any, name: str = "top", what: str = "classes") -> int:
    """Return a number of classes, or of something else. Raise `Refused` unless it is a whole number of 1 or more."""
    try:
        top = 0 if isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        top = 0
    if top < 1 or (isinstance(value, float) and top != value):
        raise Refused(400, f"{name}: {value!r} is not a number of {what}, which is 1 or more")
    return top
