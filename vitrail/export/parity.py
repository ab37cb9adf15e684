"""Comparison of an exported file with the network: on the same images, in batches of several sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.pixels.decode import decode
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample, Source
from vitrail.errors import DataError, ExportFailed, UndecodableImage
from vitrail.evaluation.metrics.intervals import difference_interval
from vitrail.export.program import end_to_end
from vitrail.models.heads.boxes import overlaps
from vitrail.models.predictor import Predictor
from vitrail.weights.answers import OUTPUT_NOUNS
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import ExportedNetwork, Interface, input_dtype, on_canvas, output_names
from vitrail.weights.zero_shot import read_templates

BATCHES = (1, 2, 5)
"""Batch sizes that are compared, in turn. The program was traced with two images."""

TOLERANCE = 1e-3
"""Largest tolerated difference, as a fraction of the largest change of an output from image to image."""

RESIZING_TOLERANCE = 1e-2
"""The same for files that resize pictures. Levels that lie nearly between two integers can be rounded differently."""

SAME_ANSWERS = 0.98
"""Smallest fraction of boxes, or of places in masks, that a file must have in common with the network."""

SAME_BOX = 0.95
"""Intersection over union from which two boxes are the same."""

LEAST_SCORE = 0.01
"""Score below which boxes are not compared."""

FLAT = 1e-4
"""Smallest change of an output from image to image that a comparison needs. Outputs are compared with their means over
the images, so a bias does not count."""


@dataclass(frozen=True)
class Parity:
    """Result of a comparison of an exported file with the network."""

    images: int
    difference: float
    """Largest absolute difference of an output."""
    spread: float
    """Largest absolute difference of an output from its mean over all images."""
    agreement: float | None
    """Fraction of images with the same likeliest class, of boxes that the file finds too, or of the places of masks
    with the same class. None if the outputs are other numbers."""
    compared: str = "images"
    """Noun for the things of which `agreement` is a fraction."""
    correct: int | None = None
    """Number of images whose likeliest class, by the exported file, is the label. None without labels."""
    labelled: int = 0
    lost: int = 0
    """Number of images that only the network classifies correctly."""
    gained: int = 0
    """Number of images that only the exported file classifies correctly."""

    @property
    def relative(self) -> float:
        """Largest difference as a fraction of the spread."""
        return self.difference / self.spread

    @property
    def drop(self) -> float:
        """Accuracy of the network minus accuracy of the exported file, in percentage points."""
        return 100 * (self.lost - self.gained) / max(self.labelled, 1)

    @property
    def drop_interval(self) -> tuple[float, float]:
        """Ends of the 95 % interval of `drop`, from the images whose result changed. At least one image must have a
        label."""
        low, high = difference_interval(self.lost, self.gained, self.labelled)
        return 100 * low, 100 * high


def usual_texts(count: int) -> list[str]:
    """Return texts for the comparison of text towers. The last one is longer than any context."""
    templates = read_templates("imagenet")
    names = ("dog", "red car at night", "violin", "old bridge over a river", "pizza", "fire engine", "x")
    texts = [templates[row % len(templates)].format(names[row % len(names)]) for row in range(max(count, 2) - 1)]
    return [*texts, " ".join(templates).format(*names * len(templates))]


def spread_samples(source: Source, count: int) -> list[Sample]:
    """Return at most `count` samples at equal distances in a source."""
    count = min(count, len(source))
    return [source[row * len(source) // count] for row in range(count)]


@dataclass(frozen=True)
class Expected:
    """Outputs of a network for some images, with which an exported file is compared."""

    run: Callable[[np.ndarray], Tensor]
    """Function that computes the file's first output with the network, from the inputs of the file."""
    batches: list[np.ndarray]
    """Inputs of the file, of shape (b, h, w, c): levels of resized images, or pictures if the file resizes them. For a
    text tower, tokens of shape (b, context)."""
    outputs: list[Tensor]
    """First output of the network for each batch."""
    name: str
    """Name of this output."""
    images: int
    """Number of images or texts. Those after these are repetitions, which fill the last batch."""
    labels: list[int | None]
    """Labels of the images, or [] if the outputs are not logits of classes that exclude each other."""
    compared: str = "images"
    """Noun for the answers that are compared: images, texts, boxes or masks."""
    decoded: Callable[[Tensor, Tensor], float] | None = None
    """Function that returns the fraction of what the first outputs mean that the second outputs mean too, or None for
    other outputs than those of boxes and masks."""

    @property
    def spread(self) -> float:
        """Largest absolute difference of an output from its mean over all images."""
        found = torch.cat(self.outputs)[: self.images]
        return (found - found.mean(dim=0)).abs().max().item()


def network_run(bundle: Bundle, interface: Interface) -> Callable[[np.ndarray], Tensor]:
    """Return a function that takes the inputs of an exported file, and computes the file's first output with the
    network in float32. If the file resizes pictures, the function resizes them by `Preprocess.pixels`."""
    predictor: Any = Predictor(end_to_end(bundle, replace(interface, resizes=False))).network

    def run(images: np.ndarray) -> Tensor:
        levels = _resized(bundle.preprocess, images) if interface.resizes else images
        with torch.inference_mode():
            return predictor(torch.from_numpy(levels))[0]

    return run


def expected_outputs(bundle: Bundle, interface: Interface, samples: Sequence[Sample | str]) -> Expected:
    """Return the outputs of the network for these samples, which are texts if the file has a text tower.

    Raise `ExportFailed` if they hardly change from image to image, because such a network agrees with any other. Raise
    `DataError` if no image can be decoded.
    """
    images: list[tuple[np.ndarray, int | None]]
    if interface.reads_texts:
        tokens = bundle.reader_of_texts().tokenizer.encode([text for text in samples if isinstance(text, str)]).tokens
        images = [(row, None) for row in tokens]
    else:
        pictures = [sample for sample in samples if isinstance(sample, Sample)]
        images = list(_decoded(bundle.preprocess, pictures, resizes=interface.resizes))
    if not images:
        raise DataError(f"data: none of {len(samples)} images can be decoded, so the exported file cannot be compared")
    run = network_run(bundle, interface)
    inputs = [image for image, _ in images]
    batches = _batches_of_pictures(inputs) if interface.resizes else [np.stack(batch) for batch in _batches(inputs)]
    outputs = [run(batch) for batch in batches]
    name = output_names(interface.contents, bundle.output)[0]
    has_labels = interface.contents == "logits" and bundle.output == "softmax"
    labels = [label for _, label in images] * has_labels
    decoded = partial(same_answers, bundle) if name == "rows" else None
    compared = OUTPUT_NOUNS[bundle.output] if name == "rows" else interface.noun + "s"
    expected = Expected(run, batches, outputs, name, len(images), labels, compared, decoded)
    if not expected.spread >= FLAT:
        raise ExportFailed(
            f"the outputs of this network change by at most {expected.spread:.1e} over {len(images)} {compared}, so a "
            "comparison with an exported file proves nothing; train the network first, or use more varied ones"
        )
    return expected


def compare(expected: Expected, written: ExportedNetwork, tolerance: float = TOLERANCE) -> Parity:
    """Return the differences between the outputs of a written file and those of the network. Raise `ExportFailed` if
    the difference exceeds the tolerance."""
    parity = _measure(expected, _outputs(expected, written))
    if not parity.relative <= tolerance:
        raise ExportFailed(
            f"{written.path} differs from the network by {parity.difference:.3g}, which is {parity.relative:.2g} of "
            f"the change of its outputs from image to image; at most {tolerance:.2g} is tolerated, so the file was "
            "deleted"
        )
    if expected.decoded is not None and parity.agreement is not None and parity.agreement < SAME_ANSWERS:
        raise ExportFailed(
            f"{written.path} has only {parity.agreement:.2%} of the boxes or the masks that the network predicts; at "
            f"least {SAME_ANSWERS:.0%} are needed, so the file was deleted"
        )
    return parity


def same_answers(bundle: Bundle, wanted: Tensor, found: Tensor) -> float:
    """Return the fraction of the boxes of `wanted` that are also among those of `found`, or of the places in masks with
    the same class. Boxes of one class are the same if they overlap by `SAME_BOX`."""
    config: Any = bundle.network.config
    head = config.dense_head
    if bundle.output == "mask":
        ours, theirs = (head.class_maps(outputs, config.grid).argmax(dim=1) for outputs in (wanted, found))
        return (ours == theirs).double().mean().item()
    same = []
    for ours, theirs in zip(head.objects(wanted, config.grid), head.objects(found, config.grid), strict=True):
        is_pair = (overlaps(ours.boxes, theirs.boxes) >= SAME_BOX) & (ours.labels[:, None] == theirs.labels[None])
        same.append(is_pair.any(dim=1)[ours.scores >= LEAST_SCORE])
    every = torch.cat(same)
    return every.double().mean().item() if len(every) else 1.0


def compare_other_size(expected: Expected, written: ExportedNetwork, tolerance: float) -> None:
    """Raise `ExportFailed` if a file for images of any size differs from the network at a larger size, with one more
    row and two more columns of patches."""
    config: Any = written.config
    patch = config.patch_size
    larger = [
        np.pad(batch, ((0, 0), (0, patch[0]), (0, 2 * patch[1]), (0, 0)), "wrap") for batch in expected.batches[:3]
    ]
    difference = max(
        float(np.abs(expected.run(batch).numpy() - written.run(batch)[expected.name]).max()) for batch in larger
    )
    if not difference <= tolerance * expected.spread:
        raise ExportFailed(
            f"{written.path} differs from the network by {difference:.3g} for images of {larger[0].shape[1:3]} pixels, "
            f"which is {difference / expected.spread:.2g} of the change of its outputs from image to image; at most "
            f"{tolerance:.2g} is tolerated, so the file was deleted"
        )


def compare_int8(expected: Expected, written: ExportedNetwork, max_drop: float, tolerance: float = TOLERANCE) -> Parity:
    """Return how far a written file in 8-bit integers is from the network.

    Raise `ExportFailed` if it loses more than `max_drop` percentage points of accuracy and this is no chance, because
    the whole 95 % interval of the loss is above `max_drop`, or if the answer for an image depends on the other images
    of its batch.
    """
    parity = _measure(expected, _outputs(expected, written))
    if not parity.labelled:
        raise DataError("data: no image has a label, so the accuracy of 8-bit integers cannot be measured")
    dependence = batch_dependence(expected, written)
    if not dependence <= tolerance * expected.spread:
        raise ExportFailed(
            f"{written.path}: an answer changes by {dependence:.3g} with the other images of its batch, which is "
            f"{dependence / expected.spread:.2g} of the change of its outputs from image to image; at most "
            f"{tolerance:.2g} is tolerated, so the file was deleted"
        )
    if parity.drop_interval[0] > max_drop:
        raise ExportFailed(
            f"{written.path} loses {describe_drop(parity)}; the whole interval is above max_drop={max_drop:g}, so the "
            "file was deleted"
        )
    return parity


def undecided_drop(parity: Parity, max_drop: float) -> str | None:
    """Return a note if the images are too few to show whether a file loses more than `max_drop` percentage points."""
    if parity.drop_interval[1] <= max_drop:
        return None
    return (
        f"it is not decided whether the loss of 8-bit integers is above max_drop={max_drop:g}, which lies in the "
        f"interval of the measured loss, {describe_drop(parity)}; more held-out images make the interval narrower"
    )


def describe_drop(parity: Parity) -> str:
    """Return the loss of accuracy of an exported file in words, with its interval and the images that it is from."""
    low, high = parity.drop_interval
    return (
        f"{parity.drop:.2f} percentage points of accuracy (95% interval {low:.2f} to {high:.2f}): of "
        f"{parity.labelled:,} held-out images, {parity.lost:,} are right with the network only and {parity.gained:,} "
        "with the file only"
    )


def batch_dependence(expected: Expected, written: ExportedNetwork) -> float:
    """Return the largest change of an output if an image is computed alone instead of in a batch."""
    together = next(batch for batch in expected.batches if len(batch) == max(BATCHES))
    run = written.run
    alone = np.concatenate([run(together[row : row + 1])[expected.name] for row in range(len(together))])
    return float(np.abs(run(together)[expected.name] - alone).max())


def _outputs(expected: Expected, written: ExportedNetwork) -> Tensor:
    found = []
    for levels, wanted in zip(expected.batches, expected.outputs, strict=True):
        found.append(torch.from_numpy(written.run(levels)[expected.name]))
        if found[-1].shape != wanted.shape:
            raise ExportFailed(
                f"{written.path}: a batch of {len(levels)} gives {tuple(found[-1].shape)}, but the network "
                f"gives {tuple(wanted.shape)}"
            )
    return torch.cat(found)


def _measure(expected: Expected, found: Tensor) -> Parity:
    wanted, labels = torch.cat(expected.outputs), expected.labels
    difference = (wanted - found).abs().max().item()
    ours, likeliest = (outputs[: expected.images].argmax(dim=1) for outputs in (wanted, found))
    agreement = (likeliest == ours).double().mean().item() if labels else None
    if expected.decoded is not None and math.isfinite(difference):
        agreement = expected.decoded(wanted, found)
    known = [row for row, label in enumerate(labels) if label is not None]
    right = [(ours[row].item() == labels[row], likeliest[row].item() == labels[row]) for row in known]
    return Parity(
        images=expected.images,
        difference=difference if math.isfinite(difference) else math.inf,
        spread=expected.spread,
        agreement=agreement,
        compared=expected.compared,
        correct=sum(file for _, file in right) if known else None,
        labelled=len(known),
        lost=right.count((True, False)),
        gained=right.count((False, True)),
    )


def levels_of(bundle: Bundle, interface: Interface, samples: Sequence[Sample], batch: int) -> list[np.ndarray]:
    """Return the inputs of an exported file for resized samples, in batches. Images that cannot be decoded are
    skipped."""
    levels = [one for one, _ in _decoded(bundle.preprocess, samples, resizes=False)]
    batches = (np.stack(levels[row : row + batch]) for row in range(0, len(levels), batch))
    return [on_canvas(each, bundle.preprocess, interface) for each in batches]


def _decoded(
    preprocess: Preprocess, samples: Sequence[Sample], *, resizes: bool
) -> Iterator[tuple[np.ndarray, int | None]]:
    """Yield images of shape (h, w, c) as an exported file takes them, and their labels."""
    for sample in samples:
        try:
            image: np.ndarray = (
                decode(sample.image, preprocess.channels)
                if resizes
                else preprocess.pixels(sample.image).transpose(1, 2, 0)
            )
        except UndecodableImage:
            continue
        label = sample.target if isinstance(sample.target, int) else None
        yield image.astype(input_dtype(preprocess), copy=False), label


def _resized(preprocess: Preprocess, pictures: np.ndarray) -> np.ndarray:
    """Return the levels of pictures that a file resizes itself."""
    levels = [preprocess.pixels(picture.astype(np.uint8)).transpose(1, 2, 0) for picture in pictures]
    return np.stack(levels).astype(input_dtype(preprocess), copy=False)


def _batches_of_pictures(pictures: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return each picture alone, and batches of mirrored copies of the first one, because a batch has one size."""
    first = pictures[0]
    copies = [first, first[:, ::-1], first[::-1], first[::-1, ::-1], 255 - first]
    return [np.stack([picture]) for picture in pictures] + [np.stack(copies[:size]) for size in BATCHES if size > 1]


def _batches(images: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
    """Yield all images in batches of 1, 2 and 5 in turn. Repeat images if there are fewer than these batches need."""
    least = sum(BATCHES)
    rest = list(images) if len(images) >= least else [images[row % len(images)] for row in range(least)]
    sizes = cycle(BATCHES)
    while rest:
        size = next(sizes)
        yield rest[:size]
        rest = rest[size:]
