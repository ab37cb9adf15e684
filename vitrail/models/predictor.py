"""Prediction that does not change the network. Weights are converted once, and several threads can predict at a
time."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.machine import Precision, TrainingPrecision, autocast, resolve_precision
from vitrail.models.compiled import compile_copy
from vitrail.models.linear.dense import Linear
from vitrail.models.linear.int8 import use_int8
from vitrail.models.network import Features
from vitrail.models.resnet import StandardisedConv

__all__ = ["Predictor", "shared_copy"]

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Predictor:
    """Predicts with a network in one precision, in evaluation mode and without gradients.

    The network is not changed, not even its mode. Several predictors of one network may work at the same time, in
    different threads and precisions. Weights that are needed in another form (bfloat16, standardised filters, adapted
    weights) are converted once, when the predictor is made. All other tensors are shared with the network. The
    conversion takes time, so keep one predictor for a sequence of calls. Make a new predictor after the network's
    weights have changed.

    Results keep the number format of the network's last operation. With precision "bf16", logits are therefore
    bfloat16. With precision "int8", the dense layers in blocks round weights and activations to 8 bits.
    """

    def __init__(self, network: nn.Module, precision: Precision = "float32") -> None:
        """Prepare a network for prediction. The precision "auto" is "bf16" if the processor has matrix units for
        bfloat16. Raise `ConfigError` for "int8" on a device without fast products of 8-bit integers, and for a network
        without dense layers in blocks."""
        first = next(itertools.chain(network.parameters(), network.buffers()), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._precision = resolve_precision(precision, self._device)
        self._network = shared_copy(network)
        is_bf16 = (resolve_precision("auto", self._device) if precision == "int8" else self._precision) == "bf16"
        self._usual: TrainingPrecision = "bf16" if is_bf16 else "float32"  # of products that are not in 8 bits
        dtype = torch.bfloat16 if is_bf16 else None
        with torch.no_grad():
            if self._precision == "int8":
                use_int8(self._network)
            for module in self._network.modules():
                # Their products may use another weight, unless a hook or a parametrisation makes it in every call.
                if type(module) in (Linear, StandardisedConv) and "weight" in module._parameters:
                    cast(Linear | StandardisedConv, module).freeze(dtype)
                compile_copy(module)

    @property
    def network(self) -> nn.Module:
        """The copy of the network that predicts, with its weights in the form that products use."""
        return self._network

    @property
    def device(self) -> torch.device:
        """Device of the weights. Images have to be on the same device."""
        return self._device

    @property
    def precision(self) -> str:
        """Format of matrix products: "int8", "bf16" or "float32"."""
        return self._precision

    def __call__(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Return logits, as `logits` does."""
        return self.logits(images)

    def logits(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Return what `network(images)` returns."""
        with self._context():
            return self._network(images)

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b embed_width"]:
        """Return what `network.embed(images)` returns: one vector for each image."""
        network: Any = self._network
        with self._context():
            return network.embed(images)

    def head_inputs(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b head_inputs"]:
        """Return what `network.head_inputs(images)` returns: the output of the hidden layer before the head."""
        network: Any = self._network
        with self._context():
            return network.head_inputs(images)

    @overload
    def features(self, images: Float[Tensor, "b c h w"], layers: None = None) -> Features: ...
    @overload
    def features(self, images: Float[Tensor, "b c h w"], layers: Sequence[int]) -> tuple[Features, ...]: ...
    def features(
        self, images: Float[Tensor, "b c h w"], layers: Sequence[int] | None = None
    ) -> Features | tuple[Features, ...]:
        """Return what `network.features(images)` returns, or `network.features(images, layers)`."""
        network: Any = self._network
        with self._context():
            return network.features(images) if layers is None else network.features(images, layers)

    @contextmanager
    def _context(self) -> Iterator[None]:
        with torch.inference_mode(), autocast(self._usual, self._device):
            yield


def shared_copy(network: AnyModule) -> AnyModule:
    """Return a copy of a network in evaluation mode that shares all tensors with the network.

    Modules of the copy can be replaced, and hooks can be added to them, without changing the network. Blocks of the
    copy are not compiled. Raises `ConfigError` if a replaced method or a hook is a function that uses a module of the
    network, because it would use the original module, which may be in training mode.
    """
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
                    "the network for predictions would use the original module; use types.MethodType(function, module) "
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
