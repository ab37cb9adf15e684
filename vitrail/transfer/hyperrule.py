"""BiT-HyperRule (1912.11370, section 3.3): settings for fine-tuning a BiT ResNet from the size of data and images."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from vitrail.data.augmentation.augment import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.models.variants import AnyConfig
from vitrail.training.config import TrainConfig
from vitrail.training.optimization.duration import Duration
from vitrail.training.optimization.optimizer import OptimizerConfig
from vitrail.transfer.choices import (
    FEW,
    MANY,
    NO_SETTINGS,
    SMALL_SIDE,
    Choices,
    DataFacts,
    Explicit,
    Plan,
    check_images,
    check_rate,
    choose_accumulation,
    choose_all_images,
    choose_geometry,
    choose_length,
    choose_task,
    crops_are_chosen,
)

__all__ = ["SCHEDULES", "StepSchedule", "plan_by_hyperrule", "schedule_for"]


class StepSchedule(NamedTuple):
    """A row of the rule's table, for data sets with fewer than `max_images` training images."""

    max_images: float
    warmup: int
    """Steps in which the learning rate rises from 0."""
    decays: tuple[int, ...]
    """Steps after which the learning rate is divided by ten."""
    steps: int
    mixup: float


SCHEDULES = (
    StepSchedule(FEW, 100, (200, 300, 400), 500, 0.0),
    StepSchedule(MANY, 500, (3000, 6000, 9000), 10_000, 0.1),
    StepSchedule(math.inf, 500, (6000, 12_000, 18_000), 20_000, 0.1),
)
"""The rows of the rule's table, with the numbers of steps of the original code."""

LEARNING_RATE, BATCH_SIZE = 0.003, 512
SMALL, LARGE = (160, 128), (512, 480)
"""Settings for small and for large images: the side in pixels to which a training image is scaled, and the side of the
box that is cut out of the scaled image. They are those of the original code. The paper has 512 and 480 for R152x4 only,
and 448 and 384 for large images with its other networks."""


def schedule_for(images: int) -> StepSchedule:
    """Return the row for this many training images."""
    return next(row for row in SCHEDULES if images < row.max_images)


def plan_by_hyperrule(
    base: TrainConfig,
    network: AnyConfig,
    preprocess: Preprocess,
    facts: DataFacts,
    *,
    memory: int,
    explicit: Explicit = NO_SETTINGS,
) -> Plan:
    """Return the settings of BiT-HyperRule for fine-tuning a ResNet with this config and preprocessing.

    No training image is held out, because the rule has nothing to choose on held-out images. `memory` is in bytes.
    Raise `ConfigError` if the network is not a BiT ResNet, if the data has no training image, or if an explicit
    optimizer lacks a learning rate.
    """
    if network.architecture != "BiT":
        raise ConfigError(
            "protocol='bit' is the rule of Big Transfer for BiT ResNets, but the model is a Vision Transformer; choose "
            "protocol='paper' or protocol='rule'"
        )
    check_images(base.data.spec, facts)
    check_rate(base.override(**explicit).optimizer, explicit, "sgd")
    row, choices = schedule_for(facts.images), Choices(explicit)
    choices.reasons.append(f"BiT-HyperRule for {facts.images:,} training images")
    size = _choose_images(choices, facts)
    batch = choose_length(choices, row.steps, BATCH_SIZE)
    choose_accumulation(choices, network, size, batch, memory)
    _choose_optimizer(choices, row)
    if row.mixup and "preset" not in explicit:
        choices.add(f"mixup {row.mixup:g}, with one weight per batch", mixup=row.mixup, mixup_per="batch")
    choose_task(choices, base.task.name, facts, label_smoothing=0.0)
    choices.add("a new head of zeros", new_head=True)
    choose_all_images(choices, facts)
    choices.add(keep="last", checkpoints=5)
    return choices.plan(replace(base, images=preprocess, optimizer=OptimizerConfig(), augment=Augment()))


def _choose_images(choices: Choices, facts: DataFacts) -> tuple[int, int]:
    """Choose the scaling, the crops and the mirroring. Return the height and width of the network's images."""
    small = facts.side is not None and facts.side < SMALL_SIDE
    scaled, side = SMALL if small else LARGE
    size: tuple[int, int] = choices.explicit.get("image_size", (side, side))
    why = f"{'smaller' if small else 'not smaller'} than {SMALL_SIDE} x {SMALL_SIDE}"
    choices.add(f"image size {side} x {side}: the images are {why}", image_size=size)
    height, width = (round(each * scaled / side) for each in size)
    if not crops_are_chosen(choices.explicit):
        choices.add(
            f"training images are scaled to {height} x {width} (height x width), and random boxes of the image "
            "size are cut out",
            crop_from=(height, width),
        )
    choices.add("random mirroring", flip=True)
    choose_geometry(choices)
    return size


def _choose_optimizer(choices: Choices, row: StepSchedule) -> None:
    """Choose SGD and the learning rate schedule.

    In a run of another length than the row's, the learning rate changes at the same fractions of the run.
    """
    explicit = choices.explicit
    is_own_length = "epochs" in explicit or "steps" in explicit
    choices.add("SGD with momentum 0.9", optimizer="sgd", momentum=0.9)
    choices.add(weight_decay=0.0, clip=0.0)
    if "learning_rate" not in explicit:
        choices.add(
            f"learning rate {LEARNING_RATE:g} for a batch size of {BATCH_SIZE}, in proportion for other sizes",
            learning_rate=LEARNING_RATE, base_batch_size=BATCH_SIZE,
        )  # fmt: skip
    if "schedule" not in explicit:
        fractions = [step / row.steps for step in row.decays]
        points: tuple[Duration, ...] = tuple(f"{step + 1} steps" for step in row.decays)
        choices.add(
            f"the learning rate is divided by ten after {', '.join(f'{one:.0%}' for one in fractions)} of the steps",
            schedule="staircase",
            stair_at=tuple(fractions) if is_own_length else points,
        )
    warmup: Duration = row.warmup / row.steps if is_own_length else f"{row.warmup} steps"
    choices.add(warmup=warmup, warmup_from_zero=True)
