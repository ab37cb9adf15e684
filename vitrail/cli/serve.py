"""`vitrail serve`: answer requests over HTTP with one or more models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vitrail.analysis.images import Overlays
from vitrail.cli.console import print_messages
from vitrail.cli.options import Call, Command, DeviceOption
from vitrail.machine import Precision
from vitrail.models.predictor import EngineChoice
from vitrail.registry import optional_module
from vitrail.serving.settings import TOKEN_VARIABLE, ServeSettings, is_loopback
from vitrail.settings import setting

NEEDED = ("starlette", "uvicorn", "python_multipart", "prometheus_client")
"""Modules of the extra `serve`."""


@dataclass(frozen=True, kw_only=True)
class Serve(DeviceOption, ServeSettings):
    """Options of `vitrail serve`."""

    models: tuple[str, ...] = setting(argument="MODEL...")
    """Folders of models or runs, exported files, or names on the Hugging Face hub. NAME=MODEL serves a model under
    another name than the last part of its path. The first model answers requests that name none."""
    precision: Precision | None = None
    """Number format of matrix products. The default is each model's own, usually float32. auto is bf16 if the processor
    has units for it. A file from vitrail export --precision int8 computes in 8-bit integers."""
    engine: EngineChoice = "auto"
    """Runtime that computes on a CPU: torch, openvino or onnxruntime (extras). auto measures which is the fastest one
    when a model is served for the first time, and keeps the result."""
    index: Path | None = setting(None, metavar="FEATURES")
    """Folder that `vitrail embed` wrote with one of the models. The page, and the path /search, then find its images by
    another image, or by a text if the model reads texts."""


COMMAND = Command(
    name="serve",
    summary="""Answer requests over HTTP with one or more models. Clients of the Open Inference Protocol v2 (Triton,
    KServe), of Hugging Face's inference API and of OpenAI's embeddings work unchanged, and so do forms with files. A
    page shows predictions for dropped images. All limits are on by default. SIGTERM stops the server after it has
    answered what it received.""",
    examples=(
        ("vitrail serve runs/flowers", "Open the page, or: curl -F file=@rose.jpg http://127.0.0.1:8000/predict"),
        ("vitrail serve clip --index features", "Search the images of a folder by texts and by images."),
        ("vitrail serve runs/flowers --host 0.0.0.0 --token SECRET", "Serve other machines with a token."),
    ),
    options=(Serve,),
    essential={
        "Address": ("host", "port", "token", "allow_host"),
        "Processes and models": ("workers", "watch", "index"),
        "Limits": ("max_body", "max_images", "max_queue", "deadline_seconds"),
        "Speed": ("max_batch", "batch_threads", "device", "precision"),
    },
)


def main(call: Call, options: Serve) -> None:
    values = {name: getattr(options, name) for name in ServeSettings.__dataclass_fields__}
    settings = ServeSettings(**values | {"token": options.token or os.environ.get(TOKEN_VARIABLE) or None})
    for module in NEEDED:
        optional_module(module, "serve")
    from vitrail.serving.server import ServeJob, Supervisor, named_models, open_socket, serve, serve_as_worker

    job = ServeJob(
        models=named_models(options.models),
        settings=settings,
        device=options.device,
        precision=options.precision,
        engine=options.engine,
        overlays=Overlays(),
        index=options.index,
    )
    with open_socket(settings) as listening:  # before the models are loaded, which takes longer
        host, port = listening.getsockname()[:2]
        names = ", ".join(job.models)
        what = f"{names} by {settings.workers} processes" if settings.workers > 1 else names

        def report() -> None:
            print_messages(f"serving {what} at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C stops)")

        if not is_loopback(settings.host) and not settings.token:
            print_messages("everyone who reaches this machine can use the server; --token restricts it")
        if settings.workers == 1:
            serve(job, listening, on_start=report, on_note=_note)
        else:
            Supervisor(settings.workers, partial(serve_as_worker, job, _note), listening, report).run()


def _note(note: str) -> None:
    print_messages(COMMAND.note(note))
