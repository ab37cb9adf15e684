"""Tests with the clients of other projects, unchanged."""

from __future__ import annotations

import base64
import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient

from tests.serving.conftest import probabilities
from tests.serving.running import Running
from vitrail.weights.bundle import Bundle, weights_sha256


@pytest.fixture(scope="module")
def triton() -> Any:
    """Triton's client for HTTP. gevent warns of the order of imports, which concerns TLS only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tritonclient.http

        return tritonclient.http


@pytest.fixture
def client(triton: Any, server: Running) -> Iterator[Any]:
    with contextlib.closing(triton.InferenceServerClient(f"127.0.0.1:{server.port}")) as opened:
        yield opened


def test_hugging_face_client_classifies(server: Running, bundle: Bundle, images: list[bytes]) -> None:
    client = InferenceClient(model=server.url, token=None)
    (wanted,) = bundle.predict([images[0]])
    found = client.image_classification(images[0])
    assert [one.label for one in found] == [label for label, _ in wanted.ranking]
    assert [one.score for one in found] == pytest.approx([value for _, value in wanted.ranking], abs=1e-6)
    assert [one.label for one in client.image_classification(images[0], top_k=2)] == [one.label for one in found[:2]]


def test_hugging_face_client_extracts_features(
    server: Running, bundles: dict[str, Bundle], images: list[bytes]
) -> None:
    client = InferenceClient(model=f"{server.url}/?model=features", token=None)
    found = client.feature_extraction(base64.b64encode(images[0]).decode())
    np.testing.assert_allclose(found, bundles["features"].embed(images[:1]), atol=1e-5)


@pytest.mark.parametrize("is_binary", [True, False])
def test_triton_client(triton: Any, client: Any, bundle: Bundle, images: list[bytes], is_binary: bool) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("flowers")
    about = client.get_model_metadata("flowers")
    assert about["outputs"][1]["name"] == "probabilities"
    pixels = np.stack([bundle.preprocess.pixels(image).transpose(1, 2, 0) for image in images[:5]])
    tensor = triton.InferInput("images", list(pixels.shape), "UINT8")
    tensor.set_data_from_numpy(pixels, binary_data=is_binary)
    outputs = [triton.InferRequestedOutput("probabilities", binary_data=is_binary)]
    answer = client.infer("flowers", [tensor], outputs=outputs, model_version=about["versions"][0])
    wanted = probabilities(bundle, images[:5])
    np.testing.assert_allclose(answer.as_numpy("probabilities"), wanted, atol=1e-6)
    assert answer.get_response()["model_version"] == weights_sha256(bundle.network)


def test_triton_client_sends_files(triton: Any, client: Any, bundle: Bundle, images: list[bytes]) -> None:
    tensor = triton.InferInput("images", [len(images)], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=np.object_))
    found = client.infer("flowers", [tensor]).as_numpy("logits")
    assert [bundle.classes[row.argmax()] for row in found] == [one.label for one in bundle.predict(images)]
    broken = [*images[:2], images[2][:70]]
    tensor = triton.InferInput("images", [3], "BYTES")
    tensor.set_data_from_numpy(np.array(broken, dtype=np.object_))
    with pytest.raises(Exception, match="image 2 "):
        client.infer("flowers", [tensor])
