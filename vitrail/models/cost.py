"""The cost of networks: the memory of training and of predictions, the default batch size, and layers that mix tokens.

The formulas are those of the configs (`parameters`, `macs`, `footprint`). The network is not built.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vitrail.errors import ConfigError
from vitrail.machine import Precision, resolve_precision, total_memory
from vitrail.models.network import Footprint, FootprintPrecision, weights_of
from vitrail.models.vit_config import ViTConfig


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


def checkpointed_bytes(config: Any, image_size: tuple[int, int], precision: FootprintPrecision) -> int:
    """Return the bytes per image that are kept at most if the backward pass computes every block of a transformer
    again: the input of each block in float32, and everything that one block keeps."""
    tokens = math.prod(config.grid_of(*image_size)) + config.prefix
    inputs = 4 * config.num_blocks * tokens * config.stream_width
    return inputs + activation_bytes(config, image_size, precision) // config.num_blocks


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
    return 12 * footprint.parameters + images + max(begin, end)


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


class LayerCost(NamedTuple):
    """The cost of one class of layer over a sequence."""

    kind: str
    macs: int
    """Multiply-accumulates of the matrix products that mix the tokens."""
    sequential: int
    """Number of steps that cannot run in parallel."""
    path: int
    """Number of layers or steps that a signal passes between the two tokens that are farthest apart."""


def layer_costs(tokens: int, width: int, kernel: int = 3) -> tuple[LayerCost, ...]:
    """Return the costs of self-attention, a recurrence and a convolution over the same sequence.

    Only matrix products that mix tokens are counted. Attention has two such products; its projections are not counted.
    A recurrence has one product per token, and a convolution has `kernel` products per token. The path of the
    convolution is the number of stacked layers after which the first token reaches the last.
    """
    return (
        LayerCost("self-attention", 2 * tokens * tokens * width, 1, 1),
        LayerCost("recurrence", tokens * width * width, tokens, tokens),
        LayerCost("convolution", kernel * tokens * width * width, 1, math.ceil((tokens - 1) / (kernel - 1))),
    )


def of_pixels(kind: str) -> str:
    """Return the name of a class of layer that mixes pixels instead of patches."""
    return f"{kind} of pixels"


def attention_costs(config: ViTConfig, kinds: tuple[str, ...]) -> tuple[LayerCost, ...]:
    """Return the costs of kinds of attention for the grid of a network with a class token. Kinds whose windows are
    larger than the grid are skipped.

    Only the products of queries, keys and values are counted, and the projections and hashing that a kind adds to
    those of full attention. All patches see the class token, so a signal between two patches passes at most two
    layers.
    """
    found = []
    for name in kinds:
        try:
            kind = replace(config, attention=name).attention_kind
        except ConfigError:
            continue
        n, square = config.tokens, config.width**2
        dense = weights_of(kind.build) // square * square * n  # biases and norms are less than one square matrix
        found.append(LayerCost(name, kind.macs(n, n) - dense, 1, 1 if name in ("full", "linformer") else 2))
    return tuple(found)


LARGEST = {"cpu": 64, "cuda": 256}
"""Largest default batch size for each type of device. On a CPU, larger batches are not faster."""

MACS_PER_THREAD = 32 * 10**9
"""Multiply-accumulates of a batch for each CPU thread: a second or two of work, so that a stop loses little."""

MEMORY_FRACTION = 1 / 8
"""Fraction of the memory of the machine or GPU that a batch may need."""

USUAL = 64
"""Batch size for networks without formulas, which are of the user's own class."""


def prediction_batch(
    network: torch.nn.Module, image_size: tuple[int, int], device: torch.device, precision: Precision = "float32"
) -> int:
    """Return the default batch size for predictions of a network. It is a power of two.

    A batch needs at most an eighth of the memory. On a CPU its arithmetic is limited as well. The result is the same
    for every call on the same machine with the same number of threads, so that the bytes of the outputs are too.
    """
    config: Any = getattr(network, "config", None)
    if not hasattr(config, "footprint"):
        return USUAL
    largest = LARGEST.get(device.type, LARGEST["cuda"])
    if device.type == "cpu":
        largest = min(largest, MACS_PER_THREAD * torch.get_num_threads() // max(1, config.macs(image_size)))
    found: FootprintPrecision = "bf16" if resolve_precision(precision, device) == "bf16" else "float32"
    empty, one = (prediction_bytes(config, count, image_size, found) for count in (0, 1))
    free = MEMORY_FRACTION * total_memory() - empty
    largest = min(largest, int(free // (one - empty)))
    return 2 ** (max(1, largest).bit_length() - 1)
