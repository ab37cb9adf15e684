"""The weight matrices of a network's blocks, for optimizers that update whole matrices."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from vitrail.models.attention.kind import AttentionLayer
from vitrail.models.layers import SwiGlu
from vitrail.models.linear.lora import LowRank
from vitrail.models.network import HasLayers

__all__ = ["Stack", "stacks_of"]

Stack = tuple[int, int, int]
"""A weight read as a stack of matrices: number of matrices, rows and columns."""


def stacks_of(module: nn.Module) -> dict[int, Stack]:
    """Return the stack of every weight matrix in the blocks of a module's network, by the parameter's id.

    Convolutions are read as matrices of (outputs, inputs x height x width). A weight of queries, keys and values is
    three matrices, and a weight of SwiGLU's gate and value is two. Each factor of an adapter is a matrix. Patch
    embedding, positions, head, norms and biases are not part of the result.
    """
    network: HasLayers = next(part for part in module.modules() if isinstance(part, HasLayers))
    found: dict[int, Stack] = {}
    for block in network.layers().blocks:
        parts = dict(_packed(block))
        for layer in block.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                weight = layer.get_parameter("weight")
                rows, count = weight.shape[0], parts.get(id(weight), 1)
                found[id(weight)] = (count, rows // count, weight[0].numel())
            elif isinstance(layer, LowRank):
                found |= {id(factor): _sizes(factor) for factor in (layer.a, layer.b)}
    return found


def _packed(block: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the id of each weight whose rows belong to several matrices, and the number of these matrices."""
    for layer in block.modules():
        if isinstance(layer, AttentionLayer):
            for dense, names in layer.projections():
                yield id(dense.weight), len(names)
        elif isinstance(layer, SwiGlu):
            yield id(layer.up.weight), 2


def _sizes(factor: Tensor) -> Stack:
    parts, rows, columns = factor.shape
    return parts, rows, columns
