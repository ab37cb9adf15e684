"""Evaluators of the features of a frozen model: a simple model learns from the features of the training split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int64

from vitrail.data.source import Source, Subset
from vitrail.errors import DataError
from vitrail.evaluation.classifiers.fewshot import check_counts, check_settings, draw_shots, few_shot
from vitrail.evaluation.classifiers.knn import knn
from vitrail.evaluation.classifiers.linear import linear_probe
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.truth import SingleLabels, Truth, check_known, truth_of

__all__ = ["ByFewShot", "ByLinear", "ByNeighbours"]

SHOTS = (1, 5, 10, 25)
"""Default numbers of images per class, as far as every class has that many."""

NEIGHBOURS = (1, 5, 10, 20, 100)
"""Default numbers of neighbours, as far as there are that many images."""


@dataclass(frozen=True)
class ByLinear:
    """Logistic regression on frozen features, or ridge regression if the targets are numbers (`linear_probe`)."""

    penalties: tuple[float, ...] = ()
    """By default those of `linear_probe`, which are others for numbers than for classes."""
    held_out: float = 0.1
    """Fraction of the training images that chooses the penalty. Then all training images are fitted."""

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return `linear`, the accuracy, or `linear_r2` and further metrics of numbers; `linear_penalty`; and
        `training_images`. Raise the errors of `linear_probe`."""
        known, asked = _both_known("linear", outputs, train, held_out)
        found = linear_probe(
            known.features,
            known.truth,
            asked.features,
            asked.truth,
            penalties=self.penalties or None,
            held_out=self.held_out,
            device=outputs.bundle.device,
        )
        metrics = {**_named("linear", found.metrics), "linear_penalty": found.penalty}
        return metrics | {"training_images": float(len(known.truth))} | asked.counts()


@dataclass(frozen=True)
class ByFewShot:
    """Least squares on the frozen features of a few images per class (`few_shot`)."""

    shots: tuple[int, ...] = ()
    """Images per class. By default 1, 5, 10 and 25, as far as every class has that many."""
    seeds: int = 3
    """Number of draws."""
    l2: float | Literal["loo"] = 1024.0
    """Strength of the regularisation; "loo" chooses it for each draw by leave-one-out error."""
    allow_fewer: bool = False
    """Accept classes with fewer images than shots, and use all of their images."""

    def __post_init__(self) -> None:
        check_settings(self.shots or SHOTS, range(self.seeds), self.l2)

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return `fewshot_5` and so on, the mean over seeds, and `fewshot_5_deviation`.

        Raise the errors of `few_shot`, and `DataError` unless each image has at most one label.
        """
        truth = _single_labels(train)
        _single_labels(held_out)
        shots = self._shots(truth, train.classes)
        features, labelled, rows = self._drawn(outputs, train, truth, max(shots))
        asked = _labelled(outputs, held_out)
        assert isinstance(asked.truth, SingleLabels)
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
        for row in found.rows:
            metrics[f"fewshot_{row.shots}"] = row.mean
            if row.std is not None:
                metrics[f"fewshot_{row.shots}_deviation"] = row.std
        return metrics | asked.counts()

    def _shots(self, truth: SingleLabels, classes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the numbers of shots to measure. Raise `DataError` if a class has too few images."""
        counts = np.bincount(truth.rows(truth.known).values, minlength=truth.num_classes)
        shots = self.shots or SHOTS
        if not self.shots and not self.allow_fewer:
            shots = tuple(count for count in SHOTS if count <= counts.min()) or SHOTS[:1]
        if not self.allow_fewer:
            check_counts(counts, max(shots), classes)
        return shots

    def _drawn(
        self, outputs: Outputs, train: Source, truth: SingleLabels, most: int
    ) -> tuple[Float32[np.ndarray, "k d"], SingleLabels, Int64[np.ndarray, " k"]]:
        """Return the features that `few_shot` reads, the truth of all usable images, and the rows of the features.

        Only features of drawn images are computed: 25 shots with 3 seeds draw 6 % of ImageNet. If a drawn image cannot
        be decoded, it is skipped and all images are drawn again.
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
            whole = whole or outputs.has_features(train) or 2 * len(wanted) > len(train)
            some = outputs.features(train if whole else Subset(train, new))
            places = {key: place for place, key in enumerate(some.keys)}
            found |= {number: some.features[places[key]] for number in new if (key := train.key(number)) in places}
            usable = np.setdiff1d(usable, [number for number in new if number not in found])
        if not found:
            raise DataError(f"none of {len(train):,} images to learn from can be decoded")
        return np.stack([found[number] for number in wanted]), labelled, rows


@dataclass(frozen=True)
class ByNeighbours:
    """A vote of the nearest frozen features, or their weighted mean if the targets are numbers (`knn`)."""

    k: tuple[int, ...] = ()
    """Numbers of neighbours. By default those of 1, 5, 10, 20 and 100 that do not exceed the number of images."""
    temperature: float = 0.07
    """The vote of a neighbour counts exp(cosine / temperature)."""

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return `knn_20` and so on, the accuracy, or `knn_20_r2` and further metrics of numbers; and
        `training_images`. Raise the errors of `knn`."""
        known, asked = _both_known("knn", outputs, train, held_out)
        rows = knn(
            known.features,
            known.truth,
            asked.features,
            asked.truth,
            k=self.k or tuple(count for count in NEIGHBOURS if count <= len(known.truth)),
            temperature=self.temperature,
            device=outputs.bundle.device,
        )
        metrics: dict[str, float] = {}
        for row in rows:
            metrics |= _named(f"knn_{row.k}", row.metrics)
        return metrics | {"training_images": float(len(known.truth))} | asked.counts()


@dataclass(frozen=True, eq=False)
class _Labelled:
    """Features of the images whose truth is known."""

    features: Float32[np.ndarray, "n d"]
    truth: Truth
    skipped: int

    def counts(self) -> dict[str, float]:
        return {"images": float(len(self.truth)), "skipped": float(self.skipped)}


def _both_known(name: str, outputs: Outputs, train: Source, held_out: Source) -> tuple[_Labelled, _Labelled]:
    """Return the features to learn from and those to measure. Raise `DataError`, before anything is computed, if no
    image of either source has a label."""
    for source in (train, held_out):
        check_known(source, name)
    return _labelled(outputs, train), _labelled(outputs, held_out)


def _labelled(outputs: Outputs, source: Source) -> _Labelled:
    """Raise `DataError` if no image can be decoded."""
    found = outputs.features(source)
    skipped = len(found.skipped)
    if not len(found):
        raise DataError(f"none of {len(source):,} images can be decoded; the first: {found.skipped[0].reason}")
    known = found.truth.known
    if known.all():  # features that are mapped from a file are not copied
        return _Labelled(found.features, found.truth, skipped)
    return _Labelled(found.features[known], found.truth.rows(known), skipped)


def _single_labels(source: Source) -> SingleLabels:
    """Return the truth for few-shot. Raise `DataError` unless it is one class per image, and known for an image."""
    truth = truth_of(source)
    if not isinstance(truth, SingleLabels):
        theirs = {"classes": "can have several", "numbers": "have numbers and no classes"}[truth.kind]
        raise DataError(f"fewshot needs images with one label each, and these {theirs}; use linear or knn")
    check_known(source, "fewshot")
    return truth


def _named(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under an evaluator's name: accuracy as NAME, any other as NAME_METRIC."""
    return {name if metric == "accuracy" else f"{name}_{metric}": value for metric, value in metrics.items()}
