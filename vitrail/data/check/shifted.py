"""Search for near duplicates that are shifted by a few pixels, or changed in brightness, contrast or colour.

Each image is compared with the few images whose thumbnails are most similar. The comparison looks for the details of
one image, such as edges and texture, at all small shifts in the other image.
"""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from vitrail.data.check.look import DETAIL_SIDE, in_threads

NEIGHBOURS = 5
"""Number of images with which each image is compared: the images with the most similar thumbnails."""

FLATTEST = 3.0
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

ROWS, GROUP, BLOCK = 256, 64, 2048


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
    starts = range(0, len(pairs), BLOCK)
    with in_threads(lambda start: detail_correlation(details, pairs[start : start + BLOCK]), starts, threads) as blocks:
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
    flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 8 * FLATTEST)
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
    side, window = DETAIL_SIDE, _window()
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


@functools.cache
def _window() -> Float32[np.ndarray, "32 32"]:
    """Return a mask of the pixels that remain in a picture at all shifts."""
    window = np.zeros((DETAIL_SIDE, DETAIL_SIDE), np.float32)
    window[MARGIN:-MARGIN, MARGIN:-MARGIN] = 1
    return window
