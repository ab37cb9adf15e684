"""Copies of networks that share their weights, for traces and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from torch import nn

from vitrail.models.copies import shared_copy
from vitrail.models.vit import VisionTransformer

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


def with_all_tokens(copied: VisionTransformer) -> VisionTransformer:
    """Return a copy of a network that does not merge or prune tokens."""
    copied.config = replace(copied.config, reduction=None)
    return copied
