"""Small networks in which every weight matters, golden outputs of other implementations, and random configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from vitrail.models.vit_config import ViTConfig

DIVISORS = {
    "none": 1,
    "learned": 1,
    "learned-2d": 2,
    "sincos-2d": 4,
    "sincos-2d-mae": 4,
    "relative-bias": 1,
    "relative-keys": 1,
    "rotary-2d": 4,
}
"""Kinds of positions, with a number that must divide a head's width, or certainly divides the network's width."""


@pytest.fixture(scope="session")
def golden(golden: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a golden file as in other tests, with tensors instead of arrays."""

    def read(name: str) -> Any:
        found = golden(name)
        return replace(found, tensors={key: torch.from_numpy(array) for key, array in found.tensors.items()})

    return read


@pytest.fixture(scope="session")
def small() -> Callable[..., ViTConfig]:
    """Return a function that makes configs for images of 12 x 10 in patches of 4 x 5. It can replace fields."""

    def make(**fields: Any) -> ViTConfig:
        defaults = {
            "image_size": (12, 10), "patch_size": (4, 5), "channels": 3, "width": 12, "depth": 3, "heads": 3,
            "mlp_width": 20, "num_classes": 5,
        }  # fmt: skip
        return ViTConfig(**{**defaults, **fields})

    return make


@pytest.fixture(scope="session")
def configs() -> st.SearchStrategy[dict[str, Any]]:
    """Draw fields of valid configs of small networks of every kind."""

    @st.composite
    def draw_fields(draw: st.DrawFn) -> dict[str, Any]:
        patch = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
        grid = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
        heads = draw(st.integers(1, 4))
        pool = draw(st.sampled_from(["cls", "gap", "map", "cls+gap"]))
        positions = draw(st.sampled_from([*DIVISORS]))
        inside = positions in ("relative-bias", "relative-keys", "rotary-2d")
        places = [None, "every-layer", *(["shared"] if positions != "rotary-2d" else []), *([] if inside else ["stem"])]
        return {
            "image_size": (patch[0] * grid[0], patch[1] * grid[1]),
            "patch_size": patch,
            "channels": draw(st.integers(1, 4)),
            "width": heads * DIVISORS[positions] * draw(st.integers(1, 3)),
            "depth": draw(st.integers(1, 3)),
            "heads": heads,
            "mlp_width": draw(st.integers(1, 20)),
            "num_classes": draw(st.integers(0, 7)),
            "pool": pool,
            "class_token": draw(st.sampled_from([None, True, *([False] if pool in ("gap", "map") else [])])),
            "registers": draw(st.integers(0, 2)),
            "head_hidden": draw(st.integers(0, 9)),
            "final_norm": draw(st.sampled_from(["tokens", "pooled"])),
            "positions": positions,
            "positions_at": draw(st.sampled_from(places)),
            "positions_cover": draw(st.sampled_from(["all", "class", "patches"])),
            "activation": draw(st.sampled_from(["gelu", "gelu-tanh", "swiglu"])),
            "layer_scale": draw(st.sampled_from([0.0, 0.1])),
            "qk_norm": draw(st.booleans()),
            "qkv_bias": draw(st.booleans()),
            "dense_bias": draw(st.booleans()),
            "patch_bias": draw(st.booleans()),
        }

    return draw_fields()
