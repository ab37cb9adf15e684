"""A few held-out images written as files, so that there is something to try a new model on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source, class_indices
from vitrail.errors import UndecodableImage
from vitrail.files import replacing_folder
from vitrail.weights.bundle import AnyPrediction, Bundle, Prediction

__all__ = ["Example", "write_examples"]


PUNCTUATION = re.compile(r"\W+")
"""What a class name may have that a file name should not; letters of any language stay."""

LONGEST = 60
"""Characters of a file's name that its labels may take."""


@dataclass(frozen=True)
class Example:
    """An image, what it is, and what the model takes it for."""

    path: Path
    labels: tuple[str, ...]
    """One, but where an image can have several."""
    prediction: AnyPrediction

    @property
    def label(self) -> str:
        return ", ".join(self.labels) or "none"

    @property
    def right(self) -> bool:
        """True if the predicted class is one of the labels."""
        return isinstance(self.prediction, Prediction) and self.prediction.label in self.labels


def write_examples(bundle: Bundle, source: Source, folder: Path, count: int = 10) -> tuple[Example, ...]:
    """Writes about `count` images, spread evenly over `source`, as PNG files named by class, and predicts them."""
    picked = []
    for number in range(min(count, len(source))):
        place = number * len(source) // min(count, len(source))
        label = source.target(place)
        if label is None:
            continue
        try:
            picture = to_pil(source[place].image, bundle.preprocess.channels)
        except UndecodableImage:
            continue
        picked.append((picture, tuple(source.classes[one] for one in class_indices(label))))
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


def _word(labels: tuple[str, ...]) -> str:
    return PUNCTUATION.sub("-", "-".join(labels) or "none")[:LONGEST]
