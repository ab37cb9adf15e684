"""The images of a data set as files in a folder per split and class, which other libraries read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitrail.data.source import Source, fingerprint
from vitrail.data.splits import Splits
from vitrail.files import replacing_folder, write_json

DONE = "images.json"
"""File with the fingerprint of the data, which is written last."""

SUFFIXES = {"JPEG": ".jpg", "PNG": ".png"}
"""Suffixes of files that are written as they are, by the format that Pillow finds. Other images become PNG files."""


def write_images(splits: Splits, folder: Path) -> None:
    """Write the images of all splits as `SPLIT/CLASS/INDEX.SUFFIX`, unless the folder has them already.

    CLASS is the index of the class with five digits. The bytes of JPEG and PNG files do not change.
    """
    name = fingerprint(splits.train, splits.validation, splits.test)
    if (folder / DONE).exists() and json.loads((folder / DONE).read_text(encoding="utf-8"))["fingerprint"] == name:
        return
    sources = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    with replacing_folder("the images", folder, [*sources, DONE]) as partial:
        for split, source in sources.items():
            if source is not None:
                _write(source, partial / split, len(splits.classes))
        write_json(partial / DONE, {"fingerprint": name, "classes": list(splits.classes)})


def _write(source: Source, folder: Path, classes: int) -> None:
    for label in range(classes):
        (folder / f"{label:05d}").mkdir(parents=True)
    for index in range(len(source)):
        sample = source[index]
        content, suffix = _encoded(sample.image)
        (folder / f"{sample.target:05d}" / f"{index:07d}{suffix}").write_bytes(content)


def _encoded(image: bytes | UInt8[np.ndarray, "h w c"]) -> tuple[bytes, str]:
    """Return the bytes of an image file and its suffix."""
    if isinstance(image, bytes):
        file = Image.open(io.BytesIO(image))
        if file.format in SUFFIXES:
            return image, SUFFIXES[file.format]
        picture: Image.Image = file
    else:
        picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue(), SUFFIXES["PNG"]
