"""The rule that chooses fine-tuning settings from the size of the data, the model and the machine.

Like BiT's HyperRule (1912.11370, section 3.3), it has a few numbers that are chosen once and work for most data.
docs/transfer.md has the measurements behind these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.data.augmentation.augment import PRESETS, Augment
from vitrail.data.pixels.decode import image_size_of
from vitrail.data.pixels.preprocess import GEOMETRIES, Preprocess
from vitrail.data.source import Source, TargetKind, target_kind
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.truth import truth_of
from vitrail.models.cost.footprint import training_bytes
from vitrail.models.variants import AnyConfig
from vitrail.tasks.classification import Classification
from vitrail.training.config import TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig
from vitrail.training.start import StartConfig

__all__ = [
    "FEW",
    "MANY",
    "NO_SETTINGS",
    "Choices",
    "DataFacts",
    "Explicit",
    "Plan",
    "accumulation_parts",
    "check_images",
    "check_rate",
    "choose_accumulation",
    "choose_all_images",
    "choose_geometry",
    "choose_length",
    "choose_task",
    "crops_are_chosen",
    "exact_size",
    "facts_of",
    "plan_by_rule",
    "scaled_size",
]

Explicit = Mapping[str, Any]
"""Values of the settings that the user chose, by the names that `TrainConfig.override` accepts."""

NO_SETTINGS: Explicit = MappingProxyType({})

SMALL_SIDE = 96
"""Images with a shorter side (in pixels) count as small. The bound is BiT's."""

SMALL_SIZE, LARGE_SIZE = 128, 384
"""Longest side in pixels to which inputs are scaled: SMALL_SIZE for small images, as in BiT, and LARGE_SIZE for large
images on a GPU, as in the paper."""

FEW, MANY = 20_000, 500_000
"""Numbers of training images at which BiT's HyperRule changes the number of steps."""

RATES = {"all": 0.2, "lora": 1.2, "head": 2.5}
"""Learning rate times network width at a batch size of 32, for each choice of trained weights. docs/transfer.md has the
measurements."""

LAYER_DECAY = 0.9
CROP_AREA = (0.8, 1.0)
MIXUP = 0.1

MIN_STEPS = 100

MAX_HEADERS = 64
"""Maximum number of images whose headers are read to measure image sizes."""

MEMORY_FRACTION = 0.7
"""Fraction of the memory that a training step may use."""


class DataFacts(NamedTuple):
    """Properties of the data that the rule uses."""

    images: int
    """Number of training images."""
    side: int | None
    """Square root of the median image area, in pixels. None if no image could be read."""
    targets: TargetKind
    has_validation: bool
    """True if there are held-out images to choose the best weights by."""
    has_test: bool = False
    """True if there is a test split, whose images are used only to measure the finished model."""


@dataclass(frozen=True)
class Plan:
    """The config of a run, with the reasons for the settings that were chosen."""

    config: TrainConfig
    reasons: tuple[str, ...]
    rates: tuple[float, ...] = ()
    """Learning rates to try before the run. If empty, the run uses the learning rate of the config."""


class Choices:
    """Settings that a rule chooses one by one, with a reason for each choice.

    Settings that the user chose are kept, and no reason is recorded for them.
    """

    def __init__(self, explicit: Explicit) -> None:
        self.explicit = explicit
        self.settings: dict[str, Any] = {}
        self.reasons: list[str] = []

    def add(self, reason: str = "", **settings: Any) -> None:
        """Choose settings by their field names, such as `batch_size`. The reason is dropped if the user chose one of
        these settings, because the reason could name a value that is not used."""
        chosen = {name: value for name, value in settings.items() if name not in self.explicit}
        self.settings |= chosen
        if chosen.keys() == settings.keys() and reason:
            self.reasons.append(reason)

    def plan(self, base: TrainConfig, rates: tuple[float, ...] = ()) -> Plan:
        """Return a plan: `base` with the chosen settings and the user's settings."""
        return Plan(base.override(**self.settings, **self.explicit), tuple(self.reasons), rates)


def facts_of(splits: Splits) -> DataFacts:
    """Return the properties of the data. The headers of up to 64 training images, evenly spaced, are read."""
    train = splits.train
    areas = list(_areas(train))
    side = math.floor(math.sqrt(float(np.median(areas)))) if areas else None
    return DataFacts(len(train), side, target_kind(train), _has_targets(splits.validation), _has_targets(splits.test))


def _has_targets(source: Source | None) -> bool:
    """Return True if a held-out split has at least one image with a known target, so that it can measure a model."""
    return source is not None and bool(truth_of(source).known.any())


def _areas(source: Source) -> Iterator[int]:
    count = min(MAX_HEADERS, len(source))
    for index in np.unique(np.linspace(0, len(source) - 1, count).astype(np.int64)).tolist():
        try:
            image = source[index].image
            yield math.prod(image_size_of(image) if isinstance(image, bytes) else image.shape[:2])
        except DataError:  # training will skip the image and report it
            continue


def plan_by_rule(
    base: TrainConfig,
    network: AnyConfig,
    preprocess: Preprocess,
    facts: DataFacts,
    *,
    device: torch.device,
    memory: int,
    explicit: Explicit = NO_SETTINGS,
) -> Plan:
    """Return the settings for fine-tuning a network with this config and preprocessing on data with these properties.

    The rule chooses the image size, the length of the run, the batch size, the optimizer, the augmentation and the
    loss, except for settings in `explicit`. Other settings are those of `base`. `memory` is the memory of the training
    device in bytes. Raise `ConfigError` if the data has no training image, or if `explicit` has an optimizer but no
    learning rate.
    """
    check_images(base.data.spec, facts)
    check_rate(base.override(**explicit).optimizer, explicit, "adamw")
    choices, gpu = Choices(explicit), device.type == "cuda"
    size, why_size = _image_size(network, facts, gpu=gpu)
    choices.add(f"image size {size[0]} x {size[1]}: {why_size}", image_size=size)
    size = explicit.get("image_size", size)
    batch = explicit.get("batch_size", _batch_size(facts.images, gpu=gpu))
    choices.add(batch_size=batch)
    _choose_steps(choices, facts.images, batch, gpu=gpu)
    choose_accumulation(choices, network, size, batch, memory)
    _choose_optimizer(choices, network, base.override(**explicit).start, batch)
    _choose_augmentation(choices, facts)
    choose_task(choices, base.task.name, facts, label_smoothing=0.1)
    choices.add(
        keep="best" if facts.has_validation else "last",
        evaluations=10 if facts.has_validation else 0,
        checkpoints=5,
    )
    return choices.plan(replace(base, images=preprocess, optimizer=OptimizerConfig(), augment=Augment()))


def check_images(spec: str, facts: DataFacts) -> None:
    """Raise `ConfigError` if the data has no training image."""
    if not facts.images:
        raise ConfigError(f"data {spec!r} has no image to fine-tune on; add training images")


def check_rate(optimizer: OptimizerConfig, explicit: Explicit, usual: str) -> None:
    """Raise `ConfigError` if the user chose an optimizer other than `usual`, and no learning rate."""
    if optimizer.kind != usual and "optimizer" in explicit and "learning_rate" not in explicit:
        raise ConfigError(
            f"optimizer={optimizer.kind!r} also needs a learning_rate, because the automatic learning rates are "
            f"for {usual!r}"
        )


def choose_task(choices: Choices, task: str, facts: DataFacts, *, label_smoothing: float) -> None:
    """Choose the task's loss for the targets of the data. Label smoothing is used only with the softmax loss."""
    if task != Classification.name:
        choices.add(f"task {task}: the targets are {facts.targets}", task=task)
        return
    loss = choices.explicit.get("loss", "sigmoid" if facts.targets == "classes" else "softmax")
    choices.add("loss sigmoid: an image can have several labels" if loss == "sigmoid" else "", loss=loss)
    choices.add(label_smoothing=label_smoothing if loss == "softmax" else 0.0)


def choose_all_images(choices: Choices, facts: DataFacts) -> None:
    """Choose to train on all training images, without evaluations during the run.

    If there is no test split, the finished model is measured on the data's own validation split.
    """
    choices.add("the run trains on all training images", validation_share=0.0)
    choices.add(evaluations=0)
    if not facts.has_test:
        choices.add(validation="train")


def choose_geometry(choices: Choices) -> None:
    """Choose the resizing and cropping of vision_transformer and Big Transfer, whichever library the weights came from.

    If the user chose any of interpolation, antialiasing and resampler, the others keep the values of the model.
    """
    scaling = dict(GEOMETRIES["vision_transformer"])
    shape = {name: scaling.pop(name) for name in ("resize", "crop_share")}
    choices.add("images squashed to the image size, as in the original code", **shape)
    choices.add(scaled_decode=scaling.pop("scaled_decode"))
    if not scaling.keys() & choices.explicit.keys():
        choices.add("images scaled bilinearly without antialiasing, as in the original code", **scaling)


def crops_are_chosen(explicit: Explicit) -> bool:
    """Return True if the user chose random crops, by a preset or by an option."""
    preset = PRESETS[explicit.get("preset", "none")]
    return bool({"crop_area", "crop_from"} & explicit.keys()) or preset.crop_area is not None


def choose_length(choices: Choices, steps: int, batch_size: int) -> int:
    """Choose the batch size and the number of steps, unless the user chose epochs. Return the batch size of the run."""
    batch: int = choices.explicit.get("batch_size", batch_size)
    choices.add(batch_size=batch)
    if "epochs" in choices.explicit:
        choices.add(steps=None)
    else:
        choices.add(f"{steps:,} steps of {batch} images", steps=steps)
    return batch


def choose_accumulation(choices: Choices, network: AnyConfig, size: tuple[int, int], batch: int, memory: int) -> None:
    """Choose the number of parts of a batch so that a training step fits into the memory."""
    parts = accumulation_parts(network, size, batch, memory)
    reason = f"each batch in {parts} parts, to fit into {memory / 1e9:.3g} GB of memory" if parts > 1 else ""
    choices.add(reason, accumulation=parts)


def accumulation_parts(network: AnyConfig, size: tuple[int, int], batch: int, memory: int) -> int:
    """Return the number of parts of a batch with which a training step needs at most 0.7 of the memory.

    The estimate is the formula for CPUs. If nothing fits, every part is a single image.
    """
    config = network.with_image_size(size)
    for parts in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        needed = training_bytes(config, math.ceil(batch / parts), size, "bf16")
        if parts >= batch or needed <= MEMORY_FRACTION * memory:
            return min(parts, batch)
    return batch


def exact_size(network: AnyConfig, longest: int) -> tuple[int, int]:
    """Return the model's image size scaled to this longest side. Patches may not divide this size."""
    height, width = network.image_size
    factor = longest / max(height, width)
    return round(height * factor), round(width * factor)


def scaled_size(network: AnyConfig, longest: int) -> tuple[int, int]:
    """Return the model's image size scaled to this longest side, or the nearest size that the network can take."""
    return network.nearest_size(*exact_size(network, longest))


def _image_size(network: AnyConfig, facts: DataFacts, *, gpu: bool) -> tuple[tuple[int, int], str]:
    """Return an image size and the reason for it."""
    own = network.image_size
    small = facts.side is not None and facts.side < SMALL_SIDE
    if small and max(own) > SMALL_SIZE:
        why = f"the images are small (about {facts.side} pixels a side), so {own[0]} x {own[1]} would only cost more"
        return scaled_size(network, SMALL_SIZE), why
    large = facts.side is not None and facts.side >= LARGE_SIZE
    if gpu and large and max(own) < LARGE_SIZE and network.architecture == "ViT":
        why = f"the images are large (about {facts.side} pixels a side), and a GPU is fast enough"
        return scaled_size(network, LARGE_SIZE), why
    return own, "the model's own"


def _batch_size(images: int, *, gpu: bool) -> int:
    """Return a batch size that gives about eight batches per epoch. It is a power of two.

    On a CPU larger batches are no faster.
    """
    largest = 512 if gpu else 32
    return max(4, min(largest, 2 ** int(math.log2(max(images / 8, 4)))))


def _choose_steps(choices: Choices, images: int, batch: int, *, gpu: bool) -> None:
    if "epochs" in choices.explicit:
        choices.add(steps=None)
        return
    if gpu:
        bit_steps = 500 if images < FEW else 10_000 if images < MANY else 20_000
        seen = 512 * bit_steps
        why = f"as many images as {bit_steps:,} steps of 512 have (BiT's rule for {images:,} images)"
    else:
        seen = max(min(20 * images, 20_000), 3 * images)
        why = f"each image is seen {seen / images:.3g} times"
    steps = max(MIN_STEPS, math.ceil(seen / batch))
    if steps * batch >= seen + batch:
        why = "the smallest number of steps"
    choices.add(f"{steps:,} steps of {batch} images: {why}", steps=steps)


def _choose_optimizer(choices: Choices, network: AnyConfig, start: StartConfig, batch: int) -> None:
    trained = "lora" if start.lora_rank is not None else "head" if start.train_blocks == 0 else "all"
    rate = float(f"{RATES[trained] / network.stream_width * math.sqrt(batch / 32):.2g}")
    why = f"for a network of width {network.stream_width:,} and a batch size of {batch}"
    if trained != "all":
        why += ", higher because few weights are trained"
    choices.add(f"learning rate {rate:g} with AdamW: {why}", learning_rate=rate)
    if trained == "all":
        choices.add(f"layer decay {LAYER_DECAY}: lower blocks change less than upper ones", layer_decay=LAYER_DECAY)


def _choose_augmentation(choices: Choices, facts: DataFacts) -> None:
    choices.add("random mirroring: set --no-flip if left and right differ, as in text", flip=True)
    if "preset" in choices.explicit:
        return
    hint = ": set --crop-area 1 1 if the numbers depend on position or size" if facts.targets == "numbers" else ""
    if "crop_from" not in choices.explicit:
        choices.add(f"random crops of at least {CROP_AREA[0]:.0%} of the area{hint}", crop_area=CROP_AREA)
    mixup = MIXUP if facts.images >= FEW and facts.targets == "class" else None
    choices.add(f"mixup {mixup}: there are at least {FEW:,} training images" if mixup else "", mixup=mixup)
