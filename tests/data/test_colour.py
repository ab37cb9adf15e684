"""Tests of the detection of colours, in files of several formats and in a mixture of grey and coloured images."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.make import MemorySource, encode
from vitrail.data.check.images import colour_note, has_colour, images_of
from vitrail.errors import UndecodableImage


def picture(*, coloured: bool, mode: str = "RGB", size: tuple[int, int] = (301, 157)) -> Image.Image:
    """Return noise in grey levels, with a red spot of about 2 % of the pixels if `coloured`."""
    grey = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 1), dtype=np.uint8).repeat(3, axis=2)
    if coloured:
        grey[: size[1] // 6, : size[0] // 8] = (200, 20, 20)
    return Image.fromarray(grey).convert(mode)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "WEBP"])
def test_a_small_spot_of_colour_counts_and_grey_stored_as_rgb_does_not(form: str) -> None:
    assert has_colour(encode(picture(coloured=True), form))
    assert not has_colour(encode(picture(coloured=False), form))


def test_grey_modes_palettes_and_arrays() -> None:
    assert not has_colour(encode(picture(coloured=True, mode="L"), "PNG"))
    assert not has_colour(encode(picture(coloured=True, mode="1"), "PNG"))
    assert has_colour(encode(picture(coloured=True).quantize(64), "PNG"))
    assert not has_colour(np.zeros((5, 7), np.uint8))
    assert has_colour(np.asarray(picture(coloured=True, size=(3000, 12))))
    with pytest.raises(UndecodableImage):
        has_colour(b"nothing")


def test_the_note_is_for_grey_networks_and_coloured_images() -> None:
    grey, red = (encode(picture(coloured=coloured, size=(31, 17)), "PNG") for coloured in (False, True))
    source = MemorySource([grey] * 300 + [red] * 100, labels=[0, 1] * 200)
    note = "the model takes grey images, so colours are dropped; 8 of 32 images looked at have colours"
    assert colour_note(images_of(source), 1) == note
    assert colour_note(images_of(MemorySource(labels=[0])), 3) == "", "no image is read"
    assert colour_note([grey] * 19 + [red], 1) == ""
    assert colour_note([b"broken", red], 1).endswith("dropped; the image has colours")
    assert colour_note([b"broken"], 1) == "" == colour_note([], 1)
    assert list(images_of(MemorySource([], labels=[]))) == []
