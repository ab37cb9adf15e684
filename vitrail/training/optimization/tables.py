"""The shapes of each layer's weights in the original code, for optimizers whose updates depend on the shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from vitrail.models.attention.kind import AttentionLayer
from vitrail.models.tokens.patches import PatchEmbedding
from vitrail.models.tokens.pooling import AttentionPool

__all__ = ["Table", "tables_of"]


@dataclass(frozen=True)
class Table:
    """A weight of this package, read as one or several arrays of the original code.

    The original has the inputs of a dense layer before its outputs, separate arrays for queries, keys and values, and
    an axis for the heads of attention. A fused weight of queries, keys and values of shape (3 D, D) is read as three
    arrays of shape (D, heads, D / heads).
    """

    shape: tuple[int, ...]
    """Shape of the view of the weight, before its axes are reordered."""
    order: tuple[int, ...]
    """Argument of `permute` that brings the axes of the view into the order of the original code."""
    is_stack: bool = False
    """True if the reordered view stacks several arrays of the original code along its first axis."""

    def read(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor of the weight's shape. The first axis of the view is the index of the original's
        arrays."""
        arrays = tensor.reshape(self.shape).permute(self.order)
        return arrays if self.is_stack else arrays[None]

    def write(self, arrays: Tensor) -> Tensor:
        """Reverse the reordering of axes by `read`, and return a tensor of the shape `shape`."""
        inverse = sorted(range(len(self.order)), key=lambda axis: self.order[axis])
        return (arrays if self.is_stack else arrays[0]).permute(inverse)


def tables_of(module: nn.Module) -> dict[int, Table]:
    """Return the table of every parameter of a module, by the parameter's id.

    Parameters of layers that the original code does not have keep their shape and order of axes.
    """
    found = {id(one): Table(tuple(one.shape), tuple(range(one.ndim))) for one in module.parameters()}
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            found[id(layer.weight)] = Table(tuple(layer.weight.shape), (1, 0))
        elif isinstance(layer, nn.Conv2d):
            found[id(layer.weight)] = Table(tuple(layer.weight.shape), (2, 3, 1, 0))
    for layer in module.modules():
        found |= {id(weight): table for weight, table in _of_layer(layer)}
    return found


def _of_layer(layer: nn.Module) -> Iterator[tuple[Tensor, Table]]:
    """Yield the weights inside a layer whose tables depend on the class of the layer, with their tables."""
    if isinstance(layer, PatchEmbedding):
        weight = layer.projection.weight
        width, values = weight.shape
        channels = values // (layer.patch_size[0] * layer.patch_size[1])
        yield weight, Table((width, channels, *layer.patch_size), (2, 3, 1, 0))
    elif isinstance(layer, AttentionLayer) and isinstance(heads := getattr(layer, "heads", None), int):
        for dense, parts in layer.projections():
            yield from _attention(dense, heads, len(parts), is_output=parts == ("out",))
    elif isinstance(layer, AttentionPool):
        yield from _attention(layer.query, layer.heads, 1, is_output=False)
        yield from _attention(layer.key_value, layer.heads, 2, is_output=False)
        yield from _attention(layer.out, layer.heads, 1, is_output=True)


def _attention(dense: nn.Linear, heads: int, parts: int, *, is_output: bool) -> Iterator[tuple[Tensor, Table]]:
    """Yield the weight and the bias of a projection with their tables. The original's weights have the shape (heads,
    channels, width) for the output projection, and (width, heads, channels) for each of the other projections."""
    rows, columns = dense.weight.shape
    if is_output:
        yield dense.weight, Table((rows, heads, columns // heads), (1, 2, 0))
        return
    channels = rows // (parts * heads)
    yield dense.weight, Table((parts, heads, channels, columns), (0, 3, 1, 2), is_stack=True)
    if dense.bias is not None:
        yield dense.bias, Table((parts, heads, channels), (0, 1, 2), is_stack=True)
