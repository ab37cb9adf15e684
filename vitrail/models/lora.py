"""Low-rank adapters (LoRA, 2106.09685): small learned changes of a transformer's weights, merged into them at the end.

An adapter acts on the weight, not on what the layer sees: a product takes `W + alpha / rank * B A`. Fused products,
conversion to bfloat16, 8-bit training and compilation therefore go on as without it, merging is exact but for rounding,
and dropout of the adapter's own input, which some have, is not possible. The price is time: the gradient of an
adapted weight is made in full before it becomes that of its factors. A step of ViT-S/16 in bf16 with queries and values
adapted takes 0.81 of one that trains all weights, with all six projections 1.08 (rank 8; two cores of an AMD EPYC 9004
that others used as well, least of 7, 2026-11). What it saves is the optimiser's memory, and what it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.dense import Linear
from vitrail.models.variants import AnyConfig, AnyNetwork, build
from vitrail.models.vit import Block

__all__ = ["LowRank", "Projection", "add_adapters", "check_adapters", "merged"]

Projection = Literal["query", "key", "value", "out", "up", "down"]
"""Of a block: queries, keys and values, which are parts of one weight; attention's output; the MLP's two layers."""

ADAPTER = ".adapter."
"""What the names of adapters' tensors have in them, and no others."""


class LowRank(nn.Module):
    """`W + alpha / rank * B A`, of some of the equal parts that the rows of a weight consist of.

    Each part has factors of its own: A (rank x inputs), which starts normal of variance 1 / inputs, and B (rows x
    rank), which starts at zero, so that the weight starts as it is (section 4.1).
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
        """Of a weight whose rows are `of` equal parts, it changes those of the numbers `parts`."""
        super().__init__()
        rows, inputs = weight.shape
        self.parts = parts
        self.of = of
        self.scale = alpha / rank
        self.a = nn.Parameter(weight.new_empty(len(parts), rank, inputs).normal_(std=inputs**-0.5))
        self.b = nn.Parameter(weight.new_zeros(len(parts), rows // of, rank))

    def forward(self, weight: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows inputs"]:
        with torch.autocast(weight.device.type, enabled=False):  # bfloat16 would lose what merging keeps
            pieces = list(weight.chunk(self.of))
            for part, a, b in zip(self.parts, self.a, self.b, strict=True):
                pieces[part] = torch.addmm(pieces[part], b, a, alpha=self.scale)
            return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def check_adapters(config: AnyConfig, rank: int, names: Sequence[str]) -> None:
    """Raises `ConfigError` where `add_adapters` could not adapt a network of this config."""
    if not config.adaptable:
        raise ConfigError(f"lora_rank={rank} is of the dense layers of a transformer's blocks; a ResNet has none")
    choices = ", ".join(map(repr, get_args(Projection)))
    if not names:
        raise ConfigError(f"lora_on=() names no weight to adapt; choices: {choices}")
    for name in names:
        if name not in get_args(Projection):
            raise ConfigError(f"lora_on has {name!r}, which matches no weight; choices: {choices}")
    if rank < 1:
        raise ConfigError(f"lora_rank={rank} is less than 1")


def add_adapters(network: AnyNetwork, *, rank: int, alpha: float, names: Sequence[Projection]) -> None:
    """Gives the named weights of every block an adapter. Of the blocks' parameters, only the adapters' are to be
    trained: the caller sees to that. Raises `ConfigError` for names that match nothing, and for a ResNet.
    """
    check_adapters(network.config, rank, names)
    for block in network.layers().blocks:
        assert isinstance(block, Block)
        for layer, own in block.projections():
            if parts := tuple(number for number, name in enumerate(own) if name in names):
                layer.adapt(LowRank(layer.weight.detach(), rank=rank, alpha=alpha, parts=parts, of=len(own)))


@torch.no_grad()
def merged(network: AnyNetwork) -> AnyNetwork:
    """A plain network that gives the same outputs without adapters; it shares the tensors that have none."""
    state = {name: tensor for name, tensor in network.state_dict().items() if ADAPTER not in name}
    for path, layer in network.named_modules():
        if isinstance(layer, Linear) and layer.adapter is not None:
            state[f"{path}.weight"] = layer.operand
    with torch.device("meta"):
        plain = build(network.config)
    plain.load_state_dict(state, assign=True)
    return plain.to(next(network.parameters()).device).train(network.training)
