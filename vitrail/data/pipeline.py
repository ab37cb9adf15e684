"""From a source to batches of pixels: a fixed order, threads that read ahead, and a place to resume from (Grain)."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.errors import UndecodableImage

if TYPE_CHECKING:
    import grain

__all__ = ["Batch", "Skipped", "TrainingBatches", "default_threads", "evaluation_batches"]


@dataclass(frozen=True)
class Skipped:
    """A sample that could not be decoded."""

    key: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """Samples side by side. One that cannot be decoded keeps its place, with `valid` False and black pixels."""

    images: Shaped[Tensor, "b c h w"]
    """uint8 as they leave the pipeline, float once normalised."""
    labels: Int64[Tensor, " b"]
    """Class indices; -1 where there is no label."""
    valid: Bool[Tensor, " b"]
    samples: Int64[Tensor, " b"]
    """Each image's index in its source."""
    epochs: Int64[Tensor, " b"]
    """The pass over the data that each image belongs to; a batch may end one and begin the next."""
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Batch:
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in TENSORS})

    def chunks(self, count: int) -> list[Batch]:
        """The batch in `count` parts of nearly equal size, in order (fewer when it has fewer samples)."""
        parts = zip(*(getattr(self, name).tensor_split(min(count, len(self))) for name in TENSORS), strict=True)
        return [Batch(*part) for part in parts]


TENSORS = ("images", "labels", "valid", "samples", "epochs")


@dataclass(frozen=True)
class _Loader:
    """Makes one sample's part of a batch. Knows the position in the run, hence the epoch."""

    source: Source
    preprocess: Preprocess

    def __call__(self, position: int, index: int) -> dict[str, Any]:
        sample = self.source[index]
        size = (self.preprocess.channels, *self.preprocess.image_size)
        skipped = None
        try:
            pixels = self.preprocess.pixels(sample.image)
        except UndecodableImage as error:
            pixels = np.zeros(size, np.uint8)
            skipped = Skipped(sample.key, str(error))
        label = -1 if sample.label is None else sample.label
        return {
            "pixels": pixels, "label": label, "index": index, "epoch": position // len(self.source), "skipped": skipped,
        }  # fmt: skip


def _collate(parts: Sequence[dict[str, Any]]) -> Batch:
    def column(name: str) -> Tensor:
        return torch.tensor([part[name] for part in parts], dtype=torch.int64)

    return Batch(
        images=torch.from_numpy(np.stack([part["pixels"] for part in parts])),
        labels=column("label"),
        valid=torch.tensor([part["skipped"] is None for part in parts]),
        samples=column("index"),
        epochs=column("epoch"),
        skipped=tuple(part["skipped"] for part in parts if part["skipped"] is not None),
    )


def default_threads() -> int:
    """Threads that read and decode: one a core, at most 16."""
    return min(16, os.cpu_count() or 1)


class TrainingBatches(Iterator[Batch]):
    """Batches without end, every epoch in an order of its own.

    Which sample stands at a position of the run is a pure function of (seed, epoch, position): neither threads nor
    batch size have a say in it. `state` and `restore` stop and go on at any batch.
    """

    def __init__(
        self, source: Source, preprocess: Preprocess, *, batch_size: int, seed: int, threads: int | None = None
    ) -> None:
        threads = default_threads() if threads is None else threads
        # Grain seeds epoch e with seed + e, so runs whose seeds are neighbours would share orders: hash the seed first.
        order_seed = int.from_bytes(hashlib.blake2b(f"order {seed}".encode(), digest_size=4).digest(), "big")
        dataset = (
            _grain()
            .MapDataset.range(len(source))
            .shuffle(seed=order_seed)
            .repeat()
            .map_with_index(_Loader(source, preprocess))
            .batch(batch_size, batch_fn=_collate, drop_remainder=True)  # there is none, but Grain counts to infinity
        )
        self._batches = iter(dataset.to_iter_dataset(_read_ahead(threads)))

    def __next__(self) -> Batch:
        batch: Batch = next(self._batches)
        return batch

    def state(self) -> dict[str, Any]:
        """Where the iterator stands, as plain JSON values."""
        return dict(self._batches.get_state())

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on after the batch at which `state` was taken."""
        self._batches.set_state(state)


def evaluation_batches(
    source: Source, preprocess: Preprocess, *, batch_size: int, threads: int | None = None
) -> Iterator[Batch]:
    """Every sample once, in the source's order; the last batch may be smaller."""
    threads = default_threads() if threads is None else threads
    dataset = (
        _grain()
        .MapDataset.range(len(source))
        .map_with_index(_Loader(source, preprocess))
        .batch(batch_size, batch_fn=_collate)
    )
    return iter(dataset.to_iter_dataset(_read_ahead(threads)))


@functools.cache
def _grain() -> ModuleType:
    """Grain, imported at first use: prediction does without it, and it warns of a missing jax while it is imported."""
    logger = logging.getLogger("absl")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        return importlib.import_module("grain")
    finally:
        logger.disabled = was_disabled


def _read_ahead(threads: int) -> grain.ReadOptions:
    # An element here is a whole batch, so a buffer a little longer than the threads is plenty and bounds memory.
    return _grain().ReadOptions(num_threads=threads, prefetch_buffer_size=threads + 2 if threads else 0)
