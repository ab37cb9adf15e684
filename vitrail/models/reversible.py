"""A backward pass that computes the inputs of blocks from their outputs (1707.04585), so that no activations are kept.

The memory for activations does not grow with the number of blocks. The backward pass computes each block once more, as
if blocks were checkpointed, and draws the same random numbers. Rounding changes the computed inputs a little.

Blocks with hooks, blocks in wrappers, and blocks whose own methods were replaced, are called as in an ordinary network,
which keeps their activations. Their outputs may not determine their inputs, and hooks may read activations for a loss
of their own. So are blocks inside function transforms (`torch.func`), which cannot transform this backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from vitrail.models.attention import AttentionPositions
from vitrail.models.block import ReversibleBlock
from vitrail.models.shortcuts import has_hooks


def reversible(
    blocks: Sequence[nn.Module],
    insides: Sequence[AttentionPositions | None],
    first: Float[Tensor, "b n width"],
    second: Float[Tensor, "b n width"],
) -> tuple[Float[Tensor, "b n width"], Float[Tensor, "b n width"]]:
    """Return both streams after all blocks. Only they are kept for the backward pass, which ends at the first block
    that is trained if the streams have no gradients."""
    own = [block for block in blocks if _is_invertible(block)]
    if torch._C._are_functorch_transforms_active() or len(own) < len(blocks):
        for block, inside in zip(blocks, insides, strict=True):
            first, second = block(second, inside, first=first)
        return first, second
    with torch.no_grad():
        while own and not first.requires_grad and not any(True for _ in _all(own[0], insides[0])):
            first, second = own[0](second, insides[0], first=first)
            own, insides = own[1:], insides[1:]
    if not own:
        return first, second
    sources = dict.fromkeys(part for block, inside in zip(own, insides, strict=True) for part in _all(block, inside))
    return _Reversible.apply(own, insides, first, second, *sources)  # type: ignore[no-untyped-call]


def _is_invertible(block: nn.Module) -> TypeGuard[ReversibleBlock]:
    """Return True if a block's inputs can be computed from its outputs, and nothing else uses its activations. A module
    that wraps a block is not a block."""
    return (
        type(block) is ReversibleBlock
        and not {"forward", "mixed", "transformed"} & vars(block).keys()
        and not any(map(has_hooks, block.modules()))
    )


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
        ctx.random = []
        with ctx.autocast():
            for block, inside in zip(blocks, insides, strict=True):
                before = _RandomState(first)
                first = first + block.mixed(second, inside)
                between = _RandomState(first)
                second = second + block.transformed(first)
                ctx.random.append((before, between))
        ctx.save_for_backward(first, second)
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_first: Tensor, of_second: Tensor) -> tuple[Any, ...]:
        first, second = ctx.saved_tensors
        sums: dict[Tensor, Tensor] = {}
        steps = zip(reversed(ctx.blocks), reversed(ctx.insides), reversed(ctx.random), strict=True)
        for block, inside, (before, between) in steps:
            with torch.enable_grad(), ctx.autocast(), between.again():
                given = first.detach().requires_grad_()
                branch = block.transformed(given)
            second = second - branch.detach()
            of_first = of_first + _gradient(branch, given, _trained(block, "norm2", "mlp", "scale2"), of_second, sums)
            with torch.enable_grad(), ctx.autocast(), before.again():
                given = second.detach().requires_grad_()
                branch = block.mixed(given, inside)
            first = first - branch.detach()
            sources = [*_trained(block, "norm1", "attention", "scale1"), *_tensors(inside)]
            of_second = of_second + _gradient(branch, given, sources, of_first, sums)
        return None, None, of_first, of_second, *(sums.get(source) for source in ctx.sources)


class _RandomState:
    """The state of the random generators of the CPU and of a tensor's device, such as dropout uses them."""

    def __init__(self, tensor: Tensor) -> None:
        self.cpu = torch.get_rng_state()
        self.devices = get_device_states(tensor)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same random numbers inside the `with` block, which leaves the generators as they were."""
        numbers, states = self.devices
        with torch.random.fork_rng(numbers):
            torch.set_rng_state(self.cpu)
            set_device_states(numbers, states)
            yield


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
