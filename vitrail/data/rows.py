"""The rows of a batch: decoded views of samples, stacked as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from vitrail.data.batch import Batch, Skipped
from vitrail.data.pixels.decode import decode, image_size_of
from vitrail.data.pixels.geometry import Box
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, Target, TargetKind, class_indices, soft_target_of
from vitrail.errors import UndecodableImage


@runtime_checkable
class Crop(Protocol):
    """A function that chooses the box of an image for training."""

    def __call__(self, epoch: int, sample: int, height: int, width: int, *, view: int) -> Box:
        """Return top, left, height and width of the box, in pixels of an image of `height` x `width` pixels."""
        ...


@dataclass(frozen=True)
class LocalViews:
    """More views of each sample, with boxes and an image size of their own, such as the local views of multi-crop."""

    count: int
    """Number of these views of each sample."""
    preprocess: Preprocess
    crop: Crop


class KeptPixels:
    """Memory for the pixels of all samples of a source, at the size of a network."""

    def __init__(self, count: int, preprocess: Preprocess) -> None:
        self._pixels = np.zeros((count, preprocess.channels, *preprocess.image_size), np.uint8)
        self._present = np.zeros(count, np.bool_)

    def get(self, place: int, read: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the pixels of a sample. The first call decodes the image by `read`. If several threads ask for a new
        sample at the same time, each of them decodes it, with the same result."""
        if not self._present[place]:
            self._pixels[place] = read()
            self._present[place] = True
        return self._pixels[place]


@dataclass(frozen=True)
class Loader:
    """Makes the rows of one sample. The epoch is computed from the position in the run."""

    source: Source
    preprocess: Preprocess
    kind: TargetKind
    crop: Crop | None = None
    first: int = 0
    """Index of the loader's first sample in `source`, which can be a mixture of several sources."""
    length: int | None = None
    """Number of samples of the loader's part of a mixture, which is the length of its epoch. By default, all samples
    of `source`."""
    views: int = 1
    local: LocalViews | None = None
    whole_levels: bool = False
    """True to round the pixels to uint8, which augmentation needs."""
    soft: bool = False
    """True for soft targets, if some samples of the source have them."""
    kept: KeptPixels | None = None
    """Memory for pixels that later epochs use again. It requires `whole_levels`, and neither `crop` nor `local`."""

    def __call__(self, position: int, index: int) -> dict[str, Any]:
        epoch = position // (self.length or len(self.source))
        place = self.first + index
        target = self.source.target(place)
        skipped = None
        try:
            pixels, local = self._pixels(epoch, place)
        except UndecodableImage as error:
            pixels, local = _black(self.preprocess, self.views), []
            if self.local is not None:
                local = _black(self.local.preprocess, self.local.count)
            skipped = Skipped(self.source.key(place), str(error))
        return {
            "images": pixels, "valid": skipped is None, "samples": place, "epochs": epoch, "local": local,
            "labels": target if isinstance(target, int) else -1, "skipped": skipped,
            "targets": self._values(place, target),
        }  # fmt: skip

    def _pixels(self, epoch: int, place: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the pixels of each view, and of each local view. The image is decoded once for all views. With
        `scaled_decode`, it is decoded for each view, because the box determines the scale."""
        if self.kept is not None:
            return [self.kept.get(place, lambda: self._whole(self.source[place].image))] * self.views, []
        local, image = self.local, self.source[place].image
        if (local is not None or (self.views > 1 and self.crop is not None)) and not self.preprocess.scaled_decode:
            image = decode(image, self.preprocess.channels)
        if self.crop is None:
            pixels = [self._whole(image)] * self.views
        else:
            pixels = self._cut(image, epoch, place, self.preprocess, self.crop, range(self.views))
        if local is None:
            return pixels, []
        views = range(self.views, self.views + local.count)
        return pixels, self._cut(image, epoch, place, local.preprocess, local.crop, views)

    def _whole(self, image: bytes | np.ndarray) -> np.ndarray:
        """Return the pixels of an image without a random box."""
        return self.preprocess.pixels(image, whole_levels=self.whole_levels)

    def _cut(
        self,
        image: bytes | np.ndarray,
        epoch: int,
        place: int,
        preprocess: Preprocess,
        crop: Crop,
        views: Iterable[int],
    ) -> list[np.ndarray]:
        """Return the pixels of a random box of an image for each view."""
        size = image_size_of(image)
        boxes = [crop(epoch, place, *size, view=view) for view in views]
        return [preprocess.pixels(image, box, whole_levels=self.whole_levels) for box in boxes]

    def _values(self, place: int, target: Target) -> np.ndarray | None:
        """Return the numbers of a target or the amount of each class. Return None if each sample has at most one
        class."""
        if self.kind == "numbers":
            return np.array([math.nan] * len(self.source.classes) if target is None else target, np.float32)
        if self.kind == "class" and self.soft:
            if (amounts := soft_target_of(self.source, place)) is not None:
                return amounts
        elif self.kind != "classes":
            return None
        amounts = np.zeros(len(self.source.classes), np.float32)
        amounts[list(class_indices(target))] = 1
        return amounts


def _black(preprocess: Preprocess, views: int) -> list[np.ndarray]:
    """Return black pixels for each view of an image that cannot be decoded."""
    return [np.zeros((preprocess.channels, *preprocess.image_size), np.uint8)] * views


def collate(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Stack samples as arrays. Arrays pass between processes through shared memory, but tensors would not."""
    skipped = tuple(part["skipped"] for part in parts if part["skipped"] is not None)
    columns = _stacked(parts, "images", 0)
    if parts[0]["local"]:
        columns["local"] = _stacked(parts, "local", len(parts[0]["images"]))
    return {**columns, "skipped": skipped}


def _stacked(parts: Sequence[dict[str, Any]], name: str, first: int) -> dict[str, Any]:
    """Stack the views of samples that have this name. Views are numbered from `first`."""
    views = len(parts[0][name])
    columns = {
        column: np.array([part[column] for part in parts], dtype).repeat(views, 0)
        for column, dtype in (("labels", np.int64), ("valid", np.bool_), ("samples", np.int64), ("epochs", np.int64))
    }
    columns["views"] = np.tile(np.arange(first, first + views), len(parts))
    columns["images"] = np.stack([pixels for part in parts for pixels in part[name]])
    if parts[0]["targets"] is not None:
        columns["targets"] = np.stack([part["targets"] for part in parts]).repeat(views, 0)
    return columns


def as_batch(columns: dict[str, Any], kind: TargetKind) -> Batch:
    values: dict[str, Any] = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in columns.items()
    }
    if "local" in values:
        values["local"] = as_batch(values["local"], kind)
    return Batch(**values, target_kind=kind, has_soft_targets=kind == "class" and "targets" in values)
