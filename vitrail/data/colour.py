"""Detection of colour in images, for a note if a grey network ignores it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np
from PIL import Image

from vitrail.data.pixels.decode import open_image
from vitrail.data.source import Source
from vitrail.errors import DataError, UndecodableImage, plural

MAX_LOOKS = 32
"""Maximum number of images that are decoded."""

SIDE = 64
"""Side in pixels to which an image is shrunk before its colours are compared."""

MIN_DIFFERENCE = 24
"""Difference between the highest and the lowest of red, green and blue from which a pixel counts as coloured, in levels
from 0 to 255. Compression and scanning leave smaller differences in grey pictures."""

MIN_PIXELS = 0.01
"""Fraction of coloured pixels from which an image counts as coloured."""

MIN_IMAGES = 0.1
"""Smallest fraction of coloured images for which a note is printed."""


def has_colour(image: bytes | np.ndarray | Image.Image) -> bool:
    """Return True if an image has colours, and False if it is grey. Raise `UndecodableImage`."""
    opened = open_image(image)
    if opened.picture.mode in ("1", "L", "LA", "I;16", "I", "F"):
        return False
    picture = opened.load(3, opened.shrink_for(max(opened.size) / SIDE))
    picture.thumbnail((SIDE, SIDE))
    levels = np.asarray(picture).astype(np.int16)
    differences = levels.max(axis=2) - levels.min(axis=2)
    return float((differences >= MIN_DIFFERENCE).mean()) >= MIN_PIXELS


def images_of(source: Source) -> Iterator[bytes | np.ndarray]:
    """Yield up to 32 evenly spaced images of a source. Images that cannot be read are skipped."""
    for index in np.unique(np.linspace(0, len(source) - 1, min(MAX_LOOKS, len(source))).astype(np.int64)).tolist():
        try:
            yield source[index].image
        except DataError:
            continue


def colours_in(images: Iterable[bytes | np.ndarray | Image.Image]) -> list[bool]:
    """Return for each image if it has colours. Images that cannot be decoded are skipped."""
    found = []
    for image in images:
        with suppress(UndecodableImage):
            found.append(has_colour(image))
    return found


def colour_note(images: Iterable[bytes | np.ndarray | Image.Image], channels: int) -> str:
    """Return a sentence about colours that a network of `channels` channels drops, or an empty text if it drops none.

    Images that cannot be decoded are skipped.
    """
    if channels != 1:
        return ""
    found = colours_in(images)
    if not found or sum(found) < MIN_IMAGES * len(found):
        return ""
    many = f"{sum(found):,} of {plural(len(found), 'image')} looked at" if len(found) > 1 else "the image"
    has = "has" if len(found) == 1 else "have"
    return f"the model takes grey images, so colours are dropped; {many} {has} colours"
