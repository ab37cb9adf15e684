"""A server as one writes it first: each request is decoded and computed alone, on the threads of the framework.

`python -m vitrail.bench.serving.naive MODEL PRECISION` is the peer that `vitrail bench serve` compares with.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import numpy as np
import torch

from vitrail.models.predictor import Predictor
from vitrail.weights.load import load

__all__ = ["main"]


def main(model: str, precision: str) -> None:
    """Serve a model on a free port, which the first line of the standard error output names."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    bundle = load(model)
    chosen: Any = precision
    predictor = Predictor(bundle.network, chosen)

    def predict(image: bytes) -> list[dict[str, Any]]:
        pixels = torch.from_numpy(np.stack([bundle.preprocess.pixels(image)]))
        logits = predictor.logits(bundle.preprocess.normalise(pixels.to(bundle.device))).float().cpu()
        values = logits.softmax(dim=1)[0].numpy()
        return [{"label": bundle.classes[k], "score": float(values[k])} for k in np.argsort(-values)[:5]]

    async def answer(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(predict, await request.body()))

    config = uvicorn.Config(Starlette(routes=[Route("/", answer, methods=["POST"])]), log_level="error")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
