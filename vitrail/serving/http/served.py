"""A model that is served: its name, its hash, its outputs, and the batches that compute them."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch

from vitrail.data.pixels.decode import image_size_of
from vitrail.data.pixels.preprocess import Pixels
from vitrail.errors import ConfigError, UndecodableImage
from vitrail.machine import Precision
from vitrail.models.predictor import Predictor
from vitrail.serving.http.batching import Batcher, Compute, choose_batch
from vitrail.serving.http.metrics import Metrics
from vitrail.serving.http.settings import ServeSettings
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.exported.description import output_names
from vitrail.weights.exported.network import ExportedNetwork

__all__ = ["ServedModel", "Task"]

Task = Literal["classes", "embedding"]
"""What is computed of an image: its classes (or the numbers of a regression), or its embedding."""


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
    ) -> None:
        """Prepare a model, and measure the largest batch unless the settings have one. Raise `ConfigError` for an
        exported file of tokens, and for a precision that the model cannot compute in. `compute` computes batches."""
        self.name = name
        self.bundle = bundle
        self.sha256 = weights_sha256(bundle.network)
        self._max_pixels = settings.max_pixels
        self._predictor = Predictor(bundle.network, precision or bundle.precision)
        runs = {"classes": self._classes, "embedding": self._embedding}
        self.tasks = self._find_tasks()
        blank = np.zeros((bundle.preprocess.channels, *bundle.preprocess.image_size), self.dtype)
        for task in self.tasks:
            runs[task](blank[None])  # the first call of a network is slow, and shows whether the network can be used
        largest = settings.max_batch or choose_batch(runs[self.tasks[0]], blank)
        self.batchers = {
            task: Batcher(
                runs[task],
                compute,
                largest=largest,
                seconds=settings.deadline_seconds,
                on_batch=metrics.batches(name, task),
            )
            for task in self.tasks
        }

    @property
    def precision(self) -> str:
        """Number format of matrix products."""
        return self._predictor.precision

    @property
    def dtype(self) -> type[np.uint8] | type[np.float32]:
        """Number format of pixels."""
        return np.float32 if self.bundle.preprocess.resampler == "tensorflow" else np.uint8

    def outputs(self, task: Task) -> dict[str, int]:
        """Return the lengths of the outputs of a task, by their names."""
        if task == "embedding":
            return {"embedding": self.bundle.network.config.embed_width}
        return dict.fromkeys(output_names("logits", self.bundle.output), len(self.bundle.classes))

    def pixels(self, image: bytes) -> Pixels:
        """Return the pixels of an encoded image. Raise `UndecodableImage`."""
        height, width = image_size_of(image)
        if height * width > self._max_pixels:
            raise UndecodableImage(f"claims {width} x {height} pixels; this server accepts {self._max_pixels:,}")
        return self.bundle.preprocess.pixels(image)

    def _find_tasks(self) -> tuple[Task, ...]:
        network: Any = self.bundle.network
        contents = network.exported.contents if isinstance(network, ExportedNetwork) else None
        if contents == "tokens":
            raise ConfigError(f"{network.path} returns tokens, which the server does not send; export the embedding")
        possible: dict[Task, bool] = {"classes": bool(self.bundle.classes), "embedding": contents != "logits"}
        return tuple(task for task in get_args(Task) if possible[task])

    def _classes(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        logits = self._predictor.logits(self._images(pixels)).float().cpu()
        if self.bundle.output == "numbers":
            return {"numbers": logits.numpy()}
        probabilities = logits.softmax(dim=1) if self.bundle.output == "softmax" else logits.sigmoid()
        return {"logits": logits.numpy(), "probabilities": probabilities.numpy()}

    def _embedding(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        return {"embedding": self._predictor.embed(self._images(pixels)).float().cpu().numpy()}

    def _images(self, pixels: np.ndarray) -> torch.Tensor:
        return self.bundle.preprocess.normalise(torch.from_numpy(pixels).to(self.bundle.device))
