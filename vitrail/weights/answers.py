"""The predictions of models: classes, numbers, boxes of objects, or a class for every pixel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, UInt8
from PIL import Image
from torch import Tensor

from vitrail.data.objects import Runs
from vitrail.data.pixels.decode import to_pil
from vitrail.data.pixels.geometry import Placement
from vitrail.errors import BundleError, ConfigError
from vitrail.models.heads.dense_head import BoxHead, FoundBoxes, MaskHead
from vitrail.report.drawing import draw_boxes, draw_mask
from vitrail.settings import typed

OutputKind = Literal["softmax", "sigmoid", "numbers", "boxes", "mask"]
"""Meaning of a network's outputs. "softmax": logits of classes that exclude each other. "sigmoid": one yes-or-no logit
per class. "numbers": numbers in the units of the training data. "boxes": objects with boxes. "mask": a class for every
pixel."""

DENSE: tuple[OutputKind, ...] = ("boxes", "mask")
"""Outputs with a place in the image."""

USUAL_THRESHOLD = 0.3
"""Least score of the objects that are shown, if none was chosen on validation images (`Bundle.score_threshold`)."""


@dataclass(frozen=True)
class Prediction:
    """The classes that a model predicts for one image."""

    label: str
    """The likeliest class."""
    probability: float
    """Probability of the likeliest class, in [0, 1]."""
    ranking: tuple[tuple[str, float], ...]
    """The `top` likeliest classes with their probabilities, the likeliest first. By default all classes."""


@dataclass(frozen=True)
class NumberPrediction:
    """The numbers that a model predicts for one image, in the units of the training data."""

    names: tuple[str, ...]
    values: tuple[float, ...]

    def __getitem__(self, name: str) -> float:
        """Return the number with this name. Raise `KeyError` if the model has no number of this name."""
        if name not in self.names:
            raise KeyError(name)
        return self.values[self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        """Yield the names, as a dictionary does."""
        return iter(self.names)

    @property
    def text(self) -> str:
        """The numbers with their names."""
        return ", ".join(f"{name} {value:.4g}" for name, value in zip(self.names, self.values, strict=True))


class FoundObject(NamedTuple):
    """An object that a model finds in an image."""

    label: str
    score: float
    """The probability that the model gives the object, in [0, 1]."""
    box: tuple[float, float, float, float]
    """Left, top, right and bottom in pixels of the image."""


@dataclass(frozen=True, eq=False)
class Detections:
    """The objects that a model finds in one image, those with the highest scores first."""

    names: tuple[str, ...]
    """The classes of the model."""
    boxes: Float64[np.ndarray, "n 4"]
    """Left, top, right and bottom in pixels of the upright image."""
    scores: Float64[np.ndarray, " n"]
    labels: Int64[np.ndarray, " n"]
    """Indices in `names`."""
    size: tuple[int, int]
    """Height and width of the image."""
    masks: tuple[Runs, ...] = ()
    """The pixels of each object. () for a model of boxes."""

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[FoundObject]:
        for box, score, label in zip(self.boxes.tolist(), self.scores.tolist(), self.labels.tolist(), strict=True):
            yield FoundObject(self.names[label], score, tuple(box))

    @property
    def text(self) -> str:
        """The numbers of objects of each class, such as "dog: 1, cat: 3", or "nothing"."""
        counts = np.bincount(self.labels, minlength=len(self.names)).tolist()
        found = [f"{name}: {count}" for name, count in zip(self.names, counts, strict=True) if count]
        return ", ".join(found) or "nothing"

    def coco(self, ids: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return the objects in the form of COCO's results. `ids` are the numbers of the classes (`Bundle.class_ids`).
        By default they are counted from 1. Raise `ConfigError` unless there is a number for each class."""
        ids = typed(tuple[int, ...], [*ids], "ids")
        if ids and len(ids) != len(self.names):
            raise ConfigError(f"ids={ids} are {len(ids)} numbers, but the model has {len(self.names)} classes")
        rows: list[dict[str, Any]] = []
        for number, (label, score, (left, top, right, bottom)) in enumerate(self):
            place = int(self.labels[number])
            box = [round(value, 4) for value in (left, top, right - left, bottom - top)]
            row = {"category_id": ids[place] if ids else place + 1, "category_name": label, "bbox": box, "score": score}
            if self.masks:
                runs = self.masks[number]
                row["segmentation"] = {"size": list(runs.size), "counts": runs.counts.decode()}
            rows.append(row)
        return rows

    def drawn(self, image: bytes | np.ndarray | Image.Image) -> Image.Image:
        """Return the upright image with the boxes and masks of the objects, and their scores. Raise `ConfigError` for
        an image of another size than that of the prediction."""
        texts, masks = [f"{one.label} {one.score:.2f}" for one in self], [runs.mask() for runs in self.masks]
        return draw_boxes(_upright(image, self.size), self.boxes, self.labels.tolist(), texts, masks)

    def above(self, score: float) -> Detections:
        """Return the objects with at least this score."""
        return self.taken(np.flatnonzero(self.scores >= score))

    def taken(self, rows: Int64[np.ndarray, " k"]) -> Detections:
        """Return the objects in these rows."""
        masks = tuple(self.masks[row] for row in rows.tolist()) if self.masks else ()
        return Detections(self.names, self.boxes[rows], self.scores[rows], self.labels[rows], self.size, masks)


@dataclass(frozen=True, eq=False)
class MaskPrediction:
    """The class that a model predicts for every pixel of one image."""

    names: tuple[str, ...]
    """The classes of the model."""
    indices: UInt8[np.ndarray, "h w"]
    """The index of the class of each pixel of the upright image."""

    @property
    def text(self) -> str:
        """The classes that cover the largest parts of the image, with their fractions."""
        return ", ".join(f"{name} {share:.1%}" for name, share in list(self.shares().items())[:LARGEST_PARTS])

    def drawn(self, image: bytes | np.ndarray | Image.Image) -> Image.Image:
        """Return the upright image under the colours of the classes. Raise `ConfigError` for an image of another size
        than that of the prediction."""
        return draw_mask(_upright(image, self.indices.shape), self.indices, len(self.names))

    def shares(self) -> dict[str, float]:
        """Return the fraction of the pixels of each class that occurs, the largest first."""
        counts = np.bincount(self.indices.ravel(), minlength=len(self.names)) / self.indices.size
        order = np.argsort(-counts, kind="stable").tolist()
        return {self.names[label]: float(counts[label]) for label in order if counts[label]}


LARGEST_PARTS = 4
"""Number of classes that a short text about a mask names."""


def _upright(image: bytes | np.ndarray | Image.Image, size: tuple[int, ...]) -> Image.Image:
    """Return an image as `decode` reads it, so that its pixels are those of its prediction. Raise `ConfigError` unless
    it has this height and width."""
    upright = to_pil(image, 3)
    if upright.size[::-1] != size:
        raise ConfigError(
            f"image is {upright.height} x {upright.width} pixels (height, width), but the prediction is of an image of "
            f"{size[0]} x {size[1]}; draw on the image that was predicted"
        )
    return upright


AnyPrediction = Prediction | NumberPrediction | Detections | MaskPrediction


def probabilities_of(logits: Tensor, output: OutputKind) -> Tensor:
    """Return the probability of every class from the logits of a network with outputs of this meaning. Raise
    `ConfigError` for numbers, boxes and masks, whose outputs are not a probability for each class."""
    if output not in ("softmax", "sigmoid"):
        raise ConfigError(f"this model predicts {OUTPUT_NOUNS[output]}, which have no probabilities; use predict")
    return torch.softmax(logits, dim=1) if output == "softmax" else torch.sigmoid(logits)


OUTPUT_NOUNS: dict[OutputKind, str] = {
    "softmax": "classes", "sigmoid": "classes", "numbers": "numbers", "boxes": "boxes", "mask": "masks",
}  # fmt: skip
"""Nouns of messages for the outputs of a model."""


def check_predicts_classes(output: OutputKind, done: str) -> None:
    """Raise `ConfigError` unless outputs of this meaning are classes of whole images. `done` says what cannot be done
    with the model, such as "compared"."""
    if output not in ("softmax", "sigmoid"):
        raise ConfigError(f"a model that predicts {OUTPUT_NOUNS[output]} cannot be {done}; choose a model of classes")


def finite(outputs: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """Return the outputs of a model. Raise `BundleError` if one of them is not finite."""
    if wrong := int((~outputs.flatten(1).isfinite().all(dim=1)).sum()):
        raise BundleError(
            f"the model's outputs are not finite for {wrong:,} of {len(outputs):,} images; its weights are damaged, or "
            "its training diverged"
        )
    return outputs


LEAST_SIDE = 0.01
"""Least width and height of a box in pixels. Smaller ones come from rounding."""


def found_objects(
    head: type[BoxHead],
    outputs: Float[Tensor, "b rows outputs"],
    names: tuple[str, ...],
    placements: Sequence[Placement],
    grid: tuple[int, int],
) -> list[Detections]:
    """Return the objects in images from the outputs of a head of boxes. `placements` are those of the images in the
    network's input, and `grid` has its rows and columns of patches."""
    answers = []
    for placement, found in zip(placements, head.objects(outputs, grid), strict=True):
        if found.masks is not None:
            answers.append(_with_masks(found, placement, names))
            continue
        inside = placement.boxes_back(found.boxes.double().numpy() * np.tile(placement.size[::-1], 2))
        seen = (inside[:, 2:] - inside[:, :2] > LEAST_SIDE).all(axis=1)  # other boxes lie in the padding
        every = Detections(names, inside, found.scores.double().numpy(), found.labels.numpy(), placement.image)
        answers.append(every.taken(np.flatnonzero(seen)))
    return answers


def _with_masks(found: FoundBoxes, placement: Placement, names: tuple[str, ...]) -> Detections:
    """Return objects with their masks at the pixels of the image. A score is the probability of the class times the
    mean probability of the object's pixels (2112.01527). Objects without a pixel in the image are left out."""
    assert found.masks is not None and found.mask_rows is not None
    queries, maps = found.mask_rows.tolist(), found.masks.double().numpy()
    masks = {query: _pixels(maps[query], placement) for query in set(queries)}
    seen = [row for row, query in enumerate(queries) if masks[query] is not None]
    chosen = [mask for row in seen if (mask := masks[queries[row]]) is not None]
    scores = found.scores.double().numpy()[seen] * np.array([mask.quality for mask in chosen])
    boxes = np.array([mask.box for mask in chosen], np.float64).reshape(len(chosen), 4)
    runs = tuple(mask.runs for mask in chosen)
    every = Detections(names, boxes, scores, found.labels.numpy()[seen], placement.image, runs)
    return every.taken(np.argsort(-scores, kind="stable"))


class _Pixels(NamedTuple):
    """The pixels of an object."""

    runs: Runs
    box: tuple[int, int, int, int]
    """Left, top, right and bottom of the pixels."""
    quality: float
    """Mean probability of the pixels."""


def _pixels(logits: Float64[np.ndarray, "h w"], placement: Placement) -> _Pixels | None:
    """Return the pixels of an image with a positive logit, from a map that covers the network's input. Return None if
    there are none. Only the part of the image around the positive cells is computed."""
    height, width = placement.image
    sides = np.array(placement.size) / logits.shape
    rows, columns = (np.flatnonzero((logits > 0).any(axis=axis)) for axis in (1, 0))
    if not len(rows):
        return None
    (up, left), (down, right) = ((np.array(each) * sides) for each in (
        (rows[0] - 1, columns[0] - 1), (rows[-1] + 2, columns[-1] + 2),
    ))  # fmt: skip
    ((first, start, last, end),) = placement.boxes_back(np.array([[left, up, right, down]]))
    start, first = max(0, int(start) - 1), max(0, int(first) - 1)
    end, last = min(height, int(end) + 2), min(width, int(last) + 2)
    part = placement.part((start, first, end - start, last - first)).map_back(logits, fill=-math.inf)
    mask = np.zeros((height, width), np.bool_)
    mask[start:end, first:last] = part > 0
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    if not len(rows):
        return None
    box = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
    return _Pixels(Runs.of(mask), box, float((1 / (1 + np.exp(-part[part > 0]))).mean()))


def class_masks(
    head: type[MaskHead],
    outputs: Float[Tensor, "b rows outputs"],
    names: tuple[str, ...],
    placements: Sequence[Placement],
    grid: tuple[int, int],
) -> list[MaskPrediction]:
    """Return the class of each pixel of images from the outputs of a head of masks. `grid` has the rows and columns of
    patches of the network's input."""
    maps = head.class_maps(outputs, grid)
    views = [View(one, placement) for one, placement in zip(maps, placements, strict=True)]
    return [mask_of([view], view.placement.image, names) for view in views]


class View(NamedTuple):
    """The logits of a part of an image."""

    maps: Float[Tensor, "classes h w"]
    placement: Placement
    """The place of the part in the network's input."""
    top: int = 0
    """The first row of the part in the image."""
    left: int = 0


BLOCK = 1 << 18
"""Number of logits that are in memory at a time, which fit into the cache of a core: the classes of a part of an
image."""


def mask_of(views: Sequence[View], size: tuple[int, int], names: tuple[str, ...]) -> MaskPrediction:
    """Return the class of each pixel of an image of a height and width: that with the largest mean of the logits of all
    views that contain the pixel."""
    indices = np.zeros(size, np.uint8)
    logits = [view.maps.double().numpy() for view in views]
    columns = max(1, min(size[1], BLOCK // len(names)))
    rows = max(1, BLOCK // len(names) // columns)
    for top, left in itertools.product(range(0, size[0], rows), range(0, size[1], columns)):
        block = indices[top : top + rows, left : left + columns]
        bottom, right = top + block.shape[0], left + block.shape[1]
        total = np.zeros((len(names), *block.shape))
        for maps, (_, placement, above, before) in zip(logits, views, strict=True):
            height, width = placement.image
            first, last = max(top, above), min(bottom, above + height)
            start, stop = max(left, before), min(right, before + width)
            if first < last and start < stop:
                part = placement.part((first - above, start - before, last - first, stop - start))
                total[:, first - top : last - top, start - left : stop - left] += part.map_back(maps)
        block[:] = total.argmax(axis=0)
    return MaskPrediction(names, indices)


def rank(probabilities: Float[Tensor, "b classes"], classes: tuple[str, ...], count: int) -> list[Prediction]:
    """Return the `count` likeliest classes of each row. Equally likely classes keep the order of `classes`."""
    predictions = []
    for row in probabilities:
        values, order = _largest(row, count)
        ranking = tuple((classes[index], value) for index, value in zip(order, values, strict=True))
        predictions.append(Prediction(*ranking[0], ranking))
    return predictions


def _largest(row: Float[Tensor, " n"], count: int) -> tuple[list[float], list[int]]:
    """Return the largest values, largest first, and their indices. Equal values keep the order of their indices."""
    if count == len(row):
        values, order = row.sort(descending=True, stable=True)
        return values.tolist(), order.tolist()
    # `topk` returns equal values in any order, so it only gives the threshold. Comparisons with NaN are false.
    candidates = (~(row < row.topk(count).values[-1])).nonzero()[:, 0]
    values, order = row[candidates].sort(descending=True, stable=True)
    return values[:count].tolist(), candidates[order[:count]].tolist()
