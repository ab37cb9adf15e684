"""Test of an exported repository in a real Triton server.

The wheel of PyTriton contains a server for the CPU, without Triton's backend for ONNX. So the backend of that name is a
few lines of Python here that run the ONNX file with onnxruntime. Everything else is Triton's own: it reads the folder
and its configuration, checks requests, collects batches, and answers with labels.

    python -m venv triton && triton/bin/pip install nvidia-pytriton onnxruntime 'numpy<2'
    VITRAIL_TRITON=triton pytest -m slow tests/export/test_triton.py
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitrail.data.source import Sample
from vitrail.export.export import export
from vitrail.weights.bundle import Bundle

BACKEND = """
import os, sys
sys.path.insert(0, {packages!r})
import onnxruntime
import triton_python_backend_utils as triton

class TritonPythonModel:
    def initialize(self, about):
        path = os.path.join(about["model_repository"], about["model_version"], "model.onnx")
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.names = [output.name for output in self.session.get_outputs()]

    def execute(self, requests):
        answers = []
        for request in requests:
            images = triton.get_input_tensor_by_name(request, "images").as_numpy()
            values = self.session.run(self.names, {{"images": images}})
            tensors = [triton.Tensor(name, value) for name, value in zip(self.names, values)]
            answers.append(triton.InferenceResponse(tensors))
        return answers
"""


@pytest.fixture
def triton(bundle: Bundle, samples: list[Sample], tmp_path: Path) -> Iterator[int]:
    """Run a Triton server with the exported model "flowers", and return its port."""
    if "VITRAIL_TRITON" not in os.environ:
        pytest.skip("VITRAIL_TRITON does not name an environment with nvidia-pytriton")
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = Path(os.environ["VITRAIL_TRITON"]).absolute() / "lib" / python / "site-packages"
    server, backends = packages / "pytriton" / "tritonserver", tmp_path / "backends"
    shutil.copytree(server / "backends" / "python", backends / "python")
    stub = server / "python_backend_stubs" / python.removeprefix("python") / "triton_python_backend_stub"
    (backends / "python" / stub.name).write_bytes(stub.read_bytes())
    (backends / "python" / stub.name).chmod(0o755)
    (backends / "onnxruntime").mkdir()
    (backends / "onnxruntime" / "model.py").write_text(BACKEND.format(packages=str(packages)))
    export(bundle, tmp_path / "repository" / "flowers", "triton", samples)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(server / "bin" / "tritonserver"), f"--model-repository={tmp_path / 'repository'}",
        f"--backend-directory={backends}", "--http-address=127.0.0.1", f"--http-port={port}", "--allow-grpc=false",
        "--allow-metrics=false",
    ]  # fmt: skip
    environment = {**os.environ, "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs")}
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as run,
    ):
        try:
            yield port
        finally:
            run.terminate()


@pytest.mark.slow
def test_a_real_server_answers_with_the_exported_model(
    triton: int, bundle: Bundle, samples: list[Sample], tmp_path: Path
) -> None:
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

    client = InferenceServerClient(f"127.0.0.1:{triton}")
    wait_until_ready(client, tmp_path / "log")
    described = client.get_model_metadata("flowers")
    assert described["platform"] == "onnxruntime_onnx"
    assert described["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 12, 10, 3]}]
    assert client.get_model_config("flowers")["max_batch_size"] == 16
    pixels = np.stack([bundle.preprocess.pixels(sample.image).transpose(1, 2, 0) for sample in samples])
    images = InferInput("images", pixels.shape, "UINT8")
    images.set_data_from_numpy(pixels)
    wanted = bundle.predict([sample.image for sample in samples])
    found = client.infer("flowers", [images]).as_numpy("probabilities")
    for row, one in zip(found, wanted, strict=True):
        np.testing.assert_allclose(row[bundle.classes.index(one.label)], one.probability, atol=1e-5)
    outputs = [InferRequestedOutput("probabilities", class_count=1)]
    labels = client.infer("flowers", [images], outputs=outputs).as_numpy("probabilities")
    assert [text.decode().split(":")[2] for (text,) in labels] == [one.label for one in wanted]


def wait_until_ready(client: Any, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if client.is_model_ready("flowers"):
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.2)
