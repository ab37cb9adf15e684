"""Training with the products of a block's dense layers in 8-bit floating point, for large models on recent GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.dense import Linear
from vitrail.models.kernels import linear
from vitrail.models.network import HasLayers
from vitrail.models.variants import AnyConfig, build

__all__ = ["check_float8", "float8_linear", "use_float8"]

OPERAND, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
"""Weights and activations want digits, gradients want range (2209.05433, section 3)."""

MULTIPLE = 16
"""What sides of a product have to be multiples of: the kernels read 16 bytes at a time."""

SMALLEST = 1e-30
"""What the largest magnitude of a tensor counts as at least, so that zeros can be scaled."""


def use_float8(network: nn.Module) -> int:
    """From now on, dense layers of the network's blocks train in 8-bit floating point; returns how many do.

    It is those whose sides are multiples of 16. Their weights stay what they are. Raises `ConfigError` where there is
    no such layer.
    """
    found = 0
    blocks = network.layers().blocks if isinstance(network, HasLayers) else []
    for module in (part for block in blocks for part in block.modules()):
        if isinstance(module, Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
            module.use_product(float8_linear)
            found += 1
    if not found:
        raise ConfigError(
            f"precision='float8' is of dense layers in a transformer's blocks whose sides are multiples of {MULTIPLE}; "
            "this network has none. Choose 'bf16' or 'float32'"
        )
    return found


def check_float8(config: AnyConfig) -> None:
    """Raises `ConfigError` where `use_float8` would for this network, without drawing its weights."""
    with torch.device("meta"):
        use_float8(build(config))


def float8_linear(
    x: Float[Tensor, "*batch inputs"], weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "*batch outputs"]:
    """`x weight^T + bias` in bfloat16, of factors in e4m3; in backward the gradient is in e5m2.

    Each factor is scaled, each time anew, so that its largest magnitude is the format's; sums are in float32. Without
    gradients, or outside autocast, this is `linear`: predictions are the same numbers as of any other model.
    """
    if not (torch.is_grad_enabled() and torch.is_autocast_enabled(x.device.type)):
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
    """`a b` of factors in their units; `fast` lets a GPU add up with fewer digits, which gradients could not spare."""
    with torch.autocast(a.device.type, enabled=False):  # or a CPU would round the factors, units applied, to bfloat16
        return torch._scaled_mm(a, b, scale_a=a_unit, scale_b=b_unit, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def _rows(x: Tensor) -> Tensor:
    """As a matrix, with rows of zeros below up to a multiple of 16, which change no sum over rows."""
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _unpadded(rows: Tensor, shape: torch.Size) -> Tensor:
    """What `_rows` did to a tensor of this shape, undone for a product of it."""
    return rows[: shape[:-1].numel()].view(*shape[:-1], rows.shape[1])


def _quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in units of what makes its largest magnitude the format's, without gaps, and that unit."""
    unit = x.abs().amax().float().clamp(min=SMALLEST) / torch.finfo(dtype).max
    return (x.float() / unit).to(dtype).contiguous(), unit


def _columns_first(matrix: Tensor) -> Tensor:
    """The same numbers, laid out as kernels want a second factor."""
    return matrix.t().contiguous().t()
