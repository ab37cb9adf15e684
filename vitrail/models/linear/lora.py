"""Low-rank adapters (LoRA, 2106.09685): small learned changes of a transformer's weights, merged into them at the end.

An adapter changes the weight, not the layer's input: the layer multiplies by `W + alpha / rank * B A`. Fused kernels,
conversion to bfloat16, 8-bit training and compilation therefore work as without adapters, and merging is exact except
for rounding. Some implementations apply dropout to the input of the adapter. Here that is not possible, because an
adapter has no input of its own.

LoRA saves memory of the optimizer but little time, because the full gradient of an adapted weight is computed before
the gradients of its factors (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.blocks import Block
from vitrail.models.linear.dense import Linear
from vitrail.models.network import with_weights
from vitrail.models.variants import AnyConfig, AnyNetwork
from vitrail.settings import raise_problems

Projection = Literal["query", "key", "value", "out", "up", "down"]
"""Names of a block's weights: the projections to queries, keys and values, attention's output, and the MLP's two
layers."""

ADAPTER = ".adapter."
"""Text that occurs in the names of all adapter tensors, and in the name of no other tensor."""


class LowRank(nn.Module):
    """Computes `W + alpha / rank * B A` for some row blocks of a weight.

    The rows of the weight are divided into equal blocks, such as queries, keys and values, and each adapted block has
    its own factors. A has the shape (rank, inputs), and starts with normally distributed numbers of standard deviation
    `inputs**-0.5`. B has the shape (rows, rank), and starts at zero, so the weight is unchanged at first (section 4.1).
    """

    def __init__(
        self,
        weight: Float[Tensor, "rows inputs"],
        *,
        rank: int,
        alpha: float,
        parts: tuple[int, ...] = (0,),
        of: int = 1,
    ) -> None:
        """Divide the rows of the weight into `of` equal blocks, and adapt the blocks with the indices `parts`."""
        super().__init__()
        rows, inputs = weight.shape
        self.parts = parts
        self.of = of
        self.scale = alpha / rank
        self.a = nn.Parameter(weight.new_empty(len(parts), rank, inputs).normal_(std=inputs**-0.5))
        self.b = nn.Parameter(weight.new_zeros(len(parts), rows // of, rank))

    def forward(self, weight: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows inputs"]:
        with torch.autocast(weight.device.type, enabled=False):  # in bfloat16, rounding would lose the update
            pieces = list(weight.chunk(self.of))
            for part, a, b in zip(self.parts, self.a, self.b, strict=True):
                pieces[part] = torch.addmm(pieces[part], b, a, alpha=self.scale)
            return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def check_adapters(config: AnyConfig, rank: int, names: Sequence[str]) -> None:
    """Raise `ConfigError` if `add_adapters` cannot adapt a network of this config."""
    if not config.adaptable:
        raise ConfigError(
            f"lora_rank={rank}: LoRA adapts a transformer's blocks, but a ResNet has none; leave lora_rank out"
        )
    choices = ", ".join(map(repr, get_args(Projection)))
    if not names:
        raise ConfigError(f"lora_on=() names no weight to adapt; choices: {choices}")
    raise_problems(
        f"lora_on has {name!r}, which matches no weight; choices: {choices}"
        for name in names
        if name not in get_args(Projection)
    )


def add_adapters(network: AnyNetwork, *, rank: int, alpha: float, names: Sequence[Projection]) -> None:
    """Add an adapter to each of the named weights in every block.

    The caller freezes the other parameters of the blocks. Raises `ConfigError` for unknown names, and for a ResNet.
    """
    check_adapters(network.config, rank, names)
    for block in network.layers().blocks:
        assert isinstance(block, Block)
        for layer, own in block.projections():
            if parts := tuple(number for number, name in enumerate(own) if name in names):
                if not isinstance(layer, Linear):
                    raise ConfigError(
                        f"lora_on={tuple(names)}: {own[parts[0]]!r} is computed by a layer of the class "
                        f"{type(layer).__name__}, which LoRA cannot adapt; add adapters before layers are replaced"
                    )
                layer.adapter = LowRank(layer.weight.detach(), rank=rank, alpha=alpha, parts=parts, of=len(own))


@torch.no_grad()
def merged(network: AnyNetwork) -> AnyNetwork:
    """Return an equivalent network whose weights contain the adapters' updates. Weights without an adapter are shared
    with `network`."""
    state = {name: tensor for name, tensor in network.state_dict().items() if ADAPTER not in name}
    for path, layer in network.named_modules():
        if isinstance(layer, Linear) and layer.adapter is not None:
            state[f"{path}.weight"] = layer.operand
    return with_weights(network, network.config, state).to(next(network.parameters()).device)
