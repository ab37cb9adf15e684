"""Tests of the paths: each protocol gives the model's own answers, and refuses wrong requests with the reason."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image

from tests.make import encode
from tests.serving.conftest import make_bundle
from tests.serving.running import Running, data_uri, serving
from vitrail import load
from vitrail.errors import BundleError
from vitrail.models.variants import variant_config
from vitrail.serving.protocol_v2 import HEADER
from vitrail.serving.service import Service
from vitrail.serving.settings import ServeSettings
from vitrail.weights.bundle import Bundle, weights_sha256


def test_models_are_chosen_by_name(server: Running, bundles: dict[str, Bundle], images: list[bytes]) -> None:
    answer = server.ask("POST", "/?model=numbers", images[1])
    assert answer.headers["x-model"] == "numbers"
    (wanted,) = bundles["numbers"].predict([images[1]])
    assert {item["label"]: item["score"] for item in answer.json} == pytest.approx(
        dict(zip(wanted.names, wanted.values, strict=True)), abs=1e-5
    )
    (row,) = server.ask("POST", "/?model=features", images[1]).json
    assert row == pytest.approx(bundles["features"].embed([images[1]])[0].tolist(), abs=1e-5)
    answer = server.ask("POST", "/?model=birds", images[1])
    assert answer.status == 404
    assert answer.json["error"] == "model 'birds' does not exist here; models: flowers, numbers, features"


def test_a_broken_file_of_a_form_fails_alone(server: Running, bundle: Bundle, images: list[bytes]) -> None:
    files = [("a.png", images[0]), ("b.png", images[1][:60]), ("ü.png", images[2])]
    answer = server.ask_form("/predict?top=1", *files)
    first, second, third = answer.json["results"]
    labels = [one.label for one in bundle.predict([images[0], images[2]])]
    assert answer.status == 200 and answer.json["sha256"] == weights_sha256(bundle.network)
    assert [one["predictions"][0]["label"] for one in (first, third)] == labels
    assert [one["file"] for one in (first, second, third)] == ["a.png", "b.png", "ü.png"]
    assert "the file" in second["error"] and "predictions" not in second
    assert server.ask_form("/predict", ("b.png", b"no image")).status == 422


def test_embeddings(server: Running, bundle: Bundle, images: list[bytes]) -> None:
    uris = [data_uri(image) for image in images[:3]]
    answer = server.ask_json("/v1/embeddings", {"input": uris, "model": "flowers"}).json
    wanted = bundle.embed(images[:3]).numpy()
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    np.testing.assert_allclose([item["embedding"] for item in answer["data"]], wanted, atol=1e-5)
    packed = server.ask_json("/v1/embeddings", {"input": uris[0], "encoding_format": "base64"}).json
    values = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(values, wanted[0], atol=1e-5)


def infer(server: Running, message: Any, binary: bytes = b"", path: str = "/v2/models/flowers/infer") -> Any:
    text = json.dumps(message).encode()
    headers = {HEADER.replace("-", "_"): str(len(text))} if binary else {}
    return server.ask("POST", path, text + binary, **headers)


def test_inference_protocol_with_files_in_binary(server: Running, bundle: Bundle, images: list[bytes]) -> None:
    binary = b"".join(struct.pack("<I", len(image)) + image for image in images)
    tensor = {
        "name": "images", "shape": [6], "datatype": "BYTES", "parameters": {"binary_data_size": len(binary)},
    }  # fmt: skip
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in ("embedding", "logits")]
    answer = infer(server, {"id": 0, "inputs": [tensor], "outputs": outputs}, binary)
    length = int(answer.headers[HEADER])
    message = json.loads(answer.body[:length])
    assert message["id"] == "0"
    embedding, logits = message["outputs"]
    size = embedding["parameters"]["binary_data_size"]
    values = np.frombuffer(answer.body[length : length + size], "<f4").reshape(embedding["shape"])
    np.testing.assert_allclose(values, bundle.embed(images), atol=1e-5)
    found = np.frombuffer(answer.body[length + size :], "<f4").reshape(logits["shape"])
    assert [bundle.classes[row.argmax()] for row in found] == [one.label for one in bundle.predict(images)]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("output", ["softmax", "sigmoid", "numbers"])
def test_a_model_whose_outputs_are_not_finite_is_not_served(output: str, wrong: float) -> None:
    classes, features = make_bundle(output=output), make_bundle()
    with torch.no_grad():
        classes.network.head.bias[1] = wrong
        features.network.norm.weight.fill_(wrong)
    features = replace(features, network=features.network.with_head(0), classes=())
    for bundle in (classes, features):
        with pytest.raises(BundleError, match="not finite"):
            Service({"damaged": bundle}, ServeSettings(max_batch=4))


def test_outputs_that_are_not_finite_are_an_error_of_their_request() -> None:
    bundle = make_bundle(resampler="tensorflow", interpolation="bilinear", antialias=False, std=(1e-3,))

    def tensor(*levels: float) -> dict[str, Any]:
        pixels = np.concatenate([np.full((1, 12, 10, 3), level, np.float32) for level in levels])
        return {"name": "images", "shape": list(pixels.shape), "datatype": "FP32", "data": pixels.ravel().tolist()}

    with serving({"flowers": bundle}) as server:
        assert infer(server, {"inputs": [tensor(0, 200)]}).status == 200
        answer = infer(server, {"inputs": [tensor(0, 3e38)]})
        assert answer.status == 500 and "not finite" in answer.json["error"]
        assert infer(server, {"inputs": [tensor(0, float("nan"))]}).status == 400
        beyond = {**tensor(0), "data": [1e39] * 360}  # a number of JSON that float32 does not have
        assert infer(server, {"inputs": [beyond]}).status == 400


def test_bodies_are_parsed_one_after_the_other(server: Running) -> None:
    running = most = 0

    def parse(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1
        return number

    async def work() -> list[int]:
        return await asyncio.gather(*(server.service.parse(parse, number) for number in range(4)))

    assert asyncio.run(work()) == [0, 1, 2, 3] and most == 1


def test_metadata_and_probes(server: Running, bundle: Bundle) -> None:
    about = server.ask("GET", "/v2/models/flowers").json
    assert about["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 12, 10, 3]}]
    assert [(one["name"], one["shape"]) for one in about["outputs"]] == [
        ("logits", [-1, 3]), ("probabilities", [-1, 3]), ("embedding", [-1, 12]),
    ]  # fmt: skip
    assert about["parameters"]["classes"] == list(bundle.classes)
    (version,) = about["versions"]
    assert server.ask("GET", f"/v2/models/flowers/versions/{version}/ready").json["ready"] is True
    assert server.ask("GET", "/v2/models/flowers/versions/1/ready").status == 404
    assert server.ask("GET", "/v2").json["name"] == "vitrail"
    listed = server.ask("GET", "/v1/models").json
    assert [one["id"] for one in listed["data"]] == ["flowers", "numbers", "features"]
    assert server.ask("GET", "/v1/models/numbers").json == listed["data"][1]
    assert server.ask("GET", "/v1/models/birds").status == 404
    for path in ("/health/live", "/health/ready", "/health/startup", "/v2/health/live", "/v2/health/ready"):
        assert server.ask("GET", path).status == 200


@pytest.mark.slow
@pytest.mark.parametrize(("to", "tolerance"), [("pt2", 1e-5), ("onnx-int8", 0.1)])
def test_exported_files_are_served(
    to: str, tolerance: float, exported: Callable[[str], Path], bundle: Bundle, images: list[bytes]
) -> None:
    file = load(exported(to))
    with serving({"file": file, "flowers": bundle}) as running:
        found, wanted = (running.ask("POST", f"/?model={name}", images[0]) for name in ("file", "flowers"))
        assert found.headers["x-model-sha256"] != wanted.headers["x-model-sha256"]
        assert {one["label"]: one["score"] for one in found.json} == pytest.approx(
            {one["label"]: one["score"] for one in wanted.json}, abs=tolerance
        )
        answer = running.ask_json("/v1/embeddings", {"input": data_uri(images[0]), "model": "file"})
        assert answer.status == 400
        assert answer.json["error"] == "model 'file' computes no embedding; it computes classes"


def test_explanations(server: Running, bundle: Bundle, images: list[bytes]) -> None:
    answer = server.ask("POST", f"/explain?label={quote(bundle.classes[2])}", images[0])
    assert answer.status == 200 and answer.headers["x-model-sha256"] == answer.json["sha256"]
    assert (answer.json["map"], answer.json["label"]) == ("relevance", bundle.classes[2])
    head, _, text = answer.json["image"].partition(",")
    assert head == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(text))) as picture, Image.open(io.BytesIO(images[0])) as original:
        assert picture.format == "JPEG" and picture.size == original.size
    answer = server.ask("POST", "/explain?model=features", images[0])
    assert (answer.json["map"], answer.json["label"], answer.json["model"]) == ("rollout", None, "features")


@pytest.mark.parametrize(
    ("query", "size", "status", "words"),
    [
        ("label=rows", 11, 400, "label: 'rows' is not a class of model 'flowers'; nearest: rose"),
        ("label=x&model=features", 11, 400, "'features'; it has no classes"),
        ("model=nowhere", 11, 404, "model 'nowhere' does not exist here"),
        ("label=rose", 0, 422, "the image "),
    ],
)
def test_an_explanation_that_is_refused(server: Running, query: str, size: int, status: int, words: str) -> None:
    image = encode(np.zeros((size, 7, 3), np.uint8), "PNG") if size else b"no image"
    answer = server.ask("POST", f"/explain?{query}", image)
    assert answer.status == status and words in answer.json["error"]


@pytest.mark.slow
def test_a_model_without_attention(images: list[bytes]) -> None:
    resnet = make_bundle(variant_config("BiT-Pico", num_classes=3))
    with serving({"resnet": resnet}) as running:
        answer = running.ask("POST", "/explain?label=rose", images[0])
        assert answer.status == 400
        assert answer.json["error"].startswith("model 'resnet' has no overlays: a network of the architecture 'BiT'")
        (card,) = running.ask("GET", "/models").json["models"]
        assert "no attention" in card["no_overlays"] and card["max_batch"] == 4 and card["batch_threads"] >= 1


def test_metrics(server: Running, images: list[bytes]) -> None:
    before = server.metric('vitrail_requests_total{path="/",status="200"}')
    server.ask("POST", "/", images[0])
    assert server.metric('vitrail_requests_total{path="/",status="200"}') == before + 1
    assert server.metric('vitrail_batch_size_count{model="flowers",task="classes"}') >= 1
    assert server.metric("vitrail_images") == 0 and server.metric("vitrail_ready") == 1
    server.ask("GET", "/a-path-of-a-scan")
    assert server.metric('vitrail_requests_total{path="other",status="404"}') >= 1


TENSOR = {"name": "images", "shape": [1, 12, 10, 3], "datatype": "UINT8", "data": [0] * 360}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"datatype": "FP32"}, 400, "float32 of [1, 12, 10, 3] does not fit model 'flowers', which takes UINT8"),
        ({"datatype": "INT8"}, 400, "'INT8' is not one of BYTES, UINT8, FP32"),
        ({"shape": [1, 10, 12, 3]}, 400, "uint8 of [1, 10, 12, 3] does not fit model 'flowers'"),
        ({"shape": [2, 12, 10, 3]}, 400, "[2, 12, 10, 3] has 720 values, but 360 were sent"),
        ({"shape": [0, 12, 10, 3], "data": []}, 400, "the request has no images"),
        ({"shape": [float("inf")]}, 400, "is not a list of whole numbers"),
        ({"data": [256] * 360}, 400, "whole numbers from 0 to 255"),
        ({"data": ["x"] * 360}, 400, "ValueError"),
        ({"datatype": "BYTES", "shape": [1], "data": ["not base64!"]}, 400, "data: the image is not base64"),
        ({"datatype": "BYTES", "shape": [1], "data": ["AAAA"]}, 422, "image 0 "),
        ({"parameters": {"binary_data_size": 5}}, 400, "5 was stated, but 0 bytes were sent"),
        ({"parameters": {"binary_data_size": 0}}, 400, "the input has binary data, too"),
        ({"data": np.zeros((1, 10, 12, 3)).tolist()}, 400, "nested lists of [1, 10, 12, 3] do not fit the shape"),
        ({"shape": [True, 12, 10, 3]}, 400, "is not a list of whole numbers"),
        ({"datatype": "FP32", "data": [1e300] * 360}, 400, "must be finite"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_refused(server: Running, change: dict[str, Any], status: int, words: str) -> None:
    answer = infer(server, {"inputs": [{**TENSOR, **change}]})
    assert answer.status == status and words in answer.json["error"]


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("/v2/models/flowers/infer", {"inputs": []}, "0 tensors were sent, but a model takes one"),
        ("/v2/models/flowers/infer", {"inputs": [TENSOR], "outputs": [{"name": "x"}]},
         "'x' does not exist; choose from logits, probabilities, embedding"),
        ("/v2/models/flowers/infer", {"inputs": [TENSOR], "outputs": [{"name": "logits"}] * 2}, "'logits' is req"),
        ("/", {"inputs": "", "parameters": {"\ud800": 1}}, "\ud800: the server does not act on this name"),
        ("/v2/models/flowers/infer", [], "not a request of the Open Inference Protocol"),
        ("/", {"inputs": "é"}, "inputs: the image is not base64"),
        ("/", {"inputs": ["eA=="]}, "inputs: this must be the text of one image in base64"),
        ("/", {"inputs": "https://example.org/a.png"}, "inputs: no URL is fetched"),
        ("/?model=flowers&model=numbers", {"inputs": ""}, "model: the address gives it more than once"),
        ("/v2/models/flowers/infer", {"inputs": [TENSOR], "parameters": {"binary_data_output": "false"}},
         "binary_data_output: 'false' is not true or false"),
        ("/", {"inputs": "data:;base64," * 100_000}, "inputs: the image is not base64"),
        ("/", {"inputs": "", "parameters": {"top_k": True}}, "top_k: True is not a number of classes"),
        ("/", {"inputs": "", "parameters": {"function_to_apply": "tanh"}}, "'tanh' is not one of softmax, sigmoid"),
        ("/", {"inputs": "", "parameters": {"threshold": 0.5}}, "threshold: the server does not act on this name"),
        ("/", {"inputs": "", "parameters": []}, "these must be JSON objects"),
        ("/", {"inputs": "", "option": {}}, "option: the server does not act on this name in the body"),
        ("/", {"inputs": "", "options": {"adapter": 1}}, "adapter: the server does not act on this name in options"),
        ("/?top=3", {"inputs": ""}, "top: the server does not act on this name in the address; it may have model"),
        ("/?model=numbers", {"inputs": "", "parameters": {"top_k": 1}}, "request to model 'numbers'; it has no"),
        ("/?model=features", {"inputs": "", "parameters": {"normalize": True}}, "model 'features'; it has no"),
        ("/v1/embeddings?model=flowers", {"input": "data:;base64,"}, "model: the server does not act on this name"),
        ("/v1/embeddings", {"input": data_uri(b""), "dimensions": 5}, "embeddings of 'flowers' have 12"),
        ("/v1/embeddings", {"input": data_uri(b""), "truncate": True}, "truncate: the server does not act"),
        ("/v2/models/flowers/infer", {"inputs": [TENSOR], "parameters": {"priority": 2}}, "priority: the server does"),
        ("/v2/models/flowers/infer", {"inputs": [{**TENSOR, "name": "input"}]}, "the input of a model is images"),
        ("/v2/models/flowers/infer", {"inputs": [{**TENSOR, "parameters": {"shared_memory_region": "x"}}]},
         "shared_memory_region: the server does not act on this name"),
        ("/v2/models/flowers/infer",
         {"inputs": [TENSOR], "outputs": [{"name": "logits", "parameters": {"classification": 2}}]},
         "classification: the server does not act on this name"),
        ("/", ["x"], "must be a JSON object"),
        ("/v1/embeddings", {"input": "file:///etc/passwd"}, "no URL is fetched"),
        ("/v1/embeddings", {"input": []}, "has no images"),
        ("/v1/embeddings", {"input": "data:,x"}, "must be in base64"),
        ("/v1/embeddings", {"input": data_uri(b""), "encoding_format": "int8"}, "'int8' is not one of"),
        ("/v1/embeddings", {"input": data_uri(b""), "encoding_format": 0}, "0 is not one of"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused(server: Running, path: str, content: Any, words: str) -> None:
    answer = server.ask_json(path, content)
    assert answer.status == 400 and words in answer.json["error"]


def test_a_name_that_a_body_gives_twice_is_refused(server: Running) -> None:
    for path, text in (
        ("/", b'{"inputs": "", "parameters": {"top_k": 1, "top_k": 2}}'),
        ("/v1/embeddings", b'{"input": "x", "input": "y"}'),
        ("/v2/models/flowers/infer", b'{"inputs": [], "id": "1", "id": "2"}'),
    ):
        answer = server.ask("POST", path, text, Content_Type="application/json")
        assert answer.status == 400 and "more than once" in answer.json["error"]


def test_what_a_path_does_not_take(server: Running, images: list[bytes]) -> None:
    assert server.ask("POST", "/predict", images[0]).status == 415
    assert "no file" in server.ask_form("/predict").json["error"]
    form = {"Content_Type": "multipart/form-data; boundary=limit"}
    head = b'--limit\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\n'
    cut = head % b"a.png" + images[0] + b"\r\n" + head % b"b.png" + images[1][:50]
    assert "it is cut off" in server.ask("POST", "/predict", cut, **form).json["error"]
    for path in ("/", "/explain"):
        assert "send it to /predict" in server.ask("POST", path, cut, **form).json["error"]
    text = json.dumps({"inputs": base64.b64encode(images[0]).decode()}).encode()
    assert "Content-Type: application/json" in server.ask("POST", "/", text).json["error"]
    answer = infer(server, {"inputs": [TENSOR]}, b"tail")
    assert answer.status == 400 and "4 bytes follow the JSON text" in answer.json["error"]
    assert server.ask_form("/predict?top=many", ("a.png", images[0])).status == 400
    (found,) = server.ask_form("/predict?top=4", ("a.png", images[0])).json["results"]
    assert len(found["predictions"]) == 3  # all of the model's classes
    field = b'--limit\r\nContent-Disposition: form-data; name="top"\r\n\r\n3\r\n--limit--\r\n'
    answer = server.ask("POST", "/predict", field, Content_Type="multipart/form-data; boundary=limit")
    assert answer.status == 400 and "the form's field 'top' is not a file" in answer.json["error"]
    assert server.ask_form("/predict", *[("a.png", images[0])] * 65).status == 413
    assert server.ask("GET", "/predict").status == server.ask("GET", "/predict/").status == 405
    answer = server.ask("GET", "/nowhere")
    assert answer.status == 404 and "GET /nowhere: Not Found" in answer.json["error"]
    bomb = bytearray(images[0])
    bomb[16:24] = struct.pack(">II", 65000, 65000)
    answer = server.ask("POST", "/", bytes(bomb))
    assert answer.status == 422


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "none", None])
def test_the_function_of_the_scores(server: Running, bundle: Bundle, images: list[bytes], function: str | None) -> None:
    text = base64.b64encode(images[1]).decode()
    asked = {"inputs": text, "parameters": {"function_to_apply": function}, "options": {"use_cache": False}}
    found = {one["label"]: one["score"] for one in server.ask_json("/", asked).json}
    pixels = bundle.preprocess.normalise(torch.from_numpy(bundle.preprocess.pixels(images[1])[None]))
    with torch.inference_mode():
        logits = bundle.network(pixels)[0]
    wanted = {"sigmoid": logits.sigmoid(), "none": logits}.get(function or "", logits.softmax(0))
    assert found == pytest.approx(dict(zip(bundle.classes, wanted.tolist(), strict=True)), abs=1e-5)


@pytest.mark.parametrize("extra", range(3))
def test_spellings_of_base64(server: Running, images: list[bytes], extra: int) -> None:
    image = images[0] + b"\xff" * extra + b"\xfb\xef\xbe"  # all three paddings, and both characters that differ
    wanted = server.ask("POST", "/", image).json
    usual, safe = base64.b64encode(image).decode(), base64.urlsafe_b64encode(image).decode()
    for text in (usual.rstrip("="), safe, safe.rstrip("="), base64.encodebytes(image).decode(), f"\t{usual}\r\n",
                 f"data:image/png;base64,{safe}", f"DATA:;BASE64,{quote(usual, safe='')}"):  # fmt: skip
        answer = server.ask_json("/", {"inputs": text})
        assert (answer.status, answer.json) == (200, wanted)
        tensor = {"name": "images", "shape": [1], "datatype": "BYTES", "data": [text]}
        assert infer(server, {"inputs": [tensor]}).status == 200
    assert server.ask_json("/", {"inputs": usual.rstrip("=")[:-1] + "*"}).status == 400


def test_the_description_holds_for_every_path(server: Running, images: list[bytes]) -> None:
    described = server.ask("GET", "/openapi.json").json
    version = server.ask("GET", "/v2/models/flowers").json["versions"][0]
    for path, operations in described["paths"].items():
        address = path.replace("{name}", "flowers").replace("{version}", version)
        for method in ("GET", "POST"):
            operation = operations.get(method.lower())
            if operation is None:
                assert server.ask(method, address, b"" if method == "POST" else None).status == 405
                continue
            answer = server.ask(method, address, images[0] if method == "POST" else None)
            assert answer.status not in (404, 405)
            if method == "GET":
                assert answer.status == 200
                continue
            names = [one["name"] for one in operation["parameters"] if one["in"] == "query"]
            for name in ("model", "top", "label"):
                error = server.ask("POST", f"{address}?{name}=x", images[0]).json.get("error", "")
                assert (f"{name}: the server does not act" in error) == (name not in names)
            assert set(re.findall(r"{(\w+)}", path)) == {one["name"] for one in operation["parameters"]} - set(names)
