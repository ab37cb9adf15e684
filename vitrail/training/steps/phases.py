"""Phases of a run: steps with the same image size, patch dropout and batch size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from vitrail.errors import ConfigError
from vitrail.models.variants import AnyConfig, transformer
from vitrail.settings import raise_problems
from vitrail.tasks.task import Task
from vitrail.training.config import TrainConfig
from vitrail.training.steps.early import KINDS

__all__ = ["Phase", "cost_text", "first_steps", "phases_of", "run_flops", "use_patch_dropout", "with_flops"]


@dataclass(frozen=True)
class Phase:
    """Steps of a run with the same image size, patch dropout and batch size."""

    first: int
    """Number of the first step, counted from 0."""
    steps: int
    image_size: tuple[int, int]
    patch_dropout: float
    batch_size: int
    cost: float = 1.0
    """FLOPs of a step as a fraction of those of a step in the last phase."""
    flops: int = 0
    """FLOPs of a step of all processes. Frozen layers have no backward pass. 0 if the FLOPs are unknown."""

    def step_flops(self, network: AnyConfig, task: Task, trained_blocks: int | None = None) -> int:
        """Return the FLOPs of one step. By default all blocks are trained, otherwise the last `trained_blocks`."""
        cost = task.step_cost(self.network(network), "float32")
        each = cost.network.training_flops(trained_blocks=trained_blocks) + cost.flops
        return self.batch_size * task.views * each

    def network(self, network: AnyConfig) -> AnyConfig:
        """Return the config of the run's network with the image size and the patch dropout of this phase."""
        fields: dict[str, Any] = {"patch_dropout": self.patch_dropout} if hasattr(network, "patch_dropout") else {}
        return replace(network, image_size=self.image_size, **fields)


def phases_of(config: TrainConfig, network: AnyConfig | None, steps: int) -> tuple[Phase, ...]:
    """Return the phases of a run of this many steps. A run without early settings has one phase.

    `network` is the config of the run's network, or None for a network of the user's own class. Raises `ConfigError`
    for settings that do not fit the run's own settings or the network, and if the task cannot train the network.
    """
    own: dict[str, Any] = {
        "early_image_size": config.images.image_size,
        "early_patch_dropout": getattr(network, "patch_dropout", 0.0),
        "early_batch_size": config.run.batch_size,
    }
    courses = {name: config.early.course(name) for name in KINDS}
    raise_problems(_problems(config, network, own))
    firsts = sorted({0, *(round(end * steps) for course in courses.values() for _, end in course)} - {steps})
    found = []
    for first, after in itertools.pairwise((*firsts, steps)):
        size, dropout, batch_size = (
            next((value for value, end in course if first < round(end * steps)), own[name])
            for name, course in courses.items()
        )
        found.append(Phase(first, after - first, size, dropout, batch_size))
    last = found[-1]
    if network is None:
        return tuple(replace(phase, cost=phase.batch_size / last.batch_size) for phase in found)
    for phase in found:
        config.task.check_network(phase.network(network))
    flops = last.step_flops(network, config.task)
    return tuple(replace(phase, cost=phase.step_flops(network, config.task) / flops) for phase in found)


def with_flops(
    phases: Sequence[Phase], config: TrainConfig, network: AnyConfig | None, outputs: int
) -> tuple[Phase, ...]:
    """Return the phases with the FLOPs of their steps, for a network with this number of outputs.

    The phases stay as they are if no formula gives the FLOPs: for networks of the user's own class, with adapters, and
    with frozen blocks in a task that also trains on views of another size.
    """
    start, task = config.start, config.task
    has_local = task.local_views_of(config.images, config.augment, config.run.seed) is not None
    if network is None or start.lora_rank is not None or (start.train_blocks is not None and has_local):
        return tuple(phases)
    headed = network.with_head(outputs)
    return tuple(replace(phase, flops=phase.step_flops(headed, task, start.train_blocks)) for phase in phases)


def first_steps(phases: Sequence[Phase], steps: int) -> tuple[Phase, ...]:
    """Return the phases of the first `steps` steps of a run. The last phase is shortened."""
    return tuple(replace(phase, steps=min(phase.steps, steps - phase.first)) for phase in phases if phase.first < steps)


def run_flops(phases: Sequence[Phase], network: AnyConfig, task: Task) -> int:
    """Return the FLOPs of all training steps of a run. Evaluations are not counted."""
    return sum(phase.steps * phase.step_flops(network, task) for phase in phases)


def cost_text(phases: Sequence[Phase], network: AnyConfig, task: Task) -> str:
    """Return a sentence about the arithmetic of the training steps."""
    flops, steps = run_flops(phases, network, task), sum(phase.steps for phase in phases)
    whole = steps * phases[-1].step_flops(network, task)
    return (
        f"the steps in {len(phases)} phases compute {flops / 1e12:,.3g} TFLOP, {flops / whole:.0%} of as many steps of "
        "the last phase"
    )


def use_patch_dropout(module: nn.Module, rate: float) -> None:
    """Set the patch dropout of the transformer in an objective. A network without patch dropout stays as it is."""
    for part in module.modules():
        vit = transformer(part)
        if vit is not None:
            vit.patch_dropout = rate


def _problems(config: TrainConfig, network: AnyConfig | None, own: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages about settings that do not fit the run's own settings or the network."""
    early = config.early
    for name, last in own.items():
        yield from early.conflicts(name, last)
    if early.early_image_size and config.augment.crop_from is not None:
        yield (
            f"early_image_size and crop_from={config.augment.crop_from} cannot be combined, because the boxes of "
            "crop_from have the network's image size; choose crop_area, or leave one of them out"
        )
    for name in ("early_image_size", "early_patch_dropout"):
        if getattr(early, name) and network is None:
            yield f"{name} cannot be combined with network=...; it works only for networks that are built from a config"
    if early.early_patch_dropout and network is not None and not hasattr(network, "patch_dropout"):
        yield "early_patch_dropout drops patches of a transformer, but a ResNet has none; leave it out"
    if network is not None:
        for size, _ in early.course("early_image_size"):
            try:
                network.grid_of(*size)
            except ConfigError as error:
                yield f"early_image_size: {error}"
