"""Dense layers in float32 on a CPU, computed by MKL or by oneDNN.

PyTorch sends float32 products to MKL. On AMD processors, MKL does not use AVX-512, and oneDNN, which is part of
PyTorch, computes large layers faster (docs/performance.md). Both libraries compute in IEEE float32. They add up in
different orders, so their results differ by rounding. Each of them returns the same bits for the same inputs and number
of threads.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vitrail.errors import ConfigError
from vitrail.machine import cpu_flags, cpu_vendor
from vitrail.models.shortcuts import can_fuse

Library = Literal["mkl", "onednn"]
"""A library of matrix products. "mkl" stands for PyTorch's own choice, which is MKL on x86 processors."""

Float32Products = Literal["auto", "mkl", "onednn"]
"""Setting of the library. "auto" is the value of the environment variable, or else the faster library."""

VARIABLE = "VITRAIL_FLOAT32_PRODUCTS"
"""Environment variable that replaces the setting "auto"."""

FORMATS = (torch.float32,)

SMALLEST = 2**17
"""Number of weights from which on a layer is large enough for oneDNN, whose calls take more time."""

_library: contextvars.ContextVar[Library | None] = contextvars.ContextVar("library", default=None)


def resolve_float32_products(setting: Float32Products = "auto") -> Library:
    """Return the library that a setting means on this machine.

    The answer depends on the processor and on the environment variable, and not on a measurement. Two runs on one
    machine therefore compute the same bits. "onednn" means "mkl" if this build of PyTorch has no oneDNN. Raises
    `ConfigError` if the environment variable has another value than the setting can have.
    """
    if setting == "auto":
        setting = _from_environment()
    if not has_onednn(torch.float32):
        return "mkl"
    return _faster() if setting == "auto" else setting


@contextmanager
def float32_products(setting: Float32Products) -> Iterator[None]:
    """Compute dense layers in float32 by this setting's library inside the `with` block. Other threads are not
    affected.
    """
    token = _library.set(resolve_float32_products(setting))
    try:
        yield
    finally:
        _library.reset(token)


def uses_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return True if `float32_linear` should compute a layer of this input, weight and bias.

    PyTorch's own kernel is used inside torch.compile, in function transforms and in forward-mode differentiation,
    which need its derivatives.
    """
    return (
        not torch.compiler.is_compiling()  # first, because the compiler can trace only this condition
        and weight.numel() >= SMALLEST
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and can_fuse((x, weight, bias), FORMATS)
        and (_library.get() or resolve_float32_products()) == "onednn"
    )


def float32_linear(
    x: Float[Tensor, "*batch inputs"], weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "*batch outputs"]:
    """Return `x weight^T + bias`, computed by oneDNN. `uses_onednn(x, weight, bias)` must be true."""
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return _product(x, weight, bias)


def _from_environment() -> Float32Products:
    value: Any = os.environ.get(VARIABLE, "auto")
    if value not in get_args(Float32Products):
        raise ConfigError(
            f"{VARIABLE}={value!r} is not one of {', '.join(map(repr, get_args(Float32Products)))}; change the "
            "environment variable or remove it"
        )
    return value


@functools.cache
def has_onednn(dtype: torch.dtype) -> bool:
    """Return True if this build of PyTorch has oneDNN's dense layer with bias, and the layer can compute in this number
    format on this processor. In bfloat16 it needs AVX-512 or AMX."""
    available: Any = torch.backends.mkldnn.is_available  # torch has no types here
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and available()):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def _faster() -> Library:
    """Return the faster library for this processor: oneDNN on AMD processors with AVX-512 if the other choice is MKL,
    which uses AVX2 there.
    """
    mkl_is_used: Any = torch.backends.mkl.is_available  # torch has no types here
    mkl_is_slow = cpu_vendor() == "AuthenticAMD" and "avx512f" in cpu_flags()
    return "onednn" if mkl_is_slow and mkl_is_used() else "mkl"


def _known_to_counters(formula: Callable[..., int]) -> Callable[..., int]:
    """Let PyTorch's `FlopCounterMode` count oneDNN's dense layer, if this build has it, by a formula."""
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        register_flop_formula(torch.ops.mkldnn._linear_pointwise)(formula)
    return formula


@_known_to_counters
def _flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weight[0]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores the strides of a bias
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        rows, seen = gradient.reshape(-1, weight.shape[0]).contiguous(), x.reshape(-1, weight.shape[1]).contiguous()
        # The gradient is differentiated again if grad mode is enabled, and oneDNN's product has no derivative.
        again = torch.is_grad_enabled()
        x_gradient = weight_gradient = None
        if to_x:
            x_gradient = (rows @ weight if again else _product(rows, weight.t())).view(x.shape)
        if to_weight:
            weight_gradient = rows.t() @ seen if again else _weight_gradient(rows, seen)
        return x_gradient, weight_gradient, rows.sum(0) if to_bias else None


def _weight_gradient(gradient: Float[Tensor, "n outputs"], x: Float[Tensor, "n inputs"]) -> Tensor:
    """Return `gradient^T x`. oneDNN copies its first factor into another order, so the smaller tensor comes first."""
    if gradient.shape[1] <= x.shape[1]:
        return _product(gradient.t(), x.t())
    return _product(x.t(), gradient.t()).t()
