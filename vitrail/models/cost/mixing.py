"""The cost of layers that mix the tokens of a sequence ("Attention Is All You Need", Table 1)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.models.vit_config import ViTConfig


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
        dense = kind.parameters() // square * square * n  # biases and norms are less than one square matrix
        found.append(LayerCost(name, kind.macs(n, n) - dense, 1, 1 if name in ("full", "linformer") else 2))
    return tuple(found)
