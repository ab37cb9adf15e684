"""Copies of networks for gradients with respect to inputs and attention weights."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from vitrail.models.predictor import shared_copy

__all__ = ["detached_copy"]

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def detached_copy(network: AnyModule) -> AnyModule:
    """Return a copy of a network in evaluation mode whose weights share the memory of the network's weights and need no
    gradients. A backward pass then keeps only the activations that gradients of the input need."""
    copied = shared_copy(network)
    for module in copied.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach(), requires_grad=False)
    return copied
