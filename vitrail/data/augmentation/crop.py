"""Random boxes that are cut out of images before they are scaled: the Inception crop, or random-resized crop."""

from __future__ import annotations

import numpy as np

from vitrail.data.augmentation.draws import Slot, keyed_uniform

__all__ = ["crop_box"]

TRIES = 10


def crop_box(
    seed: int,
    epoch: int,
    sample: int,
    height: int,
    width: int,
    *,
    area: tuple[float, float] = (0.05, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    view: int = 0,
) -> tuple[int, int, int, int]:
    """Return a random box inside an image of `height` x `width` pixels, as top, left, height and width.

    The box covers a uniform fraction of the image's area, within `area`. The logarithm of its aspect ratio (width /
    height) is uniform within the logarithms of `ratio` (1409.4842; the bounds 0.05 and 3/4 come from 2106.10270 and
    2205.01580). Its position is uniform. Up to ten boxes are drawn, and the first that fits into the image is returned.
    If none fits, the result is the largest centred box whose aspect ratio is in the range. The box is a pure function
    of the arguments.
    """
    key = np.array([epoch], np.int64), np.array([sample], np.int64), np.array([view], np.int64)
    numbers = keyed_uniform(seed, *key, draws=4 * TRIES, first=Slot.CROP)
    share, log_ratio, down, across = numbers.astype(np.float64).reshape(TRIES, 4).T
    areas = height * width * (area[0] + (area[1] - area[0]) * share)
    ratios = np.exp(np.log(ratio[0]) + (np.log(ratio[1]) - np.log(ratio[0])) * log_ratio)
    widths, heights = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    if fits.any():
        take = int(fits.argmax())
        h, w = int(heights[take]), int(widths[take])
        return int(down[take] * (height - h + 1)), int(across[take] * (width - w + 1)), h, w
    h = min(height, max(1, round(width / ratio[0])))
    w = min(width, max(1, round(height * ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w
