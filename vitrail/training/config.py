"""The config of a run. Recipes return it, the command line overrides it, `run.json` records it.

Each section is a frozen dataclass that checks itself and is defined beside the code that uses it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

from vitrail.data.augment.settings import Augment
from vitrail.data.pipeline import Readers
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import DataConfig
from vitrail.data.targets import PLACED
from vitrail.errors import ConfigError, check_known, nearest
from vitrail.machine import TrainingPrecision
from vitrail.models.compiled import Compile
from vitrail.models.heads import HEADS
from vitrail.models.linear.float32 import Float32Products
from vitrail.models.linear.lora import Projection
from vitrail.models.variants import ModelConfig, override_fields
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import (
    Checked,
    Effect,
    bare_names,
    facts,
    from_plain,
    raise_problems,
    seconds_in,
    setting,
    typed_fields,
)
from vitrail.tasks import TASKS
from vitrail.tasks.classification import Classification
from vitrail.tasks.task import HeadlessTask, Task
from vitrail.training.log import tracker_problems
from vitrail.training.optimizer import OptimizerConfig

# The settings of cheaper steps at the beginning of a run.


@dataclass(frozen=True, kw_only=True)
class EarlyConfig(Checked):
    """Cheaper steps at the beginning of a run. Each setting is a list of VALUE:END.

    A value applies until END, a fraction of the run's steps. After the last END, the run's own setting applies.
    """

    early_image_size: tuple[str, ...] = ()
    """Smaller training images at the beginning of the run: SIZE:END, such as 16:0.4 24:0.7. END is a fraction of the
    steps. Afterwards the images have --image-size, as they always have in evaluations."""
    early_patch_dropout: tuple[str, ...] = ()
    """Higher patch dropout at the beginning of the run: RATE:END, such as 0.75:0.3 0.5:0.6. END is a fraction of the
    steps. Afterwards --patch-dropout applies."""
    early_batch_size: tuple[str, ...] = ()
    """Smaller batches at the beginning of the run: IMAGES:END, such as 16:0.3. END is a fraction of the steps.
    Afterwards --batch-size applies. The learning rate does not change."""

    def course(self, name: str) -> list[tuple[Any, float]]:
        """Return the values of a setting with their ends."""
        texts = (text.rpartition(":") for text in getattr(self, name))
        return [(KINDS[name].parse(value), float(end)) for value, _, end in texts]

    def conflicts(self, name: str, last: Any) -> Iterator[str]:
        """Yield a message if a step becomes cheaper on the way to the run's own value `last`."""
        kind, values = KINDS[name], [value for value, _ in self.course(name)]
        costs = [kind.cost(value) for value in (*values, last)]
        if values and not all(before < after for before, after in itertools.pairwise(costs)):
            given, falls = " ".join(getattr(self, name)), "fall" if name == "early_patch_dropout" else "grow"
            own = name.removeprefix("early_")
            yield f"{name}={given!r} does not {falls} to {own}={last}; choose other values, or leave it out"

    def mean_batch_size(self, batch_size: int) -> float:
        """Return the mean number of images per step in a run with this batch size."""
        total, begin = 0.0, 0.0
        for value, end in self.course("early_batch_size"):
            total, begin = total + value * (end - begin), end
        return total + batch_size * (1 - begin)

    def _problems(self) -> Iterator[str]:
        """Yield a message for each text that is not VALUE:END, and for ends that do not increase."""
        for name, kind in KINDS.items():
            ends = []
            for text in getattr(self, name):
                value, _, end = text.rpartition(":")
                try:
                    ends.append(float(end) if kind.is_valid(kind.parse(value)) else math.nan)
                except ValueError:
                    ends.append(math.nan)
                if not 0 < ends[-1] < 1:
                    yield (
                        f"{name}={text!r} is not {kind.form}, with END a fraction of the run between 0 and 1; write "
                        f"for example {kind.example!r}"
                    )
            if ends != sorted(set(ends)) and not any(map(math.isnan, ends)):
                yield f"{name}={' '.join(getattr(self, name))!r} has ends that do not increase"


class Kind(NamedTuple):
    """A setting that can change during a run."""

    parse: Callable[[str], Any]
    """Function that reads a value from a text. It raises `ValueError` for any other text."""
    is_valid: Callable[[Any], bool]
    """Function of a value that returns False if the value is out of range."""
    form: str
    example: str
    cost: Callable[[Any], float]
    """Function of a value that grows with the cost of a step."""


def _size(text: str) -> tuple[int, int]:
    if (found := re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)) is None:
        raise ValueError(text)
    return int(found[1]), int(found[2] or found[1])


KINDS = {
    "early_image_size": Kind(_size, lambda size: min(size) >= 1, "SIZE:END", "16:0.5", math.prod),
    "early_patch_dropout": Kind(float, lambda rate: 0 < rate < 1, "RATE:END", "0.5:0.4", lambda rate: -rate),
    "early_batch_size": Kind(int, lambda count: count >= 1, "IMAGES:END", "16:0.3", float),
}
"""The settings that can change during a run, by the names of their options. They are "early_" and the name of the run's
own setting."""


Shard = Literal["none", "full", "hybrid"]


OnNonFinite = Literal["stop", "skip", "rollback"]


@dataclass(frozen=True, kw_only=True)
class FaultConfig(Checked):
    """Reactions to faults of training steps."""

    on_non_finite: OnNonFinite = "stop"
    """Reaction to a loss or gradient that is not finite. stop: end the run without saving its state. skip: skip the
    batch. rollback: go back to a checkpoint, and skip the last batches."""
    spike_score: float = setting(0.0, least=0)
    """Go back to a checkpoint if the loss of a step is this many robust standard deviations above the median of the
    last steps, such as 10. 0: never."""
    spike_window: int = setting(100, effect=Effect(lambda own: own.spike_score > 0, "with --spike-score"), least=2)
    """Number of steps with which --spike-score compares a loss. The first steps of a run are not compared."""
    rollback_skips: int = setting(
        10, effect=Effect(lambda own: own.may_roll_back, "with --on-non-finite rollback or --spike-score"), least=1
    )
    """Number of batches to skip after the run goes back to a checkpoint. The last skipped batch is the batch of the
    fault."""
    max_faults: int = setting(
        10,
        effect=Effect(lambda own: own.are_checked, "with --on-non-finite skip or rollback, or --spike-score"),
        least=1,
    )
    """Maximum number of faults in a run. The next fault ends the run."""

    @property
    def are_checked(self) -> bool:
        """True if steps are checked before the weights change."""
        return self.on_non_finite != "stop" or self.spike_score > 0

    @property
    def may_roll_back(self) -> bool:
        """True if a fault can lead back to a checkpoint."""
        return self.on_non_finite == "rollback" or self.spike_score > 0


@dataclass(frozen=True, kw_only=True)
class StartConfig(Checked):
    """The model that a run starts from, and the choice of weights to train."""

    init: str | None = setting(None, metavar="MODEL")
    """Model to start from: a model folder, a run folder, another library's checkpoint, a hub name, or small, which is
    part of Vitrail. The model's head is kept if the classes have the same names in the same order. Otherwise, or if the
    class names are only numbers, it is replaced by a new head of zeros."""
    train_blocks: int | None = setting(None, least=0)
    """With --init: number of last blocks to train with the final norm, pooling and head. By default all blocks. 0
    trains only the head. The blocks of a ResNet are its residual units."""
    lora_rank: int | None = setting(None, least=1, most=2**16)
    """With --init: rank of the LoRA updates (2106.09685). If given, only these updates and the head of the network are
    trained, beside a text tower."""
    lora_alpha: float | None = setting(None, above=0, below=math.inf)
    """LoRA scaling: the update is multiplied by alpha / rank. By default alpha equals rank."""
    lora_on: tuple[Projection, ...] = setting(
        ("query", "value"), effect=Effect(lambda own: own.lora_rank is not None, "with --lora-rank")
    )
    """Weights of each block that get LoRA updates: query, key, value, out, up, down."""
    new_head: bool = False
    """With --init: replace the model's head even if the model and the data have the same class names. The new head is
    zero, or a linear model of features with --linear-head."""
    linear_head: bool = False
    """With --init: fit a linear classifier to the model's features of the training images, and start from it as the
    head (2202.10054). With --keep best, the initial weights are evaluated as well, and are kept unless training
    improves them."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        for name in ("train_blocks", "lora_rank") if self.init is None else ():
            if (value := getattr(self, name)) is not None:
                yield (f"{name}={value} leaves weights untrained, so it needs a model to start from; give init=...")
        for name in ("new_head", "linear_head") if self.init is None else ():
            if getattr(self, name):
                yield (f"{name}=True is a new head for a model, so it needs a model to start from; give init=...")
        for name in ("lora_alpha", "lora_on") if self.lora_rank is None else ():
            if (value := getattr(self, name)) != getattr(StartConfig, name):
                yield f"{name}={value} needs lora_rank; give both"
        if self.lora_rank is not None and self.train_blocks is not None:
            yield (
                f"train_blocks={self.train_blocks} and lora_rank={self.lora_rank} exclude each other; give one of them"
            )


ROUNDING = "numbers then round differently"
"""Consequence of changing one of these settings when a run is resumed."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Checked):
    """The length of a run, its machine settings, its evaluations and its folder."""

    epochs: float = setting(10.0, above=0, below=math.inf)
    """Passes over the training images, unless --steps is given."""
    steps: int | None = setting(None, least=1, excludes="epochs")
    """Number of optimizer steps. By default it follows from --epochs."""
    batch_size: int = setting(128, least=1)
    """Images per step."""
    accumulation: int = setting(1, on_resume=ROUNDING, least=1)
    """Number of parts into which each batch is divided to save memory. The gradient is that of the whole batch."""
    precision: TrainingPrecision = setting("auto", on_resume=ROUNDING, resolved=True)
    """Number format of training. auto: bf16 with float32 master weights if the processor has bf16 matrix units, else
    float32. float8: the dense layers of blocks in 8 bits and everything else in bf16, on CUDA with compute capability
    8.9 or more."""
    float32_products: Float32Products = setting("auto", on_resume=ROUNDING, resolved=True, of_machine=True)
    """Library that computes large dense layers in float32 on a CPU. auto: oneDNN on AMD processors with AVX-512, else
    mkl. mkl is PyTorch's own choice."""
    compute_threads: int | None = setting(None, on_resume=ROUNDING, resolved=True, of_machine=True, least=1, most=4096)
    """Threads that compute on a CPU. By default as many as PyTorch chooses, usually one per core. The number stays the
    same when a run is resumed, because it changes how sums are rounded."""
    deterministic: bool = False
    """Compute the same bits in every repetition on one machine, also in bf16 and on a GPU: with PyTorch's deterministic
    algorithms and a fixed number of compute threads. Some steps are slower."""
    compile: Compile = setting("auto", on_resume=ROUNDING, of_machine=True)
    """Compile each block before the first step, which takes about a minute. auto: on for CUDA, off elsewhere. graphs
    also replays blocks as CUDA graphs, which helps small models or batches."""
    device: str = setting("auto", on_resume=ROUNDING, of_machine=True, metavar="DEVICE")
    """Device to run on: auto, cpu, cuda or cuda:N."""
    threads: int | Literal["auto"] | None = setting(None, on_resume="free", of_machine=True, least=0)
    """Threads that read and decode images. By default one per core. 0 reads in the main thread. auto: one per core or
    0, whichever makes the first steps faster."""
    processes: int = setting(0, on_resume="free", of_machine=True, least=0)
    """Worker processes for reading and decoding, with --threads threads each. Useful if decoding holds the GIL."""
    seed: int = setting(0, least=0, below=2**32)
    """Random seed of the initial weights, the order of images, augmentation and dropout."""
    evaluations: int = setting(10, least=0)
    """Number of evaluations on the validation split during the run."""
    patience: int | None = setting(
        None,
        effect=Effect(
            lambda run: run.patience is None or run.patience < run.evaluations, "below the number of --evaluations"
        ),
        least=1,
    )
    """End the run after this many evaluations in a row without a better result. The learning rate's schedule does not
    change."""
    probe: str = ""
    """Evaluators of the model's features to run on the validation split during training, separated by commas: linear,
    fewshot, knn. The metrics go to the journal."""
    probe_every: int | None = setting(
        None, effect=Effect(lambda run: bool(run.probe), "with --probe", by_user=True), least=1
    )
    """Steps between two runs of --probe. By default as many as between two evaluations."""
    track: str = setting("", on_resume="free")
    """Programs that show the metrics of the run during training, separated by commas: tensorboard, wandb."""
    checkpoints: int = setting(10, of_machine=True, least=1)
    """Number of times that the training state is saved during the run."""
    background_checkpoints: bool = setting(False, on_resume="free")
    """Write checkpoints in a thread while training continues, from a copy of the state in main memory. An error while
    writing is reported at the next checkpoint."""
    max_time: str | None = setting(None, of_machine=True)
    """Stop after this time, such as 50m or 2h, with the state saved and exit code 75. --resume continues the run."""
    shard: Shard = setting("none", on_resume=ROUNDING)
    """Divide weights, gradients and moments among several processes, by FSDP2. full: among all. hybrid: among those of
    each machine. none: every process has copies. A single process has whole weights."""
    checkpoint_activations: bool = setting(False, on_resume=ROUNDING)
    """Keep only the input of each transformer block for the backward pass, and compute the block again. This saves most
    of the memory of activations, for a third more computing."""
    process_timeout: str = setting("10m", on_resume="free")
    """Time after which a run of several processes ends with an error if one of them does not answer."""
    keep: Literal["best", "last"] = "best"
    """Weights that become the model: the best on the validation split, or the last."""
    name: str = setting("", of_machine=True, metavar="NAME")
    """Name of the run, saved in runs/NAME (or runs/NAME-2 if that exists). By default the name of the data."""
    folder: str | None = setting(None, name="run", of_machine=True, metavar="RUN")
    """Folder of the run, in place of runs/NAME. Without --overwrite, the folder must not exist."""
    overwrite: bool = setting(
        False,
        of_machine=True,
        effect=Effect(
            lambda run: run.folder is not None, "with --run, which names the folder to replace", by_user=True
        ),
    )
    """Replace the folder that --run names if it exists."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.threads == "auto" and self.processes:
            yield (
                f"threads='auto' compares the main thread with threads of this process, but processes={self.processes} "
                "read; leave one of them out"
            )
        yield from tracker_problems(self.track)
        for name in ("max_time", "process_timeout"):
            if (time := getattr(self, name)) is not None and seconds_in(time) is None:
                yield (f"{name}={time!r} is not a time; give a number above 0 with a unit, such as 90s, 50m or 2h")
        if self.accumulation > self.batch_size:
            yield f"accumulation={self.accumulation} is more than batch_size={self.batch_size}"

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


RESOLVED = tuple(facts(RunConfig, "resolved"))
"""Settings of which a run records what they mean on its machine, so that it is resumed with the same arithmetic."""

ON_RESUME: dict[str, str] = facts(DataConfig, "on_resume") | facts(RunConfig, "on_resume")
"""Settings that a resumed run may change, and what a change means, or "free" if it changes no number of training."""

LENGTHS = ("epochs", "steps")
"""Settings that make a resumed run longer."""

ALLOWED = {name: change for name, change in ON_RESUME.items() if change != "free"}
"""Settings that a resumed run may change if the user allows it, and what a change means."""

OF_TRAINED_NETWORK = (
    "train_blocks", "lora_rank", "dropout", "stochastic_depth", "skip_dropped", "patch_dropout", "early_patch_dropout",
)  # fmt: skip
"""Settings that have an effect only if weights of the network are trained."""

WITHOUT_WEIGHTS = tuple(facts(ViTConfig, "changes_weights"))
"""Fields of a network's config that do not change its weights, or not always. A run that starts from a model can
override only these, and those that belong to the kind of head that it chooses (`DenseHead.fields`)."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
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
        of the new task. Values may be lists, paths and numbers of numpy. New `epochs` replace the `steps` of this
        config. If both are given, the steps decide. Raises `ConfigError` with all problems. The message for an unknown
        name suggests similar names.
        """
        if values.get("epochs") is not None:
            values.setdefault("steps", None)
        task = self.task
        if (chosen := values.pop("task", task.name)) != task.name:
            task = _task_named(chosen)
        sections: dict[str, Any] = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        sections["task"] = task
        known = _sections(tuple((name, type(section)) for name, section in sections.items()))
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(_unknown(name, known, task))
            changed.setdefault(known[name], {})[name] = value
        problems = []
        for section, fields in changed.items():
            try:
                sections[section] = _replaced(sections[section], fields)
            except ConfigError as error:
                problems.append(str(error))
        raise_problems(problems)
        return dataclasses.replace(self, **sections)

    def settings(self) -> Mapping[str, str]:
        """Return a dictionary that maps the bare name of each setting of `override` to the name of the setting's
        section."""
        return _sections(tuple((item.name, type(getattr(self, item.name))) for item in dataclasses.fields(self)))

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

    def in_use(self, name: str) -> Any:
        """Return the value of `in_effect`, or None if the setting has no effect beside the other settings."""
        value, section = self.in_effect(name), getattr(self, self.settings().get(name, ""), None)
        effect = None if section is None else facts(type(section), "effect").get(name)
        return value if effect is None or effect.holds(self if effect.of_run else section) else None

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

    def _problems(self) -> Iterator[str]:
        """Yield a message for each contradiction between the sections."""
        found, own = TASKS.get(self.task.name), type(self.task)
        if found is not own and (found is not None or own in TASKS.values()):
            yield (
                f"the task {own.__name__} is not TASKS[{self.task.name!r}], which continues a run of this "
                "name; give the class the name under which you add it to TASKS"
            )
        if self.start.init is not None:
            kind = self.model.overrides.get("head_kind", "pooled")
            allowed = (*WITHOUT_WEIGHTS, *(HEADS[kind].fields if kind in HEADS else ()))
            for name, value in {"variant": self.model.variant, **self.model.overrides}.items():
                if value is not None and name not in allowed:
                    yield (
                        f"{name}={value!r} cannot be given with init={self.start.init!r}, because the model "
                        f"fixes the architecture; only {', '.join(allowed)} can"
                    )
        if self.data.numbers and "numbers" not in self.task.targets:
            yield (
                f"numbers={self.data.numbers} are targets of a regression, but the task is {self.task.name}; "
                "choose task='regression'"
            )
        for name, alpha in (("mixup", self.augment.settings.mixup), ("cutmix", self.augment.cutmix)):
            if alpha and {"none", "texts"} & set(self.task.targets):
                yield (
                    f"{name}={alpha} mixes the labels of images, which the task {self.task.name} does not learn; leave "
                    f"it out, or choose {name}=0 in place of the recipe's"
                )
        if set(PLACED) & set(self.task.targets):
            chosen, augment = self.augment.settings, self.augment
            fixed = {"mixup": chosen.mixup, "cutmix": augment.cutmix, "randaugment_layers": chosen.randaugment_layers}
            if augment.crop_from is not None:
                yield (
                    f"crop_from={augment.crop_from} cuts boxes out of images, which boxes and masks do not follow, so "
                    f"it cannot be used with the task {self.task.name}; leave it out"
                )
            for name, value in {**fixed, "erase": augment.erase}.items():
                if value:
                    yield (
                        f"{name}={value} changes images in a way that boxes and masks do not follow, so it cannot be "
                        f"used with the task {self.task.name}; leave it out, or choose {name}=0 in place of the "
                        "recipe's"
                    )
        sizes = [("early_batch_size", size) for size, _ in self.early.course("early_batch_size")]
        for name, size in (("batch_size", self.run.batch_size), *sizes):
            if size < self.task.least_batch:
                yield (
                    f"{name}={size}: the task {self.task.name} compares the images of a batch with each other; choose "
                    f"at least {self.task.least_batch}"
                )
        if self.task.views > 1 and not self.augment.is_random_for(self.images):
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

    def new_problems(self) -> Iterator[str]:
        """Yield a message for each setting that is refused in new runs. Runs of earlier versions that have it are read
        and continued. Most of these settings have no effect in the task."""
        yield from self.optimizer.new_problems()
        given = {**vars(self.start), **vars(self.early), **self.model.overrides}
        for name in OF_TRAINED_NETWORK if not self.task.trains_network else ():
            if given.get(name):
                yield f"{name}={given[name]} is for a network that is trained, but this one is frozen; leave it out"
        if isinstance(self.task, HeadlessTask):
            for name in ("new_head", "linear_head", "head_bias", "head_normalises"):
                if given.get(name):
                    yield f"{name}={given[name]} is for a head, but the task {self.task.name} has none; leave it out"
            if self.start.train_blocks == 0 and "none" in self.task.targets:
                yield f"train_blocks=0 trains only a head, but the task {self.task.name} has none; choose at least 1"
        if set(PLACED) & set(self.task.targets):
            for name in filter(given.get, ("linear_head", "head_normalises")):  # recipes of papers set `head_bias`
                yield (
                    f"{name}={given[name]} is for a linear model of one vector per image, but the task "
                    f"{self.task.name} learns {' and '.join(self.task.targets)}; leave it out"
                )


@cache
def _sections(kinds: tuple[tuple[str, type], ...]) -> Mapping[str, str]:
    """Return the bare names of all settings with their sections, from the names and types of the sections. Raise
    `ConfigError` if two sections have a setting of one name, such as a user's own task and the network."""
    found: dict[str, str] = {}
    for section, kind in kinds:
        names = ("variant", *override_fields()) if kind is ModelConfig else bare_names(kind)
        if both := sorted(found.keys() & {*names}):
            raise ConfigError(
                f"{both[0]} is a setting of {found[both[0]]} and of {section}; give the settings of a task of your own "
                "other names"
            )
        found |= dict.fromkeys(names, section)
    return found


def _unknown(name: str, known: Mapping[str, str], task: Task) -> str:
    """Return a message about a setting that is not known for a run of this task."""
    if others := [other.name for other in TASKS.values() if name in bare_names(other)]:
        return (
            f"{name}: the task of this run, {task.name}, has no such setting; leave it out, or choose a task that has "
            f"it: {', '.join(others)}"
        )
    return f"unknown field {name!r}; {nearest(name, known)}"


def _task_named(name: Any) -> Task:
    """Return the task of this name with its default settings."""
    check_known(name, TASKS, f"unknown task {name!r}")
    return TASKS[name]()


def _replaced(section: Any, values: dict[str, Any]) -> Any:
    """Return a copy of a section with new values for the fields of these bare names."""
    if isinstance(section, ModelConfig):
        return section.override(**values)
    fields = bare_names(type(section))
    given = {fields[name]: value for name, value in values.items()}
    return dataclasses.replace(section, **typed_fields(type(section), given))
