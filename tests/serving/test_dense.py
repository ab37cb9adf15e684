"""The server answers with boxes and masks in the picture's pixels, in all its shapes."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.make import dense_bundle
from tests.serving.running import Running, serving
from vitrail.serving import app
from vitrail.weights.bundle import Bundle


@pytest.fixture(scope="module")
def dense() -> dict[str, Bundle]:
    boxes = replace(dense_bundle(), metrics={"validation_score_threshold": 0.7}, provenance={"class_ids": [90, 5]})
    return {"boxes": boxes, "masks": dense_bundle("patches"), "outlines": dense_bundle("queries")}


@pytest.fixture(scope="module")
def dense_server(dense: dict[str, Bundle]) -> Iterator[Running]:
    with serving(dense) as running:
        yield running


def index_png(text: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(text.removeprefix("data:image/png;base64,")))) as picture:
        return np.asarray(picture)


def test_objects_of_files(dense_server: Running, dense: dict[str, Bundle], images: list[bytes]) -> None:
    (found,) = dense["boxes"].predict(images[:1])
    for query, threshold in (("?model=boxes", 0.7), ("?model=boxes&threshold=0.9", 0.9)):
        answer = dense_server.ask_form(f"/predict{query}", ("a.png", images[0]), ("b.png", b"no picture")).json
        first, second = answer["results"]
        assert first["objects"] == found.above(threshold).coco([90, 5])  # type: ignore[union-attr]
        assert (first["height"], first["width"]) == (11, 23) and "error" in second
        assert all(row["score"] >= threshold and row["category_id"] in (90, 5) for row in first["objects"])
    assert len(found) > len(first["objects"]) > 0  # type: ignore[arg-type]


def test_masks_of_files(dense_server: Running, dense: dict[str, Bundle], images: list[bytes]) -> None:
    wanted: Any = dense["masks"].predict(images)
    answer = dense_server.ask_form("/predict?model=masks", *((f"{n}.png", image) for n, image in enumerate(images)))
    for one, result in zip(wanted, answer.json["results"], strict=True):
        np.testing.assert_array_equal(index_png(result["mask"]), one.indices)
        assert result["fractions"] == one.shares() and result["classes"] == list(one.names)


def test_placing_a_mask_counts_and_has_a_deadline(
    dense: dict[str, Bundle], images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> dict[str, Any]:
        begun.set()
        ended.wait(20)
        return {}

    monkeypatch.setattr(app, "_placed", slow)
    with serving({"masks": dense["masks"]}, deadline_seconds=0.4) as running, ThreadPoolExecutor(1) as client:
        waiting = client.submit(running.ask_form, "/predict", ("a.png", images[0]))
        assert begun.wait(20) and running.metric("vitrail_images") == 1
        answer = waiting.result()
        assert answer.status == 503 and "an answer waited longer than 0.4 seconds" in answer.json["error"]
        ended.set()


def test_the_shapes_of_hugging_face(dense_server: Running, dense: dict[str, Bundle], images: list[bytes]) -> None:
    wanted: Any = dense["boxes"].predict(images[1:2])[0]
    sent = {"inputs": base64.b64encode(images[1]).decode(), "parameters": {"threshold": 0.5}}
    objects = dense_server.ask_json("/?model=boxes", sent).json
    kept = wanted.above(0.5)
    assert [(one["label"], one["score"]) for one in objects] == [(one.label, one.score) for one in kept]
    assert [one["box"]["xmin"] for one in objects] == kept.boxes[:, 0].round().tolist()
    mask: Any = dense["masks"].predict(images[1:2])[0]
    parts = dense_server.ask("POST", "/?model=masks", images[1]).json
    assert [one["label"] for one in parts] == [*mask.shares()]
    covered = sum((index_png(one["mask"]) == 255).astype(int) for one in parts)
    assert covered.shape == mask.indices.shape and (covered == 1).all(), "each pixel has one class"


def test_the_masks_of_objects(dense_server: Running, dense: dict[str, Bundle], images: list[bytes]) -> None:
    wanted: Any = dense["outlines"].predict(images[:1])[0].above(0.05)
    answer = dense_server.ask_form("/predict?model=outlines&threshold=0.05", ("a.png", images[0])).json
    assert len(wanted) > 2 and answer["results"][0]["objects"] == json.loads(json.dumps(wanted.coco()))
    sent = {"inputs": base64.b64encode(images[0]).decode(), "parameters": {"threshold": 0.05}}
    objects = dense_server.ask_json("/?model=outlines", sent).json
    assert [one["label"] for one in objects] == [one.label for one in wanted]
    for one, runs in zip(objects, wanted.masks, strict=True):
        with Image.open(io.BytesIO(base64.b64decode(one["mask"]))) as mask:
            assert np.array_equal(np.asarray(mask) > 0, runs.mask())


def test_the_inference_protocol_sends_rows(dense_server: Running, dense: dict[str, Bundle]) -> None:
    (output, _) = dense_server.ask("GET", "/v2/models/boxes").json["outputs"]
    cells = 5 * 20 + 6
    assert output == {"name": "rows", "datatype": "FP32", "shape": [-1, cells, 6]}
    levels = np.arange(2 * 32 * 40 * 3).reshape(2, 32, 40, 3) % 251
    tensor = {"name": "images", "datatype": "UINT8", "shape": [*levels.shape], "data": levels.ravel().tolist()}
    answer = dense_server.ask_json("/v2/models/boxes/infer", {"inputs": [tensor]}).json["outputs"][0]
    inputs = dense["boxes"].inputs(levels.astype(np.uint8).transpose(0, 3, 1, 2))
    expected = dense["boxes"].network(inputs).detach()
    assert answer["shape"] == [2, cells, 6]
    np.testing.assert_allclose(np.reshape(answer["data"], expected.shape), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("path", "parameters", "words"), [
    ("/predict?model=boxes&top=3", None, "top"),
    ("/predict?model=masks&threshold=0.5", None, "threshold"),
    ("/predict?model=boxes&threshold=2", None, "0 to 1"),
    ("/predict?model=boxes&threshold=nan", None, "0 to 1"),
    ("/explain?model=boxes&label=blue", None, "label"),
    ("/?model=boxes", {"top_k": 2}, "top_k"),
    ("/?model=masks", {"threshold": 0.5}, "threshold"),
    ("/?model=boxes", {"threshold": True}, "threshold"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(
    dense_server: Running, images: list[bytes], path: str, parameters: dict[str, Any] | None, words: str
) -> None:
    if path.startswith("/predict"):
        answer = dense_server.ask_form(path, ("a.png", images[0]))
    elif parameters is None:
        answer = dense_server.ask("POST", path, images[0])
    else:
        text = base64.b64encode(images[0]).decode()
        answer = dense_server.ask_json(path, {"inputs": text, "parameters": parameters})
    assert answer.status == 400 and words in answer.json["error"]


def test_the_attention_is_shown(dense_server: Running, images: list[bytes]) -> None:
    for model in ("boxes", "masks"):
        answer = dense_server.ask("POST", f"/explain?model={model}", images[0])
        assert answer.status == 200 and answer.json["map"] == "rollout", answer.body
