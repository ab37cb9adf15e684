"""Comparison of an exported file with the network: on the same images, in batches of several sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.pixels.preprocess import Pixels, Preprocess
from vitrail.data.source import Sample, Source
from vitrail.errors import DataError, ExportFailed, UndecodableImage
from vitrail.models.predictor import Predictor
from vitrail.serving.export.program import EndToEnd
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported.description import Exported
from vitrail.weights.exported.network import ExportedNetwork

__all__ = ["BATCHES", "TOLERANCE", "Expected", "Parity", "compare", "expected_outputs", "spread_samples"]

BATCHES = (1, 2, 5)
"""Batch sizes that are compared, in turn. The program was traced with two images."""

TOLERANCE = 1e-3
"""Largest tolerated difference, as a fraction of the largest change of an output from image to image."""

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
    """Fraction of images with the same likeliest class, or None if the outputs are not logits of several classes."""
    correct: int | None = None
    """Number of images whose likeliest class, by the exported file, is the label. None without labels."""
    labelled: int = 0

    @property
    def relative(self) -> float:
        """Largest difference as a fraction of the spread."""
        return self.difference / self.spread


def spread_samples(source: Source, count: int) -> list[Sample]:
    """Return at most `count` samples at equal distances in a source."""
    count = min(count, len(source))
    return [source[row * len(source) // count] for row in range(count)]


@dataclass(frozen=True)
class Expected:
    """Outputs of a network for some images, with which an exported file is compared."""

    batches: list[np.ndarray]
    """Levels of the images, of shape (b, h, w, c)."""
    outputs: list[Tensor]
    """First output of the network for each batch."""
    name: str
    """Name of this output."""
    images: int
    """Number of images. Images after these are repetitions, which fill the last batch."""
    labels: list[int | None]
    """Labels of the images, or [] if the outputs are not logits of classes that exclude each other."""

    @property
    def spread(self) -> float:
        """Largest absolute difference of an output from its mean over all images."""
        found = torch.cat(self.outputs)[: self.images]
        return (found - found.mean(dim=0)).abs().max().item()


def expected_outputs(bundle: Bundle, exported: Exported, samples: Sequence[Sample]) -> Expected:
    """Return the outputs of the network for these samples.

    Raise `ExportFailed` if they hardly change from image to image, because such a network agrees with any other. Raise
    `DataError` if no image can be decoded.
    """
    images = list(_decoded(bundle.preprocess, samples))
    if not images:
        raise DataError(f"data: none of {len(samples)} images can be decoded, so the exported file cannot be compared")
    reference = EndToEnd(bundle, exported)
    predictor: Any = Predictor(reference.cpu()).network
    batches = [
        np.ascontiguousarray(np.stack(batch).transpose(0, 2, 3, 1)).astype(exported.dtype, copy=False)
        for batch in _batches([pixels for pixels, _ in images])
    ]
    with torch.inference_mode():
        outputs = [predictor(torch.from_numpy(batch))[0] for batch in batches]
    has_labels = exported.contents == "logits" and exported.output == "softmax"
    expected = Expected(batches, outputs, reference.names[0], len(images), [label for _, label in images] * has_labels)
    if not expected.spread >= FLAT:
        raise ExportFailed(
            f"the outputs of this network change by at most {expected.spread:.1e} over {len(images)} images, so a "
            "comparison with an exported file proves nothing; train the network first, or use more varied images"
        )
    return expected


def compare(expected: Expected, written: ExportedNetwork, tolerance: float = TOLERANCE) -> Parity:
    """Return the differences between the outputs of a written file and those of the network. Raise `ExportFailed` if
    the difference exceeds the tolerance."""
    found = []
    for levels, wanted in zip(expected.batches, expected.outputs, strict=True):
        found.append(torch.from_numpy(written.session.run(levels)[expected.name]))
        if found[-1].shape != wanted.shape:
            raise ExportFailed(
                f"{written.path}: a batch of {len(levels)} images gives {tuple(found[-1].shape)}, but the network "
                f"gives {tuple(wanted.shape)}"
            )
    parity = _measure(expected, torch.cat(found))
    if not parity.relative <= tolerance:
        raise ExportFailed(
            f"{written.path} differs from the network by {parity.difference:.3g}, which is {parity.relative:.2%} of "
            f"the change of its outputs from image to image; at most {tolerance:.2%} is tolerated, so the file was "
            "deleted"
        )
    return parity


def _measure(expected: Expected, found: Tensor) -> Parity:
    wanted, labels = torch.cat(expected.outputs), expected.labels
    difference = (wanted - found).abs().max().item()
    wanted, likeliest = wanted[: expected.images], found[: expected.images].argmax(dim=1)
    known = [row for row, label in enumerate(labels) if label is not None]
    return Parity(
        images=expected.images,
        difference=difference if math.isfinite(difference) else math.inf,
        spread=expected.spread,
        agreement=(likeliest == wanted.argmax(dim=1)).double().mean().item() if labels else None,
        correct=sum(likeliest[row].item() == labels[row] for row in known) if known else None,
        labelled=len(known),
    )


def _decoded(preprocess: Preprocess, samples: Sequence[Sample]) -> Iterator[tuple[Pixels, int | None]]:
    for sample in samples:
        try:
            yield preprocess.pixels(sample.image), sample.target if isinstance(sample.target, int) else None
        except UndecodableImage:
            continue


def _batches(pixels: Sequence[Pixels]) -> Iterator[Sequence[Pixels]]:
    """Yield all images in batches of 1, 2 and 5 in turn. Repeat images if there are fewer than these batches need."""
    least = sum(BATCHES)
    rest = list(pixels) if len(pixels) >= least else [pixels[row % len(pixels)] for row in range(least)]
    sizes = cycle(BATCHES)
    while rest:
        size = next(sizes)
        yield rest[:size]
        rest = rest[size:]
