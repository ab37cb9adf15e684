"""Features and predictions of a model. Each is computed once and shared by all evaluators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitrail.cores import share_cores
from vitrail.data.batch import Batch, Skipped
from vitrail.data.pipeline import evaluation_batches
from vitrail.data.source import Source, image_of
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features.extract import FeatureSet, Layer, existing_layer, extract
from vitrail.evaluation.predictions import Pass, Predictions, Rows
from vitrail.models.predictor import Predictor
from vitrail.weights.answers import AnyPrediction

Take = Callable[[Batch, Tensor], None]
Seen = TypeVar("Seen")


@dataclass(eq=False)
class Outputs(Pass):
    """A model with its features and predictions for all samples of a source. They are computed at first use."""

    keep: int = 0
    """Number of values up to which `each_batch` stores the outputs for a source."""
    skipped: dict[str, str] = field(default_factory=dict, init=False)
    """Reasons of skipped samples by their keys."""

    def __post_init__(self) -> None:
        # Each result is stored with its source, because Python can reuse the id of a freed source.
        self._features: dict[tuple[int, Layer], tuple[Source, FeatureSet]] = {}
        self._predictions: dict[int, tuple[Source, Predictions]] = {}
        self._rows: dict[int, tuple[Source, Rows, tuple[Skipped, ...]]] = {}
        self._seen: dict[int, tuple[Source, Any]] = {}

    def has_features(self, source: Source, layer: Layer = "embedding") -> bool:
        """Return True if the features of a source have been computed."""
        return (id(source), existing_layer(self.bundle.network, layer)) in self._features

    def forget(self) -> None:
        """Free all features and predictions, before other data is evaluated."""
        self.skipped = {}
        self.__post_init__()

    def features(self, source: Source, layer: Layer = "embedding") -> FeatureSet:
        """Return the features of every sample: the outputs of a layer. Raise the errors of `extract`."""
        key = id(source), existing_layer(self.bundle.network, layer)
        if key not in self._features:
            found = extract(self, source, layer)
            for item in found.skipped:
                self.skip(item)
            self._features[key] = source, found
        return self._features[key][1]

    def predictions(self, source: Source) -> Predictions:
        """Return the outputs of the head for every sample, which take 4 bytes of memory per image and class.

        The source must have the model's classes. Raise `ConfigError` if the network has no head, or if its number of
        outputs is not the source's number of classes. Raise `BundleError` if an output is not finite.
        """
        if id(source) not in self._predictions:
            rows = Rows(source)
            skipped = self._each_batch(source, rows.take)
            self._predictions[id(source)] = source, rows.predictions(self.bundle.output, skipped)
        return self._predictions[id(source)][1]

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
            self._rows[id(source)] = source, rows, skipped
        return skipped

    def each_answer(self, source: Source, take: Callable[[int, AnyPrediction], None]) -> bool:
        """Call `take` with the index of each image of a source that can be used, and with the prediction of a model of
        boxes or masks for it. Return False if an output is not finite; the images after it are then left out."""
        is_finite = True

        def answer(batch: Batch, made: Tensor) -> None:
            nonlocal is_finite
            valid = batch.valid.cpu()
            places, made = batch.samples[valid].tolist(), made.cpu()[valid]
            is_finite = is_finite and bool(made.isfinite().all())
            if not is_finite or not places:
                return
            placements = self.bundle.placements([image_of(source, place) for place in places])
            for place, found in zip(places, self.bundle.answers(made, placements=placements), strict=True):
                take(place, found)

        self.each_batch(source, answer)
        return is_finite

    def once(self, source: Source, compute: Callable[[Outputs, Source], Seen]) -> Seen:
        """Return `compute(self, source)`: what a model of boxes or masks answers to the images of a source, and what is
        true. It is computed once, also for the report of a run (`remember`)."""
        if id(source) not in self._seen:
            self.remember(source, compute(self, source))
        found: Seen = self._seen[id(source)][1]
        return found

    def remember(self, source: Source, seen: Any) -> None:
        """Store what `once` returns for a source."""
        self._seen[id(source)] = source, seen

    def batches(self, source: Source) -> Iterator[Batch]:
        """Yield the batches of a source that this process computes, for evaluators that need more than the outputs of
        the head. Without a `batch_size`, they have 256 images."""
        return self._batches(source, self.batch_size or 256)

    def none_usable(self, images: str, target: str) -> DataError:
        """Return the error of images, such as "9 images", of which none can be used with its target."""
        reason = next(iter(self.skipped.values()), "none of them has one")
        return DataError(f"none of {images} can be used with its {target}; the first error: {reason}")

    def gather_skipped(self, skipped: Sequence[Skipped]) -> int:
        """Report the samples that all processes have skipped in `batches`, and return their number. All processes call
        this method together after their last batch."""
        everyone = [item for part in self.gather(list(skipped)) for item in part]
        for item in everyone:
            super().skip(item)
        return len(everyone)

    def kept(self, source: Source) -> Any:
        """Return the outputs that `each_batch` stored for a source (`Predictions`), what `once` has stored, or None.
        Raise the errors of `Rows.predictions`."""
        if id(source) not in self._rows:
            return self._seen.get(id(source), (source, None))[1]
        _, rows, skipped = self._rows[id(source)]
        return rows.predictions(self.bundle.output, skipped)

    def skip(self, item: Skipped) -> None:
        self.skipped[item.key] = item.reason
        super().skip(item)

    def _batches(self, source: Source, batch_size: int) -> Iterator[Batch]:
        preprocess = self.bundle.preprocess
        return evaluation_batches(source, preprocess, batch_size=batch_size, readers=self.readers, ranks=self.ranks)

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

        found: Iterator[tuple[Batch, Tensor]] = map(outputs_of, self._batches(source, size))
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
