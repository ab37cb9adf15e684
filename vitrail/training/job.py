"""Preparation of a run from its config: checks of its settings, its data, its steps and its memory.

All of this happens before any file is written, so a run whose settings cannot work leaves no files behind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vitrail.data.augment.settings import Augment
from vitrail.data.objects import Mask, Objects
from vitrail.data.pipeline import Readers, check_divisible, default_threads, queue_bytes
from vitrail.data.pixels.decode import MAX_PIXELS, pixel_limit
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import (
    Sample,
    Samples,
    Source,
    check_outlines,
    evenly,
    fingerprint,
    has_soft_targets,
    target_kind,
    truth_of,
)
from vitrail.data.sources import OpenedData
from vitrail.data.splits import Splits
from vitrail.data.targets import Target, TargetKind
from vitrail.errors import ConfigError, DataError, UndecodableImage, plural
from vitrail.evaluation.evaluators import EVALUATORS, OF_PLACED, Evaluator, evaluators_of, measure
from vitrail.machine import check_memory, describe, pick_device, resolve_precision, total_memory
from vitrail.models.compiled import Compiled, resolve_compile
from vitrail.models.cost import activation_bytes, checkpointed_bytes, prediction_bytes, training_bytes
from vitrail.models.linear.float32 import resolve_float32_products
from vitrail.models.network import FootprintPrecision
from vitrail.models.variants import AnyConfig, AnyNetwork, ModelConfig, transformer
from vitrail.processes.group import Processes
from vitrail.settings import Checked, raise_problems, setting, typed
from vitrail.tasks.own_model import own_config
from vitrail.tasks.task import Position, StepCost, Task
from vitrail.training.config import KINDS, TrainConfig
from vitrail.training.folder import FORMAT
from vitrail.training.log import check_trackers
from vitrail.training.schedule import RunLength, Schedule, is_zero
from vitrail.training.sharding import shard_problems
from vitrail.training.start import Origin, check_choice, fitted, head_fields
from vitrail.weights.answers import DENSE
from vitrail.weights.bundle import Bundle, check_loadable
from vitrail.weights.words import Words


@dataclass(frozen=True)
class Job:
    """The fixed facts of a run: its config, checked on this machine, its open data, and its steps."""

    config: TrainConfig
    """The checked config. This machine's precision, library of float32 products, number of threads and limit on pixels
    replace the defaults, and a run that is resumed on another machine keeps them."""
    device: torch.device
    splits: Splits
    steps: int
    phases: tuple[Phase, ...]
    """The phases of the run, in order."""
    compile: Compiled = "off"
    fingerprint: str = ""
    """A hash of the keys and targets of all splits."""
    origin: Origin | None = None
    """The model that the weights come from, or None."""
    probes: tuple[Probe, ...] = ()
    objects: tuple[str, ...] = ()
    """Names of the Python objects that the user passed, as `run.json` records them: "data", "network"."""
    own_network: nn.Module | None = None
    """The network that the user passed, or None."""
    network: AnyConfig | None = None
    """The config of the run's network with a head for two classes, or None for a network of the user's own."""
    processes: Processes = Processes()
    """The processes that share every batch."""
    words: Words | None = None
    """The text tower with which the run begins, or None if the task learns from no texts."""

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

    @cached_property
    def schedule(self) -> Schedule:
        """The learning rate of each step."""
        return schedule_of(self.config, self.splits, self.steps)

    @cached_property
    def backbone_schedule(self) -> Schedule:
        """The learning rate of each step for the weights below the head."""
        return schedule_of(self.config, self.splits, self.steps, below_head=True)

    @property
    def intervals(self) -> dict[str, int]:
        """Numbers of steps between two reports, evaluations and checkpoints. One of each also follows the last step.
        There is none for evaluations if the run has none."""
        run, is_evaluated = self.config.run, self.splits.validation is not None and self.config.run.evaluations
        found = {
            "report": min(50, math.ceil(self.steps / 100)),
            "checkpoint": math.ceil(self.steps / run.checkpoints),
        }
        return found | ({"evaluation": math.ceil(self.steps / run.evaluations)} if is_evaluated else {})

    def phase_of(self, step: int) -> Phase:
        """Return the phase of a step, counted from 0."""
        return next(phase for phase in reversed(self.phases) if phase.first <= step)

    def augment_at(self, step: int, *, height: int | None = None) -> Augment:
        """Return the augmentation of a step. Shifts are proportional to the height of the images, which is by default
        that of the step's phase."""
        augment, whole = self.config.augment, self.config.images.image_size[0]
        if height is None:
            height = self.phase_of(step).image_size[0]
        return augment if height == whole else replace(augment, shift=round(augment.shift * height / whole))

    def position(self, step: int) -> Position:
        """Return the position of a step in the run."""
        drawn = sum(phase.batch_size * phase.before(step) for phase in self.phases)
        return Position(step, self.steps, drawn / len(self.splits.train))

    def work(self, step: int) -> float:
        """Return the cost of the steps before this one, in steps of the last phase."""
        return sum(phase.cost * phase.before(step) for phase in self.phases)


def prepare(
    config: TrainConfig,
    *,
    data: Source | Splits | OpenedData | None = None,
    network: nn.Module | None = None,
    model: Bundle | None = None,
    origin: Origin | None = None,
    probes: Sequence[Probe] = (),
    measure_test: bool = True,
    processes: Processes = Processes(),
) -> Job:
    """Check a config and open its data. Raises `UserError` for settings and data that cannot work.

    `data` and `network` replace those that the config names. `model` is the model to start from. If a run continues,
    `origin` is the record of that model in run.json. `probes` are measured beside those of the config. Without
    `measure_test` the run has no test split. Several `processes` must find the same data.
    """
    if torch.get_default_dtype() != torch.float32:
        raise ConfigError(
            f"PyTorch's default number format is {torch.get_default_dtype()}, but weights are trained in float32; call "
            "torch.set_default_dtype(torch.float32) before"
        )
    processes.on_first(lambda: check_trackers(config.run.track))
    device = pick_device(processes.device_name(config.run.device))
    precision, limit = resolve_precision(config.run.precision, device), pixel_limit()
    threads = config.run.compute_threads
    if threads is None and (config.run.deterministic or device.type == "cpu"):
        threads = torch.get_num_threads()  # also when the run is resumed, because sums depend on it
    config = config.override(
        precision=precision,
        float32_products=resolve_float32_products(config.run.float32_products),
        compute_threads=threads,
        max_pixels=config.data.max_pixels or (None if limit == MAX_PIXELS else limit),
    )
    compiled: Compiled = "off"
    network_config: AnyConfig | None = None
    notes: list[str] = []
    if network is not None:
        _check_trainable(network)
        check_settings(config)
        if unused := [f"{name}={value!r}" for name, value in config.model.overrides.items()]:
            notes.append(f"{', '.join(unused)} have no effect, because network=... is trained as it is")
        config = replace(config, model=ModelConfig())
    else:  # before opening the data, whose number of classes changes none of these checks
        network_config = network_config_of(config, model, origin, num_classes=2)
        _check_network_settings(config, network_config)
        compiled = resolve_compile(config.run.compile, device, network_config)
    config, splits = _opened(config, data, model)
    splits = replace(splits, notes=(*splits.notes, *notes, *_without_effect(config, network_config)))
    config.task.check_data(splits)
    if not config.task.wanted["unlabelled"]:
        for name in ("validation", "test"):
            source = splits.sources.get(name)
            if source is not None and not truth_of(source).known.any():
                raise DataError(
                    f"the {name} split of {splits.title} cannot measure a model: none of its {len(source):,} images "
                    "has a known target; hold out more images with validation_share, or none with 0"
                )
    if config.task.reads_outlines(network_config or own_config(network)):
        for source in (splits.train, splits.validation, splits.test):
            if source is not None:
                check_outlines(source, "head_kind='queries'", "choose head_kind='pyramid', which learns boxes")
    if config.task.output in DENSE and origin is None:  # a run that continues keeps its images
        config.images.check_whole(f"the task {config.task.name}")
    config.task.selection(splits)
    _check_choosing(config, splits)
    steps = config.total_steps(len(splits.train))
    schedule_of(config, splits, steps, below_head=True)  # checks that its parts fit into the run
    phases = phases_of(config, network_config, steps)
    raise_problems(shard_problems(config.run.shard, config.optimizer, processes))
    check_divisible((phase.batch_size for phase in phases), processes.world)
    found = fingerprint(splits.train, splits.validation, splits.test)
    _check_equal(processes, found, config)
    if network_config is None:
        config.task.check_network(own_config(network))
    return Job(
        config=config,
        device=device,
        compile=compiled,
        splits=splits if typed(bool, measure_test, "measure_test") else replace(splits, test=None),
        fingerprint=found,
        steps=steps,
        origin=origin,
        probes=_probes(config, splits, steps, probes),
        objects=object_names(data, network),
        own_network=network,
        network=network_config,
        phases=with_flops(phases, config, network_config, len(config.task.output_names(splits))),
        processes=processes,
    )


def object_names(data: Source | Splits | OpenedData | None, network: nn.Module | None) -> tuple[str, ...]:
    """Return the names of the Python objects that the user passed instead of naming them in the config. `OpenedData`
    is none of them, because it is the config's data set, opened earlier."""
    own = {"data": None if isinstance(data, OpenedData) else data, "network": network}
    return tuple(name for name, value in own.items() if value is not None)


def _without_effect(config: TrainConfig, network: AnyConfig | None) -> Iterator[str]:
    """Yield a note for each setting that differs from its default, and has no effect beside the other settings."""
    for section in (*(getattr(config, item.name) for item in fields(config)), *filter(None, [network])):
        for item in fields(section):
            value, effect = getattr(section, item.name), item.metadata.get("effect")
            is_set = value != item.default if section is not network else item.name in config.model.overrides
            if effect is not None and is_set and not effect.holds(config if effect.of_run else section):
                yield f"{item.metadata.get('name', item.name)}={value!r} is not used: {effect.rule}"


def _check_network_settings(config: TrainConfig, network: AnyConfig) -> None:
    """Raise `ConfigError` for settings that do not fit the kind of network."""
    if config.run.precision == "float8":
        from vitrail.models.linear.float8 import check_float8

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


def _opened(
    config: TrainConfig, data: Source | Splits | OpenedData | None, model: Bundle | None
) -> tuple[TrainConfig, Splits]:
    """Return the config with the name of the data, and the splits. `data` replaces the data that the config names. A
    note says if the initial `model` learned from validation images."""
    if data is None:
        check_columns(config)
        data = config.data.open_whole(**config.task.wanted)
    if isinstance(data, OpenedData):
        splits = config.data.cut(data)
        is_cut = config.data.validation != "auto" or data.whole.validation is None
        if model is not None and splits.validation is not None and is_cut:
            from vitrail.evaluation.measured_images import overlap_note  # runs from scratch do not need it

            note = overlap_note(model, data, splits.validation)
            splits = splits if note is None else replace(splits, notes=(*splits.notes, f"{config.start.init}: {note}"))
        return config, splits
    own = named_splits(data)
    config = config.override(data=own.title)
    return config, config.data.cut(own, unlabelled=config.task.wanted["unlabelled"])


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


def record_of(job: Job) -> dict[str, Any]:
    """Return the content of `run.json`: the config, the data and the machine, which are enough to repeat the run."""
    splits = {"train": job.splits.train, "validation": job.splits.validation, "test": job.splits.test}
    return {
        "format": FORMAT,
        "config": job.config.to_plain(),
        "objects": list(job.objects),
        "steps": job.steps,
        "init": None if job.origin is None else job.origin.to_plain(),
        "models": job.config.task.models(),
        "data": {
            **{name: 0 if source is None else len(source) for name, source in splits.items()},
            "fingerprint": job.fingerprint,
            "classes": list(job.splits.classes),
            "notes": list(job.splits.notes),
        },
        "machine": describe(job.device),
    }


def network_config_of(
    config: TrainConfig, model: Bundle | None, origin: Origin | None, *, num_classes: int
) -> AnyConfig:
    """Return the config of the run's network: that of the model to start from, or of its record, or of the settings."""
    images = config.images
    if model is not None:
        return fitted(model.network.config, config.start.init, images, config.model.overrides, num_classes, config.task)
    if origin is not None:
        return origin.network
    made = config.model.resolve(num_classes=num_classes, image_size=images.image_size, channels=images.channels)
    kind: Any = head_fields(made, config.model.overrides, config.task)
    return replace(made, **kind)


def schedule_of(config: TrainConfig, splits: Splits, steps: int, *, below_head: bool = False) -> Schedule:
    """Return the schedule of the learning rate, by default that of the head. Raises `ConfigError` if parts of it do not
    fit into the run."""
    optimizer = config.optimizer.for_batch_size(config.run.batch_size)
    length = RunLength(steps, config.mean_batch_size, len(splits.train))
    return optimizer.backbone_schedule_of(length) if below_head else optimizer.schedule_of(length)


def _probes(config: TrainConfig, splits: Splits, steps: int, further: Sequence[Probe]) -> tuple[Probe, ...]:
    """Return the probes that the config asks for, and `further` ones. Raise `ConfigError` if no image has a label to
    measure them by, or if the data has no validation split to measure them on."""
    run = config.run
    if run.probe and splits.target_kind == "none":
        raise ConfigError(
            f"probe={run.probe!r} is measured by labels, but the images of {splits.title} have none; leave --probe out"
        )
    probes: tuple[Any, ...] = tuple(further) if isinstance(further, Iterable) else (further,)
    if not all(isinstance(one, Probe) for one in probes):
        raise ConfigError(f"probes={further!r:.60} must be a list of `Probe`")
    if run.probe:
        every = run.probe_every or math.ceil(steps / max(run.evaluations, 1))
        few = {"fewshot": {"allow_fewer": True}}  # small classes have few images
        evaluators = evaluators_of(run.probe, few if "fewshot" in map(str.strip, run.probe.split(",")) else {})
        kind = splits.target_kind
        usable = OF_PLACED.get(kind) or set(EVALUATORS).difference(*OF_PLACED.values())
        if wrong := sorted(evaluators.keys() - usable):
            raise ConfigError(
                f"probe={run.probe!r}: {', '.join(wrong)} cannot be measured on {splits.title}, whose targets are "
                f"{kind}; choose from {', '.join(sorted(usable))}, or leave it out"
            )
        probes = (Probe(run.probe, every, partial(measure, evaluators)), *probes)
    if probes and splits.validation is None:
        names = ", ".join(probe.name for probe in probes)
        raise ConfigError(
            f"{names} cannot be measured during the run, because the data has no validation split; leave --probe "
            "out, or set --validation-share above 0"
        )
    return probes


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


# Forecast of the memory that a run needs, before it starts.


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
    whole += 16 * cost.parameters + cost.fixed_bytes + config.task.views * run.batch_size * cost.batch_bytes
    if config.optimizer.average:
        whole += 4 * (network.parameters() + cost.parameters)
    if run.checkpoint_activations:
        whole -= rows * (activation_bytes(network, size, precision) - checkpointed_bytes(network, size, precision))
    if start.lora_rank is not None or (start.train_blocks is not None and getattr(network, "has_own_tokens", False)):
        return whole - 8 * network.parameters()
    if start.train_blocks is not None and start.train_blocks < network.num_blocks:
        frozen = prediction_bytes(network, rows, size, precision)
        return frozen + int(start.train_blocks / network.num_blocks * whole)
    return whole


# Checks of the user's own data and network before a run starts.


EXAMPLES = 8
"""Number of samples that are read to check a source."""


def named_splits(data: Any) -> Splits:
    """Return the user's data as splits, with a title for messages.

    Raises `ConfigError` with the broken rule if an object breaks the contract of `Source`.
    """
    splits = data if isinstance(data, Splits) else Splits(data, None, None)
    keys: set[str] = set()
    for name, source in splits.sources.items():
        check_source(source)
        own = set() if isinstance(source, Samples) else {source.key(index) for index in range(len(source))}
        if repeated := len(keys & own):
            text = "have keys of other splits; if they are the same images, its metrics are too good"
            splits = replace(splits, notes=(*splits.notes, f"{plural(repeated, 'sample')} of the {name} split {text}"))
        keys |= own
    return replace(splits, title=type(splits.train).__name__) if splits.title == Splits.title else splits


def check_source(source: Any, examples: int = EXAMPLES) -> None:
    """Raise `ConfigError` with the broken rule if an object breaks the contract of `Source`.

    All keys and targets are read, and up to `examples` samples, spread evenly over the source.
    `vitrail.testing.check_source` checks the whole contract.
    """
    if isinstance(source, type):
        raise _broken(source, f"a source must be an object, not the class {source.__name__}")
    if not isinstance(source, Source):
        lacking = [name for name in ("classes", "__len__", "__getitem__", "key", "target") if not hasattr(source, name)]
        raise _broken(source, f"a source must have {' and '.join(lacking)}")
    classes, count = source.classes, len(source)
    if not isinstance(classes, tuple) or not all(isinstance(name, str) for name in classes):
        raise _broken(source, f"classes must be a tuple of names, not {classes!r:.60}")
    if len(set(classes)) < len(classes):
        raise _broken(source, f"classes must be different names, not {classes!r:.60}")
    if not count:
        raise _broken(source, "a source must have at least one sample")
    has_flag, has_method = hasattr(source, "has_soft_targets"), hasattr(source, "soft_target")
    if has_flag != has_method and (has_method or has_soft_targets(source)):
        raise _broken(source, "soft targets need both has_soft_targets = True and the method soft_target(index)")
    kind = target_kind(source)
    read = evenly(count, examples).tolist()
    for index in read if isinstance(source, Samples) else range(count):
        key, target = source.key(index), source.target(index)
        if not isinstance(key, str):
            raise _broken(source, f"key({index}) must be a name, not {key!r:.60}")
        if not target_fits(target, kind, len(classes)):
            raise _broken(source, f"target({index}) is {target!r:.60}, but {target_rule(kind, len(classes))}")
        if index not in read:
            continue
        try:
            sample = source[index]
        except UndecodableImage:
            continue
        if not all(hasattr(sample, name) for name in Sample.__annotations__):
            raise _broken(source, f"source[{index}] must be a Sample(key, image, target), not {sample!r:.60}")
        if sample.key != key or str(sample.target) != str(target):
            raise _broken(
                source, f"source[{index}] must have the key and the target that key({index}) and target({index}) return"
            )
        image = sample.image
        is_array = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3
        if not isinstance(image, bytes) and not (is_array and image.shape[2] in (1, 3)):
            raise _broken(source, f"the image of {key!r} must be bytes or a uint8 array of (height, width, 1 or 3)")
    if not isinstance(source, Samples) and len({source.key(index) for index in range(count)}) < count:
        raise _broken(source, "two samples must not have the same key, by which features are found again")


def check_settings(config: TrainConfig) -> None:
    """Raise `ConfigError` for settings that work only with a network of this package."""
    start = config.start
    settings = (
        ("init", start.init, start.init is not None),
        ("optimizer", config.optimizer.kind, config.optimizer.kind == "muon"),
        ("layer_decay", config.optimizer.layer_decay, config.optimizer.layer_decay < 1),
        ("backbone_wait", config.optimizer.backbone_wait, not is_zero(config.optimizer.backbone_wait)),
        ("precision", config.run.precision, config.run.precision == "float8"),
        ("compile", config.run.compile, config.run.compile in ("on", "graphs")),
        ("shard", config.run.shard, config.run.shard != "none"),
        ("checkpoint_activations", True, config.run.checkpoint_activations),
        ("probe", config.run.probe, bool(config.run.probe)),
    )
    raise_problems(
        f"{name}={value!r} cannot be combined with network=...; {name} works only for networks that are built from a "
        "config"
        for name, value, used in settings
        if used
    )


def _check_trainable(network: nn.Module) -> None:
    """Raise `ConfigError` unless an object is a network whose weights can be trained."""
    if not isinstance(network, nn.Module) or hasattr(network, "_orig_mod"):
        raise ConfigError(
            f"network is a {type(network).__name__}; it must be an nn.Module, and not what torch.compile returns: "
            "network.compile() compiles it in place"
        )
    tensors = [tensor for tensor in (*network.parameters(), *network.buffers()) if not is_lazy(tensor)]
    if any(tensor.is_meta or tensor.is_inference() for tensor in tensors):
        raise ConfigError(
            "network has weights that cannot be trained, because they are on the device meta or were made in "
            "torch.inference_mode; make the network on a device and outside of that mode"
        )


def check_network(network: nn.Module, images: Preprocess, outputs: int) -> None:
    """Raise `ConfigError` with the broken rule if the run's task cannot train this network. With 0 `outputs`, the task
    does not use the outputs of the network, and `BundleError` if a network of this package was changed so that it
    cannot be saved.

    The network is called once, in evaluation mode, with two images of zeros.
    """
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise _broken(network, "a network must have a parameter that requires gradients")
    device = next(network.parameters()).device
    shape = (2, images.channels, *images.image_size)
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            made = network(torch.zeros(shape, device=device))
    except Exception as error:
        rule = f"a network must take images of (b, channels, height, width), here {shape}, but it raised"
        raise _broken(network, f"{rule} {type(error).__name__}: {error}") from error
    finally:
        network.train(was_training)
    if (
        not isinstance(made, Tensor)
        or made.shape[:1] != (2,)
        or made.ndim != 2
        or outputs not in (0, made.shape[1])
        or not made.is_floating_point()
    ):
        found = f"a tensor of {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise _broken(
            network, f"a network must return floats of (b, {outputs}), one for each output, but it returned {found}"
        )
    if (config := own_config(network)) is not None:
        if config.image_size != images.image_size:
            raise ConfigError(
                f"image_size={images.image_size} differs from the network's image_size, {config.image_size}; make the "
                "two equal"
            )
        check_loadable(cast(AnyNetwork, network))


def _broken(thing: Any, rule: str) -> ConfigError:
    name = "network" if isinstance(thing, nn.Module) else "data"
    return ConfigError(f"{name}: {type(thing).__name__} breaks a rule of its contract: {rule}")


def target_fits(target: Target, kind: TargetKind, count: int) -> bool:
    """Return True if a target is None or one of this kind for this number of classes or numbers."""
    if target is None or kind == "none":
        return target is None
    if kind == "class":
        return _is_class(target, count)
    if kind == "boxes":
        return (
            isinstance(target, Objects)
            and bool(
                ((target.labels >= 0) & (target.labels < count)).all()
                and ((target.boxes > -1e-6) & (target.boxes < 1 + 1e-6)).all()  # False for NaN
                and (target.boxes[:, 2:] > target.boxes[:, :2]).all()
            )
        )
    if kind == "mask":
        return isinstance(target, Mask) and all(-1 <= place < count for place in target.places)
    if not isinstance(target, tuple):
        return False
    if kind == "texts":
        return all(isinstance(text, str) for text in target)
    if kind == "numbers":
        return len(target) == count and all(isinstance(one, float) and not math.isinf(one) for one in target)
    return all(_is_class(one, count) for one in target)


def _is_class(value: Any, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


def target_rule(kind: TargetKind, count: int) -> str:
    """Return the rule of `target_fits` in words."""
    rules = {
        "boxes": f"`Objects` with indices from 0 to {count - 1}, and boxes (left, top, right, bottom) in [0, 1]",
        "mask": f"a `Mask` with indices from -1 to {count - 1}",
        "texts": "tuples of strings",
        "numbers": f"tuples of {count} floats, one for each name in classes, finite or NaN",
        "classes": f"tuples of indices from 0 to {count - 1}",
    }
    return (
        f"the targets of this source must be None or {rules.get(kind, f'an index from 0 to {count - 1}')}, "
        "as Python's own int (classes) or float (numbers)"
    )


# Phases of a run: steps with the same image size, patch dropout and batch size.


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

    def before(self, step: int) -> int:
        """Return the number of this phase's steps before a step, counted from 0."""
        return min(max(step - self.first, 0), self.steps)

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
    raise_problems(_phase_problems(config, network, own))
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


def run_flops(phases: Sequence[Phase], network: AnyConfig, task: Task, trained_blocks: int | None = None) -> int:
    """Return the FLOPs of all training steps of a run. Evaluations are not counted. By default all blocks are trained,
    otherwise the last `trained_blocks`."""
    return sum(phase.steps * phase.step_flops(network, task, trained_blocks) for phase in phases)


def cost_text(phases: Sequence[Phase], network: AnyConfig, task: Task) -> str:
    """Return a sentence about the arithmetic of the training steps. If the FLOPs of a phase are unknown, they are those
    of a step that trains the whole `network`."""
    each = [phase.flops or phase.step_flops(network, task) for phase in phases]
    flops = sum(phase.steps * one for phase, one in zip(phases, each, strict=True))
    whole = each[-1] * sum(phase.steps for phase in phases)
    return (
        f"the steps in {plural(len(phases), 'phase')} compute {flops / 1e12:,.3g} TFLOP, {flops / whole:.0%} of as "
        "many steps of the last phase"
    )


def use_patch_dropout(module: nn.Module, rate: float) -> None:
    """Set the patch dropout of the transformer in an objective. A network without patch dropout stays as it is."""
    for part in module.modules():
        vit = transformer(part)
        if vit is not None:
            vit.patch_dropout = rate


def _phase_problems(config: TrainConfig, network: AnyConfig | None, own: Mapping[str, Any]) -> Iterator[str]:
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


# Evaluations of the model by its features.


@dataclass(frozen=True)
class Probe(Checked):
    """An evaluation of the model during the run. The journal records its metrics."""

    name: str
    every: int = setting(least=1)
    """Number of steps between two evaluations. Another evaluation follows the last step."""
    evaluator: Evaluator = setting()
    """Evaluator of the model as it would be saved now, with averaged weights and merged adapters. The evaluator learns
    from the training split and measures on the validation split. The random state of PyTorch is restored afterwards."""
