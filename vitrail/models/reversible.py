"""A backward pass that computes the inputs of blocks from their outputs (1707.04585), so that no activations are kept.

The memory for activations does not grow with the number of blocks. The backward pass computes each block once more, as
if blocks were checkpointed. Rounding changes the computed inputs a little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitrail.models.attention import AttentionPositions
from vitrail.models.block import ReversibleBlock

__all__ = ["reversible"]


def reversible(
    blocks: Sequence[ReversibleBlock],
    insides: Sequence[AttentionPositions | None],
    first: Float[Tensor, "b n width"],
    second: Float[Tensor, "b n width"],
) -> tuple[Float[Tensor, "b n width"], Float[Tensor, "b n width"]]:
    """Return both streams after all blocks. Only they are kept for the backward pass, which ends at the first block
    that is trained if the streams have no gradients."""
    with torch.no_grad():
        while blocks and not first.requires_grad and not any(True for _ in _all(blocks[0], insides[0])):
            first, second = blocks[0](second, insides[0], first=first)
            blocks, insides = blocks[1:], insides[1:]
    if not blocks:
        return first, second
    sources = dict.fromkeys(part for block, inside in zip(blocks, insides, strict=True) for part in _all(block, inside))
    return _Reversible.apply(blocks, insides, first, second, *sources)  # type: ignore[no-untyped-call]


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[ReversibleBlock],
        insides: Sequence[AttentionPositions | None],
        first: Tensor,
        second: Tensor,
        *sources: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.blocks, ctx.insides, ctx.sources = blocks, insides, sources
        ctx.autocast = _autocast_of(first.device)
        with ctx.autocast():
            for block, inside in zip(blocks, insides, strict=True):
                first, second = block(second, inside, first=first)
        ctx.save_for_backward(first, second)
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_first: Tensor, of_second: Tensor) -> tuple[Any, ...]:
        first, second = ctx.saved_tensors
        sums: dict[Tensor, Tensor] = {}
        for block, inside in zip(reversed(ctx.blocks), reversed(ctx.insides), strict=True):
            with torch.enable_grad(), ctx.autocast():
                given = first.detach().requires_grad_()
                branch = block.transformed(given)
            second = second - branch.detach()
            of_first = of_first + _gradient(branch, given, _trained(block, "norm2", "mlp", "scale2"), of_second, sums)
            with torch.enable_grad(), ctx.autocast():
                given = second.detach().requires_grad_()
                branch = block.mixed(given, inside)
            first = first - branch.detach()
            sources = [*_trained(block, "norm1", "attention", "scale1"), *_tensors(inside)]
            of_second = of_second + _gradient(branch, given, sources, of_first, sums)
        return None, None, of_first, of_second, *(sums.get(source) for source in ctx.sources)


def _gradient(
    branch: Tensor, given: Tensor, sources: Sequence[Tensor], of_branch: Tensor, sums: dict[Tensor, Tensor]
) -> Tensor:
    """Return the gradient of a branch's input, and add those of its other sources to `sums`."""
    own, *others = torch.autograd.grad(branch, [given, *sources], of_branch.to(branch.dtype), allow_unused=True)
    for source, found in zip(sources, others, strict=True):
        if found is not None:
            sums[source] = sums[source] + found if source in sums else found
    return own


def _all(block: ReversibleBlock, inside: AttentionPositions | None) -> Iterator[Tensor]:
    """Yield all tensors that get gradients from a block: its weights, and those of positions and of the context."""
    yield from (parameter for parameter in block.parameters() if parameter.requires_grad)
    yield from _tensors(inside)


def _trained(block: ReversibleBlock, *names: str) -> list[Tensor]:
    """Return the weights of parts of a block that are trained."""
    return [weight for name in names for weight in block.get_submodule(name).parameters() if weight.requires_grad]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with a gradient in nested tuples."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)


def _autocast_of(device: torch.device) -> Any:
    """Return a function that makes a context with the automatic casts of now.

    Converted weights are not cached: those of the forward pass have no gradients.
    """
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def make() -> AbstractContextManager[Any]:
        return torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)

    return make
