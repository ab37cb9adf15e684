"""Measurements on training images before settings are chosen: is mirroring harmless, and which image size is better?

Both questions are answered by a linear model of frozen features. The linear model is fitted to two thirds of some
training images and measured on the others. The validation and the test split are not read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from vitrail.data.pipeline import Readers, default_threads
from vitrail.data.pixels.decode import decode
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample, Source, subset, target_kind, truth_of
from vitrail.data.targets import PLACED, Target, TargetKind, Targets
from vitrail.errors import DataError, UndecodableImage
from vitrail.evaluation.classifiers.linear import fit_linear
from vitrail.evaluation.classifiers.logistic import class_ranks
from vitrail.evaluation.features.extract import FeatureSet
from vitrail.evaluation.metrics.numbers import mean_of_known
from vitrail.evaluation.outputs import Outputs
from vitrail.machine import Precision
from vitrail.models.variants import AnyConfig
from vitrail.transfer.facts import DataFacts, Explicit, Findings, scaled_size
from vitrail.transfer.protocols import image_size_for
from vitrail.weights.adapt import adapted
from vitrail.weights.bundle import Bundle

MAX_IMAGES = 900
"""Maximum number of training images that are examined."""

MAX_SIZED = 450
"""Maximum number of training images with which image sizes are compared, because larger images take longer."""

MIN_TESTED = 12
"""Minimum number of test images for a comparison. With fewer images, chance would decide."""

MAX_COMPARED = 224
"""Longest side in pixels of the larger image size that is compared."""

TINY_SIDE = 48
"""Longest side in pixels up to which twice the model's own image size is compared, if the images are large enough."""

CONFIDENCE = 2.5
"""Number of standard errors by which errors must differ before a difference counts."""

IMAGES_PER_CLASS = 9
"""Number of images per class below which some classes are examined rather than a few images of every class."""

NEAR_CHANCE = 0.9
"""Fraction of a constant prediction's error from which a linear model has learned too little for a comparison."""

PIXEL_FEATURE_SIDE = 16
"""Side in pixels of the images whose levels are features."""

MIRROR_LOSS = 0.03
"""Smallest increase of the error by mirroring that counts: three of 100 images, 3 % of the wrong labels of a constant
prediction, or 3 % of the variance of numbers."""

SIZE_GAIN = 0.03
"""Smallest decrease of the error for which the larger image size is chosen."""


def examine(
    bundle: Bundle,
    train: Source,
    facts: DataFacts,
    *,
    device: torch.device,
    readers: Readers,
    precision: Precision,
    explicit: Explicit,
) -> Findings:
    """Return whether mirroring keeps the classes of training images, and the better of two image sizes on a CPU.

    Settings in `explicit` are not examined. Nothing is found if the data has too few training images.
    """
    division = divide(train)
    if division is None:
        return Findings()
    size, _ = image_size_for(bundle.network.config, facts, gpu=device.type == "cuda")
    model = on_device(bundle, device)
    found = Findings()
    if "image_size" not in explicit and device.type == "cpu":
        larger = larger_size(bundle.network.config, size, facts.side)
        if larger is not None:
            few = divide(train, MAX_SIZED) or division
            result = compare_sizes(model, few, (size, larger), readers=readers, precision=precision)
            found = _sized(found, result, size, larger)
            size = found.image_size or size
    if "flip" not in explicit:
        adapted_model = adapted(model, image_size=explicit.get("image_size", size))
        outputs = Outputs(adapted_model, batch_size=None, readers=readers, precision=precision)
        mirrored = mirror_test(outputs.features, division, bundle.preprocess.channels)
        if mirrored is not None:
            reason = mirrored_reason(mirrored, "features")
            found = replace(found, flip=not mirroring_hurts(mirrored), flip_reason=reason)
    return found


def on_device(bundle: Bundle, device: torch.device) -> Bundle:
    """Return the bundle, or on another device a copy of it."""
    if bundle.device == device:
        return bundle
    return replace(bundle, network=copy.deepcopy(bundle.network).to(device))


def larger_size(network: AnyConfig, size: tuple[int, int], side: int | None) -> tuple[int, int] | None:
    """Return a larger image size to compare with `size` (height, width): the model's own, with at most
    `MAX_COMPARED` pixels a side, or twice the size of a model for tiny images. `side` is the side of the training
    images. Return None if there is no size that is clearly larger than `size` and has details to show."""
    longest = min(max(network.image_size), MAX_COMPARED)
    if side is not None and longest <= TINY_SIDE and side >= 2 * longest:
        longest *= 2
    larger = scaled_size(network, longest)
    return larger if math.prod(larger) >= 1.5 * math.prod(size) else None


def _sized(found: Findings, result: FormsCompared | None, size: tuple[int, int], larger: tuple[int, int]) -> Findings:
    if result is None:
        return found
    chosen, other = (larger, size) if larger_is_better(result) else (size, larger)
    errors = {size: result.before, larger: result.after}
    found_errors = result._replace(before=errors[chosen], after=errors[other])
    reason = f"a linear model of the features {_evidence(found_errors, f'at {other[0]} x {other[1]}')}"
    return replace(found, image_size=chosen, size_reason=reason)


def mirrored_reason(result: FormsCompared, features: str) -> str:
    """Return the decision about mirroring with its evidence, for a linear model of these features."""
    evidence = _evidence(result, "if they are mirrored")
    return f"{'no' if mirroring_hurts(result) else 'random'} mirroring: a linear model of the {features} {evidence}"


EVIDENCE: dict[TargetKind, str] = {
    "class": "errs on {before:.1%} of {images} training images, and on {after:.1%}",
    "classes": (
        "makes {before:.1%} of the wrong labels of a constant prediction on {images} training images, and {after:.1%}"
    ),
    "numbers": "has a squared error of {before:.1%} of the variance on {images} training images, and of {after:.1%}",
}
"""Text about the errors of a comparison, by the kind of target."""


def _evidence(result: FormsCompared, condition: str) -> str:
    """Return the errors in words. `condition` is the form of the images for which the second error was measured."""
    return f"{EVIDENCE[result.kind].format(**result._asdict())} {condition}"


class FormsCompared(NamedTuple):
    """The mean errors of a linear model on the same images in two forms. `errors` defines the errors."""

    before: float
    after: float
    standard_errors: float
    """Difference of the errors, divided by the standard error of their paired differences."""
    images: int
    kind: TargetKind = "class"


@dataclass(frozen=True)
class Division:
    """The training images that are examined: some to fit a linear model, and others to measure it."""

    fitted: Source
    tested: Source


class Mirrored:
    """The images of another source, mirrored left to right. An image that cannot be decoded stays as it is."""

    def __init__(self, source: Source, channels: int) -> None:
        self.source = source
        self.channels = channels
        self.classes = source.classes
        self.target_kind: TargetKind = target_kind(source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        sample = self.source[index]
        try:
            pixels = decode(sample.image, self.channels)
        except UndecodableImage:
            return sample
        return replace(sample, image=np.ascontiguousarray(pixels[:, ::-1]))

    def key(self, index: int) -> str:
        return self.source.key(index)

    def target(self, index: int) -> Target:
        return self.source.target(index)


def divide(train: Source, most: int = MAX_IMAGES, seed: int = 0) -> Division | None:
    """Return at most `most` training images to examine, one third of each class to measure with.

    If there are too many classes for `IMAGES_PER_CLASS` images each, the images come from some of the classes. Return
    None if fewer than `MIN_TESTED` images would be left to measure with, and for boxes, masks and texts, which no
    linear model of one vector per image predicts.
    """
    truth = truth_of(train)
    if truth.kind in PLACED or truth.texts is not None:
        return None
    usable = np.flatnonzero(truth.known)
    if len(usable) > most:
        usable = usable[_drawn(truth.rows(usable).groups(), most, seed)]
    groups = truth.rows(usable).groups()
    counts = np.bincount(groups)
    is_tested = class_ranks(groups, seed) < (counts // 3)[groups]
    if is_tested.sum() < MIN_TESTED:
        return None
    return Division(subset(train, usable[~is_tested].tolist()), subset(train, usable[is_tested].tolist()))


def _drawn(groups: Int64[np.ndarray, " n"], most: int, seed: int) -> Int64[np.ndarray, " m"]:
    """Return the rows of at most `most` images, equally many of each drawn class if there are enough."""
    classes, counts = np.unique(groups, return_counts=True)
    order = np.random.default_rng(seed).permutation(np.flatnonzero(counts >= 3))  # a third is measured
    fits = np.minimum(counts[order], IMAGES_PER_CLASS).cumsum() <= most
    rows = np.flatnonzero(np.isin(groups, classes[order[fits]]))
    ranks = class_ranks(groups, seed)[rows]
    return np.sort(rows[np.argsort(ranks, kind="stable")[:most]])


def mirror_test(features_of: Callable[[Source], FeatureSet], division: Division, channels: int) -> FormsCompared | None:
    """Return the errors of a linear model of features on images, and on the same images mirrored.

    `features_of` returns the features of all samples of a source that can be decoded: those of a model, or
    `pixel_features`. `channels` is the number of channels to which images are decoded. Return None if too few images
    can be decoded, or if the linear model is hardly better than a constant prediction on the images themselves. Raise
    the errors of `features_of`.
    """
    before, after = features_of(division.tested), features_of(Mirrored(division.tested, channels))
    if len(before) != len(after) or len(before) < MIN_TESTED:
        return None
    errors_of = fit(features_of(division.fitted))
    found = compare(errors_of(before), errors_of(after), before.truth.kind)
    return None if found.before >= NEAR_CHANCE * chance(before.truth) else found


def pixel_features(source: Source, channels: int) -> FeatureSet:
    """Return the levels of every image at 16 x 16 pixels, as features for data without a model."""
    side = PIXEL_FEATURE_SIDE
    if isinstance(source, Mirrored):  # the small images are mirrored, because large images take long to decode
        found = pixel_features(source.source, channels)
        mirrored = found.features.reshape(-1, channels, side, side)[..., ::-1]
        return replace(found, features=np.ascontiguousarray(mirrored).reshape(found.features.shape))
    preprocess = Preprocess(image_size=(side, side), channels=channels, scaled_decode=True)

    def levels(index: int) -> np.ndarray | None:
        try:
            return preprocess.pixels(source[index].image).reshape(-1).astype(np.float32) / 255
        except DataError:
            return None

    with ThreadPoolExecutor(default_threads()) as pool:
        decoded = {row: pixels for row, pixels in enumerate(pool.map(levels, range(len(source)))) if pixels is not None}
    features = np.stack(list(decoded.values())) if decoded else np.empty((0, side * side * channels), np.float32)
    return FeatureSet(features, truth_of(source, decoded), tuple(map(source.key, decoded)), tuple(source.classes))


def compare_sizes(
    bundle: Bundle,
    division: Division,
    sizes: Sequence[tuple[int, int]],
    *,
    readers: Readers = Readers(),
    precision: Precision = "float32",
) -> FormsCompared | None:
    """Return the errors of linear models of the features at two image sizes (height, width).

    Return None if too few images can be decoded, or if both linear models are hardly better than a constant prediction.
    Raise the errors of `extract`.
    """
    found, tested = [], None
    for size in sizes:
        outputs = Outputs(adapted(bundle, image_size=size), batch_size=None, readers=readers, precision=precision)
        tested = outputs.features(division.tested)
        if len(tested) < MIN_TESTED:
            return None
        found.append(fit(outputs.features(division.fitted))(tested))
    before, after = found
    if tested is None or len(before) != len(after):
        return None
    result = compare(before, after, tested.truth.kind)
    return None if min(result.before, result.after) >= NEAR_CHANCE * chance(tested.truth) else result


def mirroring_hurts(found: FormsCompared) -> bool:
    """Return True if mirrored images are recognised clearly worse than the images themselves."""
    return found.after - found.before >= MIRROR_LOSS and found.standard_errors >= CONFIDENCE


def larger_is_better(found: FormsCompared) -> bool:
    """Return True if the second image size is clearly better than the first."""
    return found.before - found.after >= SIZE_GAIN and found.standard_errors <= -1


def compare(
    before: Float64[np.ndarray, " n"], after: Float64[np.ndarray, " n"], kind: TargetKind = "class"
) -> FormsCompared:
    """Return the comparison of the errors of the same images in two forms."""
    differences = after - before
    mean, spread = float(differences.mean()), float(differences.std() / np.sqrt(len(differences)))
    ratio = mean / spread if spread else math.copysign(math.inf, mean) if mean else 0.0
    return FormsCompared(float(before.mean()), float(after.mean()), ratio, len(before), kind)


def fit(found: FeatureSet) -> Callable[[FeatureSet], Float64[np.ndarray, " n"]]:
    """Fit a linear model to features, and return the function that returns its error for each of other images.

    The model has outputs only for the classes of its own images, because the data can have many more.
    """
    columns = np.unique(found.truth.groups()).tolist() if found.truth.kind == "class" else None
    truth = found.truth if columns is None else found.truth.restricted(columns)
    model = fit_linear(found.features, truth).model

    def errors_of(tested: FeatureSet) -> Float64[np.ndarray, " n"]:
        return errors(
            model.scores(tested.features), tested.truth if columns is None else tested.truth.restricted(columns)
        )

    return errors_of


def errors(scores: Float[np.ndarray, "n outputs"], truth: Targets) -> Float64[np.ndarray, " n"]:
    """Return the error of each image: 1 for a wrong class; if images can have several labels, the number of wrong
    labels as a fraction of those of the best constant prediction per image; or the squared error of numbers as a
    fraction of their variance. Numbers that do not vary have no error."""
    if truth.kind == "class":
        return (scores.argmax(axis=1) != truth.values).astype(np.float64)
    if truth.kind == "classes":
        labels = truth.dense
        wrong = ((scores > 0) != (labels > 0)).mean(axis=1)
        fractions = labels.mean(axis=0)
        constant = np.minimum(fractions, 1 - fractions).mean()
        return np.asarray(wrong / max(constant, 1 / labels.size), np.float64)  # at least one wrong label
    if truth.kind != "numbers":
        raise DataError(f"targets of the kind {truth.kind} have no error")
    variance = _moments(truth)[1]
    counted = ~np.isnan(truth.values) & (variance > 0)
    squares = np.divide((scores - truth.values) ** 2, variance, out=np.zeros_like(truth.values), where=counted)
    return np.asarray(squares.sum(axis=1) / np.maximum(counted.sum(axis=1), 1), np.float64)


def chance(truth: Targets) -> float:
    """Return the mean error of the best constant prediction. It is 0 if the targets of all images are equal."""
    if truth.kind == "class":
        constant = np.bincount(truth.values[truth.known], minlength=truth.columns).astype(np.float64)
    elif truth.kind == "classes":
        constant = truth.dense.mean(axis=0) - 0.5
    elif truth.kind == "numbers":
        constant = _moments(truth)[0]
    else:
        raise DataError(f"targets of the kind {truth.kind} have no error")
    return float(errors(np.tile(constant, (len(truth), 1)), truth).mean())


def _moments(truth: Targets) -> tuple[Float64[np.ndarray, " outputs"], Float64[np.ndarray, " outputs"]]:
    """Return the mean and the variance of the known values of each number."""
    known = ~np.isnan(truth.values)
    mean = mean_of_known(truth.values, known)
    return mean, mean_of_known((truth.values - mean) ** 2, known)
