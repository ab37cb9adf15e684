"""The running mean of the trained weights (Polyak averaging; the paper's appendix B.1.1 uses 0.9999)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Average"]


class Average:
    """The exponential moving average of a module's trainable parameters over the steps.

    Early in the run the mean would consist mostly of the initial weights. Therefore the decay after step t, counted
    from 0, is at most (1 + t) / (10 + t): the mean then spans about a tenth of the steps so far.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.decay = decay
        self.weights: list[Tensor] = list(named.values())
        self.mean = {name: parameter.detach().clone() for name, parameter in named.items()}
        """The mean of each parameter, by its name."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the mean with the weights after this step."""
        kept = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.mean.values()), self.weights, 1 - kept)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their mean in place."""
        mean = list(self.mean.values())
        trained = [weight.detach().clone() for weight in self.weights]
        torch._foreach_copy_(self.weights, mean)
        torch._foreach_copy_(mean, trained)

    @torch.no_grad()
    def restore(self, mean: dict[str, Tensor]) -> None:
        """Set the mean to that of another average."""
        for name, tensor in self.mean.items():
            tensor.copy_(mean[name])
