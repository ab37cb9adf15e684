"""Evaluation of sharded weights: no device ever holds a whole copy of them.

A copy of the objective is evaluated, whose transformer blocks have no weights. Each block gathers its weights from the
parts of all processes before it computes, and frees them afterwards. All processes therefore compute the same blocks at
the same time. A process that has no images left takes part in the passes of the others (`StreamedCopy.settle`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vitrail.models.compiled import uncompiled
from vitrail.models.linear.lora import ADAPTER
from vitrail.models.variants import transformer
from vitrail.processes.group import Processes
from vitrail.processes.parts import local, whole
from vitrail.tasks.task import Objective

__all__ = ["StreamedCopy", "can_stream"]


def can_stream(objective: Objective) -> bool:
    """Return True if the networks of an objective that are evaluated are transformers whose blocks are called one after
    the other, without reduction and not reversible. Adapters would be merged into new weights."""
    if any(ADAPTER in f".{name}" for name, _ in objective.named_parameters()):
        return False
    found = [transformer(network) for network in _networks(objective)]
    return all(one is not None and one.config.reduction is None and not one.config.reversible for one in found)


def _networks(objective: Objective) -> list[Any]:
    """Return the network in training and the network that is saved, which can be the same."""
    found = [objective.network, getattr(objective, objective.saved_part)]
    return found[:1] if found[0] is found[1] else found


class StreamedCopy:
    """A copy of an objective with sharded weights, for evaluations, and one in main memory, which is saved."""

    def __init__(self, source: Objective, device: torch.device, processes: Processes) -> None:
        """`source` is the objective before its weights are sharded, in main memory. `device` is the device of
        evaluations."""
        self.processes = processes
        self.device = device
        self.saved: Objective = copy.deepcopy(source).requires_grad_(False)
        """The objective that is saved. The first process has its weights in main memory, and the others have none."""
        if not processes.is_first:
            self.saved.to("meta")
        self.objective: Objective = copy.deepcopy(source).requires_grad_(False)
        """The objective that is evaluated. `refresh` gives it its weights, except those of blocks."""
        names = {id(parameter): name for name, parameter in self.objective.named_parameters()}
        self._blocks: list[list[list[tuple[str, nn.Parameter]]]] = []
        """The weights of each block of each network, with their names."""
        for number, network in enumerate(_networks(self.objective)):
            self._blocks.append([])
            for place, block in enumerate(network.blocks):
                uncompiled(block)
                self._blocks[-1].append([(names[id(one)], one) for one in block.parameters()])
                self._free(number, place)
                self._add_hooks(block, number, place)
        self._streamed = {name for blocks in self._blocks for block in blocks for name, _ in block}
        self.objective.to(device)
        self._weights: dict[str, nn.Parameter] = {}

    @torch.no_grad()
    def refresh(self, sharded: Objective) -> None:
        """Let the copy have the current weights of the sharded objective. All processes call this method together."""
        self._weights = dict(sharded.named_parameters())
        for name, parameter in self.objective.named_parameters():
            if name not in self._streamed:
                parameter.copy_(whole(self._weights[name].detach()))
        _copy_buffers(sharded, self.objective)

    @torch.no_grad()
    def collect(self, sharded: Objective) -> None:
        """Copy the weights of the sharded objective to the main memory of the first process, one after the other. All
        processes call this method together."""
        weights = dict(sharded.named_parameters())
        for name, parameter in self.saved.named_parameters():
            tensor = whole(weights[name].detach())
            if self.processes.is_first:
                parameter.copy_(tensor)
        if self.processes.is_first:
            _copy_buffers(sharded, self.saved)

    @torch.no_grad()
    def scatter(self, sharded: Objective) -> None:
        """Give the weights in the main memory of the first process to the sharded objective, one after the other. All
        processes call this method together."""
        saved = self.saved.state_dict()

        def of_first(name: str, like: Tensor) -> Tensor:
            if self.processes.is_first:
                tensor = saved[name].to(self.device, copy=True)
            else:
                tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
            self.processes.copy_from_first([tensor])
            return tensor

        for name, parameter in sharded.named_parameters():
            tensor = of_first(name, parameter)
            if isinstance(parameter, DTensor):
                tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
            local(parameter.detach()).copy_(local(tensor))
        for name, buffer in _kept_buffers(sharded):
            buffer.copy_(of_first(name, buffer))

    @torch.no_grad()
    def copy_rest(self, network: nn.Module, saved: nn.Module) -> None:
        """Copy all weights outside of blocks from a saved network of the first process to the same network for
        evaluations. All processes call this method together."""
        theirs = saved.state_dict()
        for name, tensor in network.state_dict().items():
            if tensor.numel():
                if self.processes.is_first:
                    tensor.copy_(theirs[name])
                self.processes.copy_from_first([tensor])

    def settle(self) -> None:
        """Take part in the passes of other processes until none computes. All processes call this method together,
        when they have computed their images and before they exchange anything else."""
        while (flags := self._agree(None)).any():
            number = int(flags.argmax())
            for place in range(len(self._blocks[number])):
                self._gather(number, place)
                self._free(number, place)

    def _add_hooks(self, block: nn.Module, number: int, place: int) -> None:
        """Let a block, and copies of it that share its weights, gather the weights before it computes."""

        def before(module: nn.Module, inputs: Any) -> None:
            if place == 0:
                self._agree(number)
            self._gather(number, place)

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self._free(number, place)

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after, always_call=True)

    def _agree(self, number: int | None) -> Tensor:
        """Return the number of processes that begin a pass of each network. `number` is the network of this process's
        pass, or None if it has no images left."""
        with torch.inference_mode(False):
            flags = torch.zeros(len(self._blocks))
            if number is not None:
                flags[number] = 1
            return self.processes.sum(flags)

    def _gather(self, number: int, place: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for name, parameter in self._blocks[number][place]:
                parameter.data = whole(self._weights[name].detach())

    def _free(self, number: int, place: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for _, parameter in self._blocks[number][place]:
                parameter.data = parameter.data.new_empty(0)


def _copy_buffers(sharded: nn.Module, copied: nn.Module) -> None:
    """Copy the buffers that checkpoints hold to a copy of the module."""
    ours = dict(copied.named_buffers())
    for name, buffer in _kept_buffers(sharded):
        ours[name].copy_(buffer)


def _kept_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that checkpoints hold, with their names."""
    kept = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in kept)
