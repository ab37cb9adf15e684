"""The parts of a prepared run: its network, its state before the first step, its plan, and its model as it is saved."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from vitrail.data.pipeline import Ranks, Stage, TrainingBatches, skips_allowed
from vitrail.errors import ConfigError
from vitrail.machine import available_memory
from vitrail.models.compiled import compile_blocks
from vitrail.models.linear.low_bits import use_float8
from vitrail.models.variants import build
from vitrail.processes.group import Processes
from vitrail.tasks.task import Objective
from vitrail.training.job import Plan, Setup, check_network, network_config_of, schedule_of
from vitrail.training.optimizer import check_names, make_optimizer
from vitrail.training.sharding import GradientSum, ShardedGradients, StreamedCopy, can_stream, shard
from vitrail.training.start import Origin, choose_weights, head_outputs, network_from, start_head
from vitrail.training.state import Average, TrainState, process_seed
from vitrail.weights.bundle import Bundle, weights_sha256

KEPT_FRACTION = 1 / 8
"""Fraction of the free memory that the pixels of the training images may take."""


def make_network(
    setup: Setup, model: Bundle | None, on_progress: Callable[[int, int], None] | None = None
) -> tuple[Any, Setup, tuple[str, ...]]:
    """Return the network on its device, the setup with the network's origin, and notes for the user.

    The weights are those of `model`. Without a `model`, the weights are random. If the setup has an origin, a
    checkpoint replaces the random weights later. `on_progress` is that of `head_outputs`.
    """
    config, task, splits = setup.config, setup.config.task, setup.splits
    notes: tuple[str, ...] = ()
    names = task.output_names(splits)
    if setup.objects.network is not None:
        network: Any = setup.objects.network.to(setup.first_device)
        check_network(network, config.images, len(names))
        check_names(network, config.optimizer)
        return network, setup, notes
    if model is not None:
        network, kept, notes = network_from(model, config.start, config.images, config.model.overrides, task, names)
        if config.start.linear_head:
            outputs = head_outputs(network.to(setup.device), names, config, on_progress, setup.processes)
            notes = (*notes, start_head(outputs, splits, kept=kept))
        if kept or config.start.linear_head:
            task.load_head(network, splits)
        origin = setup.origin or Origin(weights_sha256(model.network), network.config)
        setup = replace(setup, origin=origin)
    else:
        network = build(network_config_of(config, None, setup.origin, num_classes=len(names)))
    choose_weights(network, config.start)
    if config.run.checkpoint_activations:
        network.checkpoints_activations = True
    check_names(network, config.optimizer)
    network.to(setup.first_device)
    if config.run.precision == "float8":
        use_float8(network)
    compile_blocks(network, setup.compile)
    return network, setup, notes


def make_state(setup: Setup, network: nn.Module) -> TrainState:
    """Return the state before the first step."""
    config = setup.config
    optimizer = config.optimizer.for_batch_size(config.run.batch_size)
    objective = config.task.objective(network, setup.splits).to(setup.first_device)
    setup.processes.copy_from_first((*objective.parameters(), *objective.buffers()))
    objective.begin(config.images, config.run.seed)
    copied: Objective | None = None
    streamed = None
    if setup.shards:
        if can_stream(objective):
            streamed = StreamedCopy(objective, setup.device, setup.processes)
            copied = streamed.objective
        else:
            copied = copy.deepcopy(objective).requires_grad_(False).to(setup.device)
        shard(objective, config.run.shard, setup.device, setup.processes)
    if setup.processes.rank:
        torch.manual_seed(process_seed(config.run.seed, setup.processes.rank))
    first, *later = _stages(setup)
    batches = TrainingBatches(
        setup.splits.train,
        first.preprocess,
        batch_size=first.batch_size,
        seed=config.run.seed,
        readers=setup.readers,
        ranks=Ranks(setup.processes.rank, setup.processes.world),
        partners=config.augment.mixes,
        crop=config.augment.crop(config.run.seed),
        views=config.task.views,
        local=first.local,
        later=later,
        keep=_keeps_pixels(setup),
    )
    average = Average(objective, optimizer.average, optimizer.average_start) if optimizer.average else None
    made = make_optimizer(objective, optimizer, config.run.precision)
    if copied is not None and isinstance(made, SGD):  # PyTorch's fused SGD does not take sharded weights
        for group in made.param_groups:
            group |= {"fused": False, "foreach": True}
    gradients: GradientSum | ShardedGradients | None = None
    if setup.processes.are_several:
        gradients = GradientSum(objective, setup.processes) if copied is None else ShardedGradients(setup.processes)
    return TrainState(objective, made, batches, average=average, gradients=gradients, copy=copied, streamed=streamed)


def _keeps_pixels(setup: Setup) -> bool:
    """Return True if later epochs should use the pixels that the first epoch decoded.

    This needs a run that reads its images more than once, and enough free memory (`KEPT_FRACTION`). Data that the user
    passes as an object may return another image each time, so it is read in every epoch.
    """
    config, images = setup.config, len(setup.splits.train)
    if "data" in setup.objects.names or (setup.steps - 1) * config.run.batch_size < images:
        return False
    size = max((stage.preprocess.image_size for stage in _stages(setup)), key=math.prod)
    return pixels_fit(images * config.images.channels * math.prod(size), setup.processes)


def pixels_fit(values: int, processes: Processes) -> bool:
    """Return True if the pixels of a run's images, one byte per value, may stay in memory (`KEPT_FRACTION`). Each of
    the processes of a machine has its own copy. False if the free memory is unknown."""
    needed = processes.place.local_world * values
    try:
        return needed <= KEPT_FRACTION * available_memory(torch.device("cpu"))
    except ConfigError:
        return False


def make_plan(setup: Setup) -> Plan:
    """Return the plan of the run."""
    config, optimizer = setup.config, setup.config.optimizer
    return Plan(
        steps=setup.steps,
        schedule=schedule_of(config, setup.splits, setup.steps),
        accumulation=config.run.accumulation,
        clip=optimizer.clip,
        seed=config.run.seed,
        augment=config.augment,
        preprocess=config.images,
        precision=config.run.precision,
        device=setup.device,
        decay_factor=optimizer.decay_factor,
        batch_size=config.run.batch_size,
        images=len(setup.splits.train),
        classes=len(setup.splits.classes),
        patience=config.run.patience,
        most_skipped=skips_allowed(len(setup.splits.train), config.data.max_skipped),
        # The worker processes of a run are not distinguished from other programs.
        adapts_threads=config.run.compute_threads is None
        and setup.device.type == "cpu"
        and not config.run.processes
        and not setup.processes.are_several,
        chooses_readers=config.run.threads == "auto" and not setup.processes.are_several,
        processes=setup.processes,
        faults=config.faults,
        phases=setup.phases,
    )


def make_bundle(setup: Setup, objective: Objective) -> Bundle:
    """Return the model as it would be saved now. `objective` contains the network in training."""
    config, splits = setup.config, setup.splits
    provenance: dict[str, Any] = {
        "data": config.data.spec,
        "data_fingerprint": setup.fingerprint,
        "validation": config.data.validation,
        "validation_share": config.data.validation_share if splits.validation is not None else 0.0,
        "cut_method": config.data.cut_method,
        "recipe": config.run.name,
        "seed": config.run.seed,
        "steps": setup.steps,
        "kept": config.run.keep,
    }
    if setup.origin is not None:
        provenance |= {"init": config.start.init, "init_sha256": setup.origin.sha256}
    return config.task.bundle(objective, config.task.output_names(splits), config.images, provenance)


def _stages(setup: Setup) -> list[Stage]:
    """Return the stages of the training batches, one for each phase."""
    config = setup.config
    images = [replace(config.images, image_size=phase.image_size) for phase in setup.phases]
    return [
        Stage(
            phase.first,
            config.augment.training_preprocess(of_phase),
            phase.batch_size,
            config.task.local_views_of(of_phase, config.augment, config.run.seed),
        )
        for phase, of_phase in zip(setup.phases, images, strict=True)
    ]
