"""Search for exact and near duplicates among images, without comparing each image with every other."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8, UInt64
from PIL import Image

from vitrail.data.check.images import CHUNK, DETAIL_SIDE, Looks, Progress, in_threads
from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source
from vitrail.errors import DataError

RADIUS = 0.05
"""Largest distance between the thumbnails of two images that may be near duplicates. Thumbnails have 8 x 8 pixels
and are normalised to mean 0 and length 1."""

DIFFERENCE = 0.1
"""Largest root mean square difference of near duplicates, as a fraction of the contrast. Images are compared at 24 x 24
pixels in RGB. docs/data.md has the measured recall."""

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
    edges = [0, *(np.flatnonzero(np.diff(values[order])) + 1).tolist(), len(order)]
    return [order[start:end] for start, end in pairwise(edges) if end - start > 1]


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


NEIGHBOURS = 5
"""Number of images with which each image is compared: the images with the most similar thumbnails."""

FLATTEST_THUMBNAIL = 3.0
"""Contrast in grey levels of the flattest thumbnails that are fully compared. For a flatter thumbnail, the similarity
to other thumbnails is reduced."""

MARGIN = 5
"""Largest shift between two images that is tried, in pixels. Every image is scaled to 32 x 32 pixels first."""

FINE, COARSE = 0.7, 2.5
"""Standard deviations in pixels of two Gaussian filters. Their difference keeps the details of a picture, and removes
noise and smooth shading."""

MATCH = 0.85
"""Smallest correlation of the details of near duplicates."""

MATCH_OF_FEW, FEW = 0.95, 30
"""If fewer than `FEW` pairs are compared, near duplicates need at least the correlation `MATCH_OF_FEW`. So few pairs do
not show which correlations are usual for the data."""

OUTLIER = 5.0
"""Smallest difference between the score of near duplicates and the median score of all compared pairs, in robust
standard deviations. A score is a correlation after Fisher's transformation."""

BUSY = 0.2
"""Smallest fraction of a near duplicate's pixels that contain details. Images with fewer details, such as small objects
on a plain background, look alike without being copies."""

ROWS, GROUP, PAIRS_AT_ONCE = 256, 64, 2048


def shifted_copies(
    thumbnails: UInt8[np.ndarray, "n 8 8"], details: UInt8[np.ndarray, "n 32 32"], *, threads: int | None = None
) -> Int64[np.ndarray, "p 2"]:
    """Return the pairs of images that show the same picture. The first index of a pair is the smaller one.

    The correlation of details must be at least `MATCH`. It must also be unusual for the data: in some data sets, such
    as drawings of the same objects, the most similar images correlate strongly without being copies. The distribution
    of the correlations of all compared pairs, after Fisher's transformation, shows which correlations are usual.
    """
    pairs = most_similar(thumbnails, threads=threads)
    if not len(pairs):
        return pairs
    starts = range(0, len(pairs), PAIRS_AT_ONCE)
    with in_threads(
        lambda start: detail_correlation(details, pairs[start : start + PAIRS_AT_ONCE]), starts, threads
    ) as blocks:
        correlation, busy = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    scores = np.arctanh(np.clip(correlation, -0.999, 0.9999))
    if len(pairs) < FEW:
        limit = np.arctanh(MATCH_OF_FEW)
    else:
        usual = np.median(scores)
        deviation = 1.4826 * np.median(np.abs(scores - usual))
        limit = max(np.arctanh(MATCH), usual + OUTLIER * deviation)
    return pairs[(scores >= limit) & (busy >= BUSY)]


def most_similar(thumbnails: UInt8[np.ndarray, "n 8 8"], *, threads: int | None = None) -> Int64[np.ndarray, "p 2"]:
    """Return pairs of thumbnails: each thumbnail with each of the five others that correlate most with it.

    Each pair occurs once, with the smaller index first. All thumbnails are compared with all others, so the time grows
    with the square of their number.
    """
    count = len(thumbnails)
    flat = thumbnails.reshape(count, 64).astype(np.float32)
    flat -= flat.mean(axis=1, keepdims=True)
    flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 8 * FLATTEST_THUMBNAIL)
    columns = max(-(-count // GROUP), NEIGHBOURS) * GROUP
    others = np.zeros((64, columns), np.float32)
    others[:, :count] = flat.T

    def nearest(start: int) -> Int64[np.ndarray, "q 2"]:
        rows = np.arange(start, min(start + ROWS, count))
        similarity = flat[rows] @ others
        similarity[np.arange(len(rows)), rows] = -2
        similarity[:, count:] = -2
        groups = similarity.reshape(len(rows), -1, GROUP)
        best = np.argpartition(-groups.max(axis=2), NEIGHBOURS - 1, axis=1)[:, :NEIGHBOURS]  # the groups of the best
        values = np.take_along_axis(groups, best[..., None], axis=1).reshape(len(rows), -1)
        places = (best[..., None] * GROUP + np.arange(GROUP)).reshape(len(rows), -1)
        chosen = np.take_along_axis(places, np.argpartition(-values, NEIGHBOURS - 1, axis=1)[:, :NEIGHBOURS], axis=1)
        found = np.stack([np.repeat(rows, NEIGHBOURS), chosen.ravel()], axis=1)
        return np.sort(found[(found[:, 1] < count) & (found[:, 0] != found[:, 1])], axis=1)

    with in_threads(nearest, range(0, count, ROWS), threads) as parts:
        return np.unique(np.concatenate([np.zeros((0, 2), np.int64), *parts]), axis=0)


def detail_correlation(
    details: UInt8[np.ndarray, "n 32 32"], pairs: Int64[np.ndarray, "p 2"]
) -> tuple[Float32[np.ndarray, " p"], Float32[np.ndarray, " p"]]:
    """Return the correlation of the details of each pair at the best shift, and the fraction of the pixels that hold
    the details.

    The centre of the first image is compared with all windows of its size in the second image. The fraction is the
    participation ratio of the squared details.
    """
    side = DETAIL_SIDE
    window = np.pad(np.ones([side - 2 * MARGIN] * 2, np.float32), MARGIN)  # the pixels that remain at all shifts
    template = _details_of(details[pairs[:, 0]]) * window
    picture = _details_of(details[pairs[:, 1]])
    energy = np.square(template).sum(axis=(1, 2))
    busy = np.square(energy) / np.maximum((template**4).sum(axis=(1, 2)), 1e-6) / window.sum()
    shifts = np.r_[0 : MARGIN + 1, side - MARGIN : side]

    def slide(kernel: np.ndarray, image: np.ndarray) -> np.ndarray:
        products = np.conj(np.fft.rfft2(kernel)) * np.fft.rfft2(image)
        return np.fft.irfft2(products, s=(side, side))[:, shifts][:, :, shifts]

    energies = energy[:, None, None] * slide(window, np.square(picture))
    correlation = slide(template, picture) / np.sqrt(np.maximum(energies, 1e-3))
    return correlation.max(axis=(1, 2)).astype(np.float32), busy.astype(np.float32)


def _details_of(pictures: UInt8[np.ndarray, "n 32 32"]) -> Float32[np.ndarray, "n 32 32"]:
    values = pictures.astype(np.float32)
    fine, coarse = _blur(FINE), _blur(COARSE)
    return fine @ values @ fine.T - coarse @ values @ coarse.T


@functools.cache
def _blur(deviation: float) -> Float32[np.ndarray, "32 32"]:
    """Return the matrix of a one-dimensional Gaussian filter. Beyond the edge, the pixel at the edge is repeated."""
    side, reach = DETAIL_SIDE, round(5 * deviation)
    matrix = np.zeros((side, side))
    for row in range(side):
        for other in range(row - reach, row + reach + 1):
            matrix[row, min(max(other, 0), side - 1)] += np.exp(-((row - other) ** 2) / (2 * deviation**2))
    return (matrix / matrix.sum(axis=1, keepdims=True)).astype(np.float32)
