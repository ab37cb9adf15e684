"""What a run is: one frozen, typed config. Recipes return it, the command line overrides it, `run.json` records it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from vitrail.data.augmentation.augment import Augment
from vitrail.data.pipeline import Readers
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, nearest
from vitrail.machine import TrainingPrecision
from vitrail.models.compiled import Compile
from vitrail.models.layers import Activation
from vitrail.models.lora import Projection
from vitrail.models.pooling import Pool
from vitrail.models.positions import PositionKind, Where
from vitrail.models.variants import AnyConfig, variant_config
from vitrail.tasks.classification import Loss

__all__ = ["ModelConfig", "OptimizerConfig", "StartConfig", "TrainConfig"]

OptimizerName = Literal["adamw", "sgd"]
ScheduleName = Literal["cosine", "linear", "constant"]
Keep = Literal["best", "last"]
ClassWeights = Literal["none", "balanced"]

WITHOUT_WEIGHTS = ("dropout", "stochastic_depth", "patch_dropout")
"""Fields of `ModelConfig` that fit any weights, so that a run from a model can set them."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: a size by name, and what departs from it; or that of the model to start from."""

    variant: str | None = None
    """Size and patch, as `vitrail models` lists them: ViT-S/16, the hybrid R50+ViT-B/16, BiT-R50x1. By default
    ViT-Pico/7, or with --init the model's."""
    width: int | None = None
    """Length of a token; by default the variant's, like depth, heads and mlp-width. For a BiT: its first channels."""
    depth: int | None = None
    """Number of blocks."""
    heads: int | None = None
    """Attention heads; they divide the width."""
    mlp_width: int | None = None
    """Hidden units of each block's MLP."""
    pool: Pool | None = None
    """What the head sees: class token (cls), mean of patch tokens (gap), attention pooling (map), or cls+gap."""
    registers: int | None = None
    """Learned tokens between class token and patches, without a use of their own."""
    head_hidden: int | None = None
    """Units of a tanh layer before the head; 0 for none."""
    head_bias: float | None = None
    """Where the head's biases start; for sigmoid losses over very many classes -10 or so."""
    positions: PositionKind | None = None
    """Kind of position embedding; the paper's is learned."""
    positions_at: Where | None = None
    """Where positions act: at the stem, at every layer with its own, or at every layer with the same."""
    position_std: float | None = None
    """Standard deviation of the position embedding at the start; by default 0.02."""
    activation: Activation | None = None
    """Exact GELU, its tanh approximation, or a gated SiLU."""
    layer_scale: float | None = None
    """Where the learned factors on each branch's channels start; 0 for none."""
    qk_norm: bool | None = None
    """Layer norm of each head's queries and keys."""
    norm_eps: float | None = None
    """Epsilon of the norms; by default the variant's."""
    dropout: float | None = None
    """Chance that a value is dropped after a dense layer."""
    stochastic_depth: float | None = None
    """Chance that the last block is skipped; it grows linearly from 0 at the first."""
    patch_dropout: float | None = None
    """Share of its patches that an image goes without in training, other ones each time."""

    def resolve(self, *, num_classes: int, image_size: tuple[int, int], channels: int) -> AnyConfig:
        """The network's config for data of this shape; None leaves a field as the variant has it. Raises
        `ConfigError`."""
        variant = self.variant or "ViT-Pico/7"
        fields = {name: value for name, value in self.given.items() if name != "variant"}
        if variant.startswith("BiT"):
            fields.pop("position_std", None)  # which the demo sets: a ResNet has no positions
        return variant_config(variant, image_size=image_size, channels=channels, num_classes=num_classes, **fields)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """The model that a run starts from, and which of its weights move."""

    init: str | None = None
    """A model to start from instead of random weights: its folder or its run's, another library's file or folder, or a
    name on the hub. Its head stays where the classes have the same names; else a new one of zeros replaces it."""
    train_blocks: int | None = None
    """With --init: so many of the last blocks are trained, with final norm, pooling and head; 0: the head alone. A
    ResNet's units are its blocks. By default all weights are trained."""
    lora_rank: int | None = None
    """With --init: the head is trained, and of the blocks low-rank changes of this rank (2106.09685)."""
    lora_alpha: float | None = None
    """They count alpha / rank times; by default once."""
    lora_on: tuple[Projection, ...] = ("query", "value")
    """Which weights of each block they change: query, key, value, out, up, down."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights move."""

    optimizer: OptimizerName = "adamw"
    """AdamW, or SGD with momentum."""
    learning_rate: float = 1e-3
    """The peak, after warm-up."""
    schedule: ScheduleName = "cosine"
    """From the peak: down to 0 along a cosine or a line, or constant."""
    warmup: float = 0.1
    """Share of the run in which the learning rate rises linearly from 0."""
    weight_decay: float = 0.05
    """Times the learning rate, off every weight matrix; none off norms, biases, tokens and positions."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.999
    """AdamW's decay of the mean squared gradient."""
    momentum: float = 0.9
    """SGD's."""
    clip: float = 1.0
    """Largest norm of the gradient, over all weights; 0 for no limit."""
    layer_decay: float = 1.0
    """Each block's learning rate is so much of that of the block above it; the head has all of it (2106.08254)."""
    average: float = 0.0
    """Share of the running mean of the weights that a step leaves, such as 0.999 (Polyak averaging): the mean is what
    is measured and kept. At step t at most (1 + t) / (10 + t), so that the start is soon forgotten. 0 for none."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run. Raises `ConfigError`, naming every field that does not fit, when it is made."""

    data: str = "bundled"
    """What to learn from: a folder of class folders (with or without train/, val/, test/), a table (.csv, .tsv,
    .jsonl), tar shards, Parquet, hf:ORG/NAME, fractals:CLASSES:SAMPLES, a folder of IDX files, fashion-mnist or
    bundled. With [:1000] or [:10%] behind it, only so much of it is trained on."""
    mix: tuple[str, ...] = ()
    """More to learn from, each with its share of the images: 0.3:fractals:1000:100. Their held-out splits are not
    used."""
    per_class: int | None = None
    """Train on so many images of each class."""
    subset_seed: int = 0
    """Decides which images a part of the data, or of each class, has."""
    validation_share: float = 0.1
    """Share of the training images that is held out where the data has no validation split; 0 for none."""
    max_skipped: float = 0.01
    """Share of the images that may be undecodable before the run fails. Unless it is 0, three are always borne, or a
    tenth of fewer than 30 images."""
    epochs: float = 10.0
    """Passes over the training images, unless --steps is given."""
    steps: int | None = None
    """Optimiser steps."""
    batch_size: int = 128
    """Images a step."""
    accumulation: int = 1
    """Parts that a batch is cut into, to save memory; the result is the same."""
    loss: Loss = "softmax"
    """Classes exclude each other (softmax), or each is a question of its own (sigmoid)."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    class_weights: ClassWeights = "none"
    """balanced: every class counts as much as any other, however many images it has."""
    start: StartConfig = field(default_factory=StartConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    images: Preprocess = field(default_factory=lambda: Preprocess(image_size=(224, 224)))
    augment: Augment = field(default_factory=Augment)
    optimization: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: TrainingPrecision = "auto"
    """auto: bf16 with float32 master weights where the processor has bf16 matrix units, else float32. float8: the dense
    layers of blocks in 8 bits, the rest as in bf16, for large models on CUDA from compute capability 8.9."""
    compile: Compile = "auto"
    """Compile each block before the first step, which takes a minute or so. auto: on for CUDA, off elsewhere. graphs:
    also replay blocks as CUDA graphs, for small models or batches."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    threads: int | None = None
    """Threads that read and decode images; by default one a core."""
    processes: int = 0
    """Further processes for that, each with so many threads; worth it where decoding holds Python's lock."""
    seed: int = 0
    """Decides initial weights, order, augmentation and dropout."""
    evaluations: int = 10
    """How often to measure on the validation split during the run."""
    patience: int | None = None
    """End the run after so many of these in a row without a better accuracy; the learning rate's course stays."""
    probe: str = ""
    """Evaluators of the model's features to run meanwhile, on the validation split, with commas between them: linear,
    fewshot, knn. Their figures go to the journal."""
    probe_every: int | None = None
    """Steps between two of these; by default as many as between two evaluations."""
    checkpoints: int = 10
    """How often to save the training state during the run."""
    keep: Keep = "best"
    """Which weights become the model: the best on the validation split, or the last."""
    name: str = ""
    """The run's folder is runs/NAME, or runs/NAME-2 where that exists; by default the name of the data."""
    run: str | None = None
    """The run's folder, where it must be this one; it is an error when it exists."""
    overwrite: bool = False
    """Replace the folder that --run names when it exists."""

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise ConfigError("\n".join(problems))

    @property
    def readers(self) -> Readers:
        return Readers(self.threads, self.processes)

    def total_steps(self, images: int) -> int:
        """Optimiser steps of the run over this many training images."""
        return self.steps if self.steps is not None else max(1, math.ceil(self.epochs * images / self.batch_size))

    def override(self, **values: Any) -> TrainConfig:
        """A copy with some fields replaced, those of the parts by their bare names: `override(width=96, seed=1)`.

        Raises `ConfigError` for a name that no part has, with the nearest ones.
        """
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in FLAT:
                raise ConfigError(f"unknown field {name!r}; {nearest(name, FLAT)}")
            changed.setdefault(FLAT[name], {})[name] = value
        own = changed.pop("", {})
        parts = {part: dataclasses.replace(getattr(self, part), **fields) for part, fields in changed.items()}
        return dataclasses.replace(self, **own, **parts)

    def _problems(self) -> list[str]:
        optimization, start = self.optimization, self.start
        found = []
        for name, value, low in (
            ("batch_size", self.batch_size, 1), ("accumulation", self.accumulation, 1), ("steps", self.steps, 1),
            ("evaluations", self.evaluations, 0), ("checkpoints", self.checkpoints, 1), ("threads", self.threads, 0),
            ("processes", self.processes, 0), ("per_class", self.per_class, 1), ("subset_seed", self.subset_seed, 0),
            ("seed", self.seed, 0), ("clip", optimization.clip, 0), ("weight_decay", optimization.weight_decay, 0),
            ("patience", self.patience, 1), ("probe_every", self.probe_every, 1),
            ("train_blocks", start.train_blocks, 0), ("lora_rank", start.lora_rank, 1),
        ):  # fmt: skip
            if value is not None and not value >= low:
                found.append(f"{name}={value} is less than {low}")
        for name, value in (
            ("epochs", self.epochs), ("learning_rate", optimization.learning_rate), ("lora_alpha", start.lora_alpha),
        ):  # fmt: skip
            if value is not None and not 0 < value < math.inf:
                found.append(f"{name}={value} is not above 0")
        for name, value in (
            ("validation_share", self.validation_share), ("warmup", optimization.warmup), ("beta1", optimization.beta1),
            ("beta2", optimization.beta2), ("momentum", optimization.momentum),
            ("label_smoothing", self.label_smoothing), ("average", optimization.average),
        ):  # fmt: skip
            if not 0 <= value < 1:
                found.append(f"{name}={value} is not in [0, 1)")
        if not 0 < optimization.layer_decay <= 1:
            found.append(f"layer_decay={optimization.layer_decay} is not in (0, 1]")
        if self.seed >= 2**32:
            found.append(f"seed={self.seed} is not below 2**32")
        if not 0 <= self.max_skipped <= 1:
            found.append(f"max_skipped={self.max_skipped} is not in [0, 1]")
        if self.accumulation > self.batch_size:
            found.append(f"accumulation={self.accumulation} is more than batch_size={self.batch_size}")
        for name, choice, choices in (
            ("optimizer", optimization.optimizer, OptimizerName), ("schedule", optimization.schedule, ScheduleName),
            ("precision", self.precision, TrainingPrecision), ("compile", self.compile, Compile),
            ("keep", self.keep, Keep), ("loss", self.loss, Loss), ("class_weights", self.class_weights, ClassWeights),
        ):  # fmt: skip
            if choice not in get_args(choices):
                found.append(f"{name}={choice!r} is not one of {', '.join(map(repr, get_args(choices)))}")
        return [*found, *_misfits(start, self.model)]


def _misfits(start: StartConfig, model: ModelConfig) -> list[str]:
    """What does not go together in the choice of a network and of its weights."""
    found = []
    if start.init is None:
        for name in ("train_blocks", "lora_rank"):
            if (value := getattr(start, name)) is not None:
                found.append(f"{name}={value} keeps weights as they are: it needs init, a model to start from")
    else:
        for name, value in model.given.items():
            if name not in WITHOUT_WEIGHTS:
                found.append(
                    f"{name}={value!r} cannot be given with init={start.init!r}: the architecture is the model's; only "
                    f"{', '.join(WITHOUT_WEIGHTS)} can"
                )
    if start.lora_rank is None and start.lora_alpha is not None:
        found.append(f"lora_alpha={start.lora_alpha} needs lora_rank")
    if start.lora_rank is None and start.lora_on != StartConfig.lora_on:
        found.append(f"lora_on={start.lora_on} needs lora_rank")
    if start.lora_rank is not None and start.train_blocks is not None:
        found.append(f"train_blocks={start.train_blocks} and lora_rank={start.lora_rank} exclude each other")
    return found


PARTS = {
    "start": StartConfig, "model": ModelConfig, "images": Preprocess, "augment": Augment,
    "optimization": OptimizerConfig,
}  # fmt: skip
FLAT = {item.name: "" for item in dataclasses.fields(TrainConfig) if item.name not in PARTS} | {
    item.name: part for part, cls in PARTS.items() for item in dataclasses.fields(cls)
}
"""Every field by its bare name, with the part of the config that has it ("": the config itself)."""
