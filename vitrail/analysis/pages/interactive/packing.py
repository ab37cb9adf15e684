"""Attention weights in few bytes: codes of 4 to 8 bits, compressed, in a budget.

A row holds the weights with which one token attends to all tokens. Its largest weight is stored, and each weight is a
code from 0 to 2^bits - 1, the square root of its fraction of the largest weight. The square root gives small weights
finer steps than large ones, which a logarithmic scale shows. Codes are compressed as differences from the row above,
because neighbouring patches attend to similar patches.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, UInt8

BITS = (8, 7, 6, 5, 4)
"""Precisions of codes, from the finest to the coarsest."""

SAMPLE = 2**20
"""Approximate number of weights that are compressed to estimate the size of all of them."""


class Rows(NamedTuple):
    """Quantised rows."""

    codes: UInt8[np.ndarray, "*n tokens"]
    maxima: Float32[np.ndarray, "*n"]
    """Largest weight of each row."""


@dataclass(frozen=True, eq=False)
class PackedMaps:
    """Attention weights of some layers and heads."""

    layers: tuple[int, ...]
    """Numbers of the layers, from 0."""
    heads: tuple[int, ...]
    """Numbers of the heads, from 0."""
    tokens: int
    bits: int
    data: bytes
    """The largest weights of all rows (float32, little-endian), and then the codes of all weights, each less the code
    above it in its map, modulo 256. Layers, heads, rows and columns are in this order. All of it is compressed (zlib).
    """


def quantise(weights: Float[np.ndarray, "*n tokens"], bits: int) -> Rows:
    """Return the codes of weights, which are at least 0."""
    exact = weights.astype(np.float32)
    maxima = exact.max(axis=-1)
    fractions = exact / np.where(maxima > 0, maxima, 1)[..., None]
    return Rows(np.rint(np.sqrt(fractions) * (2**bits - 1)).astype(np.uint8), maxima)


def dequantise(rows: Rows, bits: int) -> Float64[np.ndarray, "*n tokens"]:
    """Return the weights that codes stand for. The square root of each differs from that of the quantised weight by at
    most half a step, which is the square root of the row's largest weight divided by 2^bits - 1."""
    return rows.maxima[..., None].astype(np.float64) * (rows.codes / (2**bits - 1)) ** 2


def pack(attention: Float[np.ndarray, "layers heads n n"], budget: int) -> PackedMaps | None:
    """Return the weights in at most `budget` bytes, or None if not even one map fits.

    The finest precision that fits is chosen. If the coarsest one does not fit, layers at equal distances are kept,
    among them the last one. If not even one layer fits, heads at equal distances of the last layer are kept.
    """
    layers, heads, _, _ = attention.shape
    for bits in BITS:
        if _estimate(attention, bits) <= 1.05 * budget:
            packed = _pack(attention, range(layers), range(heads), bits)
            if len(packed.data) <= budget:
                return packed
    bits = BITS[-1]
    one_map = _estimate(attention, bits) / (layers * heads)
    most = min(layers * heads - 1, int(1.05 * budget / one_map))
    for count in range(min(layers - 1, most // heads), 0, -1):
        packed = _pack(attention, _evenly(layers, count), range(heads), bits)
        if len(packed.data) <= budget:
            return packed
    for count in range(min(heads if layers > 1 else heads - 1, most), 0, -1):
        packed = _pack(attention, (layers - 1,), _evenly(heads, count), bits)
        if len(packed.data) <= budget:
            return packed
    return None


def unpack(packed: PackedMaps) -> Float64[np.ndarray, "layers heads n n"]:
    """Return the weights that packed maps stand for."""
    shape = (len(packed.layers), len(packed.heads), packed.tokens, packed.tokens)
    raw = zlib.decompress(packed.data)
    border = 4 * shape[0] * shape[1] * shape[2]
    maxima = np.frombuffer(raw[:border], "<f4").reshape(shape[:3]).astype(np.float32)
    differences = np.frombuffer(raw[border:], np.uint8).reshape(shape)
    return dequantise(Rows(differences.cumsum(axis=2, dtype=np.uint8), maxima), packed.bits)


def _pack(attention: np.ndarray, layers: Sequence[int], heads: Sequence[int], bits: int) -> PackedMaps:
    """Return the weights of layers and heads, one layer at a time, so that little memory is needed beside them."""
    maxima, codes = [], []
    for layer in layers:
        rows = quantise(attention[layer, list(heads)], bits)
        maxima.append(rows.maxima.astype("<f4").tobytes())
        codes.append(np.diff(rows.codes, axis=1, prepend=np.uint8(0)).tobytes())
    compressor = zlib.compressobj(9)
    parts = [compressor.compress(part) for part in (*maxima, *codes)]
    data = b"".join([*parts, compressor.flush()])
    return PackedMaps(tuple(layers), tuple(heads), attention.shape[-1], bits, data)


def _estimate(attention: np.ndarray, bits: int) -> float:
    """Return about how many bytes all weights take, from maps at equal distances."""
    maps = attention.reshape(-1, *attention.shape[2:])
    chosen = _evenly(len(maps), max(1, SAMPLE // maps[0].size))
    sample = maps[chosen][None]
    return len(_pack(sample, (0,), range(len(chosen)), bits).data) * len(maps) / len(chosen)


def _evenly(total: int, count: int) -> list[int]:
    """Return at most `count` different numbers below `total` at equal distances, among them the last one."""
    count = min(count, total)
    return sorted({total - 1 - round(number * (total - 1) / max(1, count - 1)) for number in range(count)})
