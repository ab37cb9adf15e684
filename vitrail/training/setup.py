"""Preparation of a run from its config: the checks of its settings, and its open data.

All of this happens before any file is written, so a run whose settings cannot work leaves no files behind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vitrail.data.pipeline import (
    Readers,
    check_divisible,
    default_threads,
)
from vitrail.data.source import Source, fingerprint
from vitrail.data.sources import OpenedData
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluators import Together, evaluators_of
from vitrail.machine import TrainingPrecision, describe, pick_device, resolve_precision
from vitrail.models.compiled import Compiled, resolve_compile
from vitrail.models.config import ModelConfig
from vitrail.models.linear.float8 import check_float8
from vitrail.models.linear.float32 import resolve_float32_products
from vitrail.models.variants import AnyConfig
from vitrail.processes.group import Processes
from vitrail.settings import raise_problems
from vitrail.tasks.own_model import own_config
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.monitoring.examiner import Probe
from vitrail.training.optimization.duration import RunLength
from vitrail.training.optimization.layers import check_choice
from vitrail.training.optimization.schedule import Schedule
from vitrail.training.own import check_settings, named_splits
from vitrail.training.parallel.sharding import shard_problems
from vitrail.training.records.record import FORMAT
from vitrail.training.reporting.trackers import check_trackers
from vitrail.training.start import Origin, fitted
from vitrail.training.steps.phases import Phase, phases_of, with_flops
from vitrail.weights.bundle import Bundle

__all__ = ["OwnObjects", "Setup", "check_columns", "network_config_of", "prepare", "record_of", "schedule_of"]


@dataclass(frozen=True)
class OwnObjects:
    """Data and a network that the user passes as Python objects, instead of naming them in the config.

    `OpenedData` does not count as the user's own object: it is the config's data set, opened earlier.
    """

    data: Source | Splits | OpenedData | None = None
    network: nn.Module | None = None

    @property
    def names(self) -> list[str]:
        """Names of the objects that were passed, as `run.json` records them."""
        own = {"data": None if isinstance(self.data, OpenedData) else self.data, "network": self.network}
        return [name for name, value in own.items() if value is not None]


@dataclass(frozen=True)
class Setup:
    """A config that has been checked on this machine, with its open data."""

    config: TrainConfig
    """The checked config. This machine's precision, library of float32 products and number of threads replace the
    defaults, and a run that is resumed on another machine keeps them."""
    device: torch.device
    compile: Compiled
    splits: Splits
    fingerprint: str
    """A hash of the keys and targets of all splits."""
    steps: int
    origin: Origin | None
    """The model that the weights come from, or None."""
    probes: tuple[Probe, ...]
    objects: OwnObjects
    network: AnyConfig | None
    """The config of the run's network with a head for two classes, or None for a network of the user's own."""
    phases: tuple[Phase, ...]
    processes: Processes = Processes()

    @property
    def shards(self) -> bool:
        """True if each process keeps only a part of the weights."""
        return self.config.run.shard != "none" and self.processes.are_several

    @property
    def first_device(self) -> torch.device:
        """Device of the network before the first step. Weights that are divided among processes are first in main
        memory, because they may not fit on one device."""
        return torch.device("cpu") if self.shards else self.device

    @property
    def readers(self) -> Readers:
        """The worker threads and processes that read and decode images in each process of the run."""
        readers, here = self.config.run.readers, self.processes.place.local_world
        if readers.threads is not None or here == 1:
            return readers
        return replace(readers, threads=max(1, default_threads() // here))


def prepare(
    config: TrainConfig,
    *,
    model: Bundle | None = None,
    origin: Origin | None = None,
    objects: OwnObjects = OwnObjects(),
    measure_test: bool = True,
    processes: Processes = Processes(),
) -> Setup:
    """Check a config and open its data. Raises `UserError` for settings and data that cannot work.

    `model` is the model to start from. If a run continues, `origin` is the record of that model in run.json. Without
    `measure_test` the run has no test split. Several `processes` must find the same data.
    """
    check_trackers(config.run.track)
    device = pick_device(processes.device_name(config.run.device))
    precision = resolve_precision(config.run.precision, device)
    config = config.override(
        precision=precision,
        float32_products=resolve_float32_products(config.run.float32_products),
        compute_threads=_fixed_threads(config.run, precision, device),
    )
    compiled: Compiled = "off"
    network_config: AnyConfig | None = None
    if objects.network is not None:
        check_settings(config)
        config = replace(config, model=ModelConfig())
    else:  # before opening the data, whose number of classes changes none of these checks
        network_config = network_config_of(config, model, origin, num_classes=2)
        _check_network_settings(config, network_config)
        compiled = resolve_compile(config.run.compile, device, network_config)
    config, splits = _opened(config, objects.data)
    config.task.check_data(splits)
    config.task.selection(splits)
    _check_choosing(config, splits)
    steps = config.total_steps(len(splits.train))
    schedule_of(config, splits, steps)  # checks that its parts fit into the run
    phases = phases_of(config, network_config, steps)
    raise_problems(shard_problems(config.run.shard, config.optimizer, processes))
    check_divisible((phase.batch_size for phase in phases), processes.world)
    found = fingerprint(splits.train, splits.validation, splits.test)
    _check_equal(processes, found, config)
    if network_config is None:
        config.task.check_network(own_config(objects.network))
    return Setup(
        config=config,
        device=device,
        compile=compiled,
        splits=splits if measure_test else replace(splits, test=None),
        fingerprint=found,
        steps=steps,
        origin=origin,
        probes=_probes(config, splits, steps),
        objects=objects,
        network=network_config,
        phases=with_flops(phases, config, network_config, len(config.task.output_names(splits))),
        processes=processes,
    )


def _check_network_settings(config: TrainConfig, network: AnyConfig) -> None:
    """Raise `ConfigError` for settings that do not fit the kind of network."""
    if config.run.precision == "float8":
        check_float8(network)
    check_choice(config.start, network)
    if config.run.checkpoint_activations and not network.recomputes_blocks:
        raise ConfigError(
            "checkpoint_activations=True computes blocks of a transformer again, but a ResNet has none; leave it out"
        )
    if getattr(network, "reversible", False):
        if config.run.checkpoint_activations:
            raise ConfigError(
                "checkpoint_activations=True keeps the inputs of blocks, but reversible=True keeps none of them; leave "
                "checkpoint_activations out"
            )
        if config.run.shard != "none":
            raise ConfigError(
                f"shard={config.run.shard!r} gathers the weights of a block when it is called, but with "
                "reversible=True the backward pass computes its branches one by one; choose shard='none'"
            )


def _opened(config: TrainConfig, data: Source | Splits | OpenedData | None) -> tuple[TrainConfig, Splits]:
    """Return the config with the name of the data, and the splits. `data` replaces the data that the config names."""
    if data is None:
        check_columns(config)
        return config, config.data.open(unlabelled="none" in config.task.targets)
    if isinstance(data, OpenedData):
        return config, config.data.cut(data)
    own = named_splits(data)
    config = config.override(data=own.title)
    return config, config.data.cut(own)


def _check_equal(processes: Processes, found: str, config: TrainConfig) -> None:
    """Raise `ConfigError` if several processes found different data or chose different precisions."""
    everyone = processes.gather((found, config.run.precision))
    for rank, (data, precision) in enumerate(everyone):
        if data != everyone[0][0]:
            raise ConfigError(
                f"data={config.data.spec!r} is not the same for all processes: process {rank} finds other images or "
                "labels than process 0; give all machines the same data"
            )
        if precision != everyone[0][1]:
            raise ConfigError(
                f"precision: process {rank} would compute in {precision} and process 0 in {everyone[0][1]}; choose one "
                "with --precision"
            )


def check_columns(config: TrainConfig) -> None:
    """Raise `ConfigError` if the task learns numbers, and the config names no columns of numbers."""
    if config.task.targets == ("numbers",) and not config.data.numbers:
        raise ConfigError(
            f"numbers: the task {config.task.name} needs the names of numeric columns, such as numbers=('age',)"
        )


def record_of(setup: Setup) -> dict[str, Any]:
    """Return the content of `run.json`: the config, the data and the machine, which are enough to repeat the run."""
    splits = {"train": setup.splits.train, "validation": setup.splits.validation, "test": setup.splits.test}
    return {
        "format": FORMAT,
        "config": setup.config.to_plain(),
        "objects": setup.objects.names,
        "steps": setup.steps,
        "init": None if setup.origin is None else setup.origin.to_plain(),
        "models": setup.config.task.models(),
        "data": {
            **{name: 0 if source is None else len(source) for name, source in splits.items()},
            "fingerprint": setup.fingerprint,
            "classes": list(setup.splits.classes),
            "notes": list(setup.splits.notes),
        },
        "machine": describe(setup.device),
    }


def network_config_of(
    config: TrainConfig, model: Bundle | None, origin: Origin | None, *, num_classes: int
) -> AnyConfig:
    """Return the config of the run's network: that of the model to start from, or of its record, or of the settings."""
    images = config.images
    if model is not None:
        return fitted(model.network.config, config.start.init, images, config.model.overrides, num_classes)
    if origin is not None:
        return origin.network
    return config.model.resolve(num_classes=num_classes, image_size=images.image_size, channels=images.channels)


def _fixed_threads(run: RunConfig, precision: TrainingPrecision, device: torch.device) -> int | None:
    """Return the number of compute threads that the whole run uses, or None if the number follows the free cores.

    Sums depend on the number of threads, so a float32 run that is resumed uses the same number.
    """
    if run.compute_threads is None and (run.deterministic or (precision == "float32" and device.type == "cpu")):
        return torch.get_num_threads()
    return run.compute_threads


def schedule_of(config: TrainConfig, splits: Splits, steps: int) -> Schedule:
    """Return the schedule of the learning rate. Raises `ConfigError` if parts of it do not fit into the run."""
    optimizer = config.optimizer.for_batch_size(config.run.batch_size)
    return optimizer.schedule_of(RunLength(steps, config.mean_batch_size, len(splits.train)))


def _probes(config: TrainConfig, splits: Splits, steps: int) -> tuple[Probe, ...]:
    """Return the probes that the config asks for. Raise `ConfigError` if no image has a label to measure them by."""
    run = config.run
    if not run.probe:
        return ()
    if splits.target_kind == "none":
        raise ConfigError(
            f"probe={run.probe!r} is measured by labels, but the images of {splits.title} have none; leave --probe out"
        )
    every = run.probe_every or math.ceil(steps / max(run.evaluations, 1))
    evaluators = evaluators_of(
        run.probe, {"fewshot": {"allow_fewer": True}}
    )  # allow_fewer: small classes have few images
    return (Probe(run.probe, every, Together(evaluators)),)


def _check_choosing(config: TrainConfig, splits: Splits) -> None:
    """Raise `ConfigError` if the run has to choose the best weights but never evaluates any."""
    run = config.run
    if splits.validation is not None and run.evaluations:
        return
    reason = (
        "needs a validation split and evaluations, but this run does not have both: "
        f"validation_share={config.data.validation_share} and evaluations={run.evaluations}."
    )
    if run.keep == "best":
        raise ConfigError(f"keep='best' {reason} Change one of these, or choose keep='last'")
    if run.patience is not None:
        raise ConfigError(f"patience={run.patience} {reason} Change one of these, or leave patience out")
