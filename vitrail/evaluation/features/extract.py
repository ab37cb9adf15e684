"""Frozen features: the input of a network's head for every sample. They are computed once and kept in a cache."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from vitrail.data.batch import Skipped
from vitrail.data.pipeline import evaluation_batches
from vitrail.data.pixels.preprocess import Pixels, Preprocess
from vitrail.data.source import Source, evenly, subset, truth_of
from vitrail.data.targets import Targets
from vitrail.errors import DataError, Interrupted, SaveError, UndecodableImage, plural
from vitrail.evaluation.features import cache as feature_rows
from vitrail.evaluation.features.cache import Entry, Identity, Kept, data_fingerprint, weights_fingerprint
from vitrail.machine import Precision, resolve_precision
from vitrail.models.predictor import Predictor
from vitrail.processes.launch import Launch
from vitrail.settings import problem_of, raise_problems, typed
from vitrail.weights.answers import finite
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import ExportedNetwork

if TYPE_CHECKING:
    from vitrail.evaluation.outputs import Outputs

Layer = Literal["embedding", "head-inputs"]
"""Layer of a network whose outputs are the features. The two layers differ if the network has a hidden layer before its
head: the embedding is the input of the hidden layer, and the head's inputs are its output."""

Keep = Callable[
    [Int64[np.ndarray, " b"], Float32[np.ndarray, "b d"], Bool[np.ndarray, " b"], tuple[Skipped, ...]], None
]
"""Function that stores a batch. Its arguments are the samples' indices in the source, the features, a mask of the
decoded samples, and the skipped samples."""


@dataclass(frozen=True, eq=False)
class FeatureSet:
    """One feature vector and one target for each sample that could be decoded, in the order of the source."""

    features: Float32[np.ndarray, "n d"]
    """Feature vectors. An array from a file is memory-mapped and read-only, and may be larger than memory."""
    truth: Targets
    keys: tuple[str, ...]
    """Keys of the samples in the source."""
    classes: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()
    """Samples that could not be decoded. `features` has no row for a skipped sample."""
    precision: str = "float32"
    """Number format of the matrix products that computed the features."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def width(self) -> int:
        """Length of a feature vector."""
        return self.features.shape[1]


def existing_layer(network: nn.Module, layer: Layer) -> Layer:
    """Return `layer`, or "embedding" if the network has no hidden layer before its head. The two layers are then
    equal. Raise `ConfigError` for any other layer."""
    typed(Layer, layer, "layer")
    return layer if getattr(network.config, "head_hidden", 0) else "embedding"


def extract(how: Outputs, source: Source, layer: Layer = "embedding") -> FeatureSet:
    """Return a feature vector for every sample, as float32: the output of `network.embed`, or with the layer
    "head-inputs" the vectors that the head receives.

    The precision "auto" is bf16 if the processor has matrix units for it and the features of a few images hardly differ
    from float32 features (`SAFE_COSINE`). Otherwise it is float32, which is also used if float32 features are cached.
    Without a given batch size, batches become smaller if one takes longer than `RECORD_SECONDS`, so that a stop loses
    little.

    Features of the same weights, data, preprocessing and precision are memory-mapped from the cache, and new ones are
    stored there, unless the network was changed (`Outputs.usable_cache`). An interrupted extraction continues where it
    stopped. The resulting bytes are the same as without the interruption if the batch sizes are the same. If another
    process is computing the same features, this call waits for it. If the cache cannot be written, the features are
    computed in memory and not stored.

    Several processes that call this function with the same arguments share the work. Each process returns all features,
    even if other processes start late or die. The bytes do not depend on the number of processes. Without a cache, the
    processes exchange the features.

    Raise `ConfigError` for invalid settings, and the `DataError`s of the source. Raise `Interrupted` for a
    `KeyboardInterrupt` if the finished features are stored.
    """
    raise_problems([problem_of("batch_size", how.batch_size, int, {"least": 1})])
    precision = how.feature_precision or how.precision
    job = _Job(how, source, existing_layer(how.bundle.network, layer), how.batch_for(precision), precision)
    kept, cache = None, how.usable_cache
    if cache is not None:
        try:
            job, kept = _from_cache(job, cache)
        except SaveError as error:
            how.note(f"features are computed but not kept, because the cache cannot be written: {error}")
    if kept is None:
        job = job.with_safe_precision()
        kept = _exchanged(job) if how.processes.are_several else _in_memory(job)
    how.progress(len(source), len(source))
    rows = [row for row in range(len(source)) if row not in kept.skipped]
    return FeatureSet(
        kept.features,
        truth_of(source, rows),
        tuple(source.key(row) for row in rows),
        tuple(source.classes),
        tuple(Skipped(source.key(row), reason) for row, reason in sorted(kept.skipped.items())),
        str(resolve_precision(job.precision, how.bundle.device)),
    )


@dataclass(frozen=True)
class _Job:
    """The features to extract."""

    how: Outputs
    source: Source
    layer: Layer
    batch_size: int
    precision: Precision

    def with_safe_precision(self) -> _Job:
        """Return the job with the precision "auto" replaced by bf16 or float32, and print the choice."""
        if self.precision != "auto" or not len(self.source):
            return self
        is_exported = isinstance(self.how.bundle.network, ExportedNetwork)  # it has its own number format
        if is_exported or resolve_precision("auto", self.how.bundle.device) == "float32":
            return replace(self, precision="float32")
        cosines = compare_precisions(self.how.bundle, self.source, self.layer, at_most=self.batch_size)
        if not len(cosines):
            return replace(self, precision="float32")
        least = float(cosines.min())
        if not least >= SAFE_COSINE:  # a cosine that is not a number is not safe
            self.how.note(
                f"features are computed in float32, because bf16 changes them too much: the smallest cosine of "
                f"{plural(len(cosines), 'image')} is {least:.4f}, and {SAFE_COSINE} is needed"
            )
            return replace(self, precision="float32")
        self.how.note(
            f"features are computed in bf16, with a cosine of at least {SAFE_COSINE} to those in float32; use "
            "precision=float32 for the exact ones"
        )
        return replace(self, precision="bf16")

    @property
    def width(self) -> int:
        config = self.how.bundle.network.config
        return config.embed_width if self.layer == "embedding" else config.head_inputs

    def run(self, rows: Int64[np.ndarray, " n"], done: int, keep: Keep) -> None:
        """Compute the features of these rows of the source, in batches and in order. `done` is the number of rows that
        were computed before.
        """
        if not len(rows):
            return
        how, preprocess = self.how, self.how.bundle.preprocess
        predictor, size, first = Predictor(how.bundle.network, self.precision), self.batch_size, 0
        while first < len(rows):
            part = subset(self.source, rows[first:].tolist())
            begun = time.monotonic()
            with contextlib.closing(
                evaluation_batches(part, preprocess, batch_size=size, readers=how.readers)
            ) as batches:
                for batch in batches:
                    vectors = _vectors(predictor, preprocess.normalise(batch.to(predictor.device).images), self.layer)
                    values = finite(vectors.cpu()).numpy()
                    keep(rows[first : first + len(batch)], values, batch.valid.numpy(), batch.skipped)
                    first += len(batch)
                    how.progress(done + first, len(self.source))
                    seconds, begun = time.monotonic() - begun, time.monotonic()
                    if how.batch_size is None and size > 1 and seconds > feature_rows.RECORD_SECONDS:
                        # a batch that takes about half of the time
                        size = max(1, min(size // 2, int(size * feature_rows.RECORD_SECONDS / (2 * seconds))))
                        break

    def reason(self, row: int) -> str:
        """Return the reason why a sample cannot be decoded, or "" if it can be."""
        try:
            self.how.bundle.preprocess.pixels(self.source[row].image)
        except UndecodableImage as error:
            return str(error)
        return ""


def _in_memory(job: _Job, chosen: Int64[np.ndarray, " n"] | None = None) -> Kept:
    """Return the features of the chosen rows, which are consecutive. By default, all rows are chosen."""
    chosen = np.arange(len(job.source)) if chosen is None else chosen
    features = np.empty((len(chosen), job.width), np.float32)
    skipped: dict[int, str] = {}

    def keep(rows: np.ndarray, values: np.ndarray, valid: np.ndarray, reasons: tuple[Skipped, ...]) -> None:
        first = int(rows[0] - chosen[0]) - len(skipped)
        features[first : first + int(valid.sum())] = values[valid]
        skipped.update(zip(rows[~valid].tolist(), (item.reason for item in reasons), strict=True))

    job.run(chosen, 0, keep)
    return Kept(features[: len(features) - len(skipped)], skipped)


def _exchanged(job: _Job) -> Kept:
    """Return all features, of which each rank computes consecutive batches."""
    ranks, gather = job.how.processes.place, job.how.gather
    precision, batch_size = gather((job.precision, job.batch_size))[0]  # machines can differ in both
    job = replace(job, precision=precision, batch_size=batch_size)
    batches = math.ceil(len(job.source) / job.batch_size)
    first, end = (
        min(batches * rank // ranks.world * job.batch_size, len(job.source)) for rank in (ranks.rank, ranks.rank + 1)
    )
    mine = _in_memory(job, np.arange(first, end))
    everyone = gather((mine.features, mine.skipped))
    skipped = {row: reason for _, part in everyone for row, reason in part.items()}
    return Kept(np.concatenate([features for features, _ in everyone]), skipped)


def _from_cache(job: _Job, cache: Path) -> tuple[_Job, Kept | None]:
    """Return the job with its final precision, and features from the cache after computing the missing features. Return
    None instead of features if the file system has no locks."""
    note, bundle = job.how.note, job.how.bundle
    precisions = ("float32", "bf16") if job.precision == "auto" else (str(job.precision),)
    data, weights = data_fingerprint(job.source), weights_fingerprint(bundle.network)
    entries = {
        name: Entry(
            cache, Identity(data, weights, bundle.preprocess, name, job.layer), len(job.source), job.width, job.reason
        )
        for name in precisions
    }
    for name, entry in entries.items():
        try:
            if (kept := entry.read()) is not None:
                note(f"features of {len(kept.features):,} images read from the cache, {entry.folder}")
                return replace(job, precision=name), kept  # type: ignore[arg-type]
        except DataError as error:
            note(f"cached features are not used, and are computed again: {error}")
    try:
        job = job.with_safe_precision()
    except KeyboardInterrupt:
        raise Interrupted("stopped before more features were computed") from None
    return job, _computed(job, entries[str(job.precision)])


def _computed(job: _Job, entry: Entry) -> Kept | None:
    """Return the features of an entry after computing the missing ones. Return None if the file system has no
    locks."""
    note, ranks = job.how.note, job.how.processes.place
    with entry.locked() as lock:
        if lock is None:
            note(f"features are computed but not kept, because the disk of {entry.cache} does not support locks")
            return None
        if ranks.world > 1:
            lock.share()
            if entry.whole() is None:
                _fill(job, entry, ranks)
        lock.alone(
            lambda: note("another process is computing the same features; waiting for it") if ranks.world == 1 else None
        )
        if (kept := entry.adopt()) is not None:
            return kept
        _fill(job, entry, Launch())
        return entry.finish()


def _fill(job: _Job, entry: Entry, ranks: Launch) -> None:
    """Compute the missing rows in the batches of one rank. With n ranks, each rank has every n-th batch."""
    with contextlib.closing(entry.filling()) as partial:
        done, size = partial.done() > 0, job.batch_size
        firsts = range(0, len(done), size)[ranks.rank :: ranks.world]
        mine = [np.arange(first, min(first + size, len(done))) for first in firsts]
        rows = np.concatenate([rows[~done[rows]] for rows in mine]) if mine else np.arange(0)
        if not len(rows):
            return
        before = sum(map(len, mine)) - len(rows)
        if before:
            job.how.note(f"continuing: features of {before:,} of {len(done):,} images are in the cache")

        def keep(rows: np.ndarray, values: np.ndarray, valid: np.ndarray, reasons: tuple[Skipped, ...]) -> None:
            gaps = np.flatnonzero(np.diff(rows) != 1) + 1  # other ranks have the rows between
            for places in np.split(np.arange(len(rows)), gaps):
                partial.write(int(rows[places[0]]), values[places], valid[places])

        try:
            job.run(rows, before, keep)
        except KeyboardInterrupt:
            partial.record()
            kept = np.count_nonzero(partial.done())
            raise Interrupted(
                f"stopped: features of {kept:,} of {len(done):,} images are kept in {entry.cache}"
            ) from None


# The choice of the number format for the extraction of features: bfloat16 if that changes them little.


COMPARED = 8
"""Largest number of images whose features are compared."""

TRIED = 32
"""Largest number of images that are read to find images that can be decoded."""

SAFE_COSINE = 0.999
"""Smallest cosine between the bfloat16 and float32 features of an image with which bfloat16 is used."""


def compare_precisions(bundle: Bundle, source: Source, layer: Layer, *, at_most: int) -> Float32[Tensor, " images"]:
    """Return the cosines between bfloat16 and float32 features of up to eight images that are evenly spaced in the
    source, and at most `at_most`. There are none if no image can be decoded."""
    pixels = list(islice(_decoded(source, bundle.preprocess), min(COMPARED, at_most)))
    if not pixels:
        return torch.empty(0)
    exact, rounded = (
        _vectors(Predictor(bundle.network, name), bundle.inputs(pixels), layer) for name in ("float32", "bf16")
    )
    return cosine_similarity(exact, rounded, dim=1)


def _decoded(source: Source, preprocess: Preprocess) -> Iterator[Pixels]:
    """Yield the pixels of images that are evenly spaced in the source. Images that cannot be decoded are skipped."""
    spread = evenly(len(source), TRIED)
    first = spread[:: max(1, len(spread) // COMPARED)]
    for index in (*first.tolist(), *np.setdiff1d(spread, first).tolist()):
        with contextlib.suppress(UndecodableImage):
            yield preprocess.pixels(source[index].image)


def _vectors(predictor: Predictor, images: Float32[Tensor, "b c h w"], layer: Layer) -> Float32[Tensor, "b d"]:
    return (predictor.embed(images) if layer == "embedding" else predictor.head_inputs(images)).float()
