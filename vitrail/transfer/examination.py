"""A look at the data through the model, before settings are chosen: is mirroring harmless, and which image size helps?

Both questions are answered by a linear model of frozen features. It is fitted to two thirds of some training images and
measured on the others, so the validation and the test split have no say.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64

from vitrail.data.pipeline import Readers
from vitrail.data.pixels.decode import decode
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample, Source, Subset, Target, TargetKind, target_kind
from vitrail.errors import DataError, UndecodableImage
from vitrail.evaluation.classifiers.arrays import class_ranks
from vitrail.evaluation.classifiers.linear import LinearMap, fit_linear
from vitrail.evaluation.features.extract import FeatureSet
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.truth import MultiLabels, Numbers, SingleLabels, Truth, truth_of
from vitrail.machine import Precision
from vitrail.models.variants import AnyConfig
from vitrail.transfer.choices import DataFacts, Explicit, Findings, scaled_size
from vitrail.transfer.rules import image_size_for
from vitrail.weights.adapt import adapted
from vitrail.weights.bundle import Bundle

__all__ = [
    "Comparison",
    "Mirrored",
    "Sides",
    "compare",
    "compare_sizes",
    "examine",
    "larger_is_better",
    "larger_size",
    "mirror_test",
    "mirrored_reason",
    "mirroring_hurts",
    "on_device",
    "pixel_features",
    "sides_of",
]

MAX_IMAGES = 900
"""Maximum number of training images that are examined."""

MAX_SIZED = 450
"""Maximum number of training images with which image sizes are compared, because larger images take longer."""

MIN_TESTED = 12
"""Minimum number of test images for a comparison. With fewer images, chance would decide."""

MAX_COMPARED = 224
"""Longest side in pixels of the larger image size that is compared."""

CONFIDENCE = 2.5
"""Number of standard errors by which errors must differ before a difference counts."""

SIDE = 16
"""Side in pixels of the images whose levels are features."""

MIRROR_LOSS = 0.03
"""Smallest increase of the error by mirroring that counts: three of 100 images, or 3 % of the variance of numbers."""

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
    sides = sides_of(train)
    if sides is None:
        return Findings()
    size, _ = image_size_for(bundle.network.config, facts, gpu=device.type == "cuda")
    model = on_device(bundle, device)
    found = Findings()
    if "image_size" not in explicit and device.type == "cpu":
        larger = larger_size(bundle.network.config, size)
        if larger is not None:
            few = sides_of(train, MAX_SIZED) or sides
            result = compare_sizes(model, few, (size, larger), readers=readers, precision=precision)
            found = _sized(found, result, size, larger)
            size = found.image_size or size
    if "flip" not in explicit:
        outputs = Outputs(adapted(model, image_size=size), readers=readers, precision=precision)
        result = mirror_test(outputs.features, sides, bundle.preprocess.channels)
        found = _mirrored(found, result)
    return found


def on_device(bundle: Bundle, device: torch.device) -> Bundle:
    """Return the bundle, or on another device a copy of it."""
    if bundle.device == device:
        return bundle
    return replace(bundle, network=copy.deepcopy(bundle.network).to(device))


def larger_size(network: AnyConfig, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return a larger image size to compare with `size` (height, width): the model's own, with at most
    `MAX_COMPARED` pixels a side. Return None if the model's own size is not clearly larger."""
    longest = min(max(network.image_size), MAX_COMPARED)
    larger = scaled_size(network, longest)
    return larger if math.prod(larger) >= 1.5 * math.prod(size) else None


def _sized(found: Findings, result: Comparison | None, size: tuple[int, int], larger: tuple[int, int]) -> Findings:
    if result is None:
        return found
    chosen, other = (larger, size) if larger_is_better(result) else (size, larger)
    errors = {size: result.before, larger: result.after}
    reason = (
        f"a linear model of the features errs on {errors[chosen]:.1%} of {result.images} training images, and on "
        f"{errors[other]:.1%} at {other[0]} x {other[1]}"
    )
    return replace(found, image_size=chosen, size_reason=reason)


def _mirrored(found: Findings, result: Comparison | None) -> Findings:
    if result is None:
        return found
    return replace(found, flip=not mirroring_hurts(result), flip_reason=mirrored_reason(result, "features"))


def mirrored_reason(result: Comparison, features: str) -> str:
    """Return the decision about mirroring with its evidence, for a linear model of these features."""
    errors = (
        f"errs on {result.before:.1%} of {result.images} training images, and on {result.after:.1%} of them mirrored"
    )
    return f"{'no' if mirroring_hurts(result) else 'random'} mirroring: a linear model of the {features} {errors}"


FeaturesOf = Callable[[Source], FeatureSet]
"""Function that returns the features of every sample that can be decoded."""


class Comparison(NamedTuple):
    """The mean errors of a linear model on the same images in two forms: the fraction of wrong labels, or the squared
    error of numbers as a fraction of their variance."""

    before: float
    after: float
    standard_errors: float
    """Difference of the errors, divided by the standard error of their paired differences."""
    images: int


@dataclass(frozen=True)
class Sides:
    """The training images that are examined: a part to fit a linear model, and a part to measure it."""

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


def sides_of(train: Source, most: int = MAX_IMAGES, seed: int = 0) -> Sides | None:
    """Return `most` training images to examine at most, with all classes in both parts where possible.

    Return None if fewer than `MIN_TESTED` images would be left to measure with.
    """
    truth = truth_of(train)
    usable = np.flatnonzero(truth.known)
    if len(usable) > most:
        usable = np.sort(np.random.default_rng(seed).choice(usable, most, replace=False))
    groups = truth.rows(usable).groups()
    counts = np.bincount(groups)
    is_tested = class_ranks(groups, seed) < (counts // 3)[groups]
    if is_tested.sum() < MIN_TESTED:
        return None
    return Sides(Subset(train, usable[~is_tested].tolist()), Subset(train, usable[is_tested].tolist()))


def mirror_test(features_of: FeaturesOf, sides: Sides, channels: int) -> Comparison | None:
    """Return the errors of a linear model of features on images, and on the same images mirrored.

    `features_of` returns the features of all samples of a source: those of a model, or `pixel_features`. `channels` is
    the number of channels to which images are decoded. Return None if the images cannot be compared, because too few of
    them can be decoded. Raise the errors of `features_of`.
    """
    before, after = features_of(sides.tested), features_of(Mirrored(sides.tested, channels))
    if len(before) != len(after) or len(before) < MIN_TESTED:
        return None
    model = _model(features_of, sides)
    return compare(errors_of(model, before), errors_of(model, after))


def pixel_features(source: Source, channels: int) -> FeatureSet:
    """Return the levels of every image at 16 x 16 pixels, as features for data without a model."""
    preprocess = Preprocess(image_size=(SIDE, SIDE), channels=channels)
    rows, found = [], []
    for index in range(len(source)):
        try:
            found.append(preprocess.pixels(source[index].image).reshape(-1).astype(np.float32) / 255)
        except DataError:
            continue
        rows.append(index)
    features = np.stack(found) if found else np.empty((0, SIDE * SIDE * channels), np.float32)
    return FeatureSet(features, truth_of(source, rows), tuple(map(source.key, rows)), tuple(source.classes))


def compare_sizes(
    bundle: Bundle,
    sides: Sides,
    sizes: Sequence[tuple[int, int]],
    *,
    readers: Readers = Readers(),
    precision: Precision = "float32",
) -> Comparison | None:
    """Return the errors of linear models of the features at two image sizes (height, width).

    Return None if the images cannot be compared, because too few of them can be decoded. Raise the errors of `extract`.
    """
    found = []
    for size in sizes:
        outputs = Outputs(adapted(bundle, image_size=size), readers=readers, precision=precision)
        tested = outputs.features(sides.tested)
        if len(tested) < MIN_TESTED:
            return None
        found.append(errors_of(_model(outputs.features, sides), tested))
    before, after = found
    return compare(before, after) if len(before) == len(after) else None


def mirroring_hurts(found: Comparison) -> bool:
    """Return True if mirrored images are recognised clearly worse than the images themselves."""
    return found.after - found.before >= MIRROR_LOSS and found.standard_errors >= CONFIDENCE


def larger_is_better(found: Comparison) -> bool:
    """Return True if the second image size is clearly better than the first."""
    return found.before - found.after >= SIZE_GAIN and found.standard_errors <= -1


def compare(before: Float64[np.ndarray, " n"], after: Float64[np.ndarray, " n"]) -> Comparison:
    """Return the comparison of the errors of the same images in two forms."""
    differences = after - before
    mean, spread = float(differences.mean()), float(differences.std() / np.sqrt(len(differences)))
    ratio = mean / spread if spread else math.copysign(math.inf, mean) if mean else 0.0
    return Comparison(float(before.mean()), float(after.mean()), ratio, len(before))


def errors_of(model: LinearMap, found: FeatureSet) -> Float64[np.ndarray, " n"]:
    """Return the error of each image: 1 for a wrong class, the fraction of wrong labels if images can have several, or
    the squared error of numbers as a fraction of their variance."""
    scores, truth = model.scores(found.features), found.truth
    return _errors(scores, truth)


def _model(features_of: FeaturesOf, sides: Sides) -> LinearMap:
    found = features_of(sides.fitted)
    return fit_linear(found.features, found.truth).model


def _errors(scores: Float[np.ndarray, "n outputs"], truth: Truth) -> Float64[np.ndarray, " n"]:
    if isinstance(truth, SingleLabels):
        return (scores.argmax(axis=1) != truth.values).astype(np.float64)
    if isinstance(truth, MultiLabels):
        return np.asarray(((scores > 0) != (truth.values > 0)).mean(axis=1), np.float64)
    if not isinstance(truth, Numbers):
        raise DataError(f"targets of the kind {truth.kind} have no error")
    known = ~np.isnan(truth.values)
    values = np.where(known, truth.values, 0.0)
    counts = np.maximum(known.sum(axis=0), 1)
    centred = np.where(known, values - values.sum(axis=0) / counts, 0.0)
    variance = np.maximum((centred**2).sum(axis=0) / counts, np.finfo(np.float64).tiny)
    errors = np.where(known, (scores - values) ** 2 / variance, 0.0)
    return np.asarray(errors.sum(axis=1) / np.maximum(known.sum(axis=1), 1), np.float64)
