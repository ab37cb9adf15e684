"""Evaluators of frozen features: a simple model learns from the features of the training split.

Several processes share the computation of the features. The first process then fits the simple model, so that the
cores of a machine do not fit it several times, and the metrics are those of one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int64

from vitrail.data.source import Source, check_known, subset
from vitrail.data.targets import Targets
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.classifiers.linear import check_counts, draw_shots, few_shot, linear_probe
from vitrail.evaluation.classifiers.nearest import knn
from vitrail.evaluation.features.extract import Layer
from vitrail.evaluation.outputs import Outputs
from vitrail.settings import Checked, Effect, setting

SHOTS = (1, 5, 10, 25)
"""Numbers of shots that are measured by default. A number is used only if every class has that many images."""

NEIGHBOURS = (1, 5, 10, 20, 100)
"""Numbers of neighbours that are measured by default. A number is used only if there are that many training images."""


@dataclass(frozen=True)
class ByLinear(Checked):
    """A linear probe: logistic regression on frozen features, or ridge regression if targets are numbers
    (`linear_probe`).
    """

    penalties: tuple[float, ...] = setting((), above=0, below=math.inf, distinct=True)
    """Penalties that linear tries. By default two per decade, from 1 (for numbers from 100) to 0.000001."""
    held_out: float = setting(
        0.1, name="penalty_share", above=0, below=1,
        effect=Effect(lambda own: len(own.penalties) != 1, "with several --penalties, or without them"),
    )  # fmt: skip
    """Fraction of the training images that linear holds out to choose the penalty. The final fit uses all training
    images."""
    features: Layer = "embedding"
    """Features of a network with a hidden layer before its head: the input of the hidden layer (embedding) or its
    output (head-inputs). By default head-inputs for fewshot, as in the original code, and embedding for linear and
    knn."""

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `DataError` if no target of `train` or of `held_out` is known."""
        for source in (train, held_out):
            check_known(source, "linear")

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics of the probe, the chosen penalty (`linear_penalty`) and the number of `training_images`.

        For classes, the accuracy is called `linear`. For numbers, the metrics are called `linear_r2` and so on. Raise
        the errors of `check` and of `linear_probe`.
        """
        self.check(outputs, train, held_out)
        known, asked = (labelled_features(outputs, source, self.features) for source in (train, held_out))

        def measure() -> dict[str, float]:
            found = linear_probe(
                known.features,
                known.truth,
                asked.features,
                asked.truth,
                penalties=self.penalties or None,
                held_out=self.held_out,
                device=outputs.bundle.device,
            )
            return {**_named("linear", found.metrics), "linear_penalty": found.penalty}

        metrics = outputs.processes.on_first(measure, is_long=True)
        return metrics | {"training_images": float(len(known.truth))} | asked.counts()


@dataclass(frozen=True)
class ByFewShot(Checked):
    """Least squares on the frozen features of a few images per class (`few_shot`)."""

    shots: tuple[int, ...] = setting((), least=1)
    """Numbers of training images per class for fewshot. By default those of 1, 5, 10 and 25 for which every class has
    enough images (with --allow-fewer: one class)."""
    seeds: int = setting(3, least=1, most=10_000)
    """Number of random draws of training images. fewshot reports the mean over the draws."""
    l2: float | Literal["loo"] = setting(1024.0, above=0, below=math.inf, advice="loo chooses the strength")
    """L2 regularisation strength of fewshot. loo chooses the strength for each draw by leave-one-out validation."""
    allow_fewer: bool = False
    """Accept classes with too few images for fewshot, and use all of their images. By default this is an error."""
    features: Layer = "head-inputs"
    """Layer of the network whose outputs are the features. The default is the layer of big_vision's evaluator."""

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `DataError` if images can have several labels, or if a class has fewer images than shots."""
        truth = _single_labels(train)
        _single_labels(held_out)
        self._shots(truth, train.classes)

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return metrics for each number of shots, such as `fewshot_5` and `fewshot_5_deviation`.

        `fewshot_5` is the mean accuracy over seeds with 5 shots, and `fewshot_5_deviation` its standard deviation.
        Raise `DataError` if images can have several labels, and the errors of `few_shot`.
        """
        truth = _single_labels(train)
        _single_labels(held_out)
        shots = self._shots(truth, train.classes)
        features, labelled, rows = self._drawn(outputs, train, truth, max(shots))
        asked = labelled_features(outputs, held_out, self.features)

        def measure() -> dict[str, float]:
            found = few_shot(
                features,
                labelled,
                asked.features,
                asked.truth,
                shots=shots,
                seeds=self.seeds,
                l2=self.l2,
                allow_fewer=self.allow_fewer,
                class_names=train.classes,
                of_rows=rows,
            )
            metrics: dict[str, float] = {}
            for count, accuracies in found.items():
                metrics[f"fewshot_{count}"] = float(np.mean(accuracies))
                if len(accuracies) > 1:
                    metrics[f"fewshot_{count}_deviation"] = float(np.std(accuracies, ddof=1))
            return metrics

        return outputs.processes.on_first(measure, is_long=True) | asked.counts()

    def _shots(self, truth: Targets, classes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the numbers of shots to measure. Raise `DataError` if a class has too few images."""
        counts = np.bincount(truth.rows(truth.known).values, minlength=truth.columns)
        shots = self.shots or SHOTS
        if not self.shots:
            enough = counts.max() if self.allow_fewer else counts.min()
            shots = tuple(count for count in SHOTS if count <= enough) or SHOTS[:1]
        if not self.allow_fewer:
            check_counts(counts, max(shots), classes)
        return shots

    def _drawn(
        self, outputs: Outputs, train: Source, truth: Targets, most: int
    ) -> tuple[Float32[np.ndarray, "k d"], Targets, Int64[np.ndarray, " k"]]:
        """Return the features of the drawn images, the labels of all usable images, and the rows of the drawn images.

        Only the features of drawn images are computed. If a drawn image cannot be decoded, this image is skipped, and
        all images are drawn again.
        """
        usable = np.flatnonzero(truth.known)
        found: dict[int, np.ndarray] = {}
        whole = False
        while True:
            labelled = truth.rows(usable)
            drawn = [draw_shots(labelled.values, most, seed) for seed in range(self.seeds)]
            rows = np.unique(np.concatenate(drawn))
            wanted = usable[rows].tolist()
            new = [number for number in wanted if number not in found]
            if not new:
                break
            whole = whole or outputs.has_features(train, self.features) or 2 * len(wanted) > len(train)
            some = outputs.features(train if whole else subset(train, new), self.features)
            places = {key: place for place, key in enumerate(some.keys)}
            if len(places) < len(some.keys):
                raise DataError("training images have the same key, by which features are found; make keys unique")
            found |= {number: some.features[places[key]] for number in new if (key := train.key(number)) in places}
            usable = np.setdiff1d(usable, [number for number in new if number not in found])
        if not found:
            raise DataError(f"none of {len(train):,} training images can be decoded")
        return np.stack([found[number] for number in wanted]), labelled, rows


@dataclass(frozen=True)
class ByNeighbours(Checked):
    """Nearest neighbours in frozen features: a vote for classes, or a weighted mean for numbers (`knn`)."""

    k: tuple[int, ...] = setting((), least=1)
    """Numbers of neighbours for knn. By default those of 1, 5, 10, 20 and 100 that do not exceed the number of training
    images."""
    temperature: float = setting(
        0.07, above=0, effect=Effect(lambda own: {*own.k} != {1}, "with several neighbours (--k)")
    )
    """Temperature of knn. The vote of a neighbour is weighted by exp(cosine similarity / temperature)."""
    features: Layer = "embedding"
    """Layer of the network whose outputs are the features."""

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `DataError` if no target of `train` or of `held_out` is known, and `ConfigError` if a k exceeds the
        number of training images."""
        known, _ = (check_known(source, "knn").known for source in (train, held_out))
        if self.k and max(self.k) > known.sum():
            raise ConfigError(
                f"k={max(self.k)} exceeds the number of labelled training images, {known.sum():,}; choose fewer "
                "neighbours"
            )

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics for each number of neighbours, and `training_images`.

        For classes, the accuracy with 20 neighbours is called `knn_20`. For numbers, the metrics are called `knn_20_r2`
        and so on. Raise the errors of `check` and of `knn`.
        """
        self.check(outputs, train, held_out)
        known, asked = (labelled_features(outputs, source, self.features) for source in (train, held_out))

        def measure() -> dict[str, float]:
            found = knn(
                known.features,
                known.truth,
                asked.features,
                asked.truth,
                k=self.k or tuple(count for count in NEIGHBOURS if count <= len(known.truth)),
                temperature=self.temperature,
                device=outputs.bundle.device,
            )
            return {name: value for k, metrics in found.items() for name, value in _named(f"knn_{k}", metrics).items()}

        metrics = outputs.processes.on_first(measure, is_long=True)
        return metrics | {"training_images": float(len(known.truth))} | asked.counts()


@dataclass(frozen=True, eq=False)
class Labelled:
    """Features of the images whose target is known."""

    features: Float32[np.ndarray, "n d"]
    truth: Targets
    skipped: int

    def counts(self) -> dict[str, float]:
        return {"images": float(len(self.truth)), "skipped": float(self.skipped)}


def labelled_features(outputs: Outputs, source: Source, layer: Layer) -> Labelled:
    """Return the features of the labelled images of a source. Raise `DataError` if no image can be decoded."""
    found = outputs.features(source, layer)
    skipped = len(found.skipped)
    if not len(found):
        raise DataError(f"none of {len(source):,} images can be decoded; the first error: {found.skipped[0].reason}")
    known = found.truth.known
    if known.all():  # avoid copying features that are mapped from a file
        return Labelled(found.features, found.truth, skipped)
    return Labelled(found.features[known], found.truth.rows(known), skipped)


def _single_labels(source: Source) -> Targets:
    """Return the labels of a source. Raise `DataError` if images have several labels or numbers, or if no image is
    labelled."""
    truth = check_known(source, "fewshot")
    if truth.kind != "class":
        theirs = "can have several" if truth.kind == "classes" else "have numbers and no classes"
        raise DataError(f"fewshot needs images with one label each, but these {theirs}; use linear or knn")
    return truth


def _named(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under the name of an evaluator. The accuracy is called NAME, and every other metric NAME_METRIC.
    The metric of one of several numbers keeps the number in front, as in age:NAME_METRIC."""
    named = {}
    for metric, value in metrics.items():
        number, colon, own = metric.rpartition(":")
        named[f"{number}{colon}{name}" + ("" if own == "accuracy" else f"_{own}")] = value
    return named
