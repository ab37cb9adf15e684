"""Sharded training by PyTorch's FSDP2: each process keeps a part of every weight, of its gradient and of its moments.

The whole weights of a block exist only while the block computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as AxisShard

from vitrail.models.network import HasLayers
from vitrail.processes.group import Processes
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["Shard", "ShardedGradients", "shard", "shard_problems", "whole_weights"]

Shard = Literal["none", "full", "hybrid"]

MOST_PADDED = 1.125
"""Largest ratio of the padded length of a weight's first axis to its own length. A weight with a larger ratio is
divided along another axis."""


def shard_problems(kind: Shard, optimizer: OptimizerConfig, processes: Processes) -> Iterator[str]:
    """Yield messages about settings that do not work with sharded weights. A single process does not shard."""
    if kind == "none" or not processes.are_several:
        return
    world, here = processes.world, processes.place.local_world
    if kind == "hybrid" and (here in (1, world) or world % here):
        yield (
            f"shard='hybrid' divides weights among the processes of each machine, but {here} of {world} processes are "
            "on this one; choose full"
        )
    is_fused = optimizer.momentum_format == "float32" and (
        (optimizer.kind == "sgd" and (optimizer.decay_rule == "coupled" or not optimizer.weight_decay))
        or (optimizer.kind == "adamw" and optimizer.decay_rule in ("decoupled", "coupled"))
    )
    if not is_fused:
        yield (
            f"shard={kind!r} works with PyTorch's AdamW and SGD, but not with optimizer={optimizer.kind!r}, "
            f"weight_decay_rule={optimizer.weight_decay_rule!r} and momentum_format={optimizer.momentum_format!r}; "
            "change one of these"
        )


def shard(objective: nn.Module, kind: Shard, device: torch.device, processes: Processes) -> None:
    """Divide the weights of an objective among all processes (`full`), or among those of each machine (`hybrid`).

    Each block of the network is gathered by itself, and everything else together.
    """
    world, here = processes.world, processes.place.local_world
    if kind == "hybrid":
        mesh = init_device_mesh(device.type, (world // here, here), mesh_dim_names=("copies", "shards"))
    else:
        mesh = init_device_mesh(device.type, (world,))
    network = next(part for part in objective.modules() if isinstance(part, HasLayers))
    shards = here if kind == "hybrid" else world
    for part in (*network.layers().blocks, objective):
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=True,
            shard_placement_fn=lambda parameter: divided_axis(parameter.shape, shards),
        )


def divided_axis(shape: Sequence[int], shards: int) -> AxisShard | None:
    """Return the axis along which a weight is divided, or None for the first one.

    FSDP2 pads the first axis to a multiple of the number of shards. For position embeddings, whose first axis has
    length 1, this would multiply what is stored and sent. Only the first axis can be padded.
    """
    if math.ceil(shape[0] / shards) * shards <= MOST_PADDED * shape[0]:
        return None
    return next((AxisShard(axis) for axis in range(len(shape) - 1, 0, -1) if shape[axis] % shards == 0), None)


class ShardedGradients:
    """The gradients of sharded weights, which FSDP2 averages over the processes during the backward pass."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss whose averaged gradients are the sums of the gradients of all processes."""
        return loss * self.processes.world

    def begin(self) -> None:
        """Announce the last backward pass of a step. FSDP2 adds the gradients in every backward pass."""

    def finish(self) -> None:
        """Wait for the sums. FSDP2 has waited for them at the end of the backward pass."""


def whole_weights(objective: nn.Module) -> dict[str, Any]:
    """Return the whole weights of an objective on every process, on its device."""
    return get_model_state_dict(objective, options=StateDictOptions(full_state_dict=True))
