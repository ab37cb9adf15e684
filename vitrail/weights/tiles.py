"""Prediction of large images in tiles of the network's input size, which finds objects that are too small in the whole
image (slicing aided inference, 2202.06934)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt8

from vitrail.data.objects import Runs, overlaps_with
from vitrail.data.pixels.decode import to_pil
from vitrail.errors import UndecodableImage
from vitrail.machine import Precision
from vitrail.models.cost import prediction_batch
from vitrail.weights.answers import AnyPrediction, Detections, View, finite, mask_of
from vitrail.weights.bundle import Bundle, ImageLike, read_image

COMMON = 0.25
"""Fraction of a tile's height and width that it has in common with the next tile."""

AT_EDGE = 2.0
"""Distance in pixels from an inner edge of a tile within which a box is cut off by it."""

SAME = 0.6
"""Intersection over union from which on two boxes of a class are the same object."""

INSIDE = 0.5
"""Fraction of a box that was cut off from which on it is a part of another box of its class."""

MOST_OBJECTS = 1000
"""Largest number of objects of an image."""

Corner = tuple[int, int]
"""Top and left of a tile."""


def predict_tiles(
    bundle: Bundle, image: ImageLike, *, precision: Precision | None = None
) -> AnyPrediction | UndecodableImage:
    """Return the objects or the mask of an image, from overlapping tiles and from the whole image.

    An image that is not larger than the network's input is predicted as a whole. Otherwise the whole image finds the
    objects that do not fit into what two tiles have in common. An object that an edge between tiles cuts off loses to
    one that is seen as a whole. Logits of masks are averaged. An image that cannot be decoded is returned as the error.
    """
    try:
        content = read_image(image) if isinstance(image, str | Path) else image
        pixels = np.asarray(to_pil(content, bundle.preprocess.channels))
    except UndecodableImage as error:
        return error
    size, full = bundle.preprocess.image_size, (pixels.shape[0], pixels.shape[1])
    corners = corners_of(full, size)
    (whole,) = (
        bundle.predict([pixels], precision=precision) if bundle.output == "boxes" or len(corners) == 1 else [None]
    )
    if len(corners) == 1 and whole is not None:
        return whole
    exact = replace(bundle, preprocess=replace(bundle.preprocess, resize="pad", crop_share=1.0))
    tiles = [pixels[top : top + size[0], left : left + size[1]] for top, left in corners]
    if isinstance(whole, Detections):
        found = exact.predict(tiles, precision=precision)
        return merged(whole, [one for one in found if isinstance(one, Detections)], corners, size)
    views = [*_views(bundle, [pixels], [(0, 0)], precision), *_views(exact, tiles, corners, precision)]
    return mask_of(views, full, bundle.classes)


def corners_of(full: tuple[int, int], size: tuple[int, int]) -> list[Corner]:
    """Return the top and left of the tiles of an image. Those at its end have more in common with the others."""
    starts = []
    for whole, part in zip(full, size, strict=True):
        count = 1 if whole <= part else 1 + int(np.ceil((whole - part) / (part * (1 - COMMON))))
        starts.append(np.linspace(0, max(0, whole - part), count).round().astype(int).tolist())
    return [(top, left) for top in starts[0] for left in starts[1]]


def merged(
    whole: Detections, tiles: Sequence[Detections], corners: Sequence[Corner], size: tuple[int, int]
) -> Detections:
    """Return the objects of an image from those of the whole image and of its tiles. `size` is that of a full tile."""
    height, width = whole.size
    common = np.array(size[::-1]) * COMMON
    sides = whole.boxes[:, 2:] - whole.boxes[:, :2]
    every = [whole.taken(np.flatnonzero((sides > common).any(axis=1)))]  # tiles see the others as a whole
    cut = [np.zeros(len(every[0]), np.bool_)]
    for tile, (top, left) in zip(tiles, corners, strict=True):
        boxes = tile.boxes + np.array([left, top, left, top])
        ends = np.array([left, top, left + tile.size[1], top + tile.size[0]])
        is_inner = ends != np.array([0, 0, width, height])
        cut.append(((np.abs(boxes - ends) <= AT_EDGE) & is_inner).any(axis=1))
        every.append(replace(tile, boxes=boxes, size=whole.size))
    joined = Detections(
        whole.names,
        np.concatenate([one.boxes for one in every]),
        np.concatenate([one.scores for one in every]),
        np.concatenate([one.labels for one in every]),
        whole.size,
        tuple(runs for one in every for runs in one.masks),
    )
    rows = _kept(joined.boxes, joined.scores, joined.labels, np.concatenate(cut))
    places = [corner for one, corner in zip(every, [(0, 0), *corners], strict=True) for _ in one.masks]
    masks = tuple(_moved(joined.masks[row], places[row], whole.size) for row in rows.tolist() if joined.masks)
    return replace(joined.taken(rows), masks=masks)


def _kept(
    boxes: Float64[np.ndarray, "n 4"],
    scores: Float64[np.ndarray, " n"],
    labels: Int64[np.ndarray, " n"],
    cut: Bool[np.ndarray, " n"],
) -> Int64[np.ndarray, " k"]:
    """Return the rows of the boxes that stay, those with the highest scores first. Boxes that are cut off come after
    all others, and lose to each one that covers a large part of them."""
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1).clip(min=1e-9)
    order = np.lexsort((-scores, cut))
    kept: list[int] = []
    while len(order) and len(kept) < MOST_OBJECTS:
        first, order = int(order[0]), order[1:]
        kept.append(first)
        shared, overlap = overlaps_with(boxes[order], boxes[first])
        same = overlap > SAME
        same |= cut[order] & (shared / areas[order] > INSIDE)
        order = order[~(same & (labels[order] == labels[first]))]
    rows = np.array(kept, np.int64)
    return rows[np.argsort(-scores[rows], kind="stable")]


def _moved(runs: Runs, corner: Corner, size: tuple[int, int]) -> Runs:
    """Return the pixels of an object in a tile as those of the whole image."""
    if runs.size == size:
        return runs
    found = np.zeros(size, np.bool_)
    found[corner[0] : corner[0] + runs.size[0], corner[1] : corner[1] + runs.size[1]] = runs.mask()
    return Runs.of(found)


def _views(
    bundle: Bundle, images: Sequence[UInt8[np.ndarray, ...]], corners: Sequence[Corner], precision: Precision | None
) -> list[View]:
    """Return the logits of parts of an image."""
    config: Any = bundle.network.config
    precision = precision or bundle.precision
    predictor = bundle.predictor(precision)
    count = prediction_batch(bundle.network, bundle.preprocess.image_size, bundle.device, precision)
    views: list[View] = []
    for start in range(0, len(images), count):
        part = images[start : start + count]
        outputs = predictor.logits(bundle.inputs([bundle.preprocess.pixels(one) for one in part]))
        maps = config.dense_head.class_maps(finite(outputs.float().cpu()), config.grid)
        views += [
            View(one, placement, *corner)
            for one, placement, corner in zip(
                maps, bundle.placements(part), corners[start : start + count], strict=True
            )
        ]
    return views
