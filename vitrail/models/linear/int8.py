"""Dense layers in 8-bit integers, for predictions on a CPU with VNNI instructions.

A weight is rounded once, with a scale for each output channel. The input of a layer is rounded in every call, with a
scale for each row (token), so that an answer does not depend on the other images of a batch. The product itself is
exact, in 32-bit integers.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.block import Block
from vitrail.models.linear.dense import Linear, can_split
from vitrail.models.linear.kernels import linear
from vitrail.models.variants import AnyConfig, build

LARGEST = 127
"""Largest magnitude of a rounded number. Numbers are symmetric around 0."""

ZERO = 128
"""Offset of rounded inputs, because the processor multiplies unsigned bytes by signed bytes."""

SMALLEST = 1e-30
"""Lower limit of the largest magnitude from which a scale is computed, so that rows of zeros can be scaled."""


def use_int8(network: nn.Module) -> int:
    """Compute the dense layers of the network's blocks in 8-bit integers from now on, and return their number.

    The layers cannot be trained afterwards. Raises `ConfigError` if the network has no such layer.
    """
    layers = _layers(network)
    for layer, names in layers:
        layer.use_product(Int8Product(layer.operand, feeds_product="query" in names))
    return len(layers)


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
        return product.to(torch.get_autocast_dtype("cpu")) if self.feeds_product and _is_autocast() else product


def _is_autocast() -> bool:
    return torch.is_autocast_enabled("cpu")


def quantized(x: Float[Tensor, "rows inputs"]) -> tuple[UInt8[Tensor, "rows inputs"], Float[Tensor, "rows 1"]]:
    """Return the rows rounded to integers plus 128, and the scale of each row."""
    scales = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=SMALLEST).mul_(1 / LARGEST)
    # `vector_norm` and conversions to uint8 would be several times as slow (docs/performance.md).
    rounded = torch.mul(x, scales.reciprocal()).round_().to(torch.int8)
    return rounded.view(torch.uint8).bitwise_xor_(ZERO), scales
