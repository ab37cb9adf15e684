"""Scaling of images as TensorFlow's `tf.image.resize` computes it, in numpy.

TensorFlow differs from Pillow and PyTorch in its bicubic kernel, in the pixels at the border and in "area".
TensorFlow's "area" weights each pixel by the fraction of the pixel that is covered.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt8

Filter = Literal["nearest", "bilinear", "bicubic", "area"]

WHOLE = (slice(None), slice(None))
"""All rows and all columns."""

BICUBIC_STEPS = 1024
"""Number of positions between two pixels that TensorFlow's bicubic interpolation distinguishes."""


def resize(
    image: UInt8[np.ndarray, "h w c"],
    size: tuple[int, int],
    method: Filter,
    *,
    antialias: bool,
    window: tuple[slice, slice] = WHOLE,
) -> Float32[np.ndarray, "height width c"]:
    """Scale the image to a height and width, and return the rows and columns that `window` selects.

    The levels have fractions and can lie outside 0 to 255. `antialias` widens the filter of "bilinear" and "bicubic" if
    the image is shrunk; the other methods ignore it. As in TensorFlow, an image that already has this height and width
    is not filtered.
    """
    if image.shape[:2] == size:
        return image[window].astype(np.float32)
    rows, columns = (
        _taps(old, new, method, antialias).part(kept)
        for old, new, kept in zip(image.shape[:2], size, window, strict=True)
    )
    if method == "bilinear" and not antialias:
        return _interpolated(image, rows, columns)
    # Summing rows first is faster, but where pixels are repeated, only TensorFlow's order gives back whole levels.
    if size[1] >= image.shape[1]:
        scaled = _sums(_sums(image, columns, 1), rows, 0)
    else:
        scaled = _sums(_sums(image, rows, 0), columns, 1)
    return scaled * (np.float32(1) / (rows.total * columns.total)) if method == "area" else scaled


class _Taps(NamedTuple):
    """The pixels that each pixel of the result reads along one axis."""

    indices: Int64[np.ndarray, "taps size"]
    weights: Float32[np.ndarray, "taps size"]
    total: np.float32 = np.float32(1)
    """Sum of the weights for one pixel of the result."""

    def part(self, kept: slice) -> _Taps:
        """Return the taps of some pixels of the result."""
        return self._replace(indices=self.indices[:, kept], weights=self.weights[:, kept])


def _interpolated(image: np.ndarray, rows: _Taps, columns: _Taps) -> np.ndarray:
    """Return the weighted means of 2 x 2 pixels. The order of the operations is the same as in TensorFlow. In another
    order, rounding errors could lead to other levels after truncation."""
    picked = image.take(rows.indices.ravel(), 0)
    left, right = (_columns(picked, index).astype(np.float32) for index in columns.indices)
    right -= left
    right *= columns.weights[1][:, None]
    left += right
    above, below = left[: len(rows.indices[0])], left[len(rows.indices[0]) :]
    below -= above
    below *= rows.weights[1][:, None, None]
    above += below
    return above


def _columns(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the columns `index`. Numbers are copied one by one, because numpy is slower if it copies the few channels
    of a pixel together."""
    rows, _, channels = values.shape
    places = (index[:, None] * channels + np.arange(channels)).ravel()
    return values.reshape(rows, -1).take(places, 1).reshape(rows, -1, channels)


def _sums(values: np.ndarray, taps: _Taps, axis: int) -> np.ndarray:
    """Return the weighted sums of pixels along an axis."""
    total: np.ndarray | None = None
    for index, weight in zip(taps.indices, taps.weights, strict=True):
        part = _columns(values, index) if axis == 1 else values.take(index, 0)
        part = part.astype(np.float32, copy=False)
        part *= weight.reshape((-1, 1, 1) if axis == 0 else (-1, 1))
        total = part if total is None else np.add(total, part, out=total)
    assert total is not None
    return total


@functools.lru_cache(maxsize=1024)
def _taps(old: int, new: int, method: Filter, antialias: bool) -> _Taps:
    scale = np.float32(old) / np.float32(new)
    places = np.arange(new, dtype=np.float32)
    if method == "area":
        return _area(old, new, scale)
    if method == "nearest":
        nearest = np.floor((places + np.float32(0.5)) * scale).clip(0, old - 1)
        return _Taps(nearest[None].astype(np.int64), np.ones((1, new), np.float32))
    centres = (places + np.float32(0.5)) * scale
    if method == "bilinear" and not antialias:
        below = np.floor(centres - np.float32(0.5))
        above = centres - np.float32(0.5) - below
        indices = np.stack([below, below + 1]).astype(np.int64).clip(0, old - 1)
        return _Taps(indices, np.stack([1 - above, above]))
    kernel, radius = (lambda distance: (1 - np.abs(distance)).clip(0), 1) if method == "bilinear" else (_cubic, 2)
    width = max(1.0, float(scale)) if antialias else 1.0
    exact = centres.astype(np.float64)
    if not antialias:
        below = np.floor(exact - 0.5)
        exact = below + np.rint((exact - 0.5 - below) * BICUBIC_STEPS) / BICUBIC_STEPS + 0.5
    first = np.ceil(exact - radius * width - 0.5).astype(np.int64)
    indices = first + np.arange(int(2 * radius * width) + 1)[:, None]
    weights = kernel((indices + 0.5 - exact) / width) * ((indices >= 0) & (indices < old))
    return _kept(indices, (weights / weights.sum(0)).astype(np.float32), old)


def _area(old: int, new: int, scale: np.float32) -> _Taps:
    """Return the taps for "area". The weight of an image pixel is the fraction of it that the pixel of the result
    covers."""
    places = np.arange(new + 1, dtype=np.float32)
    start, end = places[:-1] * scale, places[1:] * scale
    indices = np.floor(start).astype(np.int64) + np.arange(int(np.ceil(scale)) + 1)[:, None]
    covered = np.minimum(indices + 1, end, dtype=np.float32) - np.maximum(indices, start, dtype=np.float32)
    covered = np.where((indices < start) & (indices + 1 > end), scale, covered.clip(0))
    return _kept(indices, covered, old)._replace(total=scale)


def _kept(indices: Int64[np.ndarray, "taps size"], weights: Float32[np.ndarray, "taps size"], old: int) -> _Taps:
    """Return the taps that have a weight, with indices inside the image."""
    used = (weights != 0).any(1)
    return _Taps(indices.clip(0, old - 1)[used], weights[used])


def _cubic(distance: Float64[np.ndarray, "taps size"]) -> Float64[np.ndarray, "taps size"]:
    """Return Keys's cubic kernel with a = -1/2."""
    x = np.abs(distance)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return np.where(x <= 1, near, np.where(x < 2, far, 0))
