"""Random numbers that are a pure function of (seed, epoch, sample, view, draw): no generator, no order, no state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64, UInt64

from vitrail.data.pixels.geometry import Box, Jitter


class Slot(IntEnum):
    """Number of the first draw of each augmentation. The draws of an augmentation must end before the first draw of the
    next augmentation. Otherwise both would use the same random numbers."""

    MOVE = 0
    ERASE = 3
    CROP = 8
    JITTER = 48
    MIX = 56
    RANDAUGMENT = 64
    """The number of draws of RandAugment grows with its layers, so about a million draws are reserved."""
    TENSORFLOW_CROP = 1 << 20
    WINDOW = (1 << 20) + 1024
    VIEW = (1 << 20) + 1280
    ERASED_BOX = (1 << 20) + 1344
    TEXT = (1 << 20) + 2048
    PATCH_ORDER = 1 << 21
    """One draw per patch. About two million draws are reserved for each of the slots of patches."""
    PATCH_SOURCE = 1 << 22
    CODE_RESTART = 3 << 21
    PATCH_BLOCKS = 1 << 23
    ERASED_PIXELS = 1 << 24


def keyed_uniform(
    seed: int,
    epochs: Int64[np.ndarray, " b"],
    samples: Int64[np.ndarray, " b"],
    views: Int64[np.ndarray, " b"] | None = None,
    *,
    draws: int,
    first: int = 0,
) -> Float32[np.ndarray, "b draws"]:
    """Return `draws` uniform numbers in [0, 1), of 24 bits each, for every (epoch, sample, view). The numbering of the
    draws starts at `first`.

    Each component of the key is hashed in turn by the finaliser of SplitMix64 (Steele, Lea and Flood 2014). View 0 is
    not hashed. The first of several views therefore has the same numbers as a single view. The numbers are computed on
    the CPU, so reading them does not wait for a device.
    """
    state = _mix(np.array([seed], np.uint64))
    state = _mix(state ^ epochs.view(np.uint64))
    state = _mix(state ^ samples.view(np.uint64))
    if views is not None and views.any():
        state = np.where(views > 0, _mix(state ^ views.view(np.uint64)), state)
    numbers = np.arange(first + 1, first + draws + 1, dtype=np.uint64) * GOLDEN
    return (_mix(state[:, None] + numbers) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def symmetric_beta(uniform: Float[np.ndarray, "b 2"], alpha: float) -> Float64[np.ndarray, " b"]:
    """Return numbers from Beta(alpha, alpha), for alpha > 0. Each number is computed from two uniform numbers, without
    rejection sampling.

    T = sqrt(2 alpha (U^(-1 / alpha) - 1)) cos(2 pi V) follows Student's t with 2 alpha degrees of freedom (Bailey
    1994), and 1/2 + T / (2 sqrt(2 alpha + T^2)) then follows Beta(alpha, alpha).
    """
    u, v = uniform.astype(np.float64).T
    cosine = np.cos(2 * np.pi * v)
    with np.errstate(divide="ignore", over="ignore"):  # for u near 0 the odds are infinite and the result is 0 or 1
        odds = np.expm1(-np.log(u) / alpha)
        return 0.5 + 0.5 * np.sign(cosine) / np.sqrt(1 + 1 / (odds * cosine**2))


def normal(uniform: Float[np.ndarray, " draws"]) -> Float32[np.ndarray, " draws"]:
    """Return numbers of a standard normal distribution, which are computed from an even number of uniform numbers (Box
    and Muller 1958)."""
    radius, angle = uniform.reshape(2, -1).astype(np.float64)
    point = np.sqrt(-2 * np.log1p(-radius)) * np.stack([np.cos(2 * np.pi * angle), np.sin(2 * np.pi * angle)])
    return point.flatten().astype(np.float32)


def erased_box(draws: Float[np.ndarray, "tries 4"], height: int, width: int) -> Box | None:
    """Return top, left, height and width of a random box that is erased (1708.04896, with timm's ranges).

    The box covers a uniform fraction of the image's area from 2 % to a third. The logarithm of its aspect ratio
    (height / width) is uniform within those of 0.3 and 1 / 0.3. The first box is returned that is smaller than the
    image in both directions, or None.
    """
    for share, log_ratio, down, across in draws.astype(np.float64):
        area = (0.02 + (1 / 3 - 0.02) * share) * height * width
        ratio = math.exp((1 - 2 * log_ratio) * math.log(0.3))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if h < height and w < width:
            return int(down * (height - h + 1)), int(across * (width - w + 1)), h, w
    return None


def _mix(x: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


GOLDEN = np.uint64(0x9E3779B97F4A7C15)


CropRule = Literal["torchvision", "tensorflow"]

TRIES = 10
"""Largest number of boxes that torchvision's rule draws. If none of them fits, a centred box is used."""


def jitter(
    seed: int, epoch: int, sample: int, height: int, width: int, *, scale: tuple[float, float], view: int = 0
) -> Jitter:
    """Return a random scale, uniform within `scale`, and a random place of the whole image."""
    share, down, across, _ = _draws(seed, epoch, sample, view, 1, Slot.CROP)[0].astype(np.float64).tolist()
    return Jitter(scale[0] + (scale[1] - scale[0]) * share, down, across)


TENSORFLOW_TRIES = 100
TRIES_AT_ONCE = 10
"""Number of boxes for which `tensorflow_crop` draws the random numbers at once. For most images, the first box already
has an allowed area."""

TENSORFLOW_RATIO = (0.75, 1.33)
"""Range of the aspect ratio that TensorFlow uses by default. It is not exactly 3/4 to 4/3."""


def torchvision_crop(
    seed: int,
    epoch: int,
    sample: int,
    height: int,
    width: int,
    *,
    area: tuple[float, float] = (0.05, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    view: int = 0,
) -> Box:
    """Return a random box inside an image of `height` x `width` pixels, as top, left, height and width.

    This is the crop of torchvision, an idea of 1409.4842. The box covers a uniform fraction of the image's area, within
    `area`. The logarithm of its aspect ratio (width / height) is uniform within the logarithms of `ratio`. Its position
    is uniform. Up to ten boxes are drawn, and the first that fits into the image is returned. If none fits, the result
    is the largest centred box whose aspect ratio is in the range.
    """
    numbers = _draws(seed, epoch, sample, view, TRIES, Slot.CROP)
    share, log_ratio, down, across = numbers.astype(np.float64).T
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


def tensorflow_crop(
    seed: int,
    epoch: int,
    sample: int,
    height: int,
    width: int,
    *,
    area: tuple[float, float] = (0.05, 1.0),
    ratio: tuple[float, float] = TENSORFLOW_RATIO,
    view: int = 0,
) -> Box:
    """Return a random box as TensorFlow's `sample_distorted_bounding_box` draws it, as top, left, height and width.

    This is the crop of vision_transformer, big_vision and Big Transfer, with which the models of 2010.11929, 2106.10270
    and 2205.01580 were trained. The aspect ratio (width / height) is uniform within `ratio`. The height of the box is
    then a uniform integer. Its bounds are the heights of the smallest and the largest box of this aspect ratio that
    `area` allows and that fits into the image. The top is a uniform integer from 0 to `height` - box height - 1, so the
    box does not touch the last row unless it has the full height. The left is drawn in the same way. If none of 100
    boxes has an allowed area, the result is the whole image.
    """
    for first in range(0, TENSORFLOW_TRIES, TRIES_AT_ONCE):
        numbers = _draws(seed, epoch, sample, view, TRIES_AT_ONCE, Slot.TENSORFLOW_CROP + 4 * first)
        if box := first_fit(numbers.tolist(), height, width, area=area, ratio=ratio):
            return box
    return 0, 0, height, width


def first_fit(
    tries: Iterable[Sequence[float]],
    height: int,
    width: int,
    *,
    area: tuple[float, float] = (0.05, 1.0),
    ratio: tuple[float, float] = TENSORFLOW_RATIO,
) -> Box | None:
    """Return the first box of `tensorflow_crop` with an allowed area, or None if no box has one.

    Each element of `tries` contains four uniform numbers in [0, 1), for the aspect ratio, the height, the top and the
    left of a box.
    """
    for aspect, size, down, across in tries:
        found = _sized(ratio[0] + (ratio[1] - ratio[0]) * aspect, size, height, width, area)
        if found is not None:
            h, w = found
            return int(down * (height - h)), int(across * (width - w)), h, w
    return None


def _sized(ratio: float, draw: float, height: int, width: int, area: tuple[float, float]) -> tuple[int, int] | None:
    """Return height and width of a box with the aspect ratio `ratio`, or None if the area after rounding is not
    allowed."""
    least, most = area[0] * height * width, area[1] * height * width
    lowest, highest = round(math.sqrt(least / ratio)), round(math.sqrt(most / ratio))
    if round(highest * ratio) > width:
        highest = math.floor((width + 0.5) / ratio)
        highest -= round(highest * ratio) > width
    highest = min(highest, height)
    lowest = min(lowest, highest)
    h = lowest + int(draw * (highest - lowest + 1))
    if h * round(h * ratio) < least:  # rounding can make the box slightly too small or too large
        h += 1
    if h * round(h * ratio) > most:
        h -= 1
    w = round(h * ratio)
    fits = 1 <= h <= height and 1 <= w <= width and least <= h * w <= most
    return (h, w) if fits else None


def _draws(seed: int, epoch: int, sample: int, view: int, tries: int, first: int) -> np.ndarray:
    """Return four random numbers for each of `tries` boxes."""
    key = np.array([epoch], np.int64), np.array([sample], np.int64), np.array([view], np.int64)
    return keyed_uniform(seed, *key, draws=4 * tries, first=first).reshape(tries, 4)


CROPS: dict[CropRule, Callable[..., Box]] = {"torchvision": torchvision_crop, "tensorflow": tensorflow_crop}
"""Rules by name. The box of a rule is a pure function of its arguments."""
