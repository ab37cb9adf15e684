"""Tests of the keyed random numbers: the published generator, independence, and the beta distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.augment import operations, settings
from vitrail.data.augment.draws import Slot, keyed_uniform, symmetric_beta

MASK = (1 << 64) - 1


class SplitMix64:
    """The generator from its authors' C source (Vigna), in Python's integers."""

    def __init__(self, state: int) -> None:
        self.state = state & MASK

    def __call__(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


def reference_uniform(seed: int, epoch: int, sample: int, view: int, draws: range) -> list[float]:
    state = SplitMix64(seed)()
    for part in (epoch, sample, *([view] if view else [])):
        state = SplitMix64(state ^ part)()
    numbers = [SplitMix64(state + (draw + 1) * 0x9E3779B97F4A7C15)() for draw in draws]
    return [(number >> 40) / 2**24 for number in numbers]


def longs(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_the_reference_is_splitmix64() -> None:
    generator = SplitMix64(1234567)
    assert [generator() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(
    seed=st.integers(0, 2**32 - 1),
    keys=st.lists(st.tuples(*[st.integers(0, 2**40)] * 2, st.integers(0, 100)), min_size=1, max_size=5),
    draws=st.integers(1, 5),
    first=st.integers(0, 100),
)
def test_keyed_uniform_is_the_reference(seed: int, keys: list[tuple[int, int, int]], draws: int, first: int) -> None:
    epochs, samples, views = (longs(*column) for column in zip(*keys, strict=True))
    found = keyed_uniform(seed, epochs, samples, views, draws=draws, first=first)
    assert found.dtype == np.float32
    numbers = range(first, first + draws)
    assert found.tolist() == [reference_uniform(seed, *key, numbers) for key in keys]
    without = keyed_uniform(seed, epochs, samples, draws=draws, first=first)
    assert without.tolist() == [reference_uniform(seed, epoch, sample, 0, numbers) for epoch, sample, _ in keys]


def test_no_two_uses_share_a_draw() -> None:
    used = {
        Slot.MOVE: 3,
        Slot.ERASE: 5,
        Slot.CROP: 40,
        Slot.JITTER: operations.JITTER_DRAWS,
        Slot.MIX: settings.MIX_DRAWS,
    }
    numbers = [first + draw for first, draws in used.items() for draw in range(draws)]
    assert len(set(numbers)) == len(numbers) and max(numbers) < Slot.RANDAUGMENT
    large = {
        Slot.RANDAUGMENT: 1000 * operations.RANDAUGMENT_DRAWS, Slot.TENSORFLOW_CROP: 400, Slot.WINDOW: 2, Slot.VIEW: 5,
        Slot.ERASED_BOX: 40, Slot.TEXT: 1, Slot.PATCH_ORDER: 10**6, Slot.PATCH_SOURCE: 10**6,
        Slot.CODE_RESTART: 10**6, Slot.PATCH_BLOCKS: 10**6, Slot.ERASED_PIXELS: 10**6,
    }  # fmt: skip
    assert all(first + draws < later for (first, draws), later in zip(large.items(), [*large][1:], strict=False))
    assert {*used, *large} == set(Slot)


def moment(alpha: float, power: int) -> float:
    """Return E[X^power] for X from Beta(alpha, alpha)."""
    return math.prod((alpha + r) / (2 * alpha + r) for r in range(power))


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 2.0, 7.5])
def test_beta_has_the_moments_of_its_distribution(alpha: float) -> None:
    count = 100_000
    uniform = keyed_uniform(11, np.zeros(count, np.int64), np.arange(count), draws=2)
    found = symmetric_beta(uniform, alpha)
    assert found.dtype == np.float64 and found.min() >= 0 and found.max() <= 1
    for power in range(1, 7):
        error = (moment(alpha, 2 * power) - moment(alpha, power) ** 2) ** 0.5 / count**0.5
        assert abs((found**power).mean() - moment(alpha, power)) < 4 * error


def test_the_least_draw_gives_a_share_of_0_or_1() -> None:
    uniform = np.array([[0, 0], [0, 0.5], [0, 0.25], [2**-24, 0.1]], np.float32)
    assert symmetric_beta(uniform[:2], 0.01).tolist() == [1, 0]
    assert np.isfinite(symmetric_beta(uniform, 0.01)).all()
