"""Copies of networks that share the memory of all tensors with the network, and keep what a user has changed."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from vitrail.errors import ConfigError

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def separate_copy(network: AnyModule) -> AnyModule:
    """Return a copy of a network whose tensors share the memory of the network's tensors, but can be frozen, moved and
    converted without changing the network.

    Modes, frozen weights, replaced modules and methods, hooks and parametrisations are kept. Raises `ConfigError` as
    `shared_copy` does.
    """
    made, known = shared_copy(network), dict[int, Tensor]()
    pairs = (module.named_modules(remove_duplicate=False) for module in (network, made))
    for (_, old), (_, new) in zip(*pairs, strict=True):
        new.training = old.training
        for name, weight in new._parameters.items():
            if weight is not None:
                own = nn.Parameter(weight.detach(), weight.requires_grad)
                new._parameters[name] = cast(nn.Parameter, known.setdefault(id(weight), own))
        for name, buffer in new._buffers.items():
            if buffer is not None:
                new._buffers[name] = known.setdefault(id(buffer), buffer.detach())
    return made


def shared_copy(network: AnyModule) -> AnyModule:
    """Return a copy of a network in evaluation mode that shares all tensors with the network.

    Modules of the copy can be replaced, and hooks can be added to them, without changing the network. Blocks of the
    copy are not compiled. Raises `ConfigError` if a replaced method or a hook is a function that uses a module of the
    network, because it would use the original module, which may be in training mode.
    """
    network = getattr(network, "_orig_mod", network)  # of torch.compile
    modules = {id(module) for module in network.modules()}
    is_simple = True
    for name, module in network.named_modules():
        known = type(module).__module__.startswith(("torch.nn.modules.", "vitrail.models."))
        is_simple = is_simple and known
        for method, function in _replaced(module):
            used = list(_used_objects(function))
            is_simple = is_simple and not any(id(one) in modules for one, _ in used)
            if any(id(one) in modules and is_fixed for one, is_fixed in used):
                raise ConfigError(
                    f"{name or 'the network'}: {method} is a function that uses a module of the network, so a copy of "
                    "the network would use the original module; use types.MethodType(function, module) "
                    "and the function's first argument, or a subclass"
                )
    tensors = {id(tensor): tensor for tensor in itertools.chain(network.parameters(), network.buffers())}
    # Simple modules hold their submodules by name only, so copying one after the other is enough and fast. Others may
    # have references elsewhere.
    return cast(AnyModule, _copied(network)) if is_simple else copy.deepcopy(network, cast(Any, tensors)).eval()


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module and its submodules in evaluation mode, which shares all tensors."""
    made = type(module).__new__(type(module))
    for name, value in vars(module).items():
        made.__dict__[name] = value.copy() if isinstance(value, dict) else value
    made.__dict__["training"] = False
    made.__dict__.pop("_compiled_call_impl", None)  # a copied hook would call the original module
    made.__dict__["_modules"] = {
        name: None if part is None else _copied(part) for name, part in module._modules.items()
    }
    return made


def _replaced(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the methods that were replaced in a module, but not in its class, and the module's hooks, by their names.

    The compiled call of a module is not among them, because a copy is compiled anew.
    """
    for name, value in vars(module).items():
        if callable(getattr(type(module), name, None)):
            yield name, value
        elif name.endswith("_hooks") and isinstance(value, dict):
            yield from (("a hook", hook) for hook in value.values())


def _used_objects(function: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the objects that a function uses: what it is bound to, its arguments, and the variables around it.

    The second value is True if a copy of the function has the same object instead of its copy.
    """
    waiting, seen = [(function, False)], set[int]()
    while waiting:
        one, is_fixed = waiting.pop()
        yield one, is_fixed
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, MethodType):
            waiting += [(one.__self__, is_fixed), (one.__func__, is_fixed)]
        elif isinstance(one, functools.partial):
            waiting += [(part, is_fixed) for part in (one.func, *one.args, *one.keywords.values())]
        elif isinstance(one, FunctionType):
            names = inspect.getclosurevars(one)
            around = [value for value in names.globals.values() if not isinstance(value, FunctionType)]
            waiting += [(value, True) for value in (*names.nonlocals.values(), *around, *vars(one).values())]
