"""Tests of packed attention weights: they come back within half a step, and stay within a budget."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.analysis.pages.interactive.conftest import coded, decoded, unpack
from vitrail.analysis.pages.interactive import BITS, pack, quantise

WEIGHTS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 5)).map(lambda s: (*s, s[-1])),
    elements=st.floats(0, 1, width=32) | st.sampled_from([0.0, 2.0**-140, 1e-30, 1e-3]),
)


def attention(layers: int, heads: int, tokens: int, seed: int = 0) -> np.ndarray:
    logits = 2 * np.random.default_rng(seed).normal(size=(layers, heads, tokens, tokens))
    weights = np.exp(logits)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def check_steps(found: np.ndarray, weights: np.ndarray, bits: int) -> None:
    """Weights differ by at most half a step of the square root, apart from rounding of float32."""
    largest = weights.max(axis=-1, keepdims=True).astype(np.float64)
    step = np.sqrt(largest) / (2**bits - 1)
    assert (np.abs(np.sqrt(found) - np.sqrt(weights.astype(np.float64))) <= 0.5001 * step + 1e-22).all()


@pytest.mark.slow
@given(weights=WEIGHTS, bits=st.sampled_from(BITS))
def test_weights_come_back_within_half_a_step(weights: np.ndarray, bits: int) -> None:
    codes, maxima = quantise(weights, bits)
    assert codes.max() <= 2**bits - 1
    found = decoded(codes, maxima, bits)
    check_steps(found, weights, bits)
    np.testing.assert_array_equal(found.max(axis=-1), weights.max(axis=-1).astype(np.float64))
    packed = pack(weights, 10**6)
    assert packed.bits == 8
    np.testing.assert_array_equal(unpack(packed, weights.shape[-1]), coded(weights))


def test_known_codes() -> None:
    codes, maxima = quantise(np.array([[0.16, 0.04, 0.0, 0.0016], [0, 0, 0, 0]]), 4)
    np.testing.assert_array_equal(codes, [[15, 8, 0, 2], [0, 0, 0, 0]])  # 7.5 is rounded to 8, and 1.5 to 2
    np.testing.assert_array_equal(maxima, np.array([0.16, 0], np.float32))
    found = decoded(np.array([[255, 51, 0]], np.uint8), np.array([0.5], np.float32), 8)
    np.testing.assert_allclose(found, [[0.5, 0.02, 0.0]], rtol=1e-15)


def test_known_bytes() -> None:
    maps = np.array([[[[1, 0.25], [0, 0.5]]]], np.float32)
    packed = pack(maps, 1000)
    assert (packed.layers, packed.heads) == ((0,), (0,))
    raw = zlib.decompress(packed.data)
    assert raw == np.array([1, 0.5], "<f4").tobytes() + bytes([255, 128, 1, 127])  # 0 - 255 is 1, modulo 256


def test_the_precision_falls_with_the_budget() -> None:
    maps = attention(4, 3, 40)
    sizes = []
    for bits, limit in zip(BITS, (10**6, *(0,) * 4), strict=True):
        packed = pack(maps, limit or sizes[-1] - 1)
        assert packed.bits == bits
        assert (packed.layers, packed.heads) == ((0, 1, 2, 3), (0, 1, 2))
        check_steps(unpack(packed, 40), maps, bits)
        sizes.append(len(packed.data))
    assert sizes == sorted(sizes, reverse=True)


def test_layers_and_then_heads_are_dropped() -> None:
    maps = attention(5, 3, 16)
    smallest = pack(maps, 10**6)
    kept = []
    while smallest is not None:
        assert len(smallest.data) <= len(maps.tobytes())
        if smallest.bits == BITS[-1]:
            kept.append((smallest.layers, smallest.heads))
            check_steps(unpack(smallest, 16), maps[np.ix_(smallest.layers, smallest.heads)], BITS[-1])
        smallest = pack(maps, len(smallest.data) - 1)
    assert kept == [
        ((0, 1, 2, 3, 4), (0, 1, 2)), ((0, 1, 3, 4), (0, 1, 2)), ((0, 2, 4), (0, 1, 2)), ((0, 4), (0, 1, 2)),
        ((4,), (0, 1, 2)), ((4,), (0, 2)), ((4,), (2,)),
    ]  # fmt: skip
