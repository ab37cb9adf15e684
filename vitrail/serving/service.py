"""The service: the models of a server with their batches, the images that it has accepted, the threads that decode and
compute, and the metrics."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

import numpy as np
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from vitrail.cores import compute_threads
from vitrail.data.pixels.decode import allow_pixels, image_size_of, pixel_limit
from vitrail.data.pixels.preprocess import Pixels
from vitrail.data.texts import is_usable
from vitrail.errors import ConfigError, UndecodableImage, VitrailError
from vitrail.evaluation.features.index import FeatureIndex, Similar
from vitrail.export.engines import with_engine
from vitrail.machine import Precision
from vitrail.models.network import HasLayers
from vitrail.models.predictor import EngineChoice
from vitrail.serving.batching import Batcher, Compute, Row, Run, TooLate, choose_batch, choose_threads
from vitrail.serving.settings import ServeSettings
from vitrail.weights.answers import DENSE, AnyPrediction, finite
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.exported import ExportedNetwork, input_dtype, output_names

Parsed = TypeVar("Parsed")

MOST_WORKERS = 8
"""Largest number of batches that are computed at the same time on a CPU."""

RETRY = {"Retry-After": "1"}
"""Header of the answers of a busy server."""


class Refused(Exception):
    """A request that is answered by an error, with its HTTP status and headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


class Service:
    """The models of a server, and the limits and counters that all requests share."""

    def __init__(
        self,
        bundles: Mapping[str, Bundle],
        settings: ServeSettings,
        precision: Precision | None = None,
        overlays: OverlayMaker | None = None,
        index: FeatureIndex | None = None,
    ) -> None:
        """Prepare models, given by their names. The first model answers requests that name none. `overlays` draws which
        parts of a picture a model depends on. `index` has the features of images that are searched. Raise
        `VitrailError` for a model that cannot be served, and for an index that no model computed."""
        self.settings = settings
        self.metrics = Metrics()
        self.is_ready = False
        """True while the service accepts images."""
        self.is_draining = False
        """True after the server was asked to stop. Requests are still answered."""
        on_cpu = all(bundle.device.type == "cpu" for bundle in bundles.values())
        threads = torch.get_num_threads()
        self._compute = Compute(min(threads, MOST_WORKERS) if on_cpu else 1, threads)
        self._decode = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "vitrail-decode")
        self._answer = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "vitrail-answer")
        # Overlays are drawn, and JSON bodies are parsed, one at a time, because each takes much memory.
        self._draw = ThreadPoolExecutor(1, "vitrail-overlay")
        self._parse = ThreadPoolExecutor(1, "vitrail-parse")
        self._overlays = overlays
        self._accepted = 0
        self._precision = precision
        self.models = {name: self._served(name, bundle) for name, bundle in bundles.items()}
        self.index = index
        self.searching = None if index is None else searching_model(index, self.models)
        """Name of the model that computed the features of the index, or None without an index."""

    async def start(self) -> None:
        """Accept images. Call it in the server's event loop."""
        self.is_ready = True
        self.metrics.ready.set(1)

    async def stop(self) -> None:
        """End the threads, after all requests are answered."""
        self.is_ready = False
        for threads in (self._decode, self._answer, self._draw, self._parse):
            threads.shutdown()
        self._compute.stop()

    def drain(self) -> None:
        """Let the probe `ready` answer 503, because the server is going to stop."""
        self.is_draining = True
        self.metrics.ready.set(0)

    def model(self, name: str | None = None) -> ServedModel:
        """Return a model by its name, by default the first one. Raise `Refused` for an unknown name."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise Refused(404, f"model {name!r} does not exist here; models: {', '.join(self.models)}")
        return self.models[name]

    async def replace(self, name: str, bundle: Bundle) -> ServedModel:
        """Answer new requests for a model with another bundle. Requests that have begun keep the old model until their
        answer, and the old model is freed after the last of them. Raise `VitrailError` for a model that cannot be
        served."""
        before = self.models[name]
        engine: EngineChoice = "torch" if before.bundle.engine is None else before.bundle.engine.name
        with suppress(VitrailError):  # then PyTorch computes
            bundle = await asyncio.to_thread(with_engine, bundle, engine, precision=self._precision)
        made = await asyncio.to_thread(self._served, name, bundle, before)
        self.models[name] = made
        return made

    async def file_outputs(
        self,
        model: ServedModel,
        tasks: Sequence[Task],
        images: Sequence[bytes],
        answer: Callable[[Row, bytes], Any] | None = None,
    ) -> list[Any | UndecodableImage]:
        """Return the outputs of each encoded image, or what `answer` makes of them and of the image, or the reason why
        the image cannot be decoded. Raise `Refused` if the server has too much to do, or if outputs are not finite."""
        with self._accept(model, tasks, len(images)):
            loop = asyncio.get_running_loop()
            decoded = await asyncio.gather(
                *(loop.run_in_executor(self._decode, self._pixels, model, image) for image in images)
            )
            usable = [item for item in decoded if not isinstance(item, UndecodableImage)]
            rows: list[Any] = await self._outputs(model, tasks, usable)
            if answer is not None:
                read = [
                    image for image, item in zip(images, decoded, strict=True) if not isinstance(item, UndecodableImage)
                ]
                if model.bundle.output in DENSE:  # boxes and masks take long, and must not hold up other requests
                    made = (loop.run_in_executor(self._answer, answer, *pair) for pair in zip(rows, read, strict=True))
                    rows = await self._in_time(asyncio.gather(*made), "an answer")
                else:
                    rows = [answer(*pair) for pair in zip(rows, read, strict=True)]
            results = iter(rows)
            return [item if isinstance(item, UndecodableImage) else next(results) for item in decoded]

    async def all_file_outputs(
        self,
        model: ServedModel,
        tasks: Sequence[Task],
        images: Sequence[bytes],
        answer: Callable[[Row, bytes], Any] | None = None,
    ) -> list[Any]:
        """Return the same as `file_outputs`. Raise `Refused` also if an image cannot be decoded."""
        rows = await self.file_outputs(model, tasks, images, answer)
        for number, row in enumerate(rows):
            if isinstance(row, UndecodableImage):
                raise Refused(422, f"image {number} {row}")
        return rows

    async def pixel_outputs(self, model: ServedModel, tasks: Sequence[Task], pixels: Sequence[Pixels]) -> list[Row]:
        """Return the outputs of each image of decoded pixels. Raise the same errors as `file_outputs`."""
        with self._accept(model, tasks, len(pixels)):
            return await self._outputs(model, tasks, pixels)

    async def text_outputs(self, model: ServedModel, texts: Sequence[str]) -> list[Row]:
        """Return the embedding of each text, of length 1. Raise `Refused` for a model without a text tower, for a text
        that is empty or too long for the model, and if the server has too much to do."""
        words = model.bundle.words
        if words is None:
            raise Refused(400, f"model {model.name!r} reads no texts; give images")
        with self._accept(model, ("embedding",), len(texts)):
            if not all(map(is_usable, texts)):
                raise Refused(
                    400,
                    "a text is empty, or has characters that cannot be decoded; give every text at least one character",
                )
            _, cut = await self.parse(words.tokenizer.encode, texts)
            if cut:
                raise Refused(
                    400,
                    f"text {cut[0] + 1} of {len(texts)} is longer than the {words.tokenizer.context} tokens that model "
                    f"{model.name!r} reads; shorten it",
                )
            found = await self._compute.run(model.texts, np.array(texts, dtype=object))
            return [{"embedding": vector} for vector in found["embedding"]]

    async def parse(self, function: Callable[..., Parsed], *arguments: Any) -> Parsed:
        """Return `function(*arguments)`, which reads a body. Bodies are read one after the other on a thread of their
        own, so a long one holds up no other request that is answered."""
        return await asyncio.get_running_loop().run_in_executor(self._parse, function, *arguments)

    async def search(self, query: Row, top: int) -> list[Similar]:
        """Return the images of the index that resemble an image or a text most. Raise `Refused` without an index, and
        if the model of the index was replaced by another one."""
        index, model = self.index, self.searched_by()
        if index is None or index.difference(model.bundle, model.sha256) is not None:
            raise Refused(409, f"model {model.name!r} was replaced, and the features of the index are not its own")
        (found,) = await asyncio.to_thread(index.search, query["embedding"][None], top)
        return found

    def searched_by(self) -> ServedModel:
        """Return the model whose features the index has. Raise `Refused` without an index."""
        if self.searching is None:
            raise Refused(404, "this server searches no images; start it with --index FEATURES")
        return self.models[self.searching]

    async def draw(self, function: Callable[..., Parsed], *arguments: Any) -> Parsed:
        """Return `function(*arguments)`, which draws a picture. One is drawn after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._draw, function, *arguments)

    def overlay_refusal(self, model: ServedModel) -> str | None:
        """Return why a model has no overlays, or None if it has them."""
        return "this server has none" if self._overlays is None else self._overlays.refusal(model.bundle)

    async def overlay(self, model: ServedModel, image: bytes, target: int | None) -> bytes:
        """Return a picture under a map of the parts that the model depends on, as `OverlayMaker.draw` does. Raise
        `Refused` if the model has no overlays, the image cannot be decoded, or the server has too much to do."""
        overlays, refusal = self._overlays, self.overlay_refusal(model)
        if overlays is None or refusal is not None:
            raise Refused(400, f"model {model.name!r} has no overlays: {refusal}")

        def draw() -> bytes:
            model.check_size(image)
            with compute_threads(1):  # predictions come first
                return overlays.draw(model.bundle, image, target)

        with self._accept(model, (), 1):
            drawing = asyncio.get_running_loop().run_in_executor(self._draw, draw)
            try:
                return await self._in_time(drawing, "an overlay")
            except UndecodableImage as error:
                raise Refused(422, f"the image {error}") from None

    @contextmanager
    def _accept(self, model: ServedModel, tasks: Sequence[Task], images: int) -> Iterator[None]:
        """Count images as accepted inside the `with` block. Raise `Refused` if the server cannot accept them. Images
        are refused before they are decoded, because decoding takes time."""
        for task in tasks:
            if task not in model.tasks:
                raise Refused(400, f"model {model.name!r} computes no {task}; it computes {', '.join(model.tasks)}")
        if images > self.settings.max_images:
            raise Refused(413, f"{images} images are more than max_images={self.settings.max_images} of this server")
        if not self.is_ready:
            raise Refused(503, "the server is not ready", RETRY)
        if self._accepted + images > self.settings.max_queue:
            raise Refused(503, f"more than {self.settings.max_queue} images wait for answers; try again later", RETRY)
        self._accepted += images
        self.metrics.images.set(self._accepted)
        try:
            yield
        finally:
            self._accepted -= images
            self.metrics.images.set(self._accepted)

    async def _outputs(self, model: ServedModel, tasks: Sequence[Task], pixels: Sequence[Pixels]) -> list[Row]:
        try:
            found = await asyncio.gather(*(model.batchers[task].compute(pixels) for task in tasks))
        except TooLate:
            raise self._too_late("an image") from None
        outputs = [{name: row[name] for row in rows for name in row} for rows in zip(*found, strict=True)]
        if not all(np.isfinite(values).all() for row in outputs for values in row.values()):
            raise Refused(
                500, f"the outputs of model {model.name!r} are not finite for an image; its weights are damaged"
            )
        return outputs

    def _pixels(self, model: ServedModel, image: bytes) -> Pixels | UndecodableImage:
        begun = time.perf_counter()
        try:
            return model.pixels(image)
        except UndecodableImage as error:
            return error
        finally:
            self.metrics.decoding.observe(time.perf_counter() - begun)

    async def _in_time(self, waiting: Awaitable[Parsed], what: str) -> Parsed:
        """Return the result of work on a thread. Raise `Refused` after the deadline of the server."""
        try:
            return await asyncio.wait_for(waiting, self.settings.deadline_seconds)
        except TimeoutError:
            raise self._too_late(what) from None

    def _too_late(self, what: str) -> Refused:
        return Refused(
            503, f"{what} waited longer than {self.settings.deadline_seconds:g} seconds; try again later", RETRY
        )

    def _served(self, name: str, bundle: Bundle, before: ServedModel | None = None) -> ServedModel:
        with compute_threads(None if before is None else 1):  # a server that has requests keeps the other threads
            return ServedModel(name, bundle, self.settings, self.metrics, self._compute, self._precision, before=before)


def searching_model(index: FeatureIndex, models: Mapping[str, ServedModel]) -> str:
    """Return the name of the model that computed the features of an index. Raise `ConfigError` if none of the models
    did."""
    found = {name: index.difference(model.bundle, model.sha256) for name, model in models.items()}
    for name, difference in found.items():
        if difference is None:
            return name
    differing = "; ".join(f"{name!r} has other {difference}" for name, difference in found.items())
    raise ConfigError(
        f"--index: no model here computed the features in {index.path}: {differing}; serve that model, or compute the "
        "features again with vitrail embed"
    )


# --- the log, with a line per request on the standard error output, and the metrics for Prometheus


def log_line(**values: Any) -> None:
    """Write a line with the time and these values."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **values}
    sys.stderr.write(json.dumps(line) + "\n")  # in one call, so that lines of several processes do not mix
    sys.stderr.flush()


FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Variable with a folder in which several processes keep their metrics. It must be set before they start."""

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MODEL = ("model", "task")
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counters and histograms of one server. All processes of a server report the metrics of all of them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "vitrail_requests", "Answered requests", ("path", "status"), registry=self._registry
        )  # fmt: skip
        histogram = partial(Histogram, buckets=SECONDS, registry=self._registry)
        self.seconds = histogram("vitrail_request_seconds", "Time of a request", ("path",))
        self.decoding = histogram("vitrail_decode_seconds", "Time for decoding an image")
        self.queue = histogram("vitrail_queue_seconds", "Longest wait in a batch", MODEL)
        self.inference = histogram("vitrail_inference_seconds", "Time for computing a batch", MODEL)
        self.sizes = histogram("vitrail_batch_size", "Images in a batch", MODEL, buckets=SIZES)
        gauge = partial(Gauge, registry=self._registry, multiprocess_mode="livesum")
        self.images = gauge("vitrail_images", "Images that are accepted and not answered")
        self.bodies = gauge("vitrail_body_bytes", "Bytes of all bodies of requests")
        self.ready = gauge("vitrail_ready", "Number of processes that accept requests")

    def batches(self, model: str, task: str) -> Callable[[int, float, float], None]:
        """Return a function that records a batch: number of images, longest wait, and time for computing."""
        queue, inference, sizes = (one.labels(model, task) for one in (self.queue, self.inference, self.sizes))

        def record(images: int, waited: float, took: float) -> None:
            sizes.observe(images)
            queue.observe(waited)
            inference.observe(took)

        return record

    def text(self) -> bytes:
        """Return all metrics as text."""
        folder = os.environ.get(FOLDER)
        if folder is None:
            return generate_latest(self._registry)
        everyone = CollectorRegistry()
        MultiProcessCollector(everyone, path=folder)  # type: ignore[no-untyped-call]
        return generate_latest(everyone)


# --- one model: its name, its hash, its outputs, and the batches that compute them


Task = Literal["classes", "embedding"]
"""Task of a model: to predict the classes of an image (or numbers, boxes or a mask), or to compute its embedding."""


@runtime_checkable
class OverlayMaker(Protocol):
    """Draws on pictures which parts a model depends on."""

    def refusal(self, bundle: Bundle) -> str | None:
        """Return why a model has no overlays, or None if it has them."""

    def draw(self, bundle: Bundle, image: bytes, target: int | None) -> bytes:
        """Return the picture of an image file under a map, as a JPEG file. The map explains the output of the number
        `target`, or for None all outputs."""


class ServedModel:
    """A model with a queue for each of its tasks."""

    def __init__(
        self,
        name: str,
        bundle: Bundle,
        settings: ServeSettings,
        metrics: Metrics,
        compute: Compute,
        precision: Precision | None = None,
        *,
        before: ServedModel | None = None,
    ) -> None:
        """Prepare a model, and measure the largest batch and its number of threads unless the settings have them.

        Raise `ConfigError` for an exported file of tokens, and for a precision that the model cannot compute in. Raise
        `BundleError` if the outputs for a black image are not finite. `compute` computes batches. `before` is the model
        that this one replaces: what was measured for it is taken over if the network has the same settings.
        """
        self.name = name
        self.bundle = bundle
        self.sha256 = weights_sha256(bundle.network)
        self._max_pixels = settings.max_pixels
        if settings.max_pixels > pixel_limit():
            allow_pixels(settings.max_pixels)
        self.computed = ModelOutputs(bundle, precision or bundle.precision, compute.divide)
        self.precision = self.computed.precision
        self.tasks = self._find_tasks()
        blank = np.zeros((bundle.preprocess.channels, *bundle.preprocess.image_size), self.dtype)
        self.outputs: dict[Task, dict[str, tuple[int, ...]]] = {}
        """Shapes of the outputs of each task for one image, by their names."""
        for task in self.tasks:  # the first call of a network is slow, and shows whether the network can be used
            made = self.computed.run(task)(blank[None])
            for values in made.values():
                finite(torch.from_numpy(values))
            self.outputs[task] = {name: values.shape[1:] for name, values in made.items()}
        run, known = self.computed.run(self.tasks[0]), before if self._is_like(before) else None
        self.threads: int = settings.batch_threads or (
            known.threads
            if known
            else choose_threads(run, blank, compute.threads)
            if bundle.device.type == "cpu"
            else compute.threads  # on a GPU it hardly matters
        )
        """Number of compute threads of a batch that is alone."""
        self.largest: int = settings.max_batch or (known.largest if known else choose_batch(run, blank))
        """Largest number of images that are computed together."""
        self.batchers = {
            task: Batcher(
                self.computed.run(task),
                compute,
                largest=self.largest,
                seconds=settings.deadline_seconds,
                threads=self.threads,
                on_batch=metrics.batches(name, task),
            )
            for task in self.tasks
        }

    @property
    def dtype(self) -> type[np.uint8] | type[np.float32]:
        """Number format of pixels."""
        return np.float32 if input_dtype(self.bundle.preprocess) == "float32" else np.uint8

    def found(self, row: Row, image: bytes) -> AnyPrediction:
        """Return the objects or the mask of an encoded image, in its pixels, from the outputs of the image."""
        (answer,) = self.bundle.answers(torch.from_numpy(row["rows"])[None], None, self.bundle.placements([image]))
        return answer

    def pixels(self, image: bytes) -> Pixels:
        """Return the pixels of an encoded image. Raise `UndecodableImage`."""
        self.check_size(image)
        return self.bundle.preprocess.pixels(image)

    def check_size(self, image: bytes) -> None:
        """Raise `UndecodableImage` for an image that cannot be decoded, or is larger than the server accepts."""
        height, width = image_size_of(image)
        if height * width > self._max_pixels:
            raise UndecodableImage(
                f"claims {width} x {height} pixels (width x height); this server accepts {self._max_pixels:,} "
                "(its option --max-pixels)"
            )

    def texts(self, texts: np.ndarray) -> dict[str, np.ndarray]:
        """Return the embeddings of texts, of length 1, as the outputs of a batch."""
        return {"embedding": self.bundle.reader_of_texts().embed(texts.tolist()).vectors.numpy()}

    def _find_tasks(self) -> tuple[Task, ...]:
        network: Any = self.bundle.network
        contents = network.interface.contents if isinstance(network, ExportedNetwork) else None
        if contents == "text_embedding":
            raise ConfigError(
                f"{network.path} has the text tower only; serve the model that it was exported from, which reads both"
            )
        if contents == "tokens":
            raise ConfigError(f"{network.path} returns tokens, which the server does not send; export the embedding")
        possible: dict[Task, bool] = {"classes": bool(self.bundle.classes), "embedding": contents != "logits"}
        return tuple(task for task in get_args(Task) if possible[task])

    def _is_like(self, before: ServedModel | None) -> bool:
        """Return True if measurements of an earlier model hold for this one too."""
        return (
            before is not None
            and self.precision == before.precision
            and type(self.bundle.network) is type(before.bundle.network)
            and bool(self.bundle.network.config == before.bundle.network.config)
        )


class ModelOutputs:
    """Computes the outputs of batches of pixels with one model."""

    def __init__(self, bundle: Bundle, precision: Precision, on_block: Callable[[], None] = lambda: None) -> None:
        """Call `on_block` before each block of the network. Raise `ConfigError` for a precision that the model cannot
        compute in."""
        self._bundle = bundle
        self._predictor = bundle.predictor(precision)
        self.precision = self._predictor.precision
        """Number format of matrix products."""
        network: Any = self._predictor.network  # a copy, so the hooks are not those of the bundle's network
        if not isinstance(network, ExportedNetwork) and isinstance(network, HasLayers):
            for block in network.layers().blocks:
                block.register_forward_pre_hook(lambda *_: on_block())

    def run(self, task: Task) -> Run:
        """Return the function that computes the outputs of a task. It keeps the model in memory."""
        return self._classes if task == "classes" else self._embedding

    def _classes(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        logits = self._predictor.logits(self._bundle.inputs(pixels)).float().cpu()
        first, *further = output_names("logits", self._bundle.output)
        return {first: logits.numpy()} | {name: self._bundle.probabilities(logits).numpy() for name in further}

    def _embedding(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        return {"embedding": self._predictor.embed(self._bundle.inputs(pixels)).float().cpu().numpy()}
