"""The outputs of a network for every sample of a source, from which all metrics are computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn

from vitrail.cores import following_cores
from vitrail.data.batch import Batch, Skipped
from vitrail.data.pipeline import Ranks, Readers, evaluation_batches
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.data.targets import Targets
from vitrail.errors import BundleError, ConfigError
from vitrail.evaluation.truth import truth_of
from vitrail.machine import Precision
from vitrail.models.predictor import Predictor
from vitrail.processes.group import Processes
from vitrail.weights.bundle import OutputKind


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

    def restricted(self, columns: Sequence[int]) -> Predictions:
        """Return the predictions of a network that has only the outputs `columns`, in this order.

        A sample whose label is not among these outputs becomes unlabelled. Raise `ConfigError` for a column that does
        not exist or is repeated.
        """
        count = len(self.classes)
        if len(set(columns)) < len(columns) or not all(0 <= column < count for column in columns):
            raise ConfigError(f"columns {list(columns)[:10]} must be distinct numbers from 0 to {count - 1}")
        return replace(
            self,
            logits=self.logits[:, list(columns)],
            truth=self.truth.restricted(columns),
            classes=tuple(self.classes[column] for column in columns),
        )


def predict_all(
    network: nn.Module,
    source: Source,
    preprocess: Preprocess,
    *,
    scores: OutputKind = "softmax",
    batch_size: int = 256,
    readers: Readers = Readers(),
    precision: Precision = "float32",
    on_skip: Callable[[Skipped], None] | None = None,
    processes: Processes = Processes(),
    settle: Callable[[], None] = lambda: None,
) -> Predictions:
    """Return the network's outputs for every sample of a source.

    The outputs take 4 bytes of memory per image and class. `on_skip` is called with each sample that cannot be decoded.
    Raise `ConfigError` if the network has no head, or if its number of outputs is not the source's number of classes.
    Raise `BundleError` if an output is not finite.
    """
    rows = Rows(source)
    skipped = each_batch(
        network,
        source,
        preprocess,
        rows.take,
        batch_size=batch_size,
        readers=readers,
        precision=precision,
        on_skip=on_skip,
        processes=processes,
        settle=settle,
    )
    return rows.predictions(scores, skipped)


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
        if outputs.shape[1] != count:
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


def each_batch(
    network: nn.Module,
    source: Source,
    preprocess: Preprocess,
    take: Callable[[Batch, Tensor], None],
    *,
    batch_size: int,
    readers: Readers,
    precision: Precision,
    on_skip: Callable[[Skipped], None] | None,
    processes: Processes = Processes(),
    settle: Callable[[], None] = lambda: None,
) -> tuple[Skipped, ...]:
    """Call `take` with every batch of a source, on the network's device, and with its outputs in float32.

    Samples that cannot be decoded keep their rows in a batch, so `take` has to skip rows that are not `batch.valid`.
    Return the samples that could not be decoded. The network is not changed. Raise `ConfigError` for a network without
    a head. The number of compute threads follows the cores that other programs leave, except in float32.

    Several processes share the batches. Each of them calls `take` with all batches and outputs in the order of the
    source, so all of them measure the same as one process would. Their batches have no pixels (images of 0 x 0). Each
    process calls `settle` between the computation of its outputs and the exchange of them.
    """
    if getattr(network, "head", network) is None:
        raise ConfigError(
            "this model has no head, so it cannot classify; fine-tune it, or measure its features by linear, "
            "fewshot or knn"
        )
    predictor = Predictor(network, precision)
    skipped: list[Skipped] = []
    ranks = Ranks(processes.rank, processes.world)
    batches = evaluation_batches(source, preprocess, batch_size=batch_size, readers=readers, ranks=ranks)

    def outputs_of(batch: Batch) -> tuple[Batch, Tensor]:
        batch = batch.to(predictor.device)
        return batch, predictor.logits(preprocess.normalise(batch.images)).float()

    found: Iterator[tuple[Batch, Tensor]] = map(outputs_of, batches)
    if processes.are_several:
        found = _of_all(found, math.ceil(len(source) / batch_size), predictor.device, processes, settle)
    with following_cores(predictor.precision, predictor.device) as adapt_threads:
        for batch, outputs in found:
            skipped += batch.skipped
            if on_skip is not None:
                for item in batch.skipped:
                    on_skip(item)
            take(batch, outputs)
            adapt_threads()
    return tuple(skipped)


def _of_all(
    found: Iterator[tuple[Batch, Tensor]],
    count: int,
    device: torch.device,
    processes: Processes,
    settle: Callable[[], None],
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the `count` batches of all processes in order, with their outputs and without their pixels. `found` has the
    batches of this process."""
    for _ in range(math.ceil(count / processes.world)):
        mine = next(found, None)
        if mine is not None:
            batch, outputs = mine
            bare = replace(batch, images=batch.images[:, :, :0, :0]).to(torch.device("cpu"))
            mine = bare, outputs.cpu()
        settle()
        for pair in processes.gather(mine):
            if pair is not None:
                yield pair[0].to(device), pair[1].to(device)
