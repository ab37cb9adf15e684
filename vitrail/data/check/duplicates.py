"""Search for exact and near duplicates among images, without comparing each image with every other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8, UInt64
from PIL import Image

from vitrail.data.check.look import CHUNK, Looks, Progress, in_threads
from vitrail.data.check.shifted import shifted_copies
from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source
from vitrail.errors import DataError

RADIUS = 0.05
"""Largest distance between the thumbnails of two images that may be near duplicates. Thumbnails have 8 x 8 pixels
and are normalised to mean 0 and length 1."""

DIFFERENCE = 0.1
"""Largest root mean square difference of near duplicates, as a fraction of the contrast. Images are compared at 24 x 24
pixels in RGB. docs/data-check.md has the measured recall."""

SIDE = 24
FLATTEST = 3.0
"""Smallest contrast of a thumbnail in grey levels. Flatter thumbnails are not compared."""

AXES = 8
"""Number of dimensions of the grid into which thumbnails are sorted."""

MOST_COMPARISONS = 200_000_000
"""Largest number of pairs of thumbnails that are compared. The limit bounds the time if very many images look alike.
Thumbnails that follow each other along the first axis are compared first."""

MOST_NEIGHBOURS = 1_000_000
MOST_COMPARED = 20_000
"""Largest number of image pairs that are decoded again and compared in detail. The limit bounds time and memory. The
nearest pairs are compared first."""

SAMPLE = 20_000
BLOCK = 1 << 17


@dataclass(frozen=True)
class Neighbours:
    """Pairs of images whose thumbnails are close. Each pair is two row numbers of `Looks`, the smaller one first, with
    the distance between the thumbnails."""

    pairs: Int64[np.ndarray, "p 2"]
    distances: Float32[np.ndarray, " p"]
    complete: bool
    """False if the limit on comparisons was reached, so that some pairs were not compared."""


@dataclass(frozen=True)
class Duplicates:
    """Groups of duplicate images. A group holds at least two row numbers of `Looks`, in ascending order."""

    exact: list[Int64[np.ndarray, " _"]]
    """Groups of images with identical pixels."""
    near: list[Int64[np.ndarray, " _"]]
    """Groups of near duplicates: the same picture saved again, shifted by a few pixels, or in other colours. At least
    two members of a group differ in pixels."""
    complete: bool
    """True if all pairs of similar images were compared. False if there were too many of these pairs."""
    shifted: bool
    """True if the search included shifted and recoloured copies. This part of the search is skipped for very many
    images."""


def find_duplicates(
    looks: Looks, sources: Sequence[Source], *, threads: int | None = None, progress: Progress | None = None
) -> Duplicates:
    """Return the exact and near duplicates among all decoded images.

    Near duplicates are found in two ways. Pairs with nearly equal thumbnails are verified by reading both images again.
    Shifted and recoloured copies are found by `shifted_copies`.
    """
    ok = looks.ok
    exact = sorted((ok[group] for group in same(looks.pixels[ok])), key=lambda group: int(group[0]))
    copies = {int(group[0]): group for group in exact}
    repeated = np.concatenate([group[1:] for group in exact]) if exact else np.zeros(0, np.int64)
    distinct = np.setdiff1d(ok, repeated, assume_unique=True)
    found = neighbours(looks.thumbnails[distinct])
    nearest = np.argsort(found.distances, kind="stable")[:MOST_COMPARED]
    pairs = distinct[found.pairs[nearest]]
    pairs = pairs[alike(looks, sources, pairs, threads=threads, progress=progress)]
    if looks.details is not None:
        moved = distinct[shifted_copies(looks.thumbnails[distinct], looks.details[distinct], threads=threads)]
        pairs = np.concatenate([pairs, moved])
    near = [
        np.sort(np.concatenate([copies.get(row, np.array([row], np.int64)) for row in group]))
        for group in _components(pairs)
    ]
    complete = found.complete and len(found.pairs) <= MOST_COMPARED
    return Duplicates(exact, near, complete, looks.details is not None)


def same(values: UInt64[np.ndarray, " n"]) -> list[Int64[np.ndarray, " _"]]:
    """Return the indices of equal values, one group for every value that occurs more than once."""
    order = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[order])) + 1
    starts, ends = np.append(0, edges), np.append(edges, len(order))
    return [order[start:end] for start, end in zip(starts, ends, strict=True) if end - start > 1]


def neighbours(thumbnails: UInt8[np.ndarray, "n 8 8"], radius: float = RADIUS) -> Neighbours:
    """Return all pairs of thumbnails whose distance, after normalisation to mean 0 and length 1, is at most `radius`.

    Flat thumbnails are excluded. Two thumbnails that are close are also close along every axis. Thumbnails are
    therefore sorted into the cells of a grid, and a thumbnail near the edge of a cell is also put into the neighbouring
    cell. Within a cell, thumbnails are sorted along one more axis. Each thumbnail is compared only with the thumbnails
    that follow it within `radius` along this axis.
    """
    blocks = [thumbnails[start : start + BLOCK] for start in range(0, len(thumbnails), BLOCK)]
    usable = np.flatnonzero(np.concatenate([np.zeros(0), *(block.std(axis=(1, 2)) for block in blocks)]) >= FLATTEST)
    places = _places(thumbnails, usable)
    reach = radius * 1.001  # room for rounding errors
    keys, rows = _cells(places[:, 1:], radius)
    order = np.lexsort((places[rows, 0], keys))
    keys, rows = keys[order], rows[order]
    along = places[rows, 0]
    found: list[tuple[np.ndarray, np.ndarray]] = []
    active, total, shift = np.arange(len(rows)), 0, 0
    budget = MOST_COMPARISONS
    while budget > 0 and total < MOST_NEIGHBOURS:
        shift += 1
        active = active[active + shift < len(rows)]
        active = active[(keys[active] == keys[active + shift]) & (along[active + shift] - along[active] <= reach)]
        if not len(active):
            break
        budget -= len(active)
        for start in range(0, len(active), BLOCK):
            block = active[start : start + BLOCK]
            pairs = np.stack([rows[block], rows[block + shift]], axis=1)
            pairs = np.sort(pairs[_length(places[pairs[:, 0]] - places[pairs[:, 1]]) <= reach], axis=1)
            distances = _length(_unit(thumbnails[usable[pairs[:, 0]]]) - _unit(thumbnails[usable[pairs[:, 1]]]))
            near = distances <= radius
            found.append((pairs[near], distances[near]))
            total += int(near.sum())
    if not total:
        return Neighbours(np.zeros((0, 2), np.int64), np.zeros(0, np.float32), not len(active))
    pairs, first = np.unique(np.concatenate([pairs for pairs, _ in found]), axis=0, return_index=True)
    return Neighbours(usable[pairs], np.concatenate([d for _, d in found])[first], not len(active))


def alike(
    looks: Looks,
    sources: Sequence[Source],
    pairs: Int64[np.ndarray, "p 2"],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Bool[np.ndarray, " p"]:
    """Return True for each pair of rows that shows the same picture. Both images are decoded again and compared at 24 x
    24 pixels in RGB."""
    rows = np.unique(pairs)
    pictures = np.zeros((len(rows), SIDE, SIDE, 3), np.uint8)
    gone = np.zeros(len(rows), bool)

    def read(place: int) -> None:
        try:
            image = sources[looks.split[rows[place]]][int(looks.index[rows[place]])].image
            picture = to_pil(image, 3).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            pictures[place] = np.asarray(picture)
        except DataError:  # the file has vanished since it was examined
            gone[place] = True

    with in_threads(read, range(len(rows)), threads) as results:
        for place, _ in enumerate(results):
            if progress is not None and (place + 1) % CHUNK == 0:
                progress(len(looks) + place + 1, len(looks) + len(rows))
    contrasts = pictures.std(axis=(1, 2)).max(axis=1, initial=0)
    one, other = np.searchsorted(rows, pairs).T
    differences = np.zeros(len(pairs), np.float32)
    for start in range(0, len(pairs), BLOCK >> 6):
        block = slice(start, start + (BLOCK >> 6))
        gap = pictures[one[block]].astype(np.float32) - pictures[other[block]]
        differences[block] = np.sqrt(np.square(gap).mean(axis=(1, 2, 3)))
    limit = DIFFERENCE * np.minimum(contrasts[one], contrasts[other])
    return (differences <= limit) & ~gone[one] & ~gone[other]


def _places(thumbnails: np.ndarray, usable: np.ndarray) -> Float32[np.ndarray, "n axes"]:
    """Return the principal component scores of thumbnails. The components are computed from a sample."""
    sample = _unit(thumbnails[usable[:: max(1, len(usable) // SAMPLE)]])
    axes = np.linalg.eigh(sample.T @ sample)[1][:, ::-1][:, :AXES]
    places = np.zeros((len(usable), AXES), np.float32)
    for start in range(0, len(usable), BLOCK):
        places[start : start + BLOCK] = _unit(thumbnails[usable[start : start + BLOCK]]) @ axes
    return places


def _cells(places: np.ndarray, radius: float) -> tuple[UInt64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
    """Return pairs of a cell number and a row in this cell, as two arrays. A row can be in several cells. Two points
    within `radius` of each other are both in the cell of their midpoint."""
    rows = np.arange(len(places))
    keys = np.zeros(len(places), np.uint64)
    margin = radius / 2 * 1.001
    for axis in range(places.shape[1]):
        low = np.floor((places[rows, axis] - margin) / (4 * radius)).astype(np.int64)
        high = np.floor((places[rows, axis] + margin) / (4 * radius)).astype(np.int64)
        both = high != low
        keys = keys * np.uint64(0x9E3779B97F4A7C15)
        keys = np.concatenate([keys + low.astype(np.uint64), keys[both] + high[both].astype(np.uint64)])
        rows = np.concatenate([rows, rows[both]])
    return keys, rows


def _unit(thumbnails: np.ndarray) -> Float32[np.ndarray, "n 64"]:
    flat = thumbnails.reshape(-1, math.prod(thumbnails.shape[1:])).astype(np.float32)
    flat -= flat.mean(axis=1, keepdims=True)
    return flat / np.maximum(_length(flat)[:, None], 1e-6)


def _length(vectors: np.ndarray) -> Float32[np.ndarray, " n"]:
    return np.sqrt(np.einsum("ij,ij->i", vectors, vectors))


def _components(pairs: Int64[np.ndarray, "p 2"]) -> list[list[int]]:
    """Return the connected components of the pairs, as groups of rows."""
    parent: dict[int, int] = {}

    def root(row: int) -> int:
        parent.setdefault(row, row)
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    for one, other in pairs.tolist():
        parent[root(one)] = root(other)
    groups: dict[int, list[int]] = {}
    for row in sorted(parent):
        groups.setdefault(root(row), []).append(row)
    return list(groups.values())
