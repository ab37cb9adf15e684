"""Evaluators by name: what a model is measured by, on the head's logits or on frozen features, and probes of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int64, Shaped

from vitrail.data.pipeline import Readers
from vitrail.data.source import Source, Subset, target_kind
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, nearest
from vitrail.evaluation.classifiers.arrays import Figures
from vitrail.evaluation.classifiers.fewshot import check_counts, check_settings, draw_shots, few_shot
from vitrail.evaluation.classifiers.knn import knn
from vitrail.evaluation.classifiers.linear import PENALTIES, linear_probe
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.predictions.bootstrap import Figure
from vitrail.evaluation.predictions.imagenet import MappedSource, map_classes, read_real, real_accuracy
from vitrail.evaluation.predictions.report import report
from vitrail.machine import Precision
from vitrail.plain import from_plain
from vitrail.weights.bundle import Bundle

__all__ = [
    "EVALUATORS",
    "ByAccuracy",
    "ByFewShot",
    "ByLinear",
    "ByNeighbours",
    "Measure",
    "evaluators_of",
    "measure",
    "probe",
]

SHOTS = (1, 5, 10, 25)
"""Images of each class where none are asked for, as far as every class has so many."""

NEIGHBOURS = (1, 5, 10, 20, 100)
"""Numbers of neighbours where none are asked for, as far as there are as many images."""


Measure = Callable[[Outputs, Source, Source], dict[str, float]]
"""(outputs, images to learn from, images to measure on) -> figures by name, among them `images`, which were measured,
and `skipped`, which could not be decoded. Shares are in [0, 1]; NAME_low and NAME_high are ends of 95 % intervals,
NAME_deviation is the standard deviation over seeds."""


@dataclass(frozen=True)
class ByAccuracy:
    """How often the head is right, and how far to trust it; of `evaluation.report`'s figures, those of all images."""

    bootstrap: int = 1000
    """Resamples behind each interval; 0 for none."""
    real: str = ""
    """"public", or a file real.json: measure ImageNet's validation images by the ReaL labels too."""
    class_names: str = ""
    """A list of WordNet ids and names in the order of the head (`read_synsets`), to find the data's classes by."""

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Nothing is learned, so `train` is not read. The classes of `held_out` may be others than the model's
        (`map_classes`). Raises `ConfigError` for a model without a head, and `DataError` for classes that it has not.
        """
        _check_labelled(held_out, "accuracy")
        classes = outputs.bundle.classes
        if classes and classes != tuple(held_out.classes):
            mapped = map_classes(classes, held_out.classes, mapping=self.class_names or None)
            outputs.note(mapped.note)
            held_out = MappedSource(held_out, mapped, classes)
        predictions = outputs.predictions(held_out)
        found = report(predictions, bootstrap=self.bootstrap)
        figures = _of("accuracy", found.accuracy)
        if found.top5 is not None:
            figures |= _of("top5_accuracy", found.top5)
        if found.balanced_accuracy is not None:
            figures |= _of("balanced_accuracy", found.balanced_accuracy)
        if (several := found.multi_label) is not None:
            told = {
                "mean_average_precision": several.mean_average_precision,
                "micro_f1": several.micro_f1,
                "macro_f1": several.macro_f1,
            }
            figures |= {name: value for name, value in told.items() if value is not None}
            figures |= _of("exact_match", several.exact_match)
        figures |= _of("cross_entropy", found.cross_entropy)
        if found.calibration is not None:
            figures |= _of("calibration_error", found.calibration.error)
        if self.real:
            labels = read_real(None if self.real == "public" else self.real)
            by_real = real_accuracy(predictions, labels, bootstrap=self.bootstrap)
            figures |= {**_of("real_accuracy", by_real.accuracy), "real_images": float(by_real.images)}
        if found.unlabelled:
            figures["unlabelled"] = float(found.unlabelled)
        return figures | {"images": float(found.images), "skipped": float(len(found.skipped))}


@dataclass(frozen=True)
class ByLinear:
    """Logistic regression on frozen features (`evaluation.linear`)."""

    penalties: tuple[float, ...] = PENALTIES
    held_out: float = 0.1
    """The share of the images to learn from that chooses the penalty, before all of them are fitted."""

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """`linear`, `linear_penalty` and `training_images`. Raises as `linear_probe` does."""
        known, asked = _known_and_asked("linear", outputs, train, held_out)
        found = linear_probe(
            known.features,
            known.truth,
            asked.features,
            asked.truth,
            num_classes=len(train.classes),
            penalties=self.penalties,
            held_out=self.held_out,
            device=outputs.bundle.device,
        )
        figures = {**_both("linear", found.figures), "linear_penalty": found.penalty}
        return figures | {"training_images": float(len(known.truth))} | asked.counts()


@dataclass(frozen=True)
class ByFewShot:
    """Least squares on the frozen features of a few images of each class (`evaluation.fewshot`)."""

    shots: tuple[int, ...] = ()
    """By default 1, 5, 10 and 25, as far as every class has so many images."""
    seeds: int = 3
    l2: float | Literal["loo"] = 1024.0
    allow_fewer: bool = False

    def __post_init__(self) -> None:
        check_settings(self.shots or SHOTS, range(self.seeds), self.l2)

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """`fewshot_5` and so on, the mean over seeds, and `fewshot_5_deviation`. Raises as `few_shot` does, and
        `DataError` where images can have several labels."""
        for source in (train, held_out):
            if target_kind(source) == "classes":
                raise DataError(
                    "fewshot needs images with one label each, and these can have several; use linear or knn"
                )
        _check_labelled(held_out, "fewshot")
        _check_labelled(train, "fewshot")
        shots = self._shots(train)
        features, labels, rows = self._drawn(outputs, train, max(shots))
        asked = _labelled(outputs, held_out)
        found = few_shot(
            features,
            labels,
            asked.features,
            asked.truth,
            num_classes=len(train.classes),
            shots=shots,
            seeds=self.seeds,
            l2=self.l2,
            allow_fewer=self.allow_fewer,
            class_names=train.classes,
            of_rows=rows,
        )
        figures: dict[str, float] = {}
        for row in found.rows:
            figures[f"fewshot_{row.shots}"] = row.mean
            if row.std is not None:
                figures[f"fewshot_{row.shots}_deviation"] = row.std
        return figures | asked.counts()

    def _shots(self, train: Source) -> tuple[int, ...]:
        """Those asked for. Raises `DataError` where a class has fewer images and may not."""
        labels = _labels(train)
        counts = np.bincount(labels[labels >= 0], minlength=len(train.classes))
        shots = self.shots or SHOTS
        if not self.shots and not self.allow_fewer:
            shots = tuple(count for count in SHOTS if count <= counts.min()) or SHOTS[:1]
        if not self.allow_fewer:
            check_counts(counts, max(shots), train.classes)
        return shots

    def _drawn(
        self, outputs: Outputs, train: Source, most: int
    ) -> tuple[Float32[np.ndarray, "k d"], Int64[np.ndarray, " n"], Int64[np.ndarray, " k"]]:
        """The features that `few_shot` will read, the labels of all images, and the rows that the features are of.

        Of ImageNet, 25 shots and 3 seeds take 6 % of the images. Where an image that was drawn cannot be decoded, it is
        left out and all are drawn again.
        """
        labels = _labels(train)
        left = np.flatnonzero(labels >= 0)
        found: dict[int, np.ndarray] = {}
        whole = False
        while True:
            drawn = [draw_shots(labels[left], most, seed) for seed in range(self.seeds)]
            rows = np.unique(np.concatenate(drawn))
            wanted = left[rows].tolist()
            new = [number for number in wanted if number not in found]
            if not new:
                break
            whole = whole or outputs.has_features(train) or 2 * len(wanted) > len(train)
            some = outputs.features(train if whole else Subset(train, new))
            places = {key: place for place, key in enumerate(some.keys)}
            found |= {number: some.features[places[key]] for number in new if (key := train.key(number)) in places}
            left = np.setdiff1d(left, [number for number in new if number not in found])
        if not found:
            raise DataError(f"none of {len(train):,} images to learn from can be decoded")
        return np.stack([found[number] for number in wanted]), labels[left], rows


@dataclass(frozen=True)
class ByNeighbours:
    """A vote of the nearest frozen features (`evaluation.knn`)."""

    k: tuple[int, ...] = ()
    """Numbers of neighbours; without any, those of 1, 5, 10, 20 and 100 that are not above the number of images."""
    temperature: float = 0.07

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """`knn_20` and so on, and `training_images`. Raises as `knn` does."""
        known, asked = _known_and_asked("knn", outputs, train, held_out)
        rows = knn(
            known.features,
            known.truth,
            asked.features,
            asked.truth,
            num_classes=len(train.classes),
            k=self.k or tuple(count for count in NEIGHBOURS if count <= len(known.truth)),
            temperature=self.temperature,
            device=outputs.bundle.device,
        )
        figures: dict[str, float] = {}
        for row in rows:
            figures |= _both(f"knn_{row.k}", row.figures)
        return figures | {"training_images": float(len(known.truth))} | asked.counts()


EVALUATORS: dict[str, type[ByAccuracy] | type[ByLinear] | type[ByFewShot] | type[ByNeighbours]] = {
    "accuracy": ByAccuracy,
    "linear": ByLinear,
    "fewshot": ByFewShot,
    "knn": ByNeighbours,
}
"""By name; their fields are their settings, and an instance is a `Measure`."""


def evaluators_of(names: str, settings: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Measure]:
    """Evaluators by names with commas between them, like "linear,knn", each with its settings.

    `settings` are by evaluator: {"knn": {"k": [20]}}. Raises `ConfigError` for an unknown name or setting.
    """
    result: dict[str, Measure] = {}
    for name in (text.strip() for text in names.split(",")):
        if name not in EVALUATORS:
            raise ConfigError(f"unknown evaluator {name!r}; {nearest(name, EVALUATORS)}")
        try:
            result[name] = from_plain(EVALUATORS[name], dict((settings or {}).get(name, {})))
        except ConfigError as error:
            raise ConfigError(f"evaluator {name}: {error}") from None
    return result


def measure(evaluators: Mapping[str, Measure], outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
    """The figures of several evaluators, which share the features. Raises as they do."""
    figures: dict[str, float] = {}
    for name in sorted(evaluators, key=lambda name: name == "fewshot"):  # it needs no features of its own after others
        figures |= evaluators[name](outputs, train, held_out)
    return figures


def probe(
    names: str,
    splits: Splits,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    batch_size: int = 256,
    readers: Readers = Readers(),
    precision: Precision = "float32",
) -> Callable[[Bundle], dict[str, float]]:
    """A measurement to make of a model during a run: evaluators as `evaluators_of` takes them, which learn from the
    training split and measure on the validation split. The test split is for the finished model.

    Features are computed anew for every model that is measured, of all training images, or for "fewshot" alone of
    those that are drawn; nothing is kept. Raises `ConfigError` where there is no validation split.
    """
    evaluators = evaluators_of(names, settings)
    held_out = splits.validation
    if held_out is None:
        raise ConfigError(f"{names} cannot be measured during the run: the data has no validation split")

    def measured(bundle: Bundle) -> dict[str, float]:
        outputs = Outputs(bundle, batch_size=batch_size, readers=readers, precision=precision)
        return measure(evaluators, outputs, splits.train, held_out)

    return measured


@dataclass(frozen=True, eq=False)
class _Labelled:
    """Features of the images whose label is known."""

    features: Float32[np.ndarray, "n d"]
    truth: Shaped[np.ndarray, "n ..."]
    """Labels, or targets where images can have several."""
    skipped: int

    def counts(self) -> dict[str, float]:
        return {"images": float(len(self.truth)), "skipped": float(self.skipped)}


def _known_and_asked(name: str, outputs: Outputs, train: Source, held_out: Source) -> tuple[_Labelled, _Labelled]:
    """What an evaluator learns from and what it is measured on. Raises `DataError` where either has no label, before
    anything is computed."""
    for source in (train, held_out):
        _check_labelled(source, name)
    return _labelled(outputs, train), _labelled(outputs, held_out)


def _labelled(outputs: Outputs, source: Source) -> _Labelled:
    """Raises `DataError` where nothing can be decoded."""
    found = outputs.features(source)
    skipped = len(found.skipped)
    if not len(found):
        raise DataError(f"none of {len(source):,} images can be decoded; the first: {found.skipped[0].reason}")
    if found.targets is not None:
        return _Labelled(found.features, found.targets, skipped)
    kept = found.labels >= 0
    if kept.all():
        return _Labelled(found.features, found.labels, skipped)
    return _Labelled(found.features[kept], found.labels[kept], skipped)


def _labels(source: Source) -> Int64[np.ndarray, " n"]:
    """-1 for none. Of sources where an image has one label."""
    found = (source.target(index) for index in range(len(source)))
    return np.array([label if isinstance(label, int) else -1 for label in found], np.int64)


def _check_labelled(source: Source, name: str) -> None:
    """Raises `DataError` where no image has a label; asks before anything is computed."""
    if all(source.target(index) is None for index in range(len(source))):
        raise DataError(f"none of {len(source):,} images has a label, and {name} needs to know their classes")


def _of(name: str, figure: Figure) -> dict[str, float]:
    if figure.low is None or figure.high is None:
        return {name: figure.value}
    return {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}


def _both(name: str, figures: Figures) -> dict[str, float]:
    precision = figures.mean_average_precision
    more = {} if precision is None else {f"{name}_mean_average_precision": precision}
    return {name: figures.accuracy, **more}
