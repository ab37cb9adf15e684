"""Muon for the weight matrices of blocks, and Adam for all other weights.

Muon is by Jordan (https://kellerjordan.github.io/posts/muon). The size of its update is that of Moonlight (2502.16982).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Adam

from vitrail.training.optimization.update_rules import MomentumFormat

__all__ = ["COEFFICIENTS", "Muon", "orthogonalised"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 in a step of the Newton-Schulz iteration. They bring singular values near 1 quickly,
but not exactly to 1: after five steps, most of them are between 0.7 and 1.2."""

STEPS = 5

SCALE = 0.2
"""Root mean square of the update of a matrix, which is the usual one of Adam (2502.16982, section 2.2). Learning rates
and weight decays of AdamW therefore suit Muon too."""

STACK_ELEMENTS = 2**24
"""Number of elements from which a stack of matrices is divided, to save memory. Large matrices gain no speed from a
stack."""


class Muon(Adam):
    """Orthogonalises the momentum of matrices, and updates all other weights as Adam does.

    The momentum is a running mean of the gradients, with Nesterov's rule: `m = momentum * m + (1 - momentum) * g`, and
    the update is `momentum * m + (1 - momentum) * g`, orthogonalised and multiplied by 0.2 * sqrt(longer side).

    A weight can be a stack of several matrices, which are orthogonalised separately. Queries, keys and values are three
    maps of the tokens with gradients of different sizes. In one orthogonalised matrix, the largest of the three
    gradients would take most of the update.

    `torch.optim.Muon` computes the same update of one matrix in bfloat16. This class also divides stacked weights,
    computes all matrices of one shape together, and leaves the other weights to Adam in the same optimizer.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        stacks: Mapping[int, tuple[int, int, int]],
        *,
        momentum: float,
        momentum_format: MomentumFormat = "float32",
        products: torch.dtype = torch.float32,
        coupled: bool = False,
        **settings: Any,
    ) -> None:
        """`stacks` maps the id of each weight that Muon updates to a number of matrices, rows and columns. `products`
        is the number format of the iteration's matrix products. `settings` are those of `torch.optim.Adam`."""
        super().__init__(groups, fused=True, decoupled_weight_decay=not coupled, **settings)
        self.stacks = stacks
        self.momentum = momentum
        self.coupled = coupled
        self.products = products
        self.stored_as = torch.bfloat16 if momentum_format == "bfloat16" else torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient. A closure is not supported."""
        assert closure is None, "Muon takes no closure"
        matrices = [
            (weight, group)
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None and id(weight) in self.stacks
        ]
        gradients = [weight.grad for weight, _ in matrices]
        if matrices:
            self._update([weight for weight, _ in matrices], gradients, [group for _, group in matrices])
        for weight, _ in matrices:
            weight.grad = None  # Adam skips weights without a gradient
        super().step()
        for (weight, _), gradient in zip(matrices, gradients, strict=True):
            weight.grad = gradient

    def _update(self, weights: list[Tensor], gradients: list[Tensor], groups: list[dict[str, Any]]) -> None:
        """Update the matrices of all groups."""
        if self.coupled:
            gradients = [
                gradient.add(weight, alpha=group["weight_decay"]) if group["weight_decay"] else gradient
                for weight, gradient, group in zip(weights, gradients, groups, strict=True)
            ]
        means = [
            self.state[weight]["momentum"].float() if "momentum" in self.state[weight] else torch.zeros_like(weight)
            for weight in weights
        ]
        torch._foreach_lerp_(means, gradients, 1 - self.momentum)
        for weight, mean in zip(weights, means, strict=True):
            state = self.state[weight]
            state["momentum"] = mean.to(self.stored_as)
            state["step"] = state.get("step", torch.zeros((), device=weight.device)) + 1  # Adam loads no state without
        mixed = torch._foreach_lerp(gradients, means, self.momentum)
        stacks = [each.reshape(self.stacks[id(weight)]) for weight, each in zip(weights, mixed, strict=True)]
        for weight, group, update in zip(weights, groups, self._orthogonalised(stacks), strict=True):
            if group["weight_decay"] and not self.coupled:
                weight.mul_(1 - group["lr"] * group["weight_decay"])
            scale = SCALE * max(update.shape[1:]) ** 0.5
            weight.add_(update.reshape(weight.shape), alpha=-group["lr"] * scale)

    def _orthogonalised(self, stacks: list[Tensor]) -> list[Tensor]:
        """Orthogonalise every matrix of the stacks. Matrices of one shape are computed together."""
        found: dict[int, Tensor] = {}
        for members in _by_shape(stacks):
            wide = [_wide(stacks[each]) for each in members]
            results = torch.split(orthogonalised(torch.cat(wide), self.products), [len(each) for each in wide])
            found |= dict(zip(members, results, strict=True))
        return [
            found[each] if found[each].shape == stack.shape else found[each].mT for each, stack in enumerate(stacks)
        ]


def orthogonalised(
    matrices: Float[Tensor, "stack rows columns"], products: torch.dtype = torch.float32
) -> Float[Tensor, "stack rows columns"]:
    """Return matrices with the same singular vectors, whose singular values are all near 1.

    The function computes five steps of a Newton-Schulz iteration, which needs only matrix products. They are computed
    in the number format `products`. A matrix of zeros stays zero. The work is least if rows do not outnumber columns.
    """
    a, b, c = COEFFICIENTS
    x = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    x = x.to(products)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _wide(stack: Tensor) -> Tensor:
    """Return the matrices of a stack, transposed if they have more rows than columns."""
    return stack.mT if stack.shape[1] > stack.shape[2] else stack


def _by_shape(stacks: Sequence[Tensor]) -> Iterator[list[int]]:
    """Divide stacks into lists of the same shape, apart from transposition. Yield their indices."""
    members: dict[tuple[int, ...], list[int]] = {}
    for index, stack in enumerate(stacks):
        members.setdefault(tuple(sorted(stack.shape[1:])), []).append(index)
    for found in members.values():
        together, elements = list[int](), 0
        for index in found:
            if together and elements + stacks[index].numel() > STACK_ELEMENTS:
                yield together
                together, elements = [], 0
            together.append(index)
            elements += stacks[index].numel()
        yield together
