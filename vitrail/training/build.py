"""The parts of a prepared run: its network, its state before the first step, and its model as it is saved."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from vitrail.data.batch import Rows
from vitrail.data.pipeline import Stage, TrainingBatches
from vitrail.data.source import Samples, key_hash, truth_of
from vitrail.errors import ConfigError
from vitrail.machine import available_memory
from vitrail.models.compiled import compile_blocks
from vitrail.models.variants import build
from vitrail.processes.group import Processes
from vitrail.tasks.own_model import own_config
from vitrail.tasks.task import Objective
from vitrail.training.job import Job, check_network, network_config_of
from vitrail.training.optimizer import make_optimizer
from vitrail.training.sharding import GradientSum, StreamedCopy, can_stream, shard
from vitrail.training.start import Origin, choose_weights, network_from
from vitrail.training.state import Average, TrainState, process_seed
from vitrail.weights.bundle import Bundle, weights_sha256

KEPT_FRACTION = 1 / 8
"""Fraction of the free memory that the pixels of the training images may take."""

EXAMINED_TEXTS = 10_000
"""Largest number of texts whose lengths are examined when a run begins."""


def make_network(
    job: Job, model: Bundle | None, on_progress: Callable[[int, int], None] | None = None
) -> tuple[Any, Job, tuple[str, ...]]:
    """Return the network on its device, the job with the network's origin, and notes for the user.

    The weights are those of `model`. Without a `model`, the weights are random. If the job has an origin, a
    checkpoint replaces the random weights later. `on_progress` is that of `head_outputs`.
    """
    config, task, splits = job.config, job.config.task, job.splits
    notes: tuple[str, ...] = ()
    names = task.output_names(splits)
    if job.own_network is not None:
        network: Any = job.own_network.to(job.first_device)
        check_network(network, config.images, len(names))
        return network, job, notes
    if model is not None:
        network, kept, notes = network_from(model, config.start, config.images, config.model.overrides, task, names)
        if config.start.linear_head:
            from vitrail.training.linear_start import head_outputs, start_head  # few runs need what it imports

            outputs = head_outputs(network.to(job.device), names, config, on_progress, job.processes)
            before = copy.deepcopy(network.head.state_dict())
            notes = (*notes, start_head(outputs, splits, kept=kept))
            kept = kept and all(torch.equal(weight, before[name]) for name, weight in network.head.state_dict().items())
        if kept or config.start.linear_head:
            task.load_head(network, splits)
        texts = model.provenance.get("zero_shot")
        made_of = None if texts is None else {**texts, "classes": list(model.classes)}
        origin = Origin(
            weights_sha256(model.network), network.config, texts if kept else None, made_of, model.provenance
        )
        job = replace(job, origin=job.origin or origin)
    else:
        network = build(network_config_of(config, None, job.origin, num_classes=len(names)))
    choose_weights(network, config.start)
    if job.words is None:
        job = replace(job, words=task.words(model, network, splits))
        notes = (*notes, *_notes_on_texts(job))
    if config.run.checkpoint_activations:
        network.checkpoints_activations = True
    network.to(job.first_device)
    if config.run.precision == "float8":
        from vitrail.models.linear.float8 import use_float8

        use_float8(network)
    compile_blocks(network, job.compile)
    return network, job, notes


def _notes_on_texts(job: Job) -> tuple[str, ...]:
    """Return a note if the text tower does not read some of the texts to their end. The first ones are examined. A
    task of a user can learn with a text tower from images that have no texts."""
    rows = range(min(len(job.splits.train), EXAMINED_TEXTS))
    if job.words is None or (texts := truth_of(job.splits.train, rows).texts) is None:
        return ()
    some = [texts[row] for row in range(min(len(texts), EXAMINED_TEXTS))]
    return job.words.notes(some, job.words.tokenizer.encode(some).cut)


def make_state(job: Job, network: nn.Module) -> TrainState:
    """Return the state before the first step."""
    config = job.config
    optimizer = config.optimizer.for_batch_size(config.run.batch_size)
    objective = config.task.objective(network, job.splits)
    if job.words is not None:
        objective.receive(job.words)
    objective.to(job.first_device)
    job.processes.copy_from_first((*objective.parameters(), *objective.buffers()))
    objective.begin(config.images, config.run.seed)
    copied: Objective | None = None
    streamed = None
    if job.shards:
        if can_stream(objective):
            streamed = StreamedCopy(objective, job.device, job.processes)
            copied = streamed.objective
        else:
            copied = copy.deepcopy(objective).requires_grad_(False).to(job.device)
        shard(objective, config.run.shard, job.device, job.processes)
    if job.processes.rank:
        torch.manual_seed(process_seed(config.run.seed, job.processes.rank))
    rows = Rows(
        crop=config.augment.crop(config.run.seed),
        views=config.task.views,
        outlines=config.task.reads_outlines(job.network or own_config(network)),
        tokenizer=objective.text_tokenizer,
        partners=config.augment.mixes,
    )
    batches = TrainingBatches(
        job.splits.train,
        _stages(job),
        seed=config.run.seed,
        readers=job.readers,
        ranks=job.processes.place,
        rows=rows,
        keep=_keeps_pixels(job),
    )
    average = Average(objective, optimizer.average, optimizer.average_start) if optimizer.average else None
    made = make_optimizer(objective, optimizer, config.run.precision)
    if copied is not None and isinstance(made, SGD):  # PyTorch's fused SGD does not take sharded weights
        for group in made.param_groups:
            group |= {"fused": False, "foreach": True}
    gradients = GradientSum(objective, job.processes) if job.processes.are_several and copied is None else None
    return TrainState(objective, made, batches, average=average, gradients=gradients, copy=copied, streamed=streamed)


def _keeps_pixels(job: Job) -> bool:
    """Return True if later epochs should use the pixels that the first epoch decoded.

    This needs a run that reads its images more than once, and enough free memory (`KEPT_FRACTION`). Data that the user
    passes as an object may return another image each time, so it is read in every epoch.
    """
    config, images = job.config, len(job.splits.train)
    if "data" in job.objects or (job.steps - 1) * config.run.batch_size < images:
        return False
    size = max((stage.preprocess.image_size for stage in _stages(job)), key=math.prod)
    return pixels_fit(images * config.images.channels * math.prod(size), job.processes)


def pixels_fit(values: int, processes: Processes) -> bool:
    """Return True if the pixels of a run's images, one byte per value, may stay in memory (`KEPT_FRACTION`). Each of
    the processes of a machine has its own copy. False if the free memory is unknown."""
    needed = processes.place.local_world * values
    try:
        return needed <= KEPT_FRACTION * available_memory(torch.device("cpu"))
    except ConfigError:
        return False


def make_bundle(job: Job, objective: Objective) -> Bundle:
    """Return the model as it would be saved now. `objective` contains the network in training."""
    config, splits = job.config, job.splits
    provenance: dict[str, Any] = {
        "data": config.data.spec,
        "data_fingerprint": job.fingerprint,
        "validation": config.data.validation,
        "validation_share": config.data.validation_share if splits.validation is not None else 0.0,
        "cut_method": config.data.cut_method,
        "recipe": config.run.name,
        "seed": config.run.seed,
        "steps": job.steps,
        "kept": config.run.keep,
    }
    if config.data.mix:
        provenance["mix"] = list(config.data.mix)
    if splits.validation is not None:
        provenance["validation_keys"] = key_hash(splits.validation)
    if isinstance(splits.train, Samples) and splits.train.targets.ids:
        provenance["class_ids"] = list(splits.train.targets.ids)
    if job.origin is not None:
        provenance |= {
            "init": config.start.init, "init_sha256": job.origin.sha256, "initial": job.origin.provenance,
        }  # fmt: skip
        if job.origin.zero_shot is not None:
            provenance["zero_shot"] = job.origin.zero_shot
    return config.task.bundle(objective, config.task.output_names(splits), config.images, provenance)


def _stages(job: Job) -> list[Stage]:
    """Return the stages of the training batches, one for each phase."""
    config = job.config
    images = [replace(config.images, image_size=phase.image_size) for phase in job.phases]
    return [
        Stage(
            config.augment.training_preprocess(of_phase),
            phase.batch_size,
            phase.first,
            config.task.local_views_of(of_phase, config.augment, config.run.seed),
        )
        for phase, of_phase in zip(job.phases, images, strict=True)
    ]
