"""What a network says of every sample of a source, computed once for all figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor, nn

from vitrail.data.pipeline import Batch, Readers, Skipped, evaluation_batches
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.errors import BundleError, ConfigError
from vitrail.machine import Precision
from vitrail.models.fused import predicting
from vitrail.weights.bundle import OutputKind

__all__ = ["Predictions", "each_batch", "predict_all"]


@dataclass(frozen=True, eq=False)
class Predictions:
    """The logits of every image that could be decoded, in the order of the source, and what is true of it."""

    logits: Float32[np.ndarray, "n classes"]
    labels: Int64[np.ndarray, " n"]
    """Columns of `logits`; -1 where there is no label, or where `targets` say more."""
    targets: UInt8[np.ndarray, "n classes"] | None
    """1 for each class that holds, where an image can have several; else None."""
    keys: tuple[str, ...]
    """The samples' names in the source."""
    indices: Int64[np.ndarray, " n"]
    """The samples' numbers in the source."""
    classes: tuple[str, ...]
    """Names of the columns."""
    scores: OutputKind = "softmax"
    """How logits become probabilities."""
    skipped: tuple[Skipped, ...] = ()
    """What could not be decoded. It has no row here."""

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, chosen: Bool[np.ndarray, " n"]) -> Predictions:
        """Only the samples that are marked."""
        return replace(
            self,
            logits=self.logits[chosen],
            labels=self.labels[chosen],
            targets=None if self.targets is None else self.targets[chosen],
            keys=tuple(self.keys[row] for row in np.flatnonzero(chosen)),
            indices=self.indices[chosen],
        )

    def labelled(self) -> Predictions:
        """Only the samples whose label is known."""
        return self if self.targets is not None or (self.labels >= 0).all() else self.rows(self.labels >= 0)

    def restricted(self, columns: Sequence[int]) -> Predictions:
        """As if the network had these outputs only, in this order.

        A sample whose label is of another output has none afterwards. Raises `ConfigError` for a column that is not
        there, or that is given twice.
        """
        count = len(self.classes)
        if len(set(columns)) < len(columns) or not all(0 <= column < count for column in columns):
            raise ConfigError(f"columns {list(columns)[:10]} are not different numbers from 0 to {count - 1}")
        places = np.full(count + 1, -1, np.int64)  # the last is for the label -1
        places[list(columns)] = np.arange(len(columns))
        return replace(
            self,
            logits=self.logits[:, list(columns)],
            labels=places[self.labels],
            targets=None if self.targets is None else self.targets[:, list(columns)],
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
) -> Predictions:
    """The network's logits for every sample of a source, each computed once.

    They take 4 bytes for each image and class: 200 MB for 50,000 images of 1,000 classes. `on_skip` is called with each
    sample that cannot be decoded. Raises `ConfigError` for a network without a head, or with another number of outputs
    than the source has classes, and `BundleError` where outputs are not finite.
    """
    count = len(source.classes)
    logits = np.empty((len(source), count), np.float32)
    labels = np.empty(len(source), np.int64)
    indices = np.empty(len(source), np.int64)
    several: list[np.ndarray] = []
    filled = 0

    def take(batch: Batch, outputs: Tensor) -> None:
        nonlocal filled
        if outputs.shape[1] != count:
            raise ConfigError(f"the model has {outputs.shape[1]:,} outputs, and the data has {count:,} classes")
        valid = batch.valid.cpu()
        rows = slice(filled, filled + int(valid.sum()))
        logits[rows] = outputs.cpu()[valid].numpy()
        labels[rows] = batch.labels.cpu()[valid].numpy()
        indices[rows] = batch.samples[valid].numpy()
        if batch.targets is not None:
            several.append((batch.targets.cpu()[valid] > 0).numpy().astype(np.uint8))
        filled = rows.stop

    skipped = each_batch(
        network,
        source,
        preprocess,
        take,
        batch_size=batch_size,
        readers=readers,
        precision=precision,
        on_skip=on_skip,
    )
    logits, labels, indices = logits[:filled], labels[:filled], indices[:filled]
    keys = tuple(source.key(int(index)) for index in indices)
    if not (finite := np.isfinite(logits).all(axis=1)).all():
        raise BundleError(
            f"the model's outputs are not finite for {(~finite).sum():,} of {filled:,} images, like "
            f"{keys[int(finite.argmin())]!r}; its weights are damaged, or its training diverged"
        )
    targets = np.concatenate(several) if several else None
    return Predictions(logits, labels, targets, keys, indices, source.classes, scores, skipped)


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
) -> tuple[Skipped, ...]:
    """Hands every batch of a source, on the network's device, to `take`, with its logits in float32; what is skipped.

    Undecodable samples keep their places in a batch: `take` has to leave out what is not `batch.valid`. The network is
    left as it was. Raises `ConfigError` for a network without a head.
    """
    if getattr(network, "head", network) is None:
        raise ConfigError(
            "this model has no head, so it tells no classes apart; fine-tune it, or measure its features by linear, "
            "fewshot or knn"
        )
    device = next(network.parameters()).device
    skipped: list[Skipped] = []
    with predicting(network, precision):
        for batch in evaluation_batches(source, preprocess, batch_size=batch_size, readers=readers):
            skipped += batch.skipped
            if on_skip is not None:
                for item in batch.skipped:
                    on_skip(item)
            batch = batch.to(device)
            take(batch, network(preprocess.normalise(batch.images)).float())
    return tuple(skipped)
