"""A training step of one of many processes without their memory and their messages, for tests of the forecast.

PyTorch computes the shapes of all tensors (`FakeTensorMode`), and a fake process group accepts all messages. The
processes of tests import this module, so it does not import pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.machine import autocast
from vitrail.models.variants import AnyConfig, build
from vitrail.processes.group import Processes, local
from vitrail.processes.launch import Launch
from vitrail.training import sharding
from vitrail.training.sharding import GradientSum

__all__ = ["simulated"]

HERE = 8
"""Processes per machine."""


class Messages(TorchDispatchMode):
    """Counts the bytes of the tensors that are gathered, reduced to parts, and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"gathered": 0, "reduced": 0, "summed": 0}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("c10d._allgather_base_"):
            self.bytes["gathered"] += args[0].nbytes
        elif name.startswith("c10d._reduce_scatter_base_"):
            self.bytes["reduced"] += args[1].nbytes
        elif name.startswith("c10d.allreduce_"):
            self.bytes["summed"] += sum(tensor.nbytes for tensor in args[0])
        return function(*args, **(kwargs or {}))


class Step(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(images).float(), labels)


class Simulated(Processes):
    """Processes that all have the same values."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world


def simulated(network: AnyConfig, kind: str, world: int, images: int, size: tuple[int, int]) -> dict[str, float]:
    """Return the bytes that process 0 of `world` processes holds and sends in a training step with AdamW in bf16."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    processes = Simulated(Launch(0, world, 0, HERE), dist.HashStore())
    with _real_meshes(), FakeTensorMode(allow_non_fake_inputs=True):
        step = _on_cpu(network)
        gradients = GradientSum(step, processes) if kind == "none" else None
        if gradients is None:
            sharding.shard(step, kind, torch.device("cpu"), processes)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(step.parameters(), foreach=False)
        found: dict[str, float] = {}

        def train() -> None:
            with autocast("bf16", torch.device("cpu")):
                loss = step(torch.empty(images, 3, *size), torch.zeros(images, dtype=torch.long))
            if gradients is not None:
                gradients.begin()
            loss.backward()
            if gradients is not None:
                gradients.finish()
            found["weights and gradients"] = sum(
                local(tensor).nbytes for weight in step.parameters() for tensor in (weight, weight.grad)
            )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        train()  # makes the moments and the buckets
        with Messages() as messages:
            train()
        moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        found["state"] = found.pop("weights and gradients") + sum(local(moment).nbytes for moment in moments)
        if gradients is None:
            tracker: Any = FSDPMemTracker(step, optimizer)
        else:
            tracker = MemTracker()
            tracker.track_external(step, optimizer)
        with tracker:
            train()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return found | messages.bytes | {"peak": next(size for name, size in peak.items() if "Total" in str(name))}


def _on_cpu(config: AnyConfig) -> Step:
    """Return a network of fake weights on the CPU, of which no initial values are drawn."""
    with torch.device("meta"):
        step = Step(build(config))
    for module in step.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is not None:
                    empty = torch.empty(value.shape, dtype=value.dtype)
                    tensors[name] = nn.Parameter(empty) if isinstance(value, nn.Parameter) else empty
    return step


@contextmanager
def _real_meshes() -> Iterator[None]:
    """Make device meshes, whose numbers PyTorch reads, of real tensors."""
    real = sharding.init_device_mesh

    def make(*given: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return real(*given, **named)

    with mock.patch.object(sharding, "init_device_mesh", make):
        yield
