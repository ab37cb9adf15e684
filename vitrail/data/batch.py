"""One batch of training or evaluation: pixels, targets and the keys of its samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped, UInt8
from torch import Tensor

from vitrail.data.augment.draws import Slot, keyed_uniform
from vitrail.data.objects import IGNORED, Mask, Objects
from vitrail.data.pixels.decode import decode, image_size_of, open_image
from vitrail.data.pixels.geometry import Box, Jitter, Placement
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, has_soft_targets, image_of, soft_target_of
from vitrail.data.targets import Target, TargetKind, class_indices, is_texts
from vitrail.data.texts import TextTokenizer
from vitrail.errors import UndecodableImage
from vitrail.settings import problem_of, raise_problems


@dataclass(frozen=True)
class Skipped:
    """A sample that could not be decoded."""

    key: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """Samples in rows: one row per sample, or consecutive rows with several views of each sample.

    A sample that cannot be decoded keeps its row, with `valid` False and black pixels.
    """

    images: Shaped[Tensor, "b c h w"]
    """Levels from 0 to 255, or normalised values after normalisation. Levels are uint8. In evaluation, levels are
    float32 if the resampler of the preprocessing keeps fractions of levels."""
    labels: Int64[Tensor, " b"]
    """Class indices. The index is -1 for an image that has no label, or whose target is in `targets`. With texts, it is
    0 for an image that has a text."""
    valid: Bool[Tensor, " b"]
    samples: Int64[Tensor, " b"]
    """Index of each image in its source. `samples`, `epochs` and `views` stay on the CPU, because random numbers are
    computed from them on the CPU."""
    epochs: Int64[Tensor, " b"]
    """Epoch of each image, from 0. A batch can hold the last images of one epoch and the first images of the next."""
    views: Int64[Tensor, " b"] = field(default=None)  # type: ignore[assignment]
    """View number of each image, from 0. By default every image is view 0."""
    targets: Float[Tensor, "b k"] | None = None
    """Amount of each class, or the numbers of a regression target. An unknown number is NaN. If every image has at most
    one class, no targets are soft and no images are mixed, `targets` is None and `labels` contains the targets."""
    boxes: Float[Tensor, "b m 4"] | None = None
    """With boxes, left, top, right and bottom of the objects of each image in pixels of `images`. Images with fewer
    than m objects have boxes of zeros at the end."""
    box_labels: Int64[Tensor, "b m"] | None = None
    """The class of each object, -1 where there is none, and -2 for one that is neither learned nor wrong to find: a
    crowd, or an object of which less than a quarter is seen."""
    outlines: UInt8[Tensor, "b planes h w"] | None = None
    """With boxes, the pixels of the objects, if they are learned. Bit k of plane p is 1 in the pixels of object
    8 p + k."""
    masks: UInt8[Tensor, "b h w"] | None = None
    """With masks, the class of each pixel of `images`, or 255 for a pixel without a class."""
    texts: Int64[Tensor, "b context"] | None = None
    """With texts and a tokenizer, the tokens of one text of each image, which is drawn anew in each epoch."""
    target_kind: TargetKind = "class"
    has_soft_targets: bool = False
    """True if the source has soft targets. `targets` then holds the amounts of all images, and `labels` their most
    likely classes."""
    skipped: tuple[Skipped, ...] = ()
    partners: int = 0
    """Number of rows at the end that belong to another process. The last sample of this process is mixed with them."""
    first_key: tuple[int, int] | None = None
    """Epoch and sample of the first row of the batch that several processes share, or None if this batch is whole."""
    local: Batch | None = None
    """More views of the same samples, whose images have another size, or None. Their view numbers follow those of this
    batch."""

    def __post_init__(self) -> None:
        if cast(Tensor | None, self.views) is None:
            object.__setattr__(self, "views", torch.zeros_like(self.samples))

    def __len__(self) -> int:
        """Return the number of rows, which is the number of samples times the number of views."""
        return len(self.labels)

    @property
    def views_per_sample(self) -> int:
        """Number of rows per sample."""
        views = np.from_dlpack(self.views)  # DLPack shares memory on the CPU only, so nothing waits here
        return int(views[-1] - views[0]) + 1

    @property
    def counted(self) -> Bool[Tensor, " b"]:
        """True for each image that was decoded and has a label or a target."""
        if self.target_kind == "numbers" and self.targets is not None:
            return self.valid & ~self.targets.isnan().all(dim=1)
        has_labels = self.targets is None or self.has_soft_targets
        return self.valid & (self.labels >= 0) if has_labels else self.valid

    def to(self, device: torch.device) -> Batch:
        """Return the batch with the images, labels and other tensors for the loss on the device.

        `samples`, `epochs` and `views` stay on the CPU, so computing random numbers from them does not wait for the
        device.
        """
        moved = {}
        for name in ON_DEVICE:
            if (tensor := getattr(self, name)) is not None:
                if device.type == "cuda":
                    tensor = tensor.pin_memory()  # pinned, so that the copy runs while the GPU computes
                moved[name] = tensor.to(device, non_blocking=True)
        return replace(self, **moved, local=None if self.local is None else self.local.to(device))

    def with_images(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `change` of its images, and of the images of its local views."""
        local = None if self.local is None else self.local.with_images(change)
        return replace(self, images=change(self.images), local=local)

    def without_partners(self) -> Batch:
        """Return the batch without the rows that belong to another process."""
        if not self.partners:
            return self
        own = {
            item.name: getattr(self, item.name)[: len(self) - self.partners]
            for item in fields(self)
            if isinstance(getattr(self, item.name), Tensor)
        }
        return replace(self, **own, partners=0)

    def chunks(self, count: int) -> list[Batch]:
        """Return the batch as `count` smaller batches of nearly equal size, in order. A batch with fewer than `count`
        samples becomes one batch per sample.

        All views of a sample stay together.
        """
        names = [item.name for item in fields(self) if isinstance(getattr(self, item.name), Tensor)]
        views = self.views_per_sample
        samples = len(self) // views
        size, larger = divmod(samples, chunks := min(count, samples))  # the first ones have one more sample
        ends = [views * (number * size + min(number, larger)) for number in range(1, chunks)]
        parts = zip(*(getattr(self, name).tensor_split(ends) for name in names), strict=True)
        local = [None] * chunks if self.local is None else self.local.chunks(count)
        return [
            Batch(
                **dict(zip(names, part, strict=True)),
                target_kind=self.target_kind,
                has_soft_targets=self.has_soft_targets,
                local=more,
            )
            for part, more in zip(parts, local, strict=True)
        ]


ON_DEVICE = ("images", "labels", "valid", "targets", "boxes", "box_labels", "outlines", "masks", "texts")


Crop = Callable[..., Box | Jitter]
"""A function of an epoch, the index of a sample, the height and width of its image in pixels, and as `view` the number
of a view. It chooses the box of the image that training sees, in pixels (top, left, height and width), or the scale and
the place of the whole image."""


@dataclass(frozen=True)
class LocalViews:
    """More views of each sample, with boxes and an image size of their own, such as the local views of multi-crop."""

    count: int
    """Number of these views of each sample."""
    preprocess: Preprocess
    crop: Crop


@dataclass(frozen=True)
class Rows:
    """The rows that training makes of a sample, and what they contain."""

    crop: Crop | None = None
    """Chooses a random box or scale for each view. By default whole images are seen."""
    views: int = 1
    """Number of rows of a sample. They have different boxes and different augmentation."""
    outlines: bool = False
    """True to read the pixels of objects."""
    tokenizer: TextTokenizer | None = None
    """The tokenizer of texts, of which a row has one. By default batches have no texts."""
    partners: bool = False
    """True to add the sample that follows the last one of this process in the batch of all processes
    (`Batch.partners`), so that mixtures are the same as for one process."""

    def __post_init__(self) -> None:
        raise_problems([problem_of("views", self.views, int, {"least": 1})])


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
    rows: Rows = Rows()
    local: LocalViews | None = None
    is_training: bool = False
    """True to round the pixels to uint8, which augmentation needs, and to return soft targets."""
    first: int = 0
    """Index of the loader's first sample in `source`, which can be a mixture of several sources."""
    length: int | None = None
    """Number of samples of the loader's part of a mixture, which is the length of its epoch. By default, all samples
    of `source`."""
    seed: int = 0
    """Seed of the choice of a text."""
    kept: KeptPixels | None = None
    """Memory for pixels that later epochs use again. It requires `is_training`, and neither a crop nor `local`."""

    def __call__(self, position: int, index: int) -> dict[str, Any]:
        epoch = position // (self.length or len(self.source))
        place = self.first + index
        target = self.source.target(place)
        skipped = None
        dense: dict[str, np.ndarray] = {}
        try:
            pixels, local = self._pixels(epoch, place)
            if isinstance(target, Objects | Mask):
                dense = self._dense(epoch, place, target)
        except UndecodableImage as error:
            pixels, local = _black(self.preprocess, self.rows.views), []
            if self.local is not None:
                local = _black(self.local.preprocess, self.local.count)
            skipped = Skipped(self.source.key(place), str(error))
            if isinstance(target, Objects | Mask):
                dense = nothing_of(target, self.preprocess, outlines=self.rows.outlines)
        return {
            **dense,
            "images": pixels, "valid": skipped is None, "samples": place, "epochs": epoch, "local": local,
            "labels": target if isinstance(target, int) else 0 if is_texts(target) else -1, "skipped": skipped,
            "targets": self._values(place, target), "texts": self._tokens(epoch, place, target),
        }  # fmt: skip

    def _tokens(self, epoch: int, place: int, target: Target) -> np.ndarray | None:
        """Return the tokens of one text of an image, or padding if it has none. Return None without a tokenizer."""
        tokenizer = self.rows.tokenizer
        if tokenizer is None:
            return None
        if not is_texts(target):
            return np.full(tokenizer.context, tokenizer.padding, np.int64)
        key = np.array([epoch], np.int64), np.array([place], np.int64)
        drawn = float(keyed_uniform(self.seed, *key, draws=1, first=Slot.TEXT)[0, 0])
        return tokenizer.encode([target[int(drawn * len(target))]]).tokens[0]

    def _pixels(self, epoch: int, place: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the pixels of each view, and of each local view. The image is decoded once for all views. With
        `scaled_decode`, it is decoded for each view, because the box determines the scale."""
        count, crop, local = self.rows.views, self.rows.crop, self.local
        if self.kept is not None:
            return [self.kept.get(place, lambda: self._whole(image_of(self.source, place)))] * count, []
        image = image_of(self.source, place)
        if (local is not None or (count > 1 and crop is not None)) and not self.preprocess.scaled_decode:
            image = decode(image, self.preprocess.channels)
        if crop is None:
            pixels = [self._whole(image)] * count
        else:
            pixels = self._cut(image, epoch, place, self.preprocess, crop, range(count))
        if local is None:
            return pixels, []
        views = range(count, count + local.count)
        return pixels, self._cut(image, epoch, place, local.preprocess, local.crop, views)

    def _dense(self, epoch: int, place: int, target: Objects | Mask) -> dict[str, np.ndarray]:
        """Return the boxes and their labels, or the mask, at the places of the pixels."""
        size = image_size_of(image_of(self.source, place))
        box = None if self.rows.crop is None else self.rows.crop(epoch, place, *size, view=0)
        placement = self.preprocess.placement(size, box)
        if isinstance(target, Mask):
            return {"masks": placement.mask(target.indices(size), IGNORED)}
        target.check_size(size)
        return placed(target, placement, outlines=self.rows.outlines)

    def _whole(self, image: bytes | np.ndarray) -> np.ndarray:
        """Return the pixels of an image without a random box."""
        return self.preprocess.pixels(image, whole_levels=self.is_training)

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
        opened = open_image(image)
        boxes = [crop(epoch, place, *opened.size, view=view) for view in views]
        images = [opened, *[image] * (len(boxes) - 1)]  # an opened image can be decoded only once
        return [
            preprocess.pixels(one, box, whole_levels=self.is_training) for one, box in zip(images, boxes, strict=True)
        ]

    def _values(self, place: int, target: Target) -> np.ndarray | None:
        """Return the numbers of a target or the amount of each class. Return None if each sample has at most one
        class."""
        if self.kind == "numbers":
            return np.array([math.nan] * len(self.source.classes) if target is None else target, np.float32)
        if self.kind == "class" and self.is_training and has_soft_targets(self.source):
            if (amounts := soft_target_of(self.source, place)) is not None:
                return amounts
        elif self.kind != "classes":
            return None
        amounts = np.zeros(len(self.source.classes), np.float32)
        amounts[list(class_indices(target))] = 1
        return amounts


SEEN = 0.25
"""Smallest fraction of the area of a box in the network's input for which an object is learned."""


def placed(objects: Objects, placement: Placement, *, outlines: bool = False) -> dict[str, np.ndarray]:
    """Return the boxes in pixels of the network's input, and their labels, as `Batch` has them. Objects outside
    of the input are left out. With `outlines`, the result has the pixels of the objects, and those that have none are
    not learned."""
    whole = objects.boxes * np.tile(placement.image[::-1], 2)
    boxes = placement.boxes(whole)
    scale = placement.scaled[0] / placement.box[2] * placement.scaled[1] / placement.box[3]
    areas = (whole[:, 2:] - whole[:, :2]).prod(axis=1) * scale
    seen = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) / areas.clip(min=1e-12)
    labels = np.where(objects.crowd | (seen < SEEN), -2, objects.labels)
    found: dict[str, np.ndarray] = {"boxes": boxes[seen > 0].astype(np.float32), "box_labels": labels[seen > 0]}
    if not outlines:
        return found
    planes = np.zeros((-(-len(found["boxes"]) // 8), *placement.size), np.uint8)  # a byte has a bit of eight objects
    for place, row in enumerate(np.flatnonzero(seen > 0).tolist()):
        if labels[row] >= 0:
            pixels = placement.mask(objects.mask(row, placement.image))
            planes[place // 8] |= pixels.astype(np.uint8) << place % 8
            found["box_labels"][place] = labels[row] if pixels.any() else -2
    return found | {"outlines": planes}


def nothing_of(target: Objects | Mask, preprocess: Preprocess, *, outlines: bool = False) -> dict[str, np.ndarray]:
    """Return what `Batch` has for an image that cannot be used."""
    if isinstance(target, Mask):
        return {"masks": np.full(preprocess.image_size, IGNORED, np.uint8)}
    empty: dict[str, np.ndarray] = {"boxes": np.zeros((0, 4), np.float32), "box_labels": np.zeros(0, np.int64)}
    return empty | ({"outlines": np.zeros((0, *preprocess.image_size), np.uint8)} if outlines else {})


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
    for column, fill in (("boxes", 0), ("box_labels", -1), ("outlines", 0)):
        if column in parts[0]:
            columns[column] = _padded([part[column] for part in parts], fill)
    if "masks" in parts[0]:
        columns["masks"] = np.stack([part["masks"] for part in parts])
    for column in ("targets", "texts"):
        if parts[0][column] is not None:
            columns[column] = np.stack([part[column] for part in parts]).repeat(views, 0)
    return columns


def _padded(parts: Sequence[np.ndarray], fill: int) -> np.ndarray:
    """Stack arrays of different lengths. Those that are shorter end with `fill`."""
    found = np.full((len(parts), max(map(len, parts)), *parts[0].shape[1:]), fill, parts[0].dtype)
    for row, part in enumerate(parts):
        found[row, : len(part)] = part
    return found


def as_batch(columns: dict[str, Any], kind: TargetKind) -> Batch:
    values: dict[str, Any] = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in columns.items()
    }
    if "local" in values:
        values["local"] = as_batch(values["local"], kind)
    return Batch(**values, target_kind=kind, has_soft_targets=kind == "class" and "targets" in values)
