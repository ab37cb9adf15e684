"""Random numbers that are a pure function of (seed, epoch, sample, draw): no generator, no order, no state."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64, UInt64

__all__ = ["Slot", "keyed_uniform", "symmetric_beta"]


class Slot(IntEnum):
    """The first draw of each use. A use that takes more draws than there are before the next would share them."""

    MOVE = 0
    ERASE = 3
    CROP = 8
    JITTER = 48
    MIX = 56
    RANDAUGMENT = 64
    """The last: it takes more with every layer."""


def keyed_uniform(
    seed: int, epochs: Int64[np.ndarray, " b"], samples: Int64[np.ndarray, " b"], *, draws: int, first: int = 0
) -> Float32[np.ndarray, "b draws"]:
    """Uniform numbers in [0, 1), 24 bits each: those from number `first` on of every (epoch, sample).

    The key is hashed by the finaliser of SplitMix64 (Steele, Lea and Flood 2014), once for each of its parts. It is
    done on the CPU, where what follows from the numbers can be looked at without waiting for a device.
    """
    state = _mix(np.array([seed], np.uint64))
    state = _mix(state ^ epochs.view(np.uint64))
    state = _mix(state ^ samples.view(np.uint64))
    numbers = np.arange(first + 1, first + draws + 1, dtype=np.uint64) * GOLDEN
    return (_mix(state[:, None] + numbers) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def symmetric_beta(uniform: Float[np.ndarray, "b 2"], alpha: float) -> Float64[np.ndarray, " b"]:
    """Numbers from Beta(alpha, alpha), alpha above 0, made of two uniform ones each, without rejection.

    T = sqrt(2 alpha (U^(-1 / alpha) - 1)) cos(2 pi V) follows Student's t with 2 alpha degrees of freedom (Bailey
    1994), and 1/2 + T / (2 sqrt(2 alpha + T^2)) then follows Beta(alpha, alpha).
    """
    u, v = uniform.astype(np.float64).T
    cosine = np.cos(2 * np.pi * v)
    with np.errstate(divide="ignore", over="ignore"):  # of u near 0: the odds are infinite, the result is 0 or 1
        odds = np.expm1(-np.log(u) / alpha)
        return 0.5 + 0.5 * np.sign(cosine) / np.sqrt(1 + 1 / (odds * cosine**2))


def _mix(x: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
