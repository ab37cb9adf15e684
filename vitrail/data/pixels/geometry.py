"""Where an image lands when it is scaled, cut and mirrored, in whole numbers, as torchvision and timm compute them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64, Shaped

from vitrail.errors import ConfigError

__all__ = ["Box", "Placement", "Resize", "place", "scaled_side"]

Resize = Literal["squash", "crop", "pad"]

Size = tuple[int, int]
"""Height and width."""

Box = tuple[int, int, int, int]
"""Top, left, height and width of a part of an image, in pixels of the upright image at its full size."""

NEARLY_WHOLE = 1e-9
"""Relative difference to a whole number up to which a quotient counts as whole: 224 / (224 / 232) is not quite 232."""


_Part = tuple[np.ndarray, np.ndarray]
"""Along one axis: the places or weights that make each pixel, and False for pixels that become the fill value."""


class _Axis(NamedTuple):
    """A placement along one axis."""

    image: int
    begin: int
    """First pixel of the box in the image."""
    length: int
    """Pixels of the box."""
    scaled: int
    """Pixels of the scaled box."""
    start: int
    """First pixel of the window in the scaled box."""
    size: int
    """Pixels of the result."""
    mirrored: bool

    def forward(self, positions: Float64[np.ndarray, "*n"]) -> Float64[np.ndarray, "*n"]:
        found = (positions - self.begin) * self.scaled / self.length - self.start
        return self.size - found if self.mirrored else found

    def back(self, positions: Float64[np.ndarray, "*n"]) -> Float64[np.ndarray, "*n"]:
        window = self.size - positions if self.mirrored else positions
        return (window + self.start) * self.length / self.scaled + self.begin

    def pixels(self) -> tuple[Int64[np.ndarray, " size"], Bool[np.ndarray, " size"]]:
        """Return, for each pixel of the result, the pixel of the image under its centre, and False if it is padding."""
        places = np.arange(self.size)
        scaled = (places[::-1] if self.mirrored else places) + self.start
        inside = (scaled >= 0) & (scaled < self.scaled)
        return self.begin + (2 * scaled + 1) * self.length // (2 * self.scaled), inside

    def cells(self, count: int) -> tuple[Int64[np.ndarray, " image"], Bool[np.ndarray, " image"]]:
        """Return, for each pixel of the image, the one of `count` equal cells of the result that its centre is in, and
        False if it lies outside the result."""
        pixels = np.arange(self.image)
        doubled = (2 * (pixels - self.begin) + 1) * self.scaled - 2 * self.length * self.start
        found = doubled * count // (2 * self.length * self.size)
        inside = (found >= 0) & (found < count) & (pixels >= self.begin) & (pixels < self.begin + self.length)
        return count - 1 - found if self.mirrored else found, inside

    def filter(self) -> tuple[Float64[np.ndarray, "size image"], Bool[np.ndarray, " size"]]:
        """Return the weights of the image's pixels in each pixel of the result, those of Pillow's bilinear filter."""
        _, inside = self.pixels()
        centres = self.back(np.arange(self.size) + 0.5) - self.begin
        weights = np.zeros((self.size, self.image))
        weights[:, self.begin : self.begin + self.length] = _triangles(centres, self.length, self.length / self.scaled)
        return weights, inside

    def filter_back(self, count: int) -> tuple[Float64[np.ndarray, "image count"], Bool[np.ndarray, " image"]]:
        """Return the weights of `count` equal cells of the result in each pixel of the image."""
        _, inside = self.cells(count)
        centres = self.forward(np.arange(self.image) + 0.5) * count / self.size
        return _triangles(centres, count, self.scaled / self.length * count / self.size), inside


@dataclass(frozen=True)
class Placement:
    """Where an image lands. A box of it is scaled, a window of the scaled box is kept, and perhaps mirrored.

    The window reaches beyond the scaled box if `top` or `left` is negative: that part is padding. The same value places
    points, boxes, masks and maps, and puts them back onto the image. Points and boxes are in pixels from the top left
    corner, so the centre of the first pixel is at (0.5, 0.5).
    """

    image: Size
    """Of the upright image."""
    box: Box
    scaled: Size
    """Size to which the box is scaled."""
    size: Size
    """Size of the window, which is the result."""
    top: int = 0
    left: int = 0
    mirrored: bool = False
    """The result is mirrored left to right."""

    def flipped(self) -> Placement:
        """Return the placement with its result mirrored left to right."""
        return replace(self, mirrored=not self.mirrored)

    def shifted(self, down: int, right: int) -> Placement:
        """Return the placement with its window moved over its result: the content moves up and to the left."""
        return replace(self, top=self.top + down, left=self.left + (-right if self.mirrored else right))

    def points(self, points: Float[np.ndarray, "n 2"]) -> Float64[np.ndarray, "n 2"]:
        """Return points (x, y) of the image in the result. A point can land outside of it."""
        rows, columns = self._axes
        return np.stack([columns.forward(points[:, 0] * 1.0), rows.forward(points[:, 1] * 1.0)], axis=1)

    def points_back(self, points: Float[np.ndarray, "n 2"]) -> Float64[np.ndarray, "n 2"]:
        """Return points (x, y) of the result in the image."""
        rows, columns = self._axes
        return np.stack([columns.back(points[:, 0] * 1.0), rows.back(points[:, 1] * 1.0)], axis=1)

    def boxes(self, boxes: Float[np.ndarray, "n 4"]) -> Float64[np.ndarray, "n 4"]:
        """Return boxes (left, top, right, bottom) of the image in the result, clipped to it.

        A box that lies outside of the result has no area.
        """
        return _clipped(self.points(boxes[:, :2]), self.points(boxes[:, 2:]), self.size)

    def boxes_back(self, boxes: Float[np.ndarray, "n 4"]) -> Float64[np.ndarray, "n 4"]:
        """Return boxes (left, top, right, bottom) of the result in the image, clipped to it."""
        return _clipped(self.points_back(boxes[:, :2]), self.points_back(boxes[:, 2:]), self.image)

    def mask(self, mask: Shaped[np.ndarray, "*c h w"], fill: float | int = 0) -> Shaped[np.ndarray, "*c height width"]:
        """Return a mask of the image in the result, by nearest pixels. Padding becomes `fill`."""
        self._check(mask)
        rows, columns = self._axes
        return _picked(mask, rows.pixels(), columns.pixels(), fill)

    def mask_back(
        self, mask: Shaped[np.ndarray, "*c h w"], fill: float | int = 0
    ) -> Shaped[np.ndarray, "*c height width"]:
        """Return a mask of the result on the image, by nearest pixels. Pixels outside the result become `fill`.

        The mask covers the result with any number of rows and columns.
        """
        rows, columns = self._axes
        return _picked(mask, rows.cells(mask.shape[-2]), columns.cells(mask.shape[-1]), fill)

    def map(self, values: Float[np.ndarray, "*c h w"], fill: float = 0.0) -> Float64[np.ndarray, "*c height width"]:
        """Return a map of the image, one number per pixel, in the result, by Pillow's bilinear filter.

        Padding becomes `fill`.
        """
        self._check(values)
        rows, columns = self._axes
        return _filtered(values, rows.filter(), columns.filter(), fill)

    def map_back(
        self, values: Float[np.ndarray, "*c h w"], fill: float = 0.0
    ) -> Float64[np.ndarray, "*c height width"]:
        """Return numbers for the result, such as an attention map, on the image, by linear interpolation.

        The values cover the result with any number of rows and columns, such as one per patch. Pixels of the image
        outside the result become `fill`.
        """
        rows, columns = self._axes
        return _filtered(values, rows.filter_back(values.shape[-2]), columns.filter_back(values.shape[-1]), fill)

    @property
    def _axes(self) -> tuple[_Axis, _Axis]:
        top, left, height, width = self.box
        return (
            _Axis(self.image[0], top, height, self.scaled[0], self.top, self.size[0], mirrored=False),
            _Axis(self.image[1], left, width, self.scaled[1], self.left, self.size[1], mirrored=self.mirrored),
        )

    def _check(self, values: np.ndarray) -> None:
        if values.shape[-2:] != self.image:
            raise ConfigError(
                f"values of shape {values.shape} do not belong to an image of {self.image[0]} x {self.image[1]} "
                "(height, width); their last two dimensions must be its height and width"
            )


def scaled_side(side: int, share: float) -> int:
    """Return the side of which `side` is the fraction `share`, rounded down: 256 for 224 and 0.875."""
    quotient = side / share
    nearest = round(quotient)
    return nearest if abs(quotient - nearest) <= NEARLY_WHOLE * quotient else math.floor(quotient)


def place(old: Size, new: Size, resize: Resize, share: float) -> Placement:
    """Return how an image of size `old` becomes one of size `new`, by `resize` and `crop_share` of `Preprocess`.

    The window is in the middle. As in torchvision (`transforms.Resize`, `CenterCrop`), the long side is rounded down
    and the start of the window is rounded to the nearest pixel, halves to the even one. A border with an odd number of
    pixels has more of them at the end. If the sizes are not square, or with "pad", both sides are rounded to the
    nearest pixel, as in timm (`ResizeKeepRatio`).
    """
    target = scaled_side(new[0], share), scaled_side(new[1], share)
    scaled = target if resize == "squash" else _in_proportion(old, target, cover=resize == "crop")
    top, left = (_begin(whole, part) for whole, part in zip(scaled, new, strict=True))
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


def _triangles(centres: Float64[np.ndarray, " n"], count: int, scale: float) -> Float64[np.ndarray, "n count"]:
    """Return weights of `count` pixels around each centre that fall linearly to 0 over 1 pixel, or `scale` if more."""
    centres = centres.clip(0.5, count - 0.5) if scale <= 1 else centres.clip(0, count)
    weights = (1 - np.abs(np.arange(count) + 0.5 - centres[:, None]) / max(1.0, scale)).clip(0)
    return weights / weights.sum(1, keepdims=True)


def _clipped(one: np.ndarray, other: np.ndarray, size: Size) -> Float64[np.ndarray, "n 4"]:
    limit = np.array(size[::-1], np.float64)
    corners = np.minimum(one, other).clip(0, limit), np.maximum(one, other).clip(0, limit)
    return np.concatenate(corners, axis=1)


def _picked(values: np.ndarray, rows: _Part, columns: _Part, fill: float | int) -> np.ndarray:
    inside = rows[1][:, None] & columns[1]
    down, across = (np.where(part[1], part[0], 0) for part in (rows, columns))
    return np.where(inside, values[..., down[:, None], across], np.asarray(fill, values.dtype))


def _filtered(values: np.ndarray, rows: _Part, columns: _Part, fill: float | int) -> np.ndarray:
    inside = rows[1][:, None] & columns[1]
    return np.where(inside, rows[0] @ values.astype(np.float64) @ columns[0].T, fill)
