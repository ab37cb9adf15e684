"""Formulas for the memory that a training step or a prediction needs on a CPU. The network is not built."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

FootprintPrecision = Literal["float32", "bf16"]


class Footprint(NamedTuple):
    """The memory that a training step or a prediction needs. `config.footprint(size, precision)` returns it."""

    parameters: int
    """Number of weights. Each weight and its two moments in AdamW are float32 numbers."""
    activations: int
    """Bytes per image that the forward pass keeps for the backward pass."""
    first_weights: int
    """Bytes of the converted copies of weights at the beginning of the backward pass."""
    last_weights: int
    """Bytes of weight gradients and of converted copies of weights at the end of the backward pass."""
    filters: int
    """Bytes of the temporary tensors in the backward pass of weight standardisation."""
    gaps: float
    """Unused bytes between tensors in the heap, as a fraction of the activations."""
    passing: int = 0
    """Peak extra bytes per image during the backward pass, beyond the kept activations."""
    remaining: int = 0
    """Bytes per image that are still in use at the end of the backward pass."""
    predicting: int = 0
    """Peak bytes per image during a forward pass without a backward pass, besides the image itself."""


def activation_bytes(
    config: Any, image_size: tuple[int, int] | None = None, precision: FootprintPrecision = "float32"
) -> int:
    """Return the bytes per image that the forward pass keeps for the backward pass on a CPU. The loss is not counted.

    Every term counts a tensor that the backward pass reads: the input of a norm, both factors of a product, the input
    of GELU, or the output of softmax. In float32 the fused attention kernel keeps no n x n matrix. In bf16 the residual
    stream, which norms read, is still in float32.
    """
    footprint: Footprint = config.footprint(image_size or config.image_size, precision)
    return footprint.activations


def checkpointed_bytes(
    config: Any, image_size: tuple[int, int] | None = None, precision: FootprintPrecision = "float32"
) -> int:
    """Return the bytes per image that are kept at most if the backward pass computes every block of a transformer
    again: the input of each block in float32, and everything that one block keeps."""
    size = image_size or config.image_size
    tokens = math.prod(config.grid_of(*size)) + config.prefix
    inputs = 4 * config.num_blocks * tokens * config.stream_width
    return inputs + activation_bytes(config, size, precision) // config.num_blocks


def tensor_bytes(
    config: Any, batch: int, image_size: tuple[int, int] | None = None, precision: FootprintPrecision = "float32"
) -> int:
    """Return the peak number of bytes of all tensors in a training step with AdamW on a CPU.

    The weights, AdamW's two moments and the images are in memory during the whole step. The peak is at the beginning or
    at the end of the backward pass. At the beginning, activations, converted weights and the gradients inside the last
    block that computes all tokens are in memory as well. At the end, all weight gradients and the remaining activations
    of the first block or of a hybrid's root are in memory as well.
    """
    size = image_size or config.image_size
    footprint: Footprint = config.footprint(size, precision)
    images = batch * 4 * config.channels * math.prod(size)
    begin = footprint.first_weights + batch * (footprint.activations + footprint.passing)
    end = footprint.last_weights + batch * footprint.remaining
    return 12 * footprint.parameters + images + footprint.filters + max(begin, end)


def training_bytes(
    config: Any, batch: int, image_size: tuple[int, int] | None = None, precision: FootprintPrecision = "float32"
) -> int:
    """Return the bytes that a process needs for a training step with AdamW on a CPU, besides Python and torch.

    The result is `tensor_bytes` plus the unused bytes between tensors in the heap. docs/performance.md compares the
    result with measurements.
    """
    footprint: Footprint = config.footprint(image_size or config.image_size, precision)
    gaps = footprint.gaps * (batch * footprint.activations)
    return tensor_bytes(config, batch, image_size, precision) + int(gaps)


def prediction_bytes(
    config: Any, batch: int, image_size: tuple[int, int] | None = None, precision: FootprintPrecision = "float32"
) -> int:
    """Return the bytes that a process needs to predict a batch on a CPU, besides Python and torch.

    They are the weights, the batch as float32 and as bytes, and the peak of the forward pass. In bf16, a converted copy
    of the weights is in memory as well.
    """
    size = image_size or config.image_size
    footprint: Footprint = config.footprint(size, precision)
    weights = (4 + 2 * (precision == "bf16")) * footprint.parameters
    return weights + batch * (footprint.predicting + 5 * config.channels * math.prod(size))


def bytes_each(precision: FootprintPrecision) -> int:
    """Return the number of bytes of one element in a matrix product: 2 in bf16, 4 in float32."""
    return 4 if precision == "float32" else 2
