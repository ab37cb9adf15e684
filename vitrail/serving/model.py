"""A model that is served: its name, its hash, its outputs, and the batches that compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch

from vitrail.data.pixels.decode import allow_pixels, image_size_of, pixel_limit
from vitrail.data.pixels.preprocess import Pixels
from vitrail.errors import ConfigError, UndecodableImage
from vitrail.machine import Precision
from vitrail.models.network import HasLayers
from vitrail.serving.batching import Batcher, Compute, Row, Run, choose_batch, choose_threads
from vitrail.serving.monitoring import Metrics
from vitrail.serving.settings import ServeSettings
from vitrail.weights.answers import AnyPrediction, finite
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.exported import ExportedNetwork, input_dtype, output_names

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
        self.threads: int = settings.batch_threads or (known.threads if known else self._threads(run, blank, compute))
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

    def _threads(self, run: Run, blank: np.ndarray, compute: Compute) -> int:
        """Return the number of compute threads of a batch that is alone. On a GPU it hardly matters."""
        is_on_cpu = self.bundle.device.type == "cpu"
        return choose_threads(run, blank, compute.threads) if is_on_cpu else compute.threads

    def _is_like(self, before: ServedModel | None) -> bool:
        """Return True if measurements of an earlier model hold for this one too."""
        if before is None or self.precision != before.precision:
            return False
        mine, theirs = self.bundle.network, before.bundle.network
        return type(mine) is type(theirs) and bool(mine.config == theirs.config)


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
        functions: dict[Task, Run] = {"classes": self._classes, "embedding": self._embedding}
        return functions[task]

    def _classes(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        logits = self._predictor.logits(self._bundle.inputs(pixels)).float().cpu()
        first, *further = output_names("logits", self._bundle.output)
        return {first: logits.numpy()} | {name: self._bundle.probabilities(logits).numpy() for name in further}

    def _embedding(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        return {"embedding": self._predictor.embed(self._bundle.inputs(pixels)).float().cpu().numpy()}
