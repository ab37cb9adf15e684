"""A pass of a model over a source, and the outputs for every sample, from which all metrics are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from vitrail.data.batch import Batch, Skipped
from vitrail.data.pipeline import Ranks, Readers
from vitrail.data.source import Source, truth_of
from vitrail.data.targets import Targets
from vitrail.errors import BundleError, ConfigError
from vitrail.machine import Precision
from vitrail.models.cost import prediction_batch
from vitrail.processes.group import Processes
from vitrail.weights.answers import OutputKind
from vitrail.weights.bundle import Bundle, is_described


@dataclass(eq=False)
class Pass:
    """A model, and the way in which its outputs for all samples of a source are computed."""

    bundle: Bundle
    _: KW_ONLY
    batch_size: int | None = 256
    """Images per batch. With None, it follows from the network's arithmetic and memory."""
    readers: Readers = Readers()
    precision: Precision = "float32"
    """Number format of matrix products."""
    feature_precision: Precision | None = None
    """Number format for features. The default is `precision`."""
    cache: Path | None = None
    """Folder that stores features between runs. With None, features are not stored."""
    on_progress: Callable[[int, int], None] | None = None
    """Function that receives the numbers of finished samples and of all samples."""
    on_note: Callable[[str], None] | None = None
    """Function that receives messages for the user."""
    on_skip: Callable[[Skipped], None] | None = None
    """Function that receives each sample that cannot be decoded."""
    processes: Processes = Processes()
    """Processes that share the work. Each of them has all results. Features are shared through the cache if there is
    one."""
    settle: Callable[[], None] | None = None
    """Function for processes that can only compute together. Each of them calls it when it has computed its images, and
    before they exchange anything."""

    def batch_for(self, precision: Precision) -> int:
        """Return the batch size, which follows from the network's arithmetic and memory unless it was given."""
        if self.batch_size is not None:
            return self.batch_size
        bundle = self.bundle
        return prediction_batch(bundle.network, bundle.preprocess.image_size, bundle.device, precision)

    @cached_property
    def usable_cache(self) -> Path | None:
        """The folder `cache`. It is None, with a note, if the network was changed, because the features in the folder
        are found by the config and the weights. The comparison of the network computes images, so it is made once."""
        if self.cache is None or is_described(self.bundle.network):
            return self.cache
        self.note(
            "features are computed and not taken from the cache, because the network was changed: its config and its "
            "weights alone do not determine its outputs"
        )
        return None

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.processes.rank, self.processes.world)

    def gather(self, value: Any) -> list[Any]:
        """Exchange a value with all processes, and return the values of all."""
        if self.settle is not None:
            self.settle()
        return self.processes.gather(value)

    def progress(self, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(done, total)

    def note(self, text: str) -> None:
        if self.on_note is not None:
            self.on_note(text)

    def skip(self, item: Skipped) -> None:
        if self.on_skip is not None:
            self.on_skip(item)


@dataclass(frozen=True, eq=False)
class Predictions:
    """The network's outputs and the targets for every sample that could be decoded, in the order of the source."""

    logits: Float32[np.ndarray, "n outputs"]
    truth: Targets
    keys: tuple[str, ...]
    """Keys of the samples in the source."""
    indices: Int64[np.ndarray, " n"]
    """Indices of the samples in the source."""
    classes: tuple[str, ...]
    """Names of the outputs."""
    scores: OutputKind = "softmax"
    """Meaning of the outputs."""
    skipped: tuple[Skipped, ...] = ()
    """Samples that could not be decoded. They have no row."""

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, chosen: Bool[np.ndarray, " n"]) -> Predictions:
        """Return the predictions of the chosen samples. `chosen` is a mask, with True for each of them."""
        return replace(
            self,
            logits=self.logits[chosen],
            truth=self.truth.rows(chosen),
            keys=tuple(self.keys[row] for row in np.flatnonzero(chosen)),
            indices=self.indices[chosen],
        )

    def labelled(self) -> Predictions:
        """Return the predictions of the samples whose target is known."""
        known = self.truth.known
        return self if known.all() else self.rows(known)


class Rows:
    """Collects the outputs for a source from its batches, which come in order."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.logits = np.empty((len(source), len(source.classes)), np.float32)
        self.indices = np.empty(len(source), np.int64)
        self.filled = 0

    def take(self, batch: Batch, outputs: Tensor) -> None:
        """Add a batch. Raise `ConfigError` if its number of outputs is not the source's number of classes."""
        count = self.logits.shape[1]
        if outputs.shape[1:] != (count,):
            raise ConfigError(f"the model has {outputs.shape[1]:,} outputs, but the data has {count:,} classes")
        valid = batch.valid.cpu()
        rows = slice(self.filled, self.filled + int(valid.sum()))
        self.logits[rows] = outputs.cpu()[valid].numpy()
        self.indices[rows] = batch.samples[valid].cpu().numpy()
        self.filled = rows.stop

    def predictions(self, scores: OutputKind, skipped: tuple[Skipped, ...]) -> Predictions:
        """Return the collected outputs. Raise `BundleError` if an output is not finite."""
        logits, indices = self.logits[: self.filled], self.indices[: self.filled]
        keys = tuple(self.source.key(index) for index in indices.tolist())
        if not (finite := np.isfinite(logits).all(axis=1)).all():
            raise BundleError(
                f"the model's outputs are not finite for {(~finite).sum():,} of {len(logits):,} images, such as "
                f"{keys[int(finite.argmin())]!r}; its weights are damaged, or its training diverged"
            )
        truth = truth_of(self.source, indices.tolist())
        return Predictions(logits, truth, keys, indices, self.source.classes, scores, skipped)
