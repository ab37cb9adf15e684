"""The objects in an image: their boxes, classes and outlines; and masks, which give every pixel of an image a class.

Boxes and outlines are fractions of the image's width and height, so that they do not depend on the size at which a
image is decoded. A box is (left, top, right, bottom).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64, Shaped, UInt8
from PIL import Image

from vitrail.errors import UndecodableImage
from vitrail.report.drawing import draw_boxes, draw_mask

Polygon = Float64[np.ndarray, "corners 2"]
"""The corners (x, y) of a closed line, as fractions of the image."""


@dataclass(frozen=True)
class Runs:
    """The pixels of an object as run lengths, compressed as in COCO: column by column, from the top left."""

    size: tuple[int, int]
    """Height and width of the image."""
    counts: bytes

    def mask(self) -> Bool[np.ndarray, "h w"]:
        return _coco().decode({"size": list(self.size), "counts": self.counts}).astype(np.bool_)

    @staticmethod
    def of(mask: Bool[np.ndarray, "h w"]) -> Runs:
        """Return the run lengths of a mask."""
        return Runs((mask.shape[0], mask.shape[1]), _coco().encode(np.asfortranarray(mask, np.uint8))["counts"])

    @staticmethod
    def from_lengths(size: tuple[int, int], lengths: Sequence[int]) -> Runs:
        """Return run lengths that are a list of numbers, of which the first counts pixels outside of the object."""
        return Runs(size, _coco().frPyObjects({"size": list(size), "counts": list(lengths)}, *size)["counts"])


def packed_lengths(text: str) -> list[int] | None:
    """Return the run lengths in COCO's packed text, or None if it is not one.

    Each number has characters of five bits, the lowest first, with a sixth bit if another character follows. From the
    fourth number on, the difference to the second last one is stored.
    """
    lengths: list[int] = []
    value = shift = 0
    for code in text.encode("ascii", "replace"):
        bits = code - 48
        if not 0 <= bits < 64:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
            value = shift = 0
    return None if shift else lengths


Outline = tuple[Polygon, ...] | Runs
"""The outline of an object: polygons, which together cover it, or the pixels themselves."""


def box_around(outline: Outline) -> tuple[float, float, float, float]:
    """Return the smallest box around an outline: left, top, right and bottom as fractions of the image. It is all zeros
    if the outline has no pixels."""
    if isinstance(outline, Runs):
        rows, columns = (np.flatnonzero(outline.mask().any(axis=axis)) for axis in (1, 0))
        if not len(rows):
            return 0.0, 0.0, 0.0, 0.0
        height, width = outline.size
        return columns[0] / width, rows[0] / height, (columns[-1] + 1) / width, (rows[-1] + 1) / height
    corners = np.concatenate(outline)
    (left, top), (right, bottom) = corners.min(axis=0).tolist(), corners.max(axis=0).tolist()
    return left, top, right, bottom


@dataclass(frozen=True, eq=False)
class Objects:
    """The objects in one image, the target of detection. n can be 0: nothing is in the image."""

    labels: Int64[np.ndarray, " n"]
    """The index of the class of each object."""
    boxes: Float64[np.ndarray, "n 4"]
    """Left, top, right and bottom of each object, as fractions of the width and height of the image."""
    crowd: Bool[np.ndarray, " n"]
    """True for a box around many objects that were not separated. It is neither learned nor counted as missed."""
    areas: Float64[np.ndarray, " n"]
    """Stated area of each object as a fraction of the image. It is NaN if none was stated: use `area`."""
    outlines: tuple[Outline | None, ...] = ()
    """The outline of each object, or () if no object of the data has one."""
    size: tuple[int, int] = (0, 0)
    """Height and width of the image as the annotation states them, or 0 and 0."""

    @staticmethod
    def of(labels: Sequence[int], boxes: Sequence[Sequence[float | int]], **more: Any) -> Objects:
        """Return objects with these indices of classes and these boxes, which are left, top, right and bottom as
        fractions of the image. None of them is a crowd."""
        count = len(labels)
        values = {"crowd": np.zeros(count, np.bool_), "areas": np.full(count, np.nan), **more}
        return Objects(np.array(labels, np.int64), np.array(boxes, np.float64).reshape(count, 4), **values)

    def __len__(self) -> int:
        return len(self.labels)

    def __str__(self) -> str:
        """Return a text that differs for different objects, for fingerprints of data."""
        digest = hashlib.sha256(f"{self.size}".encode())
        for values in (self.labels, self.boxes, self.crowd, self.areas):
            digest.update(np.ascontiguousarray(values).tobytes())
        for outline in self.outlines:
            for part in outline if isinstance(outline, tuple) else () if outline is None else (outline.counts,):
                digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
        return f"objects {digest.hexdigest()}"

    def check_size(self, size: tuple[int, int]) -> None:
        """Raise `UndecodableImage` if the image has another height and width than the annotation states."""
        if self.size in ((0, 0), size):
            return
        turned = ", which is the size before it is turned by its EXIF tag" if self.size == size[::-1] else ""
        raise UndecodableImage(
            f"its boxes are of an image of {self.size[1]} x {self.size[0]} pixels (width x height){turned}, and it "
            f"has {size[1]} x {size[0]}; correct the annotation"
        )

    def area(self, row: int, size: tuple[int, int]) -> float:
        """Return the area of an object in pixels of an image of a height and width, as COCO states it: that of the
        outline, or without an outline that of the box."""
        outline = self.outlines[row] if self.outlines else None
        if not math.isnan(self.areas[row]):
            found = self.areas[row] * math.prod(size)
        elif outline:
            found = self.mask(row, size).sum() if isinstance(outline, Runs) else _coco().area(_runs_of(outline, size))
        else:
            found = (self.boxes[row, 2:] - self.boxes[row, :2]).prod() * math.prod(size)
        return round(float(found), 6)  # fractions of an image are rounded, and the limits of sizes are whole numbers

    def all_areas(self, size: tuple[int, int]) -> Float64[np.ndarray, " n"]:
        """Return the areas of all objects in pixels of an image of a height and width."""
        return np.array([self.area(row, size) for row in range(len(self))], np.float64)

    def mask(self, row: int, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
        """Return the mask of an object in an image of a height and width. Without an outline it is the box."""
        outline = self.outlines[row] if self.outlines else None
        if isinstance(outline, Runs):
            found = Image.fromarray(outline.mask())
            return np.asarray(found if outline.size == size else found.resize(size[::-1], Image.Resampling.NEAREST))
        left, top, right, bottom = self.boxes[row].tolist()
        box = np.array([(left, top), (right, top), (right, bottom), (left, bottom)])
        return drawn(outline or (box,), size)


def drawn(polygons: Sequence[Polygon], size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the pixels of an image of a height and width that are in at least one of the polygons, as COCO counts
    them."""
    return _coco().decode(_runs_of(polygons, size)).astype(np.bool_)


def _runs_of(polygons: Sequence[Polygon], size: tuple[int, int]) -> Any:
    """Return the pixels that `drawn` returns in COCO's form, whose area takes less time and memory."""
    corners = [(polygon * size[::-1]).ravel().tolist() for polygon in polygons]
    return _coco().merge(_coco().frPyObjects(corners, *size))


@dataclass(frozen=True, eq=False)
class ObjectRows:
    """The columns of the objects of several images, one image after another, and the size of each image."""

    boxes: Float64[np.ndarray, "m 4"]
    crowd: Bool[np.ndarray, " m"]
    areas: Float64[np.ndarray, " m"]
    sizes: Int64[np.ndarray, "n 2"]
    outlines: Shaped[np.ndarray, " m"] | None = None
    """An array of `Outline` or None, or None if no object has an outline."""

    @staticmethod
    def of(images: Sequence[Objects]) -> ObjectRows:
        """Return the objects of several images."""
        outlines = [outline for one in images for outline in one.outlines or (None,) * len(one)]
        return ObjectRows(
            np.concatenate([np.zeros((0, 4)), *(one.boxes for one in images)]),
            np.concatenate([np.zeros(0, np.bool_), *(one.crowd for one in images)]),
            np.concatenate([np.zeros(0), *(one.areas for one in images)]),
            np.array([one.size for one in images], np.int64).reshape(len(images), 2),
            outline_column(outlines),
        )

    def objects(self, image: int, labels: Int64[np.ndarray, " n"], start: int, stop: int) -> Objects:
        """Return the objects of one image, which stand from `start` up to `stop`."""
        part = slice(start, stop)
        outlines = () if self.outlines is None else tuple(self.outlines[part])
        height, width = self.sizes[image].tolist()
        return Objects(labels, self.boxes[part], self.crowd[part], self.areas[part], outlines, (height, width))

    def taken(self, objects: Int64[np.ndarray, " k"], images: Any = slice(None)) -> ObjectRows:
        """Return some objects, and the sizes of some images."""
        outlines = None if self.outlines is None else self.outlines[objects]
        return ObjectRows(self.boxes[objects], self.crowd[objects], self.areas[objects], self.sizes[images], outlines)

    @staticmethod
    def joined(parts: Sequence[ObjectRows]) -> ObjectRows:
        """Return the objects of several data sets, one after another."""
        outlines = [(None,) * len(one.boxes) if one.outlines is None else one.outlines for one in parts]
        return ObjectRows(
            np.concatenate([one.boxes for one in parts]),
            np.concatenate([one.crowd for one in parts]),
            np.concatenate([one.areas for one in parts]),
            np.concatenate([one.sizes for one in parts]),
            outline_column([*itertools.chain(*outlines)]),
        )


def outline_column(outlines: Sequence[Outline | None]) -> Shaped[np.ndarray, " m"] | None:
    """Return the outlines of objects as an array, or None if no object has one."""
    column = np.empty(len(outlines), object)
    column[:] = outlines
    return column if any(one is not None for one in outlines) else None


IGNORED = 255
"""Index in a mask of a pixel that has no class. It is neither learned nor measured."""


@dataclass(frozen=True, eq=False)
class Mask:
    """The mask of one image, the target of segmentation. It is read when it is needed."""

    name: str
    """Name of the mask in its data, for messages."""
    read: Callable[[], UInt8[np.ndarray, "h w"]]
    """Returns the values that the file holds. Raises `UndecodableImage`."""
    places: tuple[int, ...]
    """The index of the class of each value in the file, or -1 for one that is ignored."""

    def __str__(self) -> str:
        return f"mask {self.name} {self.places}"

    def indices(self, size: tuple[int, int] | None = None) -> UInt8[np.ndarray, "h w"]:
        """Return the class of each pixel, or 255 for a pixel without a class. `size` is that of the image.

        Raise `UndecodableImage` if the file cannot be read, has another size, or holds a value that is no class.
        """
        values = self.read()
        if size is not None and values.shape != size:
            raise UndecodableImage(
                f"mask {self.name} has {values.shape[1]} x {values.shape[0]} pixels (width x height), and its image "
                f"has {size[1]} x {size[0]}; both must have the same size"
            )
        table = np.full(256, IGNORED, np.int64)
        table[: len(self.places)] = [IGNORED if place < 0 else place for place in self.places]
        strange = np.setdiff1d(np.unique(values), [*range(len(self.places)), IGNORED])
        if len(strange):
            raise UndecodableImage(
                f"mask {self.name} holds the value {strange[0]}, but there are {len(self.places)} classes, numbered "
                f"from 0, and {IGNORED} for pixels without one"
            )
        return table[np.asarray(values, np.intp)].astype(np.uint8)

    def renumbered(self, places: Sequence[int]) -> Mask:
        """Return the mask with other indices of classes: class i gets the index `places[i]`, or is ignored (-1)."""
        return replace(self, places=tuple(-1 if place < 0 else int(places[place]) for place in self.places))


def overlaps_with(
    boxes: Float64[np.ndarray, "n 4"], box: Float64[np.ndarray, " 4"]
) -> tuple[Float64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
    """Return the area that each of some boxes has in common with a box, and their intersection over union."""
    starts, ends = np.maximum(boxes[:, :2], box[:2]), np.minimum(boxes[:, 2:], box[2:])
    common = (ends - starts).clip(min=0).prod(axis=1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) + (box[2:] - box[:2]).prod()
    return common, common / (areas - common).clip(min=1e-12)


def drawn_on(image: Image.Image, target: Objects | Mask, names: Sequence[str]) -> Image.Image:
    """Return an image with its objects or its mask. Raise `UndecodableImage` if the mask cannot be read."""
    size = image.height, image.width
    if isinstance(target, Mask):
        return draw_mask(image, target.indices(size), len(names))
    masks = [target.mask(row, size) if outline else None for row, outline in enumerate(target.outlines)]
    labels = target.labels.tolist()
    return draw_boxes(image, target.boxes * np.tile(size[::-1], 2), labels, [names[label] for label in labels], masks)


def _coco() -> Any:
    """Import the run lengths of COCO at their first use."""
    from faster_coco_eval.core import mask  # type: ignore[import-untyped]

    return mask
