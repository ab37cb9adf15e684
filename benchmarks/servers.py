"""Other servers with the same model and the same preprocessing, with which `vitrail bench serve` compares its own.

`PYTHON servers.py naive MODEL PRECISION` computes each request alone. `PYTHON servers.py batches MODEL PRECISION` and
`workers` are the two ways that LitServe offers on a CPU: one process that computes batches on all threads, or a process
per core, each of which computes one image at a time. PYTHON belongs to an environment with the server's library and the
packages that Vitrail needs.
"""
# LitServe reads annotations, so this module does not turn them into texts.

import os
import socket
import sys
import threading
import time
import urllib.request
from importlib import import_module
from typing import Annotated, Any, cast

import numpy as np
import torch

from vitrail.machine import Precision
from vitrail.models.predictor import Predictor
from vitrail.weights.load import load

BATCH = 16
"""Largest batch."""

WAIT = 0.01
"""Seconds that LitServe waits for a batch to fill. At 0 its process would never sleep."""


def make_api(model: str, precision: str, threads: int, batch: int) -> Any:
    """Return an instance of LitServe's class that answers the bytes of an image with the five likeliest classes."""
    litserve: Any = import_module("litserve")
    body = import_module("fastapi").Body(media_type="image/jpeg")

    class Api(litserve.LitAPI):  # type: ignore[misc]
        def __reduce__(self) -> Any:  # LitServe sends it to other processes, which make the class anew
            return make_api, (model, precision, threads, batch), self.__dict__

        def setup(self, device: str) -> None:
            torch.set_num_threads(threads)
            self.bundle = load(model, device="cpu")
            self.predictor = Predictor(self.bundle.network, cast(Precision, precision))

        def decode_request(self, request: Annotated[bytes, body]) -> np.ndarray:
            return self.bundle.preprocess.pixels(request)

        def predict(self, pixels: np.ndarray) -> np.ndarray:
            images = torch.from_numpy(pixels if batch > 1 else pixels[None])
            values = self.predictor.logits(self.bundle.preprocess.normalise(images)).float().softmax(dim=1).numpy()
            return values if batch > 1 else values[0]

        def encode_response(self, output: np.ndarray) -> Any:
            best = np.argsort(-output)[:5]
            return [{"label": self.bundle.classes[k], "score": float(output[k])} for k in best]

    return Api(max_batch_size=batch, batch_timeout=WAIT if batch > 1 else 0.0, api_path="/")


def serve_with_litserve(model: str, precision: str, way: str) -> None:
    """Serve a model on a free port, which a line of the standard error output names when the server answers."""
    litserve: Any = import_module("litserve")
    cores = len(os.sched_getaffinity(0))
    workers, threads, batch = (cores, 1, 1) if way == "workers" else (1, cores, BATCH)
    api = make_api(model, precision, threads, batch)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threading.Thread(target=_report, args=(port,), daemon=True).start()
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=workers, timeout=60)
    server.run(host="127.0.0.1", port=port, num_api_servers=1, log_level="error", generate_client_file=False)


def _report(port: int) -> None:
    """Name the address when all processes are ready."""
    address = f"http://127.0.0.1:{port}"
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                break
        except OSError:
            time.sleep(0.2)
    print(address, file=sys.stderr, flush=True)


def serve_naively(model: str, precision: str) -> None:
    """Serve a model as one writes it first: each request is computed alone, on the threads of the framework.

    The first line of the standard error output names the port, which is a free one.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    bundle = load(model)
    predictor = Predictor(bundle.network, cast(Precision, precision))

    def predict(image: bytes) -> list[dict[str, Any]]:
        pixels = torch.from_numpy(np.stack([bundle.preprocess.pixels(image)]))
        logits = predictor.logits(bundle.preprocess.normalise(pixels.to(bundle.device))).float().cpu()
        values = logits.softmax(dim=1)[0].numpy()
        return [{"label": bundle.classes[k], "score": float(values[k])} for k in np.argsort(-values)[:5]]

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(await run_in_threadpool(predict, await request.body()))

    config = uvicorn.Config(Starlette(routes=[Route("/", answer, methods=["POST"])]), log_level="error")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    way, model, precision = sys.argv[1:]
    if way == "naive":
        serve_naively(model, precision)
    else:
        serve_with_litserve(model, precision, way)
