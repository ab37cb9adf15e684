"""The running mean of the weights that training moves (Polyak averaging; the paper's appendix B.1.1 has 0.9999)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Average"]


class Average:
    """The mean of a module's trainable parameters over the steps, each step's share `decay` times that of the next.

    Early on the mean would be mostly the weights that the run began with, so after step t, counted from 0, no more than
    (1 + t) / (10 + t) of it remains: it then spans about a tenth of the steps so far.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.decay = decay
        self.weights: list[Tensor] = list(named.values())
        self.mean = {name: parameter.detach().clone() for name, parameter in named.items()}
        """By the parameters' names."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights as they are after this step."""
        kept = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.mean.values()), self.weights, 1 - kept)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the weights and their mean. In place: whoever holds a parameter sees it change."""
        mean = list(self.mean.values())
        trained = [weight.detach().clone() for weight in self.weights]
        torch._foreach_copy_(self.weights, mean)
        torch._foreach_copy_(mean, trained)

    @torch.no_grad()
    def restore(self, mean: dict[str, Tensor]) -> None:
        """Takes over what another's `mean` was."""
        for name, tensor in self.mean.items():
            tensor.copy_(mean[name])
