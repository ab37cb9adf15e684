"""Deterministic stand-in weights, so that a reference model of any size fits in a few kilobytes.

A golden file names every tensor of a reference model and its shape. Both the reference implementation and the
code under test fill those tensors with `tensor(name, shape)` and feed `image(seed, shape)`; the golden file
holds the outputs that the reference implementation gave.
"""

import math
import zlib

import numpy as np

NORMS = (
    "scale", "gamma", "lambda1", "norm.weight", "norm1.weight", "norm2.weight", "ln.weight", "ln_1.weight",
    "ln_2.weight", "gn1.weight", "gn2.weight", "gn3.weight", "before.weight", "after.weight", "layernorm.weight",
)  # fmt: skip
"""Ends of the names of scales."""


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of `shape` that depend on `name` alone; norms near 1, matrices scaled by their fan-in."""
    z = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
    if len(shape) <= 1 or name.endswith(("scale", "gamma", "lambda1")):  # norm scales, LayerScale, biases
        centre = 1.0 if name.endswith(NORMS) else 0.0
        return (centre + 0.1 * z).astype(np.float32)
    if "kernel" in name:  # JAX layouts: (..., fan_in, fan_out); attention out is (heads, head_dim, out)
        fan_in = math.prod(shape[:1]) if _is_qkv(name) else math.prod(shape[:-1])
    elif "weight" in name:  # PyTorch layouts: (fan_out, fan_in, ...)
        fan_in = math.prod(shape[1:])
    else:  # tokens and position embeddings
        return (0.5 * z).astype(np.float32)
    return (z / math.sqrt(fan_in)).astype(np.float32)


def _is_qkv(name: str) -> bool:
    return any(part in name for part in ("query/", "key/", "value/"))


def image(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """float32 pixels in [-1, 1], drawn in the order of `shape` (NCHW)."""
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
