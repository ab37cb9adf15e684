"""Dense layers in 8 bits: floating point for training large models on recent GPUs, and integers for predictions on a
CPU with VNNI instructions.

In integers, a weight is rounded once, with a scale for each output channel. The input of a layer is rounded in every
call, with a scale for each row (token), so that an answer does not depend on the other images of a batch. The product
itself is exact, in 32-bit integers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.blocks import Block
from vitrail.models.linear.dense import Linear, can_split, linear
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


LARGEST = 127
"""Largest magnitude of a rounded number. Numbers are symmetric around 0."""

ZERO = 128
"""Offset of rounded inputs, because the processor multiplies unsigned bytes by signed bytes."""


def use_int8(network: nn.Module) -> None:
    """Compute the dense layers of the network's blocks in 8-bit integers from now on.

    The layers cannot be trained afterwards. Raises `ConfigError` if the network has no such layer.
    """
    for layer, names in _layers(network):
        layer.product = Int8Product(layer.operand, feeds_product="query" in names)


def check_int8(config: AnyConfig) -> None:
    """Raise `ConfigError` if `use_int8` would raise it for a network of this config. No weights are drawn."""
    with torch.device("meta"):
        _layers(build(config))


def _layers(network: nn.Module) -> list[tuple[Linear, tuple[str, ...]]]:
    """Return the dense layers of a network's blocks, with the names of their projections. Layers of other classes, and
    those with hooks or a parametrisation, are not among them."""
    projections = (layer for block in network.modules() if isinstance(block, Block) for layer in block.projections())
    layers = [(layer, names) for layer, names in projections if can_split(layer)]
    if not layers:
        raise ConfigError(
            "precision='int8' needs dense layers in a transformer's blocks, and this network has none; "
            "choices: 'auto', 'bf16', 'float32'"
        )
    return layers


class Int8Product:
    """A kernel of a dense layer that rounds the input and the weight to 8-bit integers. Outputs are float32, or with
    `feeds_product` in the format that autocast gives to matrix products.

    A product with some rows of the weight (`Linear.by_rows`) is not rounded, because the rounded weight is stored in
    the layout of the whole layer.
    """

    def __init__(self, weight: Float[Tensor, "outputs inputs"], *, feeds_product: bool = False) -> None:
        self.feeds_product = feeds_product
        weight = weight.detach().float()
        self.shape = weight.shape
        self.scales = weight.abs().amax(dim=1).clamp_(min=SMALLEST) / LARGEST
        rounded = (weight / self.scales[:, None]).round_().to(torch.int8)
        self.zeros = torch.zeros(len(weight), dtype=torch.int64)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)

    def __call__(
        self,
        x: Float[Tensor, "*batch inputs"],
        weight: Float[Tensor, "outputs inputs"],
        bias: Float[Tensor, " outputs"] | None,
    ) -> Float[Tensor, "*batch outputs"]:
        if weight.shape != self.shape or not x.numel():
            return linear(x, weight, bias)
        rounded, scales = quantized(x.reshape(-1, x.shape[-1]))
        product = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, ZERO, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        ).mul_(scales)
        product = (product if bias is None else product.add_(bias)).view(*x.shape[:-1], -1)
        converts = self.feeds_product and torch.is_autocast_enabled("cpu")
        return product.to(torch.get_autocast_dtype("cpu")) if converts else product


def quantized(x: Float[Tensor, "rows inputs"]) -> tuple[UInt8[Tensor, "rows inputs"], Float[Tensor, "rows 1"]]:
    """Return the rows rounded to integers plus 128, and the scale of each row."""
    scales = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=SMALLEST).mul_(1 / LARGEST)
    # `vector_norm` and conversions to uint8 would be several times as slow (docs/performance.md).
    rounded = torch.mul(x, scales.reciprocal()).round_().to(torch.int8)
    return rounded.view(torch.uint8).bitwise_xor_(ZERO), scales
