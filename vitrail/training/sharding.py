"""Gradients that are summed over processes, weights that are divided among them (PyTorch's FSDP2), and a forecast of
both on many GPUs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as AxisShard

from vitrail.errors import ProcessError
from vitrail.models.compiled import uncompiled
from vitrail.models.cost import checkpointed_bytes
from vitrail.models.linear.lora import ADAPTER
from vitrail.models.network import Footprint
from vitrail.models.variants import AnyConfig, transformer, transformer_config
from vitrail.processes.group import Processes, local, whole
from vitrail.settings import raise_problems
from vitrail.tasks.task import BatchObjective, Objective
from vitrail.training.config import Shard, TrainConfig
from vitrail.training.optimizer import OptimizerConfig
from vitrail.training.update_rules import layers_of

# The sum of gradients over several processes that have copies of the same network. PyTorch's DistributedDataParallel
# does the same around a module's `forward`. Here the loop also needs the sum over parts of a batch, other methods of
# the objective, and a loss that is divided by the number of samples of all processes, so the gradients are added and
# not averaged.


BUCKET_BYTES = 25 * 2**20
"""Largest size of the gradients that are sent together. A single weight can be larger."""


class GradientSum:
    """Adds the gradients of all processes while the backward pass computes further gradients.

    Gradients are sent in buckets, in the order of the backward pass: from the last weight to the first. All processes
    send the same buckets in the same order. The first sum decides which weights have gradients.
    """

    def __init__(self, module: nn.Module, processes: Processes) -> None:
        self.processes = processes
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[int, int] = {}
        self._awaited: list[int] = []
        """Number of gradients that each bucket still lacks."""
        self._sums: list[Callable[[], Tensor]] = []
        self._is_last = False
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Announce the last backward pass of a step. Gradients are final when this pass has computed them."""
        self._is_last = True
        self._awaited = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Replace the gradients of this process by their sums over all processes. A process without a gradient of a
        weight adds zeros."""
        self._is_last = False
        if not self._buckets:
            self._make_buckets()
        for parameter in self.parameters:
            if id(parameter) in self._bucket_of and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif id(parameter) not in self._bucket_of and parameter.grad is not None:
                raise ProcessError(
                    f"a weight of shape {tuple(parameter.shape)} had no gradient in the first step, but has one now; "
                    "several processes can only train networks that use the same weights in every step"
                )
        self._awaited = [0] * len(self._buckets)
        self._send()
        for bucket, summed in zip(self._buckets, self._sums, strict=True):
            gradients = [_gradient(parameter) for parameter in bucket]
            parts = torch.split(summed(), [gradient.numel() for gradient in gradients])
            views = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
            torch._foreach_copy_(gradients, views)
        self._sums = []

    def _take(self, parameter: nn.Parameter) -> None:
        """Send the buckets that are complete with the gradient of this weight."""
        if self._is_last and (number := self._bucket_of.get(id(parameter))) is not None:
            self._awaited[number] -= 1
            self._send()

    def _send(self) -> None:
        while (number := len(self._sums)) < len(self._buckets) and not self._awaited[number]:
            flat = torch.cat([_gradient(parameter).flatten() for parameter in self._buckets[number]])
            self._sums.append(self.processes.sum_later(flat))

    def _make_buckets(self) -> None:
        """Divide the weights that have gradients into buckets. Raises `ProcessError` if the processes have gradients of
        different weights."""
        used = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if any(other != used for other in self.processes.gather(used)):
            raise ProcessError(
                "the processes have gradients of different weights; several processes can only train networks that use "
                "the same weights for every image"
            )
        size = 0
        for number in reversed(used):
            parameter = self.parameters[number]
            gradient = _gradient(parameter)
            is_new_type = bool(self._buckets) and gradient.dtype != _gradient(self._buckets[-1][0]).dtype
            if not self._buckets or is_new_type or size + gradient.nbytes > BUCKET_BYTES:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(parameter)
            self._bucket_of[id(parameter)] = len(self._buckets) - 1
            size += gradient.nbytes


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


# Sharded training by PyTorch's FSDP2: each process keeps a part of every weight, of its gradient and of its moments.
# The whole weights of a block exist only while the block computes.


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
    shards = here if kind == "hybrid" else world
    for part in (*layers_of(objective).blocks, objective):
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=True,
            shard_placement_fn=lambda parameter: divided_axis(parameter.shape, shards),
        )
    for name in ("features", "fixed_features", "compare") if isinstance(objective, BatchObjective) else ():
        register_fsdp_forward_method(objective, name)


def divided_axis(shape: Sequence[int], shards: int) -> AxisShard | None:
    """Return the axis along which a weight is divided, or None for the first one.

    FSDP2 pads the first axis to a multiple of the number of shards. For position embeddings, whose first axis has
    length 1, this would multiply what is stored and sent. Only the first axis can be padded.
    """
    if math.ceil(shape[0] / shards) * shards <= MOST_PADDED * shape[0]:
        return None
    return next((AxisShard(axis) for axis in range(len(shape) - 1, 0, -1) if shape[axis] % shards == 0), None)


# Evaluation of sharded weights: no device ever holds a whole copy of them. A copy of the objective is evaluated,
# whose transformer blocks have no weights. Each block gathers its weights from the parts of all processes before it
# computes, and frees them afterwards. All processes therefore compute the same blocks at the same time. A process
# that has no images left takes part in the passes of the others (`StreamedCopy.settle`).


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


# Forecast of a training step on many GPUs by closed forms: memory, communication and bounds of the speed. Nothing is
# measured. The weights and their moments are counted exactly. The activations are those of the closed form for a CPU
# (models/cost.py), which keeps about what fused attention keeps on a GPU. The bounds of the speed follow from the
# numbers of the GPU's data sheet.


@dataclass(frozen=True)
class Gpu:
    """A GPU in a machine of several, by the numbers of its data sheet."""

    name: str
    memory: float
    """Bytes of memory."""
    flops: float
    """Dense bfloat16 FLOPs per second."""
    per_machine: int
    within: float
    """Bytes per second that a GPU sends to the other GPUs of its machine."""
    between: float
    """Bytes per second that a GPU sends to other machines."""


H100 = Gpu("H100 SXM", 80e9, 989e12, 8, 450e9, 50e9)
"""NVLink sends 450 GB/s in each direction. Each GPU is assumed to have a network adapter of 400 Gbit/s."""


@dataclass(frozen=True)
class ScalePlan:
    """Memory, communication and FLOPs of one process in a training step."""

    processes: int
    shard: Shard
    batch_size: int
    """Images per step of all processes."""
    images: int
    """Images that a process computes at once: its part of the batch, divided by the number of accumulated parts."""
    state_bytes: int
    """Bytes of this process's parts of the weights, their gradients, moments and mean."""
    whole_bytes: int
    """Bytes of whole weights: in bf16, of the blocks that are gathered at once, and of the copy that evaluations use.
    The copy of a transformer has no blocks, which evaluations gather one after the other."""
    activation_bytes: int
    bucket_bytes: int
    """Bytes of the copies of gradients that are sent, at a time when all activations are freed."""
    sent_within: float
    """Bytes that a process sends within its machine in a step."""
    sent_between: float
    """Bytes that a process sends to other machines in a step."""
    flops: float
    """FLOPs of a process in a step."""
    checkpoint_bytes: int
    gpu: Gpu

    @property
    def memory_bytes(self) -> int:
        """Bytes that a process needs at the peak of a step."""
        return self.state_bytes + max(self.whole_bytes + self.activation_bytes, self.bucket_bytes)

    @property
    def compute_seconds(self) -> float:
        """Time of a step's products at the GPU's peak."""
        return self.flops / self.gpu.flops

    @property
    def sending_seconds(self) -> float:
        """Time of a step's communication at the full rate of the links."""
        return max(self.sent_within / self.gpu.within, self.sent_between / self.gpu.between)

    @property
    def fractions(self) -> tuple[float, float]:
        """Bounds of the fraction of peak that the communication leaves: if nothing of it overlaps with products, and if
        all of it does. The products themselves do not reach the peak, so a real run is below both."""
        compute, sending = self.compute_seconds, self.sending_seconds
        return compute / (compute + sending), compute / max(compute, sending)

    @property
    def images_per_second(self) -> float:
        """Images per second of all processes at the upper bound, which is the rate at which data must arrive."""
        return self.batch_size / max(self.compute_seconds, self.sending_seconds)


def scale_plans(
    config: TrainConfig, network: AnyConfig, processes: Sequence[int], *, gpu: Gpu = H100
) -> Iterator[ScalePlan]:
    """Yield the plan of a run for each number of processes. Raises `ConfigError` if a number does not divide the
    batch size or the processes of a machine."""
    for world in processes:
        raise_problems(_plan_problems(config, network, world, gpu))
        yield _plan(config, network, world, gpu)


def _plan_problems(config: TrainConfig, network: AnyConfig, world: int, gpu: Gpu) -> Iterator[str]:
    if world < 1 or (world > gpu.per_machine and world % gpu.per_machine):
        yield f"plan={world} is not a number of GPUs in machines of {gpu.per_machine}; choose a multiple"
    elif config.run.batch_size % world:
        yield f"batch_size={config.run.batch_size} is not a multiple of the number of processes ({world})"
    if config.run.checkpoint_activations and not network.recomputes_blocks:
        yield "checkpoint_activations=True is for transformers; leave it out"


def _plan(config: TrainConfig, network: AnyConfig, world: int, gpu: Gpu) -> ScalePlan:
    cost = config.task.step_cost(network.with_image_size(config.images.image_size), "bf16")
    run, network, weights = config.run, cost.network, 4 * (network.parameters() + cost.parameters)
    footprint: Footprint = network.footprint(config.images.image_size, "bf16")
    here = min(world, gpu.per_machine)
    machines = world // here
    shard: Shard = "none" if world == 1 else "full" if run.shard == "hybrid" and machines == 1 else run.shard
    shards = {"none": 1, "full": world, "hybrid": here}[shard]
    part = run.batch_size // world
    images = math.ceil(part / run.accumulation)
    kept, flops = footprint.activations, cost.all_flops
    if run.checkpoint_activations:
        kept = checkpointed_bytes(network, config.images.image_size, "bf16")
        flops += 2 * network.macs()  # every block is computed twice
    if run.accumulation > 1 and cost.batch_bytes:  # a `BatchObjective` computes every part twice
        flops += network.inference_flops(config.images.image_size)
    optimizer = config.optimizer
    moments = optimizer.momentum_rate > 0 if optimizer.kind in ("sgd", "lars") else 2
    copies = 2 + moments + (optimizer.average > 0)  # weights, gradients, moments, mean
    vit = transformer_config(network) if config.start.lora_rank is None else None
    copied = (
        weights if vit is None or vit.reduction is not None or vit.reversible else weights - 4 * vit.block_parameters()
    )
    gathered = 2 * weights // network.num_blocks + copied  # two blocks at a time, and the copy for evaluations
    within, between = _sent(weights, shard, here, machines, run.accumulation)
    return ScalePlan(
        world,
        shard,
        run.batch_size,
        images,
        state_bytes=math.ceil(copies * weights / shards),
        whole_bytes=weights // 2
        + cost.fixed_bytes
        + (0 if shard == "none" else gathered),  # autocast keeps copies in bf16
        activation_bytes=config.task.views
        * (images * (kept + footprint.passing + cost.image_bytes) + part * cost.batch_bytes),
        bucket_bytes=weights if shard == "none" and world > 1 else 0,
        sent_within=within,
        sent_between=between,
        flops=float(part * config.task.views * flops),
        checkpoint_bytes=(copies - 1) * weights,
        gpu=gpu,
    )


def _sent(weights: int, shard: Shard, here: int, machines: int, parts: int) -> tuple[float, float]:
    """Return the bytes that a process sends within its machine and to other machines, by rings.

    A ring of n processes sends (n - 1) / n of the weights to gather or to reduce them. Copies are reduced and then
    gathered. Sharded weights are gathered for the forward pass and for the backward pass of every part of a batch, and
    their gradients are reduced.
    """

    def ring(size: int | float, count: int) -> float:
        return size * (count - 1) / count

    if shard == "hybrid":
        return 3 * parts * ring(weights, here), 2 * parts * ring(weights / here, machines)
    times, world = (2, here * machines) if shard == "none" else (3 * parts, here * machines)
    # One link of the ring in each machine leads to another machine.
    sent = times * ring(weights, world)
    return sent, sent / here if machines > 1 else 0.0


def scale_texts(plan: ScalePlan) -> dict[str, str]:
    """Return the numbers of a plan as texts by their names."""
    low, high = plan.fractions
    return {
        "GPUs": f"{plan.processes:,}",
        "weights": {"none": "copies", "full": "sharded", "hybrid": "sharded by machine"}[plan.shard],
        "images at once": f"{plan.images:,}",
        "state": _gigabytes(plan.state_bytes),
        "whole weights": _gigabytes(plan.whole_bytes),
        "activations": _gigabytes(plan.activation_bytes),
        "memory": _gigabytes(plan.memory_bytes),
        "sent per step": _gigabytes(plan.sent_within),
        "computing": f"{1000 * plan.compute_seconds:,.0f} ms",
        "sending": f"{1000 * plan.sending_seconds:,.0f} ms",
        "fraction of peak": f"{low:.0%} to {high:.0%}",
        "images/s": f"{plan.images_per_second:,.0f}",
        "checkpoint": _gigabytes(plan.checkpoint_bytes),
    }


def _gigabytes(size: int | float) -> str:
    return f"{size / 1e9:,.1f} GB"
