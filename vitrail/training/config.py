"""The config of a run. Recipes return it, the command line overrides it, `run.json` records it.

Each section is a frozen dataclass that checks itself and is defined beside the code that uses it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pipeline import Readers
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, nearest
from vitrail.machine import TrainingPrecision
from vitrail.models.compiled import Compile
from vitrail.models.config import ModelConfig, override_fields
from vitrail.models.linear.float32 import Float32Products
from vitrail.plain import from_plain
from vitrail.settings import above_zero, at_least, bare_names, named, one_of, raise_problems, seconds_in
from vitrail.tasks import TASKS, Classification, Task
from vitrail.training.optimization.optimizer import OptimizerConfig
from vitrail.training.parallel.sharding import Shard
from vitrail.training.reporting.trackers import tracker_problems
from vitrail.training.start import StartConfig
from vitrail.training.steps.early import EarlyConfig
from vitrail.training.steps.faults import FaultConfig

__all__ = ["RESOLVED", "RunConfig", "TrainConfig"]

Keep = Literal["best", "last"]

RESOLVED = ("precision", "float32_products", "compute_threads")
"""Settings of which a run records what they mean on its machine, so that it is resumed with the same arithmetic."""

WITHOUT_WEIGHTS = ("dropout", "stochastic_depth", "skip_dropped", "patch_dropout", "cut_uneven")
"""Fields of a network's config that do not change its weights. A run that starts from a model can override only
these."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The length of a run, its machine settings, its evaluations and its folder.

    Raises `ConfigError` if fields have invalid values. The message names all of them.
    """

    epochs: float = 10.0
    """Passes over the training images, unless --steps is given."""
    steps: int | None = None
    """Number of optimizer steps. By default it follows from --epochs."""
    batch_size: int = 128
    """Images per step."""
    accumulation: int = 1
    """Number of parts into which each batch is divided to save memory. The gradient is that of the whole batch."""
    precision: TrainingPrecision = "auto"
    """Number format of training. auto: bf16 with float32 master weights if the processor has bf16 matrix units, else
    float32. float8: the dense layers of blocks in 8 bits and everything else in bf16, on CUDA with compute capability
    8.9 or more."""
    float32_products: Float32Products = "auto"
    """Library that computes large dense layers in float32 on a CPU. auto: oneDNN on AMD processors with AVX-512, else
    mkl. mkl is PyTorch's own choice."""
    compute_threads: int | None = None
    """Threads that compute on a CPU. By default as many as PyTorch chooses, usually one per core, and fewer while other
    programs use the cores. In float32 the number is fixed, so that repeated runs compute equal bits."""
    deterministic: bool = False
    """Compute the same bits in every repetition on one machine, also in bf16 and on a GPU: with PyTorch's deterministic
    algorithms and a fixed number of compute threads. Some steps are slower."""
    compile: Compile = "auto"
    """Compile each block before the first step, which takes about a minute. auto: on for CUDA, off elsewhere. graphs
    also replays blocks as CUDA graphs, which helps small models or batches."""
    device: str = "auto"
    """Device to run on: auto, cpu, cuda or cuda:N."""
    threads: int | Literal["auto"] | None = None
    """Threads that read and decode images. By default one per core. 0 reads in the main thread. auto: one per core or
    0, whichever makes the first steps faster."""
    processes: int = 0
    """Worker processes for reading and decoding, with --threads threads each. Useful if decoding holds the GIL."""
    seed: int = 0
    """Random seed of the initial weights, the order of images, augmentation and dropout."""
    evaluations: int = 10
    """Number of evaluations on the validation split during the run."""
    patience: int | None = None
    """End the run after this many evaluations in a row without a better result. The learning rate's schedule does not
    change."""
    probe: str = ""
    """Evaluators of the model's features to run on the validation split during training, separated by commas: linear,
    fewshot, knn. The metrics go to the journal."""
    probe_every: int | None = None
    """Steps between two runs of --probe. By default as many as between two evaluations."""
    track: str = ""
    """Programs that show the metrics of the run during training, separated by commas: tensorboard, wandb."""
    checkpoints: int = 10
    """Number of times that the training state is saved during the run."""
    background_checkpoints: bool = False
    """Write checkpoints in a thread while training continues, from a copy of the state in main memory. An error while
    writing is reported at the next checkpoint."""
    max_time: str | None = None
    """Stop after this time, such as 50m or 2h, with the state saved and exit code 75. --resume continues the run."""
    shard: Shard = "none"
    """Divide weights, gradients and moments among several processes, by FSDP2. full: among all. hybrid: among those of
    each machine. none: every process has copies. A single process has whole weights."""
    checkpoint_activations: bool = False
    """Keep only the input of each transformer block for the backward pass, and compute the block again. This saves most
    of the memory of activations, for a third more computing."""
    process_timeout: str = "10m"
    """Time after which a run of several processes ends with an error if one of them does not answer."""
    keep: Keep = "best"
    """Weights that become the model: the best on the validation split, or the last."""
    name: str = ""
    """Name of the run, saved in runs/NAME (or runs/NAME-2 if that exists). By default the name of the data."""
    folder: str | None = field(default=None, metadata=named("run"))
    """Folder of the run, in place of runs/NAME. Without --overwrite, the folder must not exist."""
    overwrite: bool = False
    """Replace the folder that --run names if it exists."""

    def __post_init__(self) -> None:
        problems = [
            *at_least(
                self, batch_size=1, accumulation=1, steps=1, evaluations=0, checkpoints=1, processes=0,
                seed=0, patience=1, probe_every=1, compute_threads=1,
            ),
            *above_zero(self, "epochs"),
            *one_of(
                self, precision=TrainingPrecision, float32_products=Float32Products, compile=Compile, keep=Keep,
                shard=Shard,
            ),
        ]  # fmt: skip
        if isinstance(self.threads, int) and self.threads < 0:
            problems.append(f"threads={self.threads} is less than 0")
        if self.threads == "auto" and self.processes:
            problems.append(
                f"threads='auto' compares the main thread with threads of this process, but processes={self.processes} "
                "read; leave one of them out"
            )
        problems += tracker_problems(self.track)
        if self.seed >= 2**32:
            problems.append(f"seed={self.seed} is too large; choose one below 2**32")
        for name in ("max_time", "process_timeout"):
            if (time := getattr(self, name)) is not None and seconds_in(time) is None:
                problems.append(
                    f"{name}={time!r} is not a time; give a number above 0 with a unit, such as 90s, 50m or 2h"
                )
        if self.accumulation > self.batch_size:
            problems.append(f"accumulation={self.accumulation} is more than batch_size={self.batch_size}")
        raise_problems(problems)

    @property
    def max_seconds(self) -> float | None:
        """The time after which the run stops, in seconds, or None."""
        return None if self.max_time is None else seconds_in(self.max_time)

    @property
    def process_seconds(self) -> float:
        """The time that a process waits for another one, in seconds."""
        return seconds_in(self.process_timeout) or 0.0

    @property
    def readers(self) -> Readers:
        """The worker threads and processes that read and decode images. While `threads` is "auto" and nothing is
        chosen, there are as many threads as by default."""
        return Readers(None if self.threads == "auto" else self.threads, self.processes)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The whole config of a run. Raises `ConfigError` if the sections contradict each other."""

    data: DataConfig = field(default_factory=DataConfig)
    task: Task = field(default_factory=Classification)
    model: ModelConfig = field(default_factory=ModelConfig)
    start: StartConfig = field(default_factory=StartConfig)
    images: Preprocess = field(default_factory=lambda: Preprocess(image_size=(224, 224)))
    augment: Augment = field(default_factory=Augment)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    early: EarlyConfig = field(default_factory=EarlyConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    def __post_init__(self) -> None:
        raise_problems(self._contradictions())

    @property
    def mean_batch_size(self) -> float:
        """Mean number of images per step, which is smaller than the batch size if early batches are smaller."""
        return self.early.mean_batch_size(self.run.batch_size)

    def total_steps(self, images: int) -> int:
        """Return the number of optimizer steps with this many training images."""
        if self.run.steps is not None:
            return self.run.steps
        return max(1, math.ceil(self.run.epochs * images / self.mean_batch_size))

    def override(self, **values: Any) -> TrainConfig:
        """Return a copy with some settings replaced. Each setting is given by its bare name, such as `width` or `seed`.
        A bare name belongs to a field of one of the sections, or to a field of the network's config. `task` is the name
        of the new task. Raises `ConfigError` with all problems. The message for an unknown name suggests similar names.
        """
        base = self
        if (task := values.pop("task", self.task.name)) != self.task.name:
            base = dataclasses.replace(self, task=_task_named(task))
        known = base.settings()
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(base._unknown(name, known))
            changed.setdefault(known[name], {})[name] = value
        sections: dict[str, Any] = {}
        problems = []
        for section, fields in changed.items():
            try:
                sections[section] = _replaced(getattr(base, section), fields)
            except ConfigError as error:
                problems.append(str(error))
        raise_problems(problems)
        return dataclasses.replace(base, **sections)

    def settings(self) -> dict[str, str]:
        """Return a dictionary that maps the bare name of each setting of `override` to the name of the setting's
        section."""
        found: dict[str, str] = {}
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            names = ("variant", *override_fields()) if isinstance(value, ModelConfig) else bare_names(type(value))
            found |= dict.fromkeys(names, section.name)
        return found

    def in_effect(self, name: str) -> Any:
        """Return the value that the run uses for the setting with this bare name. None means that the setting has no
        value, is unknown, or is decided by something else, such as the model to start from.

        A preset of augmentation, a variant of a network and an optimizer have values for settings that are None. With
        `steps`, `epochs` has no effect.
        """
        if name == "task":
            return self.task.name
        section = getattr(self, self.settings().get(name, ""), None)
        if section is None or (name == "epochs" and self.run.steps is not None):
            return None
        if isinstance(section, ModelConfig):
            images = self.images
            of_variant = section.value_of(name, image_size=images.image_size, channels=images.channels)
            return section.variant if name == "variant" else of_variant
        if name == "momentum" and self.optimizer.kind != "adamw":
            return self.optimizer.momentum_rate
        value = getattr(section, bare_names(type(section))[name])
        return getattr(self.augment.settings, name, None) if value is None and section is self.augment else value

    def to_plain(self) -> dict[str, Any]:
        """Return the config as plain JSON values. The task's values include its name."""
        plain = dataclasses.asdict(self)
        return plain | {"task": {"name": self.task.name, **plain["task"]}}

    @classmethod
    def from_plain(cls, values: Any) -> TrainConfig:
        """Return the config that `to_plain` wrote. Raises `ConfigError` with the first field that does not fit."""
        if isinstance(values, dict) and isinstance(values.get("task"), dict):
            settings = {name: value for name, value in values["task"].items() if name != "name"}
            task = from_plain(type(_task_named(values["task"].get("name"))), settings)
            values = values | {"task": task}
        return from_plain(cls, values)

    def _contradictions(self) -> Iterator[str]:
        if self.start.init is not None:
            for name, value in {"variant": self.model.variant, **self.model.overrides}.items():
                if value is not None and name not in WITHOUT_WEIGHTS:
                    yield (
                        f"{name}={value!r} cannot be given with init={self.start.init!r}, because the model "
                        f"fixes the architecture; only {', '.join(WITHOUT_WEIGHTS)} can"
                    )
        if self.data.numbers and "numbers" not in self.task.targets:
            yield (
                f"numbers={self.data.numbers} are targets of a regression, but the task is {self.task.name}; "
                "choose task='regression'"
            )
        for name, alpha in (("mixup", self.augment.settings.mixup), ("cutmix", self.augment.cutmix)):
            if alpha and "none" in self.task.targets:
                yield (
                    f"{name}={alpha} mixes the labels of images, which the task {self.task.name} does not learn; leave "
                    f"{name} out"
                )
        if self.task.views > 1 and not self.augment.is_random:
            yield (
                f"task={self.task.name!r} compares {self.task.views} views of each image, which are all equal without "
                "augmentation; set crop_area, such as (0.2, 1.0)"
            )
        if self.augment.cutmix and self.task.targets == ("numbers",):
            yield (
                f"cutmix={self.augment.cutmix} cannot be used for regression, because the effect of a pasted "
                "part of another image on a number is not defined; choose mixup, which blends images and numbers alike"
            )
        if self.optimizer.average and self.task.averages_weights:
            yield (
                f"average={self.optimizer.average} keeps a running mean of the weights, but the model that "
                f"task={self.task.name!r} saves is such a mean already; leave average out"
            )
        try:
            self.augment.training_preprocess(self.images)
            local = self.task.local_views_of(self.images, self.augment, self.run.seed)
        except ConfigError as error:
            yield str(error)
        else:
            if local is not None and self.augment.mixes:
                yield (
                    f"mixup and cutmix mix images of one size, but task={self.task.name!r} has local views of another "
                    "size; leave both out"
                )

    def _unknown(self, name: str, known: dict[str, str]) -> str:
        for task in TASKS.values():
            if name in bare_names(task):
                return f"{name} is a setting of the task {task.name}, but the task of this run is {self.task.name}"
        return f"unknown field {name!r}; {nearest(name, known)}"


def _task_named(name: Any) -> Task:
    """Return the task of this name with its default settings."""
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; {nearest(str(name), TASKS)}")
    return TASKS[name]()


def _replaced(section: Any, values: dict[str, Any]) -> Any:
    """Return a copy of a section with new values for the fields of these bare names."""
    if isinstance(section, ModelConfig):
        return section.override(**values)
    fields = bare_names(type(section))
    return dataclasses.replace(section, **{fields[name]: value for name, value in values.items()})
