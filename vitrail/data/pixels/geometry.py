"""Geometry of scaling, cropping and mirroring an image, with the rounding of torchvision and timm, or of big_vision."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64, Shaped

from vitrail.errors import ConfigError

Resize = Literal["squash", "crop", "pad"]

Size = tuple[int, int]
"""Height and width."""

Box = tuple[int, int, int, int]
"""Top, left, height and width of a part of an image, in pixels of the upright image at its full size."""


class Jitter(NamedTuple):
    """A random scale and place of a whole image in the network's input (large-scale jitter, 2012.07177)."""

    scale: float
    """Factor beside the scale at which the image just fits into the input."""
    down: float
    """Place of the window, from 0 (the upper end) to 1 (the lower end)."""
    across: float


NEARLY_WHOLE = 1e-9
"""Largest relative rounding error of a quotient that counts as an integer. For example, 224 / (224 / 232) is not
exactly 232."""


@dataclass(frozen=True)
class Placement:
    """The position of an image in the network's input. A box of the image is scaled, and a window of the scaled box is
    kept.

    If `top` or `left` is negative, the window extends beyond the scaled box and is padded there. A placement converts
    points, boxes and masks from the image to the result, and points, boxes and maps back. Points and boxes are in
    pixels from the top left corner, so the centre of the first pixel is at (0.5, 0.5).
    """

    image: Size
    """Height and width of the upright image."""
    box: Box
    scaled: Size
    """Height and width of the scaled box."""
    size: Size
    """Height and width of the window, which is the result."""
    top: int = 0
    left: int = 0

    def part(self, box: Box) -> Placement:
        """Return the placement of a part of the image."""
        top, left, height, width = box
        return replace(self, image=(height, width), box=(self.box[0] - top, self.box[1] - left, *self.box[2:]))

    def points(self, points: Float[np.ndarray, "n 2"]) -> Float64[np.ndarray, "n 2"]:
        """Convert points (x, y) from the image to the result. A converted point can lie outside the result."""
        return np.stack([self._forward(points[:, 1 - axis] * 1.0, axis) for axis in (1, 0)], axis=1)

    def points_back(self, points: Float[np.ndarray, "n 2"]) -> Float64[np.ndarray, "n 2"]:
        """Convert points (x, y) from the result to the image."""
        return np.stack([self._back(points[:, 1 - axis] * 1.0, axis) for axis in (1, 0)], axis=1)

    def boxes(self, boxes: Float[np.ndarray, "n 4"]) -> Float64[np.ndarray, "n 4"]:
        """Convert boxes (left, top, right, bottom) from the image to the result, and clip them to the result.

        A box outside the result gets an area of 0.
        """
        return _clipped(self.points(boxes[:, :2]), self.points(boxes[:, 2:]), self.size)

    def boxes_back(self, boxes: Float[np.ndarray, "n 4"]) -> Float64[np.ndarray, "n 4"]:
        """Convert boxes (left, top, right, bottom) from the result to the image, and clip them to the image."""
        return _clipped(self.points_back(boxes[:, :2]), self.points_back(boxes[:, 2:]), self.image)

    def mask(self, mask: Shaped[np.ndarray, "*c h w"], fill: float | int = 0) -> Shaped[np.ndarray, "*c height width"]:
        """Convert a mask from the image to the result, by nearest-neighbour interpolation. Padding becomes `fill`."""
        if mask.shape[-2:] != self.image:
            raise ConfigError(
                f"values of shape {mask.shape} do not belong to an image of {self.image[0]} x {self.image[1]} "
                "(height, width); their last two dimensions must be its height and width"
            )
        (rows, is_row), (columns, is_column) = map(self._pixels, (0, 1))
        found = mask[..., np.where(is_row, rows, 0)[:, None], np.where(is_column, columns, 0)]
        return np.where(is_row[:, None] & is_column, found, np.asarray(fill, mask.dtype))

    def map_back(
        self, values: Float[np.ndarray, "*c h w"], fill: float = 0.0
    ) -> Float64[np.ndarray, "*c height width"]:
        """Convert a map, such as an attention map, from the result to the image, by linear interpolation.

        The map may have any number of rows and columns, such as one per patch; it always covers the whole result.
        Pixels of the image outside the result become `fill`.
        """
        down, across = (self._weights_back(axis, count) for axis, count in enumerate(values.shape[-2:]))
        inside = self._seen(0)[:, None] & self._seen(1)
        return np.where(inside, down @ values.astype(np.float64) @ across.T, fill)

    # Along one axis: 0 converts rows, and 1 converts columns.

    def _along(self, axis: int) -> tuple[int, int, int, int]:
        """Return the first pixel and the length of the box in the image, its length after scaling, and the first pixel
        of the window in the scaled box."""
        return self.box[axis], self.box[2 + axis], self.scaled[axis], (self.top, self.left)[axis]

    def _forward(self, positions: Float[np.ndarray, " n"], axis: int) -> Float[np.ndarray, " n"]:
        begin, length, scaled, start = self._along(axis)
        return (positions - begin) * scaled / length - start

    def _back(self, positions: Float[np.ndarray, " n"], axis: int) -> Float[np.ndarray, " n"]:
        begin, length, scaled, start = self._along(axis)
        return (positions + start) * length / scaled + begin

    def _pixels(self, axis: int) -> tuple[Int64[np.ndarray, " size"], Bool[np.ndarray, " size"]]:
        """Return two arrays with one entry per pixel of the result. The first array contains the index of the image
        pixel under the centre of the result's pixel. The second array is False for pixels that are padding."""
        begin, length, scaled, start = self._along(axis)
        places = np.arange(self.size[axis]) + start
        return begin + (2 * places + 1) * length // (2 * scaled), (places >= 0) & (places < scaled)

    def _seen(self, axis: int) -> Bool[np.ndarray, " image"]:
        """Return True for each pixel of the image whose centre is in the box and in the result."""
        begin, length, scaled, start = self._along(axis)
        pixels = np.arange(self.image[axis])
        doubled = (2 * (pixels - begin) + 1) * scaled - 2 * length * start
        inside = (doubled >= 0) & (doubled < 2 * length * self.size[axis])
        return inside & (pixels >= begin) & (pixels < begin + length)

    def _weights_back(self, axis: int, count: int) -> Float64[np.ndarray, "image count"]:
        """Return interpolation weights: one row per pixel of the image, one column per cell. The result is divided into
        `count` equal cells. The weights of a pixel fall linearly to 0 over at least one cell, and sum to 1."""
        centres = self._forward(np.arange(self.image[axis]) + 0.5, axis) * count / self.size[axis]
        scale = self.scaled[axis] / self.box[2 + axis] * count / self.size[axis]
        centres = centres.clip(0.5, count - 0.5) if scale <= 1 else centres.clip(0, count)
        weights = (1 - np.abs(np.arange(count) + 0.5 - centres[:, None]) / max(1.0, scale)).clip(0)
        return weights / weights.sum(1, keepdims=True)


def place_jittered(old: Size, new: Size, jitter: Jitter) -> Placement:
    """Return the placement of a image that is scaled as `jitter` says. The window is cut out of the scaled image,
    or extends beyond it."""
    ratio = min(new[0] / old[0], new[1] / old[1]) * jitter.scale
    scaled = max(1, round(old[0] * ratio)), max(1, round(old[1] * ratio))
    top, left = round(jitter.down * (scaled[0] - new[0])), round(jitter.across * (scaled[1] - new[1]))
    return Placement(old, (0, 0, *old), scaled, new, top, left)


def scaled_side(side: int, share: float) -> int:
    """Return `side / share`, rounded down. For example, 224 and 0.875 give 256."""
    quotient = side / share
    nearest = round(quotient)
    return nearest if abs(quotient - nearest) <= NEARLY_WHOLE * quotient else math.floor(quotient)


def place(old: Size, new: Size, resize: Resize, share: float) -> Placement:
    """Return the placement of an image of size `old` in a result of size `new`. See `Preprocess` for `resize` and
    `crop_share`.

    The window is centred. As in torchvision (`transforms.Resize`, `CenterCrop`), the long side of the scaled image is
    rounded down. The start of the window is rounded to the nearest pixel (halves to even). If the padding is odd, the
    extra pixel is at the bottom or right. If `new` is not square or `resize` is "pad", both sides are rounded to the
    nearest pixel, as in timm (`ResizeKeepRatio`).
    """
    target = scaled_side(new[0], share), scaled_side(new[1], share)
    scaled = target if resize == "squash" else _in_proportion(old, target, cover=resize == "crop")
    top, left = (_begin(whole, part) for whole, part in zip(scaled, new, strict=True))
    return Placement(old, (0, 0, *old), scaled, new, top, left)


def place_like_big_vision(old: Size, new: Size, resize: Resize, share: float) -> Placement:
    """Return the placement of `place` with the rounding of big_vision (`resize_small`, `resize_long`, `central_crop`).

    Each side of the scaled image is the old side times a common float32 factor, rounded to the nearest integer (halves
    to even). The start of the window is rounded down.
    """
    scaled = target = scaled_side(new[0], share), scaled_side(new[1], share)
    if resize != "squash":
        factors = [np.float32(side) / np.float32(was) for side, was in zip(target, old, strict=True)]
        factor = max(factors) if resize == "crop" else min(factors)
        height, width = (max(1, int(np.rint(np.float32(side) * factor))) for side in old)
        scaled = height, width
    top, left = (
        (whole - part) // 2 if whole >= part else _begin(whole, part) for whole, part in zip(scaled, new, strict=True)
    )
    return Placement(old, (0, 0, *old), scaled, new, top, left)


def _in_proportion(old: Size, target: Size, *, cover: bool) -> Size:
    if cover and target[0] == target[1]:
        short, long = min(old), target[0] * max(old) // min(old)
        return (target[0], long) if old[0] == short else (long, target[0])
    ratios = old[0] / target[0], old[1] / target[1]
    ratio = min(ratios) if cover else max(ratios)
    return max(1, round(old[0] / ratio)), max(1, round(old[1] / ratio))


def _begin(whole: int, part: int) -> int:
    return round((whole - part) / 2) if whole >= part else -((part - whole) // 2)


def _clipped(one: np.ndarray, other: np.ndarray, size: Size) -> Float64[np.ndarray, "n 4"]:
    limit = np.array(size[::-1], np.float64)
    corners = np.minimum(one, other).clip(0, limit), np.maximum(one, other).clip(0, limit)
    return np.concatenate(corners, axis=1)
