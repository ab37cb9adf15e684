"""What a model makes of sources, computed once for all evaluators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitrail.data.pipeline import Readers
from vitrail.data.source import Source
from vitrail.evaluation.features.extract import FeatureSet, extract
from vitrail.evaluation.predictions.predict import Predictions, predict_all
from vitrail.machine import Precision
from vitrail.weights.bundle import Bundle

__all__ = ["Outputs"]


class Outputs:
    """Features and predictions of every sample of the sources that are asked for.

    `cache` is the folder in which features are kept and found again; None keeps none. `on_progress` is told how many
    samples are done, of how many; `on_note` what the user should know. `skipped` collects why samples could not be
    decoded, by their keys.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        batch_size: int = 256,
        readers: Readers = Readers(),
        precision: Precision = "float32",
        cache: Path | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.bundle = bundle
        self.batch_size = batch_size
        self.readers = readers
        self.precision: Precision = precision
        self.cache = cache
        self.on_progress = on_progress or (lambda done, total: None)
        self.note = on_note or (lambda text: None)
        self.skipped: dict[str, str] = {}
        # Sources are kept beside what was computed of them, so that none can take the identity of another.
        self._features: dict[int, tuple[Source, FeatureSet]] = {}
        self._predictions: dict[int, tuple[Source, Predictions]] = {}

    def has_features(self, source: Source) -> bool:
        """Whether the features of a source are computed already."""
        return id(source) in self._features

    def forget(self) -> None:
        """Lets go of what was computed, before other data are measured."""
        self.skipped = {}
        self._features.clear()
        self._predictions.clear()

    def features(self, source: Source) -> FeatureSet:
        """What the head would see. Raises as `extract` does."""
        if id(source) not in self._features:
            found = extract(
                self.bundle.network,
                source,
                self.bundle.preprocess,
                batch_size=self.batch_size,
                readers=self.readers,
                precision=self.precision,
                cache=self.cache,
                on_progress=lambda done: self.on_progress(done, len(source)),
                on_note=self.note,
            )
            self.skipped |= {item.key: item.reason for item in found.skipped}
            self._features[id(source)] = source, found
        return self._features[id(source)][1]

    def predictions(self, source: Source) -> Predictions:
        """What the head says, of a source with the model's classes. Raises as `predict_all` does."""
        if id(source) not in self._predictions:
            found = predict_all(
                self.bundle.network,
                source,
                self.bundle.preprocess,
                scores=self.bundle.output,
                batch_size=self.batch_size,
                readers=self.readers,
                precision=self.precision,
            )
            self.skipped |= {item.key: item.reason for item in found.skipped}
            self._predictions[id(source)] = source, found
        return self._predictions[id(source)][1]
