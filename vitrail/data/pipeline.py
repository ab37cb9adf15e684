"""From a source to batches of pixels: a fixed order, readers ahead of it, and a place to resume from (Grain)."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from vitrail.data.pixels.decode import image_size_of
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Mixture, Source, Target, TargetKind, class_indices, target_kind
from vitrail.errors import ConfigError, UndecodableImage

if TYPE_CHECKING:
    import grain

__all__ = [
    "Batch",
    "Crop",
    "Ranks",
    "Readers",
    "Skipped",
    "TrainingBatches",
    "default_threads",
    "evaluation_batches",
    "skips_allowed",
]

Crop = Callable[[int, int, int, int], tuple[int, int, int, int]]
"""(epoch, sample, height, width) of an image -> top, left, height and width of the box of it to train on."""


@dataclass(frozen=True)
class Readers:
    """Who reads and decodes. None of it has a say in which samples a batch holds."""

    threads: int | None = None
    """In each process; by default one a core, at most 16. 0 reads when asked."""
    processes: int = 0
    """Further processes that share the batches; 0 reads in this one, whose threads decode side by side as well."""


@dataclass(frozen=True)
class Ranks:
    """Which part of every batch is read here, where several processes train or measure one network."""

    rank: int = 0
    world: int = 1


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
    """Class indices; -1 where there is no label, or where `targets` say more."""
    valid: Bool[Tensor, " b"]
    samples: Int64[Tensor, " b"]
    """Each image's index in its source. It stays on the CPU, as `epochs` does: what follows from it is drawn there."""
    epochs: Int64[Tensor, " b"]
    """The pass over the data that each image belongs to; a batch may end one and begin the next."""
    targets: Float[Tensor, "b k"] | None = None
    """The amount of each class if an image can have several or is mixed from others, or the numbers of regression, NaN
    for one that is unknown. None if `labels` hold everything that is known."""
    target_kind: TargetKind = "class"
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def counted(self) -> Bool[Tensor, " b"]:
        """True for each image that could be decoded and of which something is known."""
        if self.target_kind == "numbers" and self.targets is not None:
            return self.valid & ~self.targets.isnan().all(dim=1)
        return self.valid & (self.labels >= 0) if self.targets is None else self.valid

    def to(self, device: torch.device) -> Batch:
        """What the network and its loss see goes to the device. `samples` and `epochs` stay: augmentation draws its
        numbers from them here, where looking at the result makes no device wait."""
        moved = {}
        for name in ON_DEVICE:
            if (tensor := getattr(self, name)) is not None:
                if device.type == "cuda":
                    tensor = tensor.pin_memory()  # from where a copy takes place while the GPU computes
                moved[name] = tensor.to(device, non_blocking=True)
        return replace(self, **moved)

    def chunks(self, count: int) -> list[Batch]:
        """The batch in `count` parts of nearly equal size, in order (fewer when it has fewer samples)."""
        names = [item.name for item in fields(self) if isinstance(getattr(self, item.name), Tensor)]
        parts = zip(*(getattr(self, name).tensor_split(min(count, len(self))) for name in names), strict=True)
        return [Batch(**dict(zip(names, part, strict=True)), target_kind=self.target_kind) for part in parts]


ON_DEVICE = ("images", "labels", "valid", "targets")


@dataclass(frozen=True)
class _Loader:
    """Makes one sample's part of a batch. Knows the position in the run, hence the epoch."""

    source: Source
    preprocess: Preprocess
    kind: TargetKind
    crop: Crop | None = None
    first: int = 0
    """Of a mixture: where the part that the positions count begins, and its length."""
    length: int | None = None

    def __call__(self, position: int, index: int) -> dict[str, Any]:
        epoch = position // (self.length or len(self.source))
        place = self.first + index
        target = self.source.target(place)
        skipped = None
        try:
            sample = self.source[place]
            if self.crop is None:
                pixels = self.preprocess.pixels(sample.image)
            else:
                box = self.crop(epoch, place, *image_size_of(sample.image))
                pixels = self.preprocess.pixels(sample.image, box)
        except UndecodableImage as error:
            pixels = np.zeros((self.preprocess.channels, *self.preprocess.image_size), np.uint8)
            skipped = Skipped(self.source.key(place), str(error))
        return {
            "images": pixels, "valid": skipped is None, "samples": place, "epochs": epoch,
            "labels": target if isinstance(target, int) else -1, "targets": self._values(target), "skipped": skipped,
        }  # fmt: skip

    def _values(self, target: Target) -> np.ndarray | None:
        """Return the numbers of a target, or the amount of each class; None if its label holds everything."""
        if self.kind == "numbers":
            return np.array([math.nan] * len(self.source.classes) if target is None else target, np.float32)
        if self.kind != "classes":
            return None
        amounts = np.zeros(len(self.source.classes), np.float32)
        amounts[list(class_indices(target))] = 1
        return amounts


def _collate(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Arrays rather than tensors: these pass between processes through shared memory."""
    columns = {
        name: np.array([part[name] for part in parts], dtype)
        for name, dtype in (("labels", np.int64), ("valid", np.bool_), ("samples", np.int64), ("epochs", np.int64))
    }
    columns["images"] = np.stack([part["images"] for part in parts])
    if parts[0]["targets"] is not None:
        columns["targets"] = np.stack([part["targets"] for part in parts])
    return {**columns, "skipped": tuple(part["skipped"] for part in parts if part["skipped"] is not None)}


def _batch(columns: dict[str, Any], kind: TargetKind) -> Batch:
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in columns.items() if name != "skipped"}
    return Batch(**tensors, target_kind=kind, skipped=columns["skipped"])


def skips_allowed(images: int, share: float) -> int:
    """How many of so many images may be undecodable: this share, but up to three, or a tenth of fewer than 30, are
    always borne unless the share is 0."""
    return max(math.floor(share * images), min(3, images // 10)) if share else 0


def default_threads() -> int:
    """Threads that read and decode: one a core, at most 16."""
    return min(16, os.cpu_count() or 1)


class TrainingBatches(Iterator[Batch]):
    """Batches without end, every epoch in an order of its own.

    Which sample stands at a position of the run is a pure function of (seed, epoch, position): neither readers nor
    batch size have a say in it. Of every batch, each of `ranks.world` processes gets an equal part, so that together
    they see at each step what one would. `state` and `restore` stop and go on at any batch, with other readers and
    ranks if need be. Raises `ConfigError` where the ranks do not divide the batch.
    """

    def __init__(
        self,
        source: Source,
        preprocess: Preprocess,
        *,
        batch_size: int,
        seed: int,
        readers: Readers = Readers(),
        ranks: Ranks = Ranks(),
        crop: Crop | None = None,
    ) -> None:
        if batch_size % ranks.world:
            raise ConfigError(f"batch_size={batch_size} cannot be shared evenly by {ranks.world} processes")
        self._kind = target_kind(source)
        parts = source.parts if isinstance(source, Mixture) else ((0, len(source), 1.0),)
        orders = [
            _grain()
            .MapDataset.range(length)
            .shuffle(seed=_order_seed(seed, number))
            .repeat()
            .map_with_index(_Loader(source, preprocess, self._kind, crop, first, length))
            for number, (first, length, _) in enumerate(parts)
        ]
        order = orders[0] if len(orders) == 1 else _grain().MapDataset.mix(orders, [weight for _, _, weight in parts])
        mine = order[ranks.rank :: ranks.world] if ranks.world > 1 else order
        # There is no remainder to drop, but Grain counts to infinity.
        self._batches = mine.batch(batch_size // ranks.world, batch_fn=_collate, drop_remainder=True)
        self._readers = readers
        self._taken = 0
        self._iterator: Any = None

    def __next__(self) -> Batch:
        if self._iterator is None:
            ahead = self._batches[self._taken :] if self._taken else self._batches
            self._iterator = _read(ahead, self._readers)
            weakref.finalize(self, self._iterator.close)  # at the latest before Python takes its modules apart
        columns = next(self._iterator)
        self._taken += 1
        return _batch(columns, self._kind)

    def state(self) -> dict[str, int]:
        """Where the iterator stands, as plain JSON values."""
        return {"batches": self._taken}

    def restore(self, state: dict[str, int]) -> None:
        """Goes on after the batch at which `state` was taken."""
        self.close()
        self._taken = state["batches"]

    def close(self) -> None:
        """Ends the readers; the next batch starts them anew."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


def evaluation_batches(
    source: Source,
    preprocess: Preprocess,
    *,
    batch_size: int,
    readers: Readers = Readers(),
    ranks: Ranks = Ranks(),
) -> Iterator[Batch]:
    """Every sample once, in the source's order; the last batch may be smaller.

    Of several ranks each gets its share of the samples and none is read twice: one may get a sample, or a batch, less.
    """
    kind = target_kind(source)
    order = _grain().MapDataset.range(len(source)).map_with_index(_Loader(source, preprocess, kind))
    mine = order[ranks.rank :: ranks.world] if ranks.world > 1 else order
    batches = _read(mine.batch(batch_size, batch_fn=_collate), readers)
    try:
        for columns in batches:
            yield _batch(columns, kind)
    finally:
        batches.close()


def _order_seed(seed: int, part: int) -> int:
    """Grain seeds epoch e with seed + e, so runs whose seeds are neighbours would share orders: hash the seed first."""
    text = f"order {seed}" + (f" of part {part}" if part else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def _read(batches: grain.MapDataset, readers: Readers) -> Any:
    """An iterator over the batches, read ahead. An element is a whole batch, so a buffer a little longer than the
    readers is plenty, and bounds the memory."""
    threads = default_threads() if readers.threads is None else readers.threads
    options = _grain().ReadOptions(num_threads=threads, prefetch_buffer_size=threads + 2 if threads else 0)
    dataset = batches.to_iter_dataset(options)
    if readers.processes:
        dataset = dataset.mp_prefetch(_grain().MultiprocessingOptions(num_workers=readers.processes))
    return iter(dataset)


@functools.cache
def _grain() -> ModuleType:
    """Grain, imported at first use: prediction does without it, and it warns of a missing jax while it is imported."""
    logger = logging.getLogger("absl")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        return importlib.import_module("grain")
    finally:
        logger.disabled = was_disabled
