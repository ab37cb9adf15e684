"""SGD and Adam with the rules of weight decay and the momentum formats of the papers' code.

With PyTorch's own rule of weight decay and a float32 momentum, PyTorch's fused optimizers compute the same updates
faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["MomentumFormat", "OptaxAdam", "OptaxMomentum", "UpdateRule"]

MomentumFormat = Literal["float32", "bfloat16"]


class UpdateRule(Optimizer, ABC):
    """Base class of optimizers that subtract `lr * (update + weight_decay * weight)` from each weight.

    Subclasses compute the update from the gradient. With `coupled`, `weight_decay * weight` is instead added to the
    gradient from which the update is computed.

    Groups have the entries `lr` and `weight_decay`. As in optax, the update is computed from the running mean in
    float32, and then the mean is stored in the momentum's format. The decay rate of the mean is rounded to the same
    format: in bfloat16, 0.9 becomes 0.8984375.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        momentum_format: MomentumFormat = "float32",
        coupled: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.momentum = momentum
        self.coupled = coupled
        self.stored_as = torch.bfloat16 if momentum_format == "bfloat16" else torch.float32
        self.kept = torch.tensor(momentum, dtype=self.stored_as).item()
        """The decay rate of the momentum, rounded to the momentum's format."""

    @abstractmethod
    def updates(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Return the update of each weight, and change the state of the weights."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient. A closure is not supported."""
        assert closure is None, "an update rule takes no closure"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients, rate, decay = [weight.grad for weight in weights], group["lr"], group["weight_decay"]
            if self.coupled and decay:
                gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
            updates = self.updates(weights, gradients)
            if decay and not self.coupled:
                torch._foreach_mul_(weights, 1 - rate * decay)
            torch._foreach_add_(weights, updates, alpha=-rate)

    def state_of(self, weights: list[Tensor], name: str) -> list[Tensor]:
        """Return the tensor `name` from the state of each weight, in float32. Before the first step, return zeros."""
        return [
            self.state[weight][name].float() if name in self.state[weight] else torch.zeros_like(weight)
            for weight in weights
        ]

    def keep_momentum(self, weights: list[Tensor], name: str, momentum: list[Tensor]) -> None:
        """Store the momentum of each weight in the momentum's format."""
        for weight, tensor in zip(weights, momentum, strict=True):
            self.state[weight][name] = tensor.to(self.stored_as)

    def next_steps(self, weights: list[Tensor]) -> list[Tensor]:
        """Add 1 to the step count of each weight. Return the counts, which start at 1, as tensors on the weights'
        device."""
        steps = [
            self.state[weight]["step"] + 1 if "step" in self.state[weight] else torch.ones((), device=weight.device)
            for weight in weights
        ]
        for weight, step in zip(weights, steps, strict=True):
            self.state[weight]["step"] = step
        return steps


class OptaxMomentum(UpdateRule):
    """SGD with momentum: `m = g + momentum * m`, and the update is `m` (`optax.sgd`, big_vision's `momentum_hp`)."""

    def updates(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        updates = self.state_of(weights, "momentum_buffer")
        updates = list(torch._foreach_add(gradients, torch._foreach_mul(updates, self.kept)))
        self.keep_momentum(weights, "momentum_buffer", updates)
        return updates


class OptaxAdam(UpdateRule):
    """Adam (1412.6980) as `optax.scale_by_adam`. `momentum` is beta 1."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, beta2: float, eps: float = 1e-8, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.beta2 = beta2
        self.eps = eps

    def updates(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        steps = self.next_steps(weights)
        means, squares = self.state_of(weights, "exp_avg"), self.state_of(weights, "exp_avg_sq")
        means = list(torch._foreach_mul(means, self.kept))
        torch._foreach_add_(means, gradients, alpha=1 - self.momentum)
        squares = list(torch._foreach_mul(squares, self.beta2))
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - self.beta2)
        self.keep_momentum(weights, "exp_avg", means)
        for weight, square in zip(weights, squares, strict=True):
            self.state[weight]["exp_avg_sq"] = square
        divisors = list(torch._foreach_sqrt(torch._foreach_div(squares, _corrections(self.beta2, steps))))
        torch._foreach_add_(divisors, self.eps)
        return list(torch._foreach_div(torch._foreach_div(means, _corrections(self.momentum, steps)), divisors))


def _corrections(beta: float, steps: list[Tensor]) -> list[Tensor]:
    """Return the sum of the weights of the steps in a running mean that starts at 0: 1 - beta^step."""
    return [1 - beta**step for step in steps]
