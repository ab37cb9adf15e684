"""Images with boxes, outlines and masks drawn on them, each class in a colour of its own."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageDraw, ImageFont

COVER = 0.45
"""Opacity of a mask over the image."""

GOLDEN = (math.sqrt(5) - 1) / 2
"""Step between the hues of consecutive classes, which keeps any number of them apart."""

Colour = tuple[int, int, int]


def colour_of(number: int) -> Colour:
    """Return the colour of a class. Consecutive classes have clearly different colours."""
    lightness = (0.95, 0.75, 0.55)[number // 12 % 3]
    red, green, blue = colorsys.hsv_to_rgb((0.58 + number * GOLDEN) % 1, 0.85, lightness)
    return round(255 * red), round(255 * green), round(255 * blue)


FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial Unicode.ttf", "arial.ttf")
"""Fonts of common systems with more letters than that of Pillow, which has ASCII only."""


def font_of(texts: Iterable[str], size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return the font of Pillow, or one of this machine if a text has letters beyond ASCII."""
    for name in () if all(text.isascii() for text in texts) else FONTS:
        with suppress(OSError):
            return ImageFont.truetype(name, size)
    return ImageFont.load_default(size)


def draw_boxes(
    image: Image.Image,
    boxes: Float[np.ndarray, "n 4"],
    classes: Sequence[int],
    texts: Sequence[str] = (),
    masks: Sequence[Bool[np.ndarray, "h w"] | None] = (),
) -> Image.Image:
    """Return the image with boxes (left, top, right, bottom) in its pixels, in the colours of their classes.

    `texts` stand at the boxes, and `masks` cover the objects. Larger boxes are drawn first.
    """
    found = image.convert("RGB")
    order = np.argsort(-(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]), kind="stable").tolist()
    for number in order if masks else ():
        if (mask := masks[number]) is not None:
            found = _covered(found, mask, colour_of(classes[number]))
    pen = ImageDraw.Draw(found)
    line = max(1, round(min(found.size) / 250))
    font = font_of(texts, max(10.0, min(found.size) / 32))
    for number in order:
        colour = colour_of(classes[number])
        left, top, right, bottom = boxes[number].tolist()
        right, bottom = max(right - 1, left), max(bottom - 1, top)
        pen.rectangle((left, top, right, bottom), outline=colour, width=line)
        if not (texts and texts[number]):
            continue
        _, _, width, height = pen.textbbox((0, 0), texts[number], font=font)
        x = min(left, max(0, found.width - width - 4))
        y = top - height - 4 if top >= height + 4 else top
        pen.rectangle((x, y, x + width + 4, y + height + 4), fill=colour)
        pen.text((x + 2, y + 1), texts[number], fill=_ink(colour), font=font)
    return found


def draw_mask(image: Image.Image, mask: UInt8[np.ndarray, "h w"], classes: int) -> Image.Image:
    """Return the image under the colours of the classes in a mask. Pixels of other values are not covered."""
    table = np.zeros((256, 3), np.uint8)
    table[:classes] = [colour_of(number) for number in range(classes)]
    levels = np.asarray(image.convert("RGB")).astype(np.float32)
    mixed = np.where((mask < classes)[..., None], (1 - COVER) * levels + COVER * table[mask], levels)
    return Image.fromarray(mixed.round().astype(np.uint8))


def draw_legend(names: Sequence[str], across: int, classes: Sequence[int]) -> Image.Image:
    """Return an image of the colours of classes with their names, in `across` columns. `classes` are the indices of
    those that are shown."""
    font = font_of(names, 14.0)
    width = max(24 + round(font.getlength(names[number])) for number in classes) + 16
    down = math.ceil(len(classes) / across)
    found = Image.new("RGB", (width * min(across, len(classes)), 22 * down), "white")
    pen = ImageDraw.Draw(found)
    for place, number in enumerate(classes):
        left, top = place // down * width, place % down * 22
        pen.rectangle((left, top + 3, left + 16, top + 18), fill=colour_of(number))
        pen.text((left + 24, top + 2), names[number], fill="black", font=font)
    return found


def beside(first: Image.Image, second: Image.Image) -> Image.Image:
    """Return two images of one height beside each other."""
    gap = max(2, first.width // 50)
    found = Image.new("RGB", (first.width + gap + second.width, first.height), "white")
    found.paste(first, (0, 0))
    found.paste(second, (first.width + gap, 0))
    return found


def with_legend(image: Image.Image, names: Sequence[str], classes: Sequence[int]) -> Image.Image:
    """Return an image above the legend of these classes."""
    widest = max(font_of(names, 14.0).getlength(names[number]) for number in classes)
    legend = draw_legend(names, max(1, image.width // (40 + round(widest))), classes)
    found = Image.new("RGB", (max(image.width, legend.width), image.height + legend.height), "white")
    found.paste(image, (0, 0))
    found.paste(legend, (0, image.height))
    return found


def _covered(image: Image.Image, mask: Bool[np.ndarray, "h w"], colour: Colour) -> Image.Image:
    levels = np.array(image)
    levels[mask] = ((1 - COVER) * levels[mask] + COVER * np.array(colour)).round().astype(np.uint8)
    return Image.fromarray(levels)


def _ink(colour: Colour) -> Colour:
    """Return black or white, whichever is easier to read on a colour."""
    light = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    return (0, 0, 0) if light > 140 else (255, 255, 255)
