"""Features and predictions of a model. Each is computed once and shared by all evaluators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.data.batch import Batch, Skipped
from vitrail.data.pipeline import Ranks, Readers, evaluation_batches
from vitrail.data.source import Source
from vitrail.evaluation.features.extract import FeatureSet, Layer, existing_layer, extract
from vitrail.evaluation.predictions import Predictions, Rows, each_batch, predict_all
from vitrail.machine import Precision
from vitrail.models.cost import prediction_batch
from vitrail.processes.group import Processes
from vitrail.weights.bundle import Bundle


class Outputs:
    """A model with its features and predictions for all samples of a source. They are computed at first use.

    `cache` is the folder that stores features between runs. With None, features are not stored. `each_batch` stores
    outputs of at most `keep` values. `on_progress` is called with the numbers of finished samples and of all samples,
    `on_note` with messages for the user, and `on_skip` with each sample that cannot be decoded. `skipped` maps the key
    of each skipped sample to the reason. With the batch size None, `prediction_batch` chooses it. `feature_precision`
    is the precision of features, by default `precision`. Several `processes` share the work, and each of them has all
    results. Features are shared through the cache if there is one. If the processes can only compute together, `settle`
    is called by each of them when it has computed its images, and before they exchange anything.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        batch_size: int | None = 256,
        readers: Readers = Readers(),
        precision: Precision = "float32",
        feature_precision: Precision | None = None,
        cache: Path | None = None,
        keep: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
        on_note: Callable[[str], None] | None = None,
        on_skip: Callable[[Skipped], None] | None = None,
        processes: Processes = Processes(),
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.processes = processes
        self.settle = settle
        self.bundle = bundle
        self.batch_size = batch_size
        self.readers = readers
        self.precision: Precision = precision
        self.feature_precision: Precision = feature_precision or precision
        self.cache = cache
        self.keep = keep
        self.on_progress = on_progress or (lambda done, total: None)
        self.note = on_note or (lambda text: None)
        self.on_skip = on_skip or (lambda item: None)
        self.skipped: dict[str, str] = {}
        # Each result is stored with its source, because Python can reuse the id of a freed source.
        self._features: dict[tuple[int, Layer], tuple[Source, FeatureSet]] = {}
        self._predictions: dict[int, tuple[Source, Predictions]] = {}
        self._rows: dict[int, tuple[Source, Rows, tuple[Skipped, ...]]] = {}

    def has_features(self, source: Source, layer: Layer = "embedding") -> bool:
        """Return True if the features of a source have been computed."""
        return (id(source), existing_layer(self.bundle.network, layer)) in self._features

    def forget(self) -> None:
        """Free all features and predictions, before other data is evaluated."""
        self.skipped = {}
        self._features.clear()
        self._predictions.clear()
        self._rows.clear()

    def features(self, source: Source, layer: Layer = "embedding") -> FeatureSet:
        """Return the features of every sample: the outputs of a layer. Raise the errors of `extract`."""
        key = id(source), existing_layer(self.bundle.network, layer)
        if key not in self._features:
            found = extract(
                self.bundle.network,
                source,
                self.bundle.preprocess,
                batch_size=self.batch_size,
                readers=self.readers,
                precision=self.feature_precision,
                layer=layer,
                cache=self.cache,
                ranks=Ranks(self.processes.rank, self.processes.world),
                gather=self._gather if self.processes.are_several else None,
                on_progress=lambda done: self.on_progress(done, len(source)),
                on_note=self.note,
            )
            for item in found.skipped:
                self._skip(item)
            self._features[key] = source, found
        return self._features[key][1]

    def predictions(self, source: Source) -> Predictions:
        """Return the outputs of the head. The source must have the model's classes. Raise the errors of
        `predict_all`."""
        if id(source) not in self._predictions:
            found = predict_all(
                self.bundle.network,
                source,
                self.bundle.preprocess,
                scores=self.bundle.output,
                batch_size=self._batch_of_head,
                readers=self.readers,
                precision=self.precision,
                on_skip=self._skip,
                processes=self.processes,
                settle=self.settle,
            )
            self._predictions[id(source)] = source, found
        return self._predictions[id(source)][1]

    def each_batch(self, source: Source, take: Callable[[Batch, Tensor], None]) -> tuple[Skipped, ...]:
        """Call `take` with every batch of a source and the head's outputs for the batch.

        The outputs are stored for `kept` if they have at most `keep` values. Return the samples that could not
        be decoded. Raise the errors of `predictions.predict.each_batch`.
        """
        rows = Rows(source) if len(source) * len(source.classes) <= self.keep else None

        def both(batch: Batch, outputs: Tensor) -> None:
            nonlocal rows
            take(batch, outputs)
            if rows is not None and outputs.shape[1] != len(source.classes):
                rows = None  # the outputs of this task do not belong to the classes one by one
            elif rows is not None:
                rows.take(batch, outputs)

        skipped = each_batch(
            self.bundle.network,
            source,
            self.bundle.preprocess,
            both,
            batch_size=self._batch_of_head,
            readers=self.readers,
            precision=self.precision,
            on_skip=self._skip,
            processes=self.processes,
            settle=self.settle,
        )
        if rows is not None:
            self._rows[id(source)] = source, rows, skipped
        return skipped

    def batches(self, source: Source) -> Iterator[Batch]:
        """Yield the batches of a source that this process computes, for evaluators that need more than the outputs of
        the head. Without a `batch_size`, they have 256 images."""
        ranks = Ranks(self.processes.rank, self.processes.world)
        return evaluation_batches(
            source, self.bundle.preprocess, batch_size=self.batch_size or 256, readers=self.readers, ranks=ranks
        )

    def gather_skipped(self, skipped: Sequence[Skipped]) -> int:
        """Report the samples that all processes have skipped in `batches`, and return their number. All processes call
        this method together after their last batch."""
        everyone = [item for part in self._gather(list(skipped)) for item in part]
        for item in everyone:
            self.on_skip(item)
        return len(everyone)

    def kept(self, source: Source) -> Predictions | None:
        """Return the outputs that `each_batch` stored for a source, or None. Raise the errors of `Rows.predictions`."""
        if id(source) not in self._rows:
            return None
        _, rows, skipped = self._rows[id(source)]
        return rows.predictions(self.bundle.output, skipped)

    @property
    def _batch_of_head(self) -> int:
        """Batch size for the outputs of the head. Processes share the images batch by batch, so all of them have the
        size of the first one, although their machines can differ."""
        if self.batch_size is not None:
            return self.batch_size
        own = prediction_batch(
            self.bundle.network, self.bundle.preprocess.image_size, self.bundle.device, self.precision
        )
        return self.processes.from_first(own)

    def _gather(self, value: Any) -> list[Any]:
        self.settle()
        return self.processes.gather(value)

    def _skip(self, item: Skipped) -> None:
        self.skipped[item.key] = item.reason
        self.on_skip(item)
