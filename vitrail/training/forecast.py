"""Forecast of the memory that a run needs, before it starts."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from vitrail.data.pipeline import queue_bytes
from vitrail.machine import check_memory, total_memory
from vitrail.models.cost.footprint import (
    FootprintPrecision,
    activation_bytes,
    checkpointed_bytes,
    prediction_bytes,
    training_bytes,
)
from vitrail.models.variants import AnyConfig
from vitrail.processes.group import Processes
from vitrail.tasks.task import StepCost
from vitrail.training.config import TrainConfig

__all__ = ["check_run_memory", "evaluation_batch", "run_bytes"]

EVALUATION_BATCH = 256
"""Largest number of images per forward pass in evaluations during a run."""

MEMORY_FRACTION = 1 / 8
"""Fraction of the machine's memory that an evaluation's batches may need."""


def check_run_memory(
    config: TrainConfig, network: AnyConfig | None, device: torch.device, processes: Processes = Processes()
) -> str:
    """Return a sentence about the memory that a run needs. Raises `ConfigError` if a run on the CPU needs more than is
    free.

    The need of a network of the user's own class (`network` is None) is unknown and not counted. Each of several
    processes has its part of every batch, and all processes of this machine share its memory.
    """
    run = config.run
    part = replace(run, batch_size=max(run.batch_size // processes.world, run.accumulation))
    parts = f" and --accumulation above {run.accumulation}" if run.accumulation < run.batch_size else ""
    size = " x ".join(map(str, config.images.image_size))
    return check_memory(
        processes.place.local_world * run_bytes(replace(config, run=part), network),
        device,
        f"training with {size} pixels and batches of {run.batch_size} images",
        f"try a smaller --image-size, a smaller --batch-size{parts}, or a smaller network",
    )


def run_bytes(config: TrainConfig, network: AnyConfig | None) -> int:
    """Return the bytes that a run needs on a CPU. They are those of the training step by its closed form, of the
    batches that are read ahead, of the batches of an evaluation, and of the copy of the state from which checkpoints in
    the background are written. An evaluation begins while training batches are read ahead."""
    run, images = config.run, config.images
    queue = queue_bytes(images, run.batch_size * config.task.views, run.readers)
    if (local := config.task.local_views_of(images, config.augment, run.seed)) is not None:
        queue += queue_bytes(local.preprocess, run.batch_size * local.count, run.readers)
    if network is None:
        return queue
    size = images.image_size
    cost = _cost(config, network)
    evaluation = evaluation_batch(config, network)
    predicting = prediction_bytes(network, evaluation, size) + queue_bytes(images, evaluation, run.readers)
    predicting += evaluation * cost.image_bytes + cost.fixed_bytes
    state = (12 + 4 * (config.optimizer.average > 0)) * (network.parameters() + cost.parameters)
    copied = state if run.background_checkpoints else 0
    return queue + copied + max(_step_bytes(config, network), state + predicting)


def evaluation_batch(config: TrainConfig, network: AnyConfig | None) -> int:
    """Return the number of images per forward pass in evaluations during a run. It is smaller than 256 only if batches
    of 256 images would need more than an eighth of the machine's memory. It is a power of two."""
    batch = EVALUATION_BATCH
    if network is None:
        return batch
    images, readers, each = config.images, config.run.readers, _cost(config, network).image_bytes
    while batch > 1:
        needed = prediction_bytes(network, batch, images.image_size) + queue_bytes(images, batch, readers)
        needed += batch * each
        if needed <= MEMORY_FRACTION * total_memory():
            break
        batch //= 2
    return batch


def _precision(config: TrainConfig) -> FootprintPrecision:
    return "float32" if config.run.precision == "float32" else "bf16"


def _cost(config: TrainConfig, network: AnyConfig) -> StepCost:
    """Return what the task adds to the network."""
    return config.task.step_cost(network.with_image_size(config.images.image_size), _precision(config))


def _step_bytes(config: TrainConfig, network: AnyConfig) -> int:
    """Return the bytes of a training step. Frozen weights have no moments, and frozen blocks keep no activations."""
    run, start, size, precision = config.run, config.start, config.images.image_size, _precision(config)
    rows = config.task.views * math.ceil(run.batch_size / run.accumulation)
    cost = _cost(config, network)
    network = cost.network
    whole = training_bytes(network, rows, size, precision) + rows * cost.image_bytes
    whole += 16 * cost.parameters + cost.fixed_bytes
    if config.optimizer.average:
        whole += 4 * (network.parameters() + cost.parameters)
    if run.checkpoint_activations:
        whole -= rows * (activation_bytes(network, size, precision) - checkpointed_bytes(network, size, precision))
    if start.lora_rank is not None:
        return whole - 8 * network.parameters()
    if start.train_blocks is not None and start.train_blocks < network.num_blocks:
        frozen = prediction_bytes(network, rows, size, precision)
        return frozen + int(start.train_blocks / network.num_blocks * whole)
    return whole
