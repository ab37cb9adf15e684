"""The cost of three layers that mix the tokens of a sequence ("Attention Is All You Need", Table 1)."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["LayerCost", "layer_costs"]


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
