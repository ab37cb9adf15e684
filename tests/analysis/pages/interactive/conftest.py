"""Attention of constructed weights, for tests of the page that shows it, and what the page's script decodes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vitrail.analysis.pages.interactive import AttentionMaps, PackedMaps, quantise

MakeMaps = Callable[..., AttentionMaps]


def decoded(codes: np.ndarray, maxima: np.ndarray, bits: int) -> np.ndarray:
    """Return the weights that codes and the largest weight of each row stand for."""
    return maxima[..., None].astype(np.float64) * (codes / (2**bits - 1)) ** 2


def coded(weights: np.ndarray, bits: int = 8) -> np.ndarray:
    """Return the weights that the codes of weights stand for."""
    return decoded(*quantise(weights, bits), bits)


def unpack(packed: PackedMaps, tokens: int) -> np.ndarray:
    """Return the weights that packed maps stand for."""
    shape = (len(packed.layers), len(packed.heads), tokens, tokens)
    raw = zlib.decompress(packed.data)
    border = 4 * shape[0] * shape[1] * shape[2]
    maxima = np.frombuffer(raw[:border], "<f4").reshape(shape[:3]).astype(np.float32)
    differences = np.frombuffer(raw[border:], np.uint8).reshape(shape)
    return decoded(differences.cumsum(axis=2, dtype=np.uint8), maxima, packed.bits)


@pytest.fixture(scope="session")
def make_maps() -> MakeMaps:
    """Return a function that makes maps of 2 layers, 3 heads and 3 x 5 patches on a picture of 50 x 30 pixels. It can
    replace fields."""

    def make(layers: int = 2, heads: int = 3, grid: tuple[int, int] = (3, 5), **fields: Any) -> AttentionMaps:
        prefix = fields.get("prefix", ("class token", "register 0", "register 1"))
        random, tokens = np.random.default_rng(0), len(prefix) + grid[0] * grid[1]
        weights = np.exp(2 * random.normal(size=(layers, heads, tokens, tokens)))
        defaults: dict[str, Any] = {
            "attention": (weights / weights.sum(-1, keepdims=True)).astype(np.float32),
            "grid": grid,
            "prefix": prefix,
            "has_class_token": bool(prefix),
            "area": (5.0, 3.0, 40.0, 24.0),
            "rollout": random.random(grid).astype(np.float32),
            "relevance": (
                ("</script>a & b", random.random(grid).astype(np.float32)),
                ("cat", random.random(grid).astype(np.float32)),
            ),
        }
        return AttentionMaps(**{**defaults, **fields})

    return make
