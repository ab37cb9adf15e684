"""The conditions of shortcuts. A shortcut is a computation that skips the call of a module, or that uses an operation
without rules for differentiation, tracing and other formats.

A shortcut is taken only if nobody can see it. Otherwise modules are called, and operations are those of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as all_modules

Kind = TypeVar("Kind", bound=type[nn.Module])

COUNTER = "torch.utils.module_tracker"
"""Module of the global hooks of PyTorch's FLOP counter. They only note names, and the counter has to count what is
computed without it."""

_forward: dict[type[nn.Module], Callable[..., Any]] = {}
"""The classes of which calls can be skipped, with the methods that shortcuts replace."""


def skippable(kind: Kind) -> Kind:
    """Declare that shortcuts replace calls of this class."""
    _forward[kind] = kind.forward
    return kind


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True if a call of the module does nothing but compute the `forward` that `kind` was defined with.

    A subclass, which a parametrisation makes as well, an exchanged `forward` of the object or of its class, and hooks
    of the module or of all modules make it False. The older functions for pruning and weight norm use hooks.
    """
    return (
        type(module) is kind
        and not has_hooks(module)
        and "forward" not in module.__dict__
        and (torch.compiler.is_compiling() or kind.forward is _forward.get(kind, kind.forward))
    )


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of the module calls hooks, which are those of the module or of all modules."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ) or any(
        getattr(hook, "__module__", None) != COUNTER
        for hooks in (
            all_modules._global_forward_hooks,
            all_modules._global_forward_pre_hooks,
            all_modules._global_backward_hooks,
            all_modules._global_backward_pre_hooks,
        )
        if hooks
        for hook in hooks.values()
    )


def has_plain_type(tensor: Tensor) -> bool:
    """Return True unless the tensor's class has operations of its own, like the quantised and the divided weights of
    other libraries. The tensors with which PyTorch traces a program are plain.
    """
    kind = type(tensor)
    return kind is nn.Parameter or kind is Tensor or kind.__module__.startswith("torch._subclasses.")


def is_transformed() -> bool:
    """Return True inside function transforms (`torch.func`) and forward-mode differentiation, for which our own
    backward passes have no rules."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def can_fuse(tensors: Iterable[Tensor | None], formats: Iterable[torch.dtype]) -> bool:
    """Return True if an operation on a CPU that only knows plain memory can compute with these tensors.

    Such operations have no rules for torch.compile, exporters, function transforms and forward-mode differentiation.
    They read tensors of other devices, formats and layouts as if they were plain numbers.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not is_transformed()
        and all(
            tensor is None
            or (
                (type(tensor) is Tensor or type(tensor) is nn.Parameter)
                and tensor.is_cpu
                and tensor.dtype in formats
                and tensor.layout is torch.strided
            )
            for tensor in tensors
        )
    )
