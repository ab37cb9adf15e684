"""Attention of constructed weights, for tests of the page that shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vitrail.analysis.pages.interactive import AttentionMaps

MakeMaps = Callable[..., AttentionMaps]


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
