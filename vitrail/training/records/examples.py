"""A few held-out images, saved as files for trying the new model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source, Target, class_indices, target_kind
from vitrail.errors import UndecodableImage
from vitrail.files import replacing_folder
from vitrail.weights.bundle import AnyPrediction, Bundle, Prediction

__all__ = ["Example", "write_examples"]


PUNCTUATION = re.compile(r"\W+")
"""Characters of class names that are replaced by a hyphen in file names. Letters of all alphabets are kept."""

LONGEST = 60
"""Maximum number of characters of the labels in a file name."""


@dataclass(frozen=True)
class Example:
    """An image with its labels and the model's prediction."""

    path: Path
    labels: tuple[str, ...]
    """The class of the image, all its classes, or its numbers with their names."""
    prediction: AnyPrediction

    @property
    def label(self) -> str:
        return ", ".join(self.labels) or "none"

    @property
    def right(self) -> bool:
        """True if the predicted class is one of the labels."""
        return isinstance(self.prediction, Prediction) and self.prediction.label in self.labels


def write_examples(bundle: Bundle, source: Source, folder: Path, count: int = 10) -> tuple[Example, ...]:
    """Write about `count` images as PNG files with their labels in the file names. Return the images with their labels
    and the model's predictions.

    The images are spread evenly over `source`. Images without labels and broken images are skipped. A model without a
    head gets no examples. Raises `SaveError`.
    """
    if not bundle.classes:
        return ()
    picked = []
    for number in range(min(count, len(source))):
        place = number * len(source) // min(count, len(source))
        if (target := source.target(place)) is None:
            continue
        try:
            picture = to_pil(source[place].image, bundle.preprocess.channels)
        except UndecodableImage:
            continue
        picked.append((picture, _labels(source, target)))
    names = [f"{number:02}-{_word(labels)}.png" for number, (_, labels) in enumerate(picked)]
    with replacing_folder("example images", folder, ("*.png",)) as partial:
        for (picture, _), name in zip(picked, names, strict=True):
            picture.save(partial / name)
    paths = [folder / name for name in names]
    predictions = bundle.predict(paths)
    return tuple(
        Example(path, labels, prediction)
        for path, (_, labels), prediction in zip(paths, picked, predictions, strict=True)
    )


def _labels(source: Source, target: Target) -> tuple[str, ...]:
    if target_kind(source) == "numbers" and isinstance(target, tuple):
        return tuple(f"{name} {value:.6g}" for name, value in zip(source.classes, target, strict=True))
    return tuple(source.classes[one] for one in class_indices(target))


def _word(labels: tuple[str, ...]) -> str:
    return PUNCTUATION.sub("-", "-".join(labels) or "none")[:LONGEST]
