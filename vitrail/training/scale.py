"""Forecast of a training step on many GPUs by closed forms: memory, communication and bounds of the speed.

Nothing is measured. The weights and their moments are counted exactly. The activations are those of the closed form for
a CPU (`models/cost.py`), which keeps about what fused attention keeps on a GPU. The bounds of the speed follow from the
numbers of the GPU's data sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vitrail.models.cost import checkpointed_bytes
from vitrail.models.network import Footprint
from vitrail.models.variants import AnyConfig, transformer_config
from vitrail.settings import raise_problems
from vitrail.training.config import Shard, TrainConfig


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
        raise_problems(_problems(config, network, world, gpu))
        yield _plan(config, network, world, gpu)


def _problems(config: TrainConfig, network: AnyConfig, world: int, gpu: Gpu) -> Iterator[str]:
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


def scale_table(plans: Sequence[ScalePlan]) -> list[tuple[str, ...]]:
    """Return a header and a row of texts for each plan."""
    header = (
        "GPUs", "weights", "images at once", "state", "whole weights", "activations", "memory", "sent per step",
        "computing", "sending", "fraction of peak", "images/s", "checkpoint",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [header]
    for plan in plans:
        low, high = plan.fractions
        rows.append(
            (
                f"{plan.processes:,}",
                {"none": "copies", "full": "sharded", "hybrid": "sharded by machine"}[plan.shard],
                f"{plan.images:,}",
                *(
                    _gigabytes(size)
                    for size in (plan.state_bytes, plan.whole_bytes, plan.activation_bytes, plan.memory_bytes)
                ),
                _gigabytes(plan.sent_within),
                f"{1000 * plan.compute_seconds:,.0f} ms",
                f"{1000 * plan.sending_seconds:,.0f} ms",
                f"{low:.0%} to {high:.0%}",
                f"{plan.images_per_second:,.0f}",
                _gigabytes(plan.checkpoint_bytes),
            )
        )
    return rows


def _gigabytes(size: int | float) -> str:
    return f"{size / 1e9:,.1f} GB"
