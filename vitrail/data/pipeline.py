"""Batches of pixels from a source, read ahead by Grain in a fixed order that can be resumed."""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import logging
import math
import os
import re
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.batch import Batch, KeptPixels, Loader, LocalViews, Rows, as_batch, collate
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, parts_of, target_kind
from vitrail.errors import ProcessError
from vitrail.processes.launch import Launch
from vitrail.settings import raise_problems

if TYPE_CHECKING:
    import grain


SHARED_MEMORY = "/dev/shm"
"""The folder of the shared memory. Containers often limit it to 64 MB."""

NEVER = 1 << 62
"""Least size in bytes of arrays that pass through shared memory, if none should."""


@dataclass(frozen=True)
class Readers:
    """Worker threads and processes that read and decode. They do not influence which samples a batch holds."""

    threads: int | None = None
    """Threads per process. By default one per core, at most 16. With 0 threads, samples are read when a batch is
    requested."""
    processes: int = 0
    """Worker processes for reading and decoding. By default there are none, and the threads of this process read the
    batches."""


@dataclass(frozen=True)
class _Key:
    """Makes the epoch and the index of a sample without reading it."""

    first: int
    length: int

    def __call__(self, position: int, index: int) -> tuple[int, int]:
        return position // self.length, self.first + index


@dataclass(frozen=True)
class _WithPartner:
    """Adds the first sample of the next process to a process's part of a batch, and the key of the batch's first
    sample. Mixup and CutMix need both."""

    partners: Any
    """The rows of the partner by the number of the batch."""
    first_keys: Any

    def __call__(self, number: int, columns: dict[str, Any]) -> dict[str, Any]:
        partner = collate([self.partners[number]])
        joined = {name: np.concatenate([value, partner[name]]) for name, value in columns.items() if name != "skipped"}
        # The other process reports a partner that cannot be decoded.
        return {
            **joined,
            "skipped": columns["skipped"],
            "partners": len(partner["labels"]),
            "first_key": self.first_keys[number],
        }


@dataclass(frozen=True)
class Stage:
    """Consecutive training batches with the same image size and batch size."""

    preprocess: Preprocess
    batch_size: int
    first: int = 0
    """Number of the stage's first batch, counted from 0."""
    local: LocalViews | None = None
    """Local views of each sample, whose size can follow that of the images."""


def check_divisible(batch_sizes: Iterable[int], world: int) -> None:
    """Raise `ConfigError` if the number of processes does not divide one of the batch sizes."""
    raise_problems(
        f"batch_size={batch_size} is not a multiple of the number of processes ({world}); choose a multiple"
        for batch_size in batch_sizes
        if batch_size % world
    )


def skips_allowed(images: int, share: float) -> int:
    """Return the number of images that may fail to decode: the fraction `share` of `images`. Unless `share` is 0, at
    least three failures are allowed, or a tenth of the images if there are fewer than 30."""
    return max(math.floor(share * images), min(3, images // 10)) if share else 0


def queue_bytes(preprocess: Preprocess, batch_size: int, readers: Readers) -> int:
    """Return the bytes of the batches that are read ahead: those in the buffer, one that is stacked from its images,
    and the one in use."""
    ahead = _buffer_size(readers) * max(readers.processes, 1) + 2
    return ahead * batch_size * preprocess.channels * math.prod(preprocess.image_size)


def default_threads() -> int:
    """Return the number of threads that read and decode: one per core, at most 16."""
    return min(16, os.cpu_count() or 1)


class TrainingBatches(Iterator[Batch]):
    """An endless iterator over training batches, with a new order in every epoch.

    The sample at a position of the run is a pure function of (seed, epoch, position). Readers and batch size do not
    influence it. Each of `ranks.world` processes gets an equal part of every batch, in consecutive rows, so that
    together they see the same samples at each step as one process would. `state` and `restore` resume from any batch,
    even with a different number of readers or ranks. A batch has `batch_size` samples of the current stage, with
    `rows.views` rows each. From the first batch of each of the `stages` on, batches have the image size, the batch size
    and the local views (`Batch.local`) of that stage; the order of the samples does not change. With `keep`, each image
    is decoded once, and its pixels stay in memory for later epochs, so the source must return the same image each time.
    With random boxes, local views or worker processes, `keep` has no effect. Raise `ConfigError` if a batch size is not
    divisible by the number of ranks.
    """

    def __init__(
        self,
        source: Source,
        stages: Sequence[Stage],
        *,
        seed: int,
        readers: Readers = Readers(),
        ranks: Launch = Launch(),
        rows: Rows = Rows(),
        keep: bool = False,
    ) -> None:
        check_divisible([stage.batch_size for stage in stages], ranks.world)
        self._source, self._stages, self._seed = source, tuple(stages), seed
        self._readers, self._ranks, self._rows, self._keep = readers, ranks, rows, keep
        self._has_partners = rows.partners and ranks.world > 1
        self._kind = target_kind(source)
        self._kept: tuple[Stage, KeptPixels] | None = None
        self._taken = 0
        self._iterator: Any = None

    def __next__(self) -> Batch:
        if any(stage.first == self._taken for stage in self._stages):
            self.close()
        if self._iterator is None:
            self._iterator = _read(self._ahead(), self._readers, self._bytes_ahead())
            weakref.finalize(self, self._iterator.close)  # closed at the latest before Python unloads its modules
        columns = next(self._iterator)
        self._taken += 1
        return as_batch(columns, self._kind)

    def _ahead(self) -> Any:
        """Return all batches that follow, with the settings of the current stage."""
        number = max(number for number, stage in enumerate(self._stages) if stage.first <= self._taken)
        stage, world = self._stages[number], self._ranks.world
        before = sum(
            (after.first - earlier.first) * earlier.batch_size
            for earlier, after in itertools.pairwise(self._stages[: number + 1])
        )
        loader = functools.partial(
            Loader, self._source, stage.preprocess, self._kind, self._rows, stage.local, True,
            seed=self._seed, kept=self._pixels_of(stage),
        )  # fmt: skip
        order = self._order(loader)[before:]
        size, rank = stage.batch_size // world, self._ranks.rank
        # Grain's endless data set has no remainder, but without drop_remainder it would look for one.
        batches = order.batch(size, batch_fn=collate, drop_remainder=True)[rank::world]
        if self._has_partners:
            partners = order[(rank + 1) % world * size :: stage.batch_size]
            batches = batches.map_with_index(_WithPartner(partners, self._order(_Key)[before :: stage.batch_size]))
        done = self._taken - stage.first
        return batches[done:] if done else batches

    def _bytes_ahead(self) -> int:
        """Return the bytes of the batches that are read ahead, at most, in any stage."""
        found = []
        for stage in self._stages:
            size = stage.batch_size // self._ranks.world + self._has_partners
            whole = queue_bytes(stage.preprocess, size * self._rows.views, self._readers)
            local = stage.local
            more = 0 if local is None else queue_bytes(local.preprocess, size * local.count, self._readers)
            found.append(whole + more)
        return max(found)

    def _pixels_of(self, stage: Stage) -> KeptPixels | None:
        """Return the memory for the pixels of a stage, or None if they are not kept. The memory of the stage before is
        freed."""
        if not self._keep or self._rows.crop is not None or stage.local is not None or self._readers.processes:
            self._kept = None
        elif self._kept is None or self._kept[0] != stage:
            self._kept = stage, KeptPixels(len(self._source), stage.preprocess)
        return self._kept and self._kept[1]

    def _order(self, make: Callable[[int, int], Callable[[int, int], Any]]) -> Any:
        """Return what functions make of all samples in the order of the run. `make` receives the first sample and the
        length of a part of the source, and returns a function of the position and of the index in the part."""
        parts = parts_of(self._source)
        texts = (f"order {self._seed}" + (f" of part {part}" if part else "") for part in range(len(parts)))
        # Grain seeds epoch e with seed + e, so runs with consecutive seeds would share orders without the hash.
        seeds = (int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") for text in texts)
        orders = [
            _grain().MapDataset.range(length).shuffle(seed=seed).repeat().map_with_index(make(first, length))
            for seed, (first, length, _) in zip(seeds, parts, strict=True)
        ]
        if len(orders) == 1:
            return orders[0]
        return _grain().MapDataset.mix(orders, [weight for _, _, weight in parts])

    def use_readers(self, readers: Readers) -> None:
        """Read the next batch and all later ones with other threads or processes. The batches stay the same."""
        if readers != self._readers:
            self.close()
            self._readers = readers

    def state(self) -> dict[str, int]:
        """Return the position of the iterator as plain JSON values."""
        return {"batches": self._taken}

    def restore(self, state: dict[str, int]) -> None:
        """Continue after the batch at which `state` was taken."""
        self.close()
        self._taken = state["batches"]

    def close(self) -> None:
        """Stop the readers. The next batch starts them again."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


def evaluation_batches(
    source: Source,
    preprocess: Preprocess,
    *,
    batch_size: int,
    readers: Readers = Readers(),
    ranks: Launch = Launch(),
) -> Generator[Batch, None, None]:
    """Yield every sample once, in the order of the source. The last batch may be smaller.

    Each rank reads different batches: the first rank reads the first batch, and so on in turn.
    """
    kind = target_kind(source)
    order = _grain().MapDataset.range(len(source)).map_with_index(Loader(source, preprocess, kind))
    own = order.batch(batch_size, batch_fn=collate)[ranks.rank :: ranks.world]
    batches = _read(own, readers, queue_bytes(preprocess, batch_size, readers))
    try:
        for columns in batches:
            yield as_batch(columns, kind)
    finally:
        batches.close()


def _read(batches: grain.MapDataset, readers: Readers, ahead: int) -> Any:
    """Return an iterator that reads whole batches ahead, which take `ahead` bytes.

    The buffer holds a few more batches than there are readers. This is enough to keep the readers busy and limits
    memory. Worker processes pass batches through shared memory if it is large enough, and otherwise through pipes.
    """
    threads = default_threads() if readers.threads is None else readers.threads
    options = _grain().ReadOptions(num_threads=threads, prefetch_buffer_size=_buffer_size(readers))
    dataset = batches.to_iter_dataset(options)
    if readers.processes:
        dataset = dataset.mp_prefetch(_grain().MultiprocessingOptions(num_workers=readers.processes))
        if not _fits_shared_memory(ahead):
            options = _grain().experimental.DatasetOptions(min_shm_size=NEVER)
            dataset = _grain().experimental.WithOptionsIterDataset(dataset, options)
        return _OfWorkers(iter(dataset))
    return iter(dataset)


class _OfWorkers(Iterator[Any]):
    """The batches of worker processes. Raises `ProcessError` if they cannot start, or if one of them was killed."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except OSError as error:  # of the locks of multiprocessing
            raise ProcessError(
                f"worker processes that read images cannot start: {error.strerror}; they need shared memory in "
                f"{SHARED_MEMORY}. Use no --processes and more --threads, or start the container with a larger "
                "--shm-size"
            ) from error
        except RuntimeError as error:
            code = re.search(r"Worker process .* exit code (-?\d+)", str(error))
            if code is None:
                raise
            raise ProcessError(
                f"a worker process that reads images has ended with exit code {code[1]}, for example because the "
                f"memory or the shared memory in {SHARED_MEMORY} is full; use fewer --processes, or none and more "
                "--threads, or start the container with a larger --shm-size. A program that calls vitrail.train needs "
                'a line `if __name__ == "__main__":` before the call, because each worker process imports the program'
            ) from error

    def close(self) -> None:
        self._batches.close()


def _fits_shared_memory(ahead: int) -> bool:
    """Return True if the shared memory has room for twice this number of bytes. Batches of training and of an
    evaluation can be read ahead at the same time. Systems without a folder for shared memory have no such limit."""
    try:
        state = os.statvfs(SHARED_MEMORY)
    except OSError:
        return True
    return 2 * ahead <= state.f_bavail * state.f_frsize


def _buffer_size(readers: Readers) -> int:
    threads = default_threads() if readers.threads is None else readers.threads
    return threads + 2 if threads else 0


@functools.cache
def _grain() -> ModuleType:
    """Import Grain, and return the module.

    It is imported at first use, because prediction does not need it and its import warns that jax is missing.
    """
    logger, handlers = logging.getLogger("absl"), [*logging.root.handlers]
    was_disabled, logger.disabled = logger.disabled, True
    try:
        module = importlib.import_module("grain")
    finally:
        logger.disabled = was_disabled
        logging.root.handlers[:] = handlers  # with the one that absl adds, a program's logging.basicConfig does nothing
    flags: Any = importlib.import_module("absl.flags")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # where jax is installed, worker processes read a flag of Grain
    return module
