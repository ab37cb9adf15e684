"""Random numbers that are a pure function of (seed, epoch, sample, view, draw): no generator, no order, no state."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64, UInt64


class Slot(IntEnum):
    """Number of the first draw of each augmentation. The draws of an augmentation must end before the first draw of the
    next augmentation. Otherwise both would use the same random numbers."""

    MOVE = 0
    ERASE = 3
    CROP = 8
    JITTER = 48
    MIX = 56
    RANDAUGMENT = 64
    """The number of draws of RandAugment grows with its layers, so about a million draws are reserved."""
    TENSORFLOW_CROP = 1 << 20
    WINDOW = (1 << 20) + 1024
    PATCH_ORDER = 1 << 21
    """One draw per patch. About two million draws are reserved for each of the slots of patches."""
    PATCH_SOURCE = 1 << 22
    CODE_RESTART = 3 << 21
    PATCH_BLOCKS = 1 << 23


def keyed_uniform(
    seed: int,
    epochs: Int64[np.ndarray, " b"],
    samples: Int64[np.ndarray, " b"],
    views: Int64[np.ndarray, " b"] | None = None,
    *,
    draws: int,
    first: int = 0,
) -> Float32[np.ndarray, "b draws"]:
    """Return `draws` uniform numbers in [0, 1), of 24 bits each, for every (epoch, sample, view). The numbering of the
    draws starts at `first`.

    Each component of the key is hashed in turn by the finaliser of SplitMix64 (Steele, Lea and Flood 2014). View 0 is
    not hashed. The first of several views therefore has the same numbers as a single view. The numbers are computed on
    the CPU, so reading them does not wait for a device.
    """
    state = _mix(np.array([seed], np.uint64))
    state = _mix(state ^ epochs.view(np.uint64))
    state = _mix(state ^ samples.view(np.uint64))
    if views is not None and views.any():
        state = np.where(views > 0, _mix(state ^ views.view(np.uint64)), state)
    numbers = np.arange(first + 1, first + draws + 1, dtype=np.uint64) * GOLDEN
    return (_mix(state[:, None] + numbers) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def symmetric_beta(uniform: Float[np.ndarray, "b 2"], alpha: float) -> Float64[np.ndarray, " b"]:
    """Return numbers from Beta(alpha, alpha), for alpha > 0. Each number is computed from two uniform numbers, without
    rejection sampling.

    T = sqrt(2 alpha (U^(-1 / alpha) - 1)) cos(2 pi V) follows Student's t with 2 alpha degrees of freedom (Bailey
    1994), and 1/2 + T / (2 sqrt(2 alpha + T^2)) then follows Beta(alpha, alpha).
    """
    u, v = uniform.astype(np.float64).T
    cosine = np.cos(2 * np.pi * v)
    with np.errstate(divide="ignore", over="ignore"):  # for u near 0 the odds are infinite and the result is 0 or 1
        odds = np.expm1(-np.log(u) / alpha)
        return 0.5 + 0.5 * np.sign(cosine) / np.sqrt(1 + 1 / (odds * cosine**2))


def _mix(x: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
