"""A few held-out images written as files, so that there is something to try a new model on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.decode import to_pil
from vitrail.data.source import Source
from vitrail.errors import UndecodableImage
from vitrail.files import replacing_folder
from vitrail.weights.bundle import Bundle, Prediction

__all__ = ["Example", "write_examples"]


PUNCTUATION = re.compile(r"\W+")
"""What a class name may have that a file name should not; letters of any language stay."""


@dataclass(frozen=True)
class Example:
    """An image, what it is, and what the model takes it for."""

    path: Path
    label: str
    prediction: Prediction


def write_examples(bundle: Bundle, source: Source, folder: Path, count: int = 10) -> tuple[Example, ...]:
    """Writes about `count` images, spread evenly over `source`, as PNG files named by class, and predicts them."""
    picked = []
    for number in range(min(count, len(source))):
        sample = source[number * len(source) // min(count, len(source))]
        if sample.label is None:
            continue
        try:
            picked.append((to_pil(sample.image, bundle.preprocess.channels), source.classes[sample.label]))
        except UndecodableImage:
            continue
    names = [f"{number:02}-{PUNCTUATION.sub('-', label)}.png" for number, (_, label) in enumerate(picked)]
    with replacing_folder("example images", folder) as partial:
        for (picture, _), name in zip(picked, names, strict=True):
            picture.save(partial / name)
    paths = [folder / name for name in names]
    predictions = bundle.predict(paths)
    return tuple(
        Example(path, label, prediction)
        for path, (_, label), prediction in zip(paths, picked, predictions, strict=True)
    )
