"""Dense layers in 8-bit floating point, for training large models on recent GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.linear.dense import Linear, linear
from vitrail.models.network import HasLayers
from vitrail.models.shortcuts import has_plain_type, is_transformed
from vitrail.models.variants import AnyConfig, build

OPERAND, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
"""The two 8-bit formats: e4m3 has the precision that weights and activations need, and e5m2 has the range that
gradients need (2209.05433, section 3)."""

MULTIPLE = 16
"""Number that must divide the rows and columns of a weight, because the kernels read 16 bytes at a time."""

SMALLEST = 1e-30
"""Lower limit of the largest magnitude from which the scale of a tensor is computed, so that zeros can be scaled."""


def use_float8(network: nn.Module) -> None:
    """Train the dense layers of the network's blocks in 8-bit floating point from now on.

    Only layers whose numbers of inputs and outputs are multiples of 16 are changed. The stored weights keep their
    format. Raises `ConfigError` if no layer can be changed.
    """
    blocks = network.layers().blocks if isinstance(network, HasLayers) else []
    dense = [module for block in blocks for module in block.modules() if isinstance(module, Linear)]
    fitting = [layer for layer in dense if not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)]
    if not fitting:
        raise ConfigError(
            f"precision='float8' needs dense layers in a transformer's blocks whose sides are multiples of {MULTIPLE}; "
            "this network has none. Choose 'bf16' or 'float32'"
        )
    for layer in fitting:
        layer.product = float8_linear


def check_float8(config: AnyConfig) -> None:
    """Raise `ConfigError` if `use_float8` would raise it for a network of this config. No weights are drawn."""
    with torch.device("meta"):
        use_float8(build(config))


def float8_linear(
    x: Float[Tensor, "*batch inputs"], weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "*batch outputs"]:
    """Return `x weight^T + bias` in bfloat16, computed from `x` and `weight` in e4m3.

    In the backward pass, the gradient is converted to e5m2. In every call, each factor is scaled so that its largest
    magnitude is the largest number of the format. Sums are computed in float32. Without gradients, or outside autocast,
    this function does the same as `linear`, so 8-bit training does not change how predictions are computed. It also
    does the same in function transforms, and with weights of a class of their own.
    """
    if not (torch.is_grad_enabled() and torch.is_autocast_enabled(x.device.type)):
        return linear(x, weight, bias)
    if not (torch.compiler.is_compiling() or (has_plain_type(weight) and not is_transformed())):
        return linear(x, weight, bias)
    return _Float8Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, rows_unit = _quantised(_rows(x), OPERAND)
        columns, columns_unit = _quantised(weight, OPERAND)
        ctx.save_for_backward(rows, rows_unit, columns, columns_unit)
        ctx.has_bias = bias is not None
        added = None if bias is None else bias.to(torch.bfloat16)
        y = _product(rows, columns.t(), rows_unit, columns_unit, torch.bfloat16, bias=added, fast=True)
        return _unpadded(y, x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, rows_unit, columns, columns_unit = ctx.saved_tensors
        upstream, unit = _quantised(_rows(gradient), GRADIENT)
        to_x = _product(upstream, _columns_first(columns), unit, columns_unit, torch.bfloat16)
        to_weight = _product(upstream.t().contiguous(), _columns_first(rows), unit, rows_unit, torch.float32)
        to_bias = gradient.flatten(0, -2).sum(0, dtype=torch.float32) if ctx.has_bias else None
        return _unpadded(to_x, gradient.shape), to_weight, to_bias


def _product(
    a: Tensor,
    b: Tensor,
    a_unit: Tensor,
    b_unit: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Return the matrix product `a b` of scaled factors. With `fast`, a GPU sums in lower precision.

    Gradients are computed without `fast`, because they need the higher precision.
    """
    a_unit, b_unit = _balanced(a_unit, b_unit)
    with torch.autocast(a.device.type, enabled=False):  # otherwise a CPU would round the scaled factors to bfloat16
        return torch._scaled_mm(a, b, scale_a=a_unit, scale_b=b_unit, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def _rows(x: Tensor) -> Tensor:
    """Return `x` as a matrix, padded with rows of zeros to a multiple of 16 rows. The zeros do not change sums over
    rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _unpadded(rows: Tensor, shape: torch.Size) -> Tensor:
    """Remove the rows that `_rows` added, and restore the leading dimensions of `shape`."""
    return rows[: shape[:-1].numel()].view(*shape[:-1], rows.shape[1])


def _quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the tensor divided by a scale, converted to `dtype` and contiguous in memory. Also return the scale, which
    maps the tensor's largest magnitude to the largest number of `dtype`."""
    unit = x.abs().amax().float().clamp(min=SMALLEST) / torch.finfo(dtype).max
    return (x.float() / unit).to(dtype).contiguous(), unit


def _balanced(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two scales of about the same size with the product of `a` and `b`.

    Kernels multiply a sum of 8-bit products by one scale after the other. If one scale is very large and the other is
    small, the first multiplication can leave the range of float32 although the result is inside. Multiplication by a
    power of two is exact.
    """
    power = torch.exp2(((a.log2() - b.log2()) / 2).round())
    return a / power, b * power


def _columns_first(matrix: Tensor) -> Tensor:
    """Return the same matrix in column-major layout, which the kernels need for the second factor."""
    return matrix.t().contiguous().t()
