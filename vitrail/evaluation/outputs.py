"""Features and predictions of a model. Each is computed once and shared by all evaluators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from vitrail.cores import share_cores
from vitrail.data.batch import Batch, Skipped
from vitrail.data.pipeline import Readers, evaluation_batches
from vitrail.data.source import Source, image_of, truth_of
from vitrail.data.targets import Target, Targets
from vitrail.errors import BundleError, ConfigError, DataError
from vitrail.evaluation.features.extract import FeatureSet, Layer, existing_layer, extract
from vitrail.machine import Precision
from vitrail.models.cost import prediction_batch
from vitrail.models.predictor import Predictor
from vitrail.processes.group import Processes
from vitrail.settings import Checked
from vitrail.weights.answers import AnyPrediction, OutputKind
from vitrail.weights.bundle import Bundle, is_described

Take = Callable[[Batch, Tensor], None]
Stored = TypeVar("Stored")


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


class Answered(NamedTuple):
    """The images of a source to which a model of boxes or masks has given an answer."""

    indices: list[int]
    """Indices in the source of the images that can be used."""
    judged: list[Any]
    """For each of these images, the value that an evaluator computed from its target and the model's answer."""
    is_finite: bool
    """False if an output of the model is not finite. The lists are then empty."""


@dataclass(eq=False)
class Outputs(Checked):
    """A model with its features and predictions for all samples of a source, and the way in which they are computed.
    They are computed at first use and kept. After the weights have changed, call `forget`. Raises `ConfigError` for
    values of another type."""

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
    keep: int = 0
    """Number of values up to which `each_batch` stores the outputs for a source."""
    skipped: dict[str, str] = field(default_factory=dict, init=False)
    """Reasons of skipped samples by their keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Each result is stored with its source, because Python can reuse the id of a freed source.
        self._stored: dict[tuple[int, str], tuple[Source, Any]] = {}
        self._told: set[str] = set()

    def _stored_or(self, source: Source, name: str, compute: Callable[[], Stored]) -> Stored:
        """Return what is stored for a source under a name, or else what `compute` returns, which is then stored."""
        if (id(source), name) not in self._stored:
            self._stored[id(source), name] = source, compute()
        found: Stored = self._stored[id(source), name][1]
        return found

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

    def gather(self, value: Any) -> list[Any]:
        """Exchange a value with all processes, and return the values of all."""
        if self.settle is not None:
            self.settle()
        return self.processes.gather(value)

    def progress(self, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(done, total)

    def note(self, text: str) -> None:
        """Pass on a note, once for all sources."""
        if self.on_note is not None and text not in self._told:
            self._told.add(text)
            self.on_note(text)

    def skip(self, item: Skipped) -> None:
        self.skipped[item.key] = item.reason
        if self.on_skip is not None:
            self.on_skip(item)

    def has_features(self, source: Source, layer: Layer = "embedding") -> bool:
        """Return True if the features of a source have been computed."""
        return (id(source), existing_layer(self.bundle.network, layer)) in self._stored

    def forget(self) -> None:
        """Free all features and predictions, before other data is evaluated or after the weights have changed."""
        self.skipped, self._stored = {}, {}

    def features(self, source: Source, layer: Layer = "embedding") -> FeatureSet:
        """Return the features of every sample: the outputs of a layer. Raise the errors of `extract`."""

        def compute() -> FeatureSet:
            found = extract(self, source, layer)
            for item in found.skipped:
                self.skip(item)
            return found

        return self._stored_or(source, existing_layer(self.bundle.network, layer), compute)

    def predictions(self, source: Source) -> Predictions:
        """Return the outputs of the head for every sample, which take 4 bytes of memory per image and class.

        The source must have the model's classes. Raise `ConfigError` if the network has no head, or if its number of
        outputs is not the source's number of classes. Raise `BundleError` if an output is not finite.
        """

        def compute() -> Predictions:
            rows = Rows(source)
            skipped = self._each_batch(source, rows.take)
            return rows.predictions(self.bundle.output, skipped)

        return self._stored_or(source, "predictions", compute)

    def each_batch(self, source: Source, take: Take) -> tuple[Skipped, ...]:
        """Call `take` with every batch of a source, on the network's device, and with the head's outputs in float32.

        Samples that cannot be decoded keep their rows in a batch, so `take` has to skip rows that are not
        `batch.valid`. Return the samples that could not be decoded. The network is not changed. Raise `ConfigError` for
        a network without a head. The outputs are stored for `kept` if they have at most `keep` values.

        Several processes share the batches. Each of them calls `take` with all batches and outputs in the order of the
        source, so all of them measure the same as one process would. Their batches have no pixels (images of 0 x 0).
        """
        rows = Rows(source) if self.keep and len(source) * len(source.classes) <= self.keep else None

        def both(batch: Batch, outputs: Tensor) -> None:
            nonlocal rows
            take(batch, outputs)
            if rows is not None and outputs.shape[1:] != (len(source.classes),):
                rows = None  # the outputs of this task do not belong to the classes one by one
            elif rows is not None:
                rows.take(batch, outputs)

        skipped = self._each_batch(source, both)
        if rows is not None:
            self._stored[id(source), "rows"] = source, (rows, skipped)
        return skipped

    def answered(self, source: Source, judge: Callable[[Target, AnyPrediction], Any]) -> Answered:
        """Return what `judge` makes of the target of each image of a source that can be used, and of the answer of a
        model of boxes or masks. An image is skipped if `judge` returns None. The images are answered once, also for the
        report of a run (`remember`)."""
        indices: list[int] = []
        judged: list[Any] = []
        is_finite = True

        def take(batch: Batch, made: Tensor) -> None:
            nonlocal is_finite
            valid = batch.valid.cpu()
            places, made = batch.samples[valid].tolist(), made.cpu()[valid]
            is_finite = is_finite and bool(made.isfinite().all())
            if not is_finite or not places:
                return
            placements = self.bundle.placements([image_of(source, place) for place in places])
            for place, found in zip(places, self.bundle.answers(made, placements=placements), strict=True):
                one = judge(source.target(place), found)
                if one is not None:
                    indices.append(place)
                    judged.append(one)

        def compute() -> Answered:
            self.each_batch(source, take)
            return Answered(indices, judged, True) if is_finite else Answered([], [], False)

        return self._stored_or(source, "answered", compute)

    def remember(self, source: Source, answered: Answered) -> None:
        """Store what `answered` returns for a source."""
        self._stored[id(source), "answered"] = source, answered

    def batches(self, source: Source, batch_size: int | None = None) -> Iterator[Batch]:
        """Yield the batches of a source that this process computes, for evaluators that need more than the outputs of
        the head. By default they have `batch_size` images, or 256 if the size was not given."""
        size, preprocess = batch_size or self.batch_size or 256, self.bundle.preprocess
        return evaluation_batches(source, preprocess, batch_size=size, readers=self.readers, ranks=self.processes.place)

    def check_usable(self, usable: Sized, images: str, target: str) -> None:
        """Raise `DataError` if none of the images, such as "9 images", can be used with its target."""
        if not len(usable):
            reason = next(iter(self.skipped.values()), "none of them has one")
            raise DataError(f"none of {images} can be used with its {target}; the first error: {reason}")

    def gather_skipped(self, skipped: Sequence[Skipped]) -> int:
        """Report the samples that all processes have skipped in `batches`, and return their number. All processes call
        this method together after their last batch."""
        everyone = [item for part in self.gather(list(skipped)) for item in part]
        for item in everyone:
            self.skip(item)
        return len(everyone)

    def kept(self, source: Source) -> Any:
        """Return the outputs that `each_batch` stored for a source (`Predictions`), or what `answered` stored, or None.
        Raise the errors of `Rows.predictions`."""
        if (id(source), "rows") not in self._stored:
            return self._stored.get((id(source), "answered"), (source, None))[1]
        rows, skipped = self._stored[id(source), "rows"][1]
        return rows.predictions(self.bundle.output, skipped)

    def _each_batch(self, source: Source, take: Take) -> tuple[Skipped, ...]:
        network, preprocess = self.bundle.network, self.bundle.preprocess
        if getattr(network, "head", network) is None:
            raise ConfigError(
                "this model has no head, so it cannot classify; fine-tune it, or measure its features by linear, "
                "fewshot or knn"
            )
        predictor = Predictor(network, self.precision, exact_head=self.bundle.output == "numbers")
        skipped: list[Skipped] = []
        # Processes share the images batch by batch, so all of them use the size of the first, although their machines
        # can differ.
        size = (
            self.batch_size
            if self.batch_size is not None
            else self.processes.from_first(self.batch_for(self.precision))
        )

        def outputs_of(batch: Batch) -> tuple[Batch, Tensor]:
            batch = batch.to(predictor.device)
            return batch, predictor.logits(preprocess.normalise(batch.images)).float()

        found: Iterator[tuple[Batch, Tensor]] = map(outputs_of, self.batches(source, size))
        if self.processes.are_several:
            found = self._of_all(found, math.ceil(len(source) / size), predictor.device)
        share_cores()
        for batch, outputs in found:
            skipped += batch.skipped
            for item in batch.skipped:
                self.skip(item)
            take(batch, outputs)
        return tuple(skipped)

    def _of_all(
        self, found: Iterator[tuple[Batch, Tensor]], count: int, device: torch.device
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Yield the `count` batches of all processes in order, with their outputs and without their pixels. `found` has
        the batches of this process."""
        for _ in range(math.ceil(count / self.processes.world)):
            mine = next(found, None)
            if mine is not None:
                batch, outputs = mine
                bare = replace(batch, images=batch.images[:, :, :0, :0]).to(torch.device("cpu"))
                mine = bare, outputs.cpu()
            for pair in self.gather(mine):
                if pair is not None:
                    yield pair[0].to(device), pair[1].to(device)
