"""The running mean of the trained weights (Polyak averaging; the paper's appendix B.1.1 uses 0.9999)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.processes.parts import local

__all__ = ["Average", "AverageStart"]

AverageStart = Literal["debiased", "initial", "capped"]


class Average:
    """The exponential moving average of a module's trainable parameters over the updates of the optimizer.

    With a decay rate d, every update multiplies the contribution of earlier weights by d. A step whose batch is skipped
    is no update. The choices of `start` differ early in the run, when a plain average would consist mostly of the
    initial weights:

    - "debiased": The initial weights are not part of the mean, and the factors of the weights of all updates add up to
      1. This is the bias correction of Adam (1412.6980, section 3).
    - "initial": The average starts at the initial weights, without a correction.
    - "capped": The average starts at the initial weights, and the decay after update t, counted from 0, is at most
      (1 + t) / (10 + t). The average then spans about a tenth of the updates so far until the decay is reached, after
      about 9 / (1 - d) updates.
    """

    def __init__(self, module: nn.Module, decay: float, start: AverageStart = "debiased") -> None:
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.decay = decay
        self.start = start
        self.weights: list[Tensor] = [local(parameter.detach()) for parameter in named.values()]
        """This process's parts of the weights, which share memory with the module."""
        self.mean = {name: parameter.detach().clone() for name, parameter in named.items()}
        """The mean of each parameter, by the parameter's name."""
        self.updates = 0
        """Number of updates in the mean."""

    @property
    def kept(self) -> float:
        """The factor of the old mean in the next update."""
        if self.start == "initial":
            return self.decay
        if self.start == "capped":
            return min(self.decay, (1 + self.updates) / (10 + self.updates))
        return self.decay * (1 - self.decay**self.updates) / (1 - self.decay ** (self.updates + 1))

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after an update of the optimizer to the mean."""
        torch._foreach_lerp_(self._means(), self.weights, 1 - self.kept)
        self.updates += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their mean in place."""
        mean = self._means()
        trained = [weight.clone() for weight in self.weights]
        torch._foreach_copy_(self.weights, mean)
        torch._foreach_copy_(mean, trained)

    @torch.no_grad()
    def restore(self, mean: dict[str, Tensor]) -> None:
        """Copy the mean of another average into this one."""
        for name, tensor in self.mean.items():
            local(tensor).copy_(local(mean[name]))

    def _means(self) -> list[Tensor]:
        return [local(tensor) for tensor in self.mean.values()]
