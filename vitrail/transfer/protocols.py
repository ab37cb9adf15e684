"""Fine-tuning protocols of papers: SGD with a chosen learning rate (Appendix B.1.1), and BiT-HyperRule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

from vitrail.data.augment.settings import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.models.variants import AnyConfig
from vitrail.training.config import TrainConfig
from vitrail.training.optimizer import OptimizerConfig
from vitrail.training.schedule import Duration
from vitrail.transfer.facts import (
    FEW,
    MANY,
    NO_SETTINGS,
    SMALL_SIDE,
    Choices,
    DataFacts,
    Explicit,
    FinetunePlan,
    check_rate,
    choose_accumulation,
    choose_all_images,
    choose_geometry,
    choose_length,
    choose_task,
    crops_are_chosen,
    exact_size,
)

TableRow = Literal["flowers", "cifar", "imagenet", "vtab"]


class Row(NamedTuple):
    """One row of the paper's Table 4."""

    max_images: float
    """By default the row applies to data sets with fewer training images. 0 if only the user can choose the row."""
    steps: int
    warmup: int
    """Number of steps in which the learning rate rises."""
    rates: tuple[float, ...]
    held_out: float
    """Fraction of the training images that is held out to choose the learning rate. 0 if there is only one rate."""
    data: str
    """The data sets for which the paper states this row."""
    crop_from: int | None = None
    """Side in pixels to which whole training images are scaled, before a random box of 384 x 384 is cut out of each. By
    default, random crops of the original code are used instead."""


TABLE_4: dict[TableRow, Row] = {
    "flowers": Row(FEW, 500, 100, (0.001, 0.003, 0.01, 0.03), 0.1, "Pets and Flowers"),
    "cifar": Row(MANY, 10_000, 500, (0.001, 0.003, 0.01, 0.03), 0.02, "CIFAR"),
    "imagenet": Row(math.inf, 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.01, "ImageNet"),
    "vtab": Row(0, 2500, 500, (0.01,), 0.0, "VTAB", 448),
}
"""Rows by name. The paper names data sets instead of numbers of images, so the bounds between the first three rows are
those of BiT's HyperRule. For VTAB the paper uses the preprocessing of BiT (1912.11370, section 3.3) at 384 pixels,
where BiT scales to 448 x 448, cuts out a random box of 384 x 384, and mirrors."""

VTAB_HELD_OUT = 0.2
"""Fraction of the 1,000 images of a VTAB task that is held out if several learning rates are tried."""

BATCH_SIZE, LONGEST_SIDE = 512, 384
CROP_AREA = (0.05, 1.0)
"""Range of the area of random crops, as a fraction of the image, as in the original code."""


def plan_by_paper(
    base: TrainConfig,
    network: AnyConfig,
    preprocess: Preprocess,
    facts: DataFacts,
    *,
    memory: int,
    row: TableRow | None = None,
    rates: tuple[float, ...] | None = None,
    explicit: Explicit = NO_SETTINGS,
) -> FinetunePlan:
    """Return the paper's settings for fine-tuning a network with this config and preprocessing.

    The momentum is in float32, while the original code keeps it in bfloat16, with 8 bits instead of 24.

    By default, `row` is the row for the number of training images, and `rates` are the rates of the row. `facts.images`
    includes the images that will be held out. If there is only one rate, or `explicit` has a learning rate, no rates
    are tried and no image is held out. Raise `ConfigError` if `explicit` has an optimizer but no learning rate.
    """
    if rates is None:
        check_rate(base.override(**explicit).optimizer, explicit, "sgd")
    usual = next(name for name, one in TABLE_4.items() if facts.images < one.max_images)
    found, choices = TABLE_4[row or usual], Choices(explicit)
    why = f"the data has {facts.images:,} training images" if row is None else "as chosen"
    choices.reasons.append(f"the paper's settings for {found.data}: {why}")
    size = explicit.get("image_size", exact_size(network, LONGEST_SIDE))
    choices.add(f"image size {size[0]} x {size[1]}", image_size=size)
    if network.architecture == "ViT" and network.nearest_size(*size) != size:
        choices.add("pixels that fill no patch are ignored, as in the original code", cut_uneven=True)
        network = replace(network, cut_uneven=True)
    choose_geometry(choices)
    batch = choose_length(choices, found.steps, BATCH_SIZE)
    choose_accumulation(choices, network, size, batch, memory)
    choices.add("SGD with momentum 0.9", optimizer="sgd", momentum=0.9)
    choices.add("no weight decay", weight_decay=0.0)
    choices.add(warmup=found.warmup / found.steps, warmup_from_zero=True, clip=1.0)
    choices.add("a new head of zeros", new_head=True)
    _choose_crops(choices, found, size)
    choices.add("random mirroring", flip=True)
    choose_task(choices, base.task.name, facts, label_smoothing=0.0)
    choices.add(keep="last", checkpoints=5)
    rates = found.rates if rates is None else rates
    choices.add(learning_rate=rates[0])
    if "learning_rate" in explicit or len(rates) == 1:
        choose_all_images(choices, facts)
        rates = ()
    else:
        _choose_trials(choices, facts, found, rates)
    return choices.plan(replace(base, images=preprocess, optimizer=OptimizerConfig(), augment=Augment()), rates)


def _choose_trials(choices: Choices, facts: DataFacts, row: Row, rates: tuple[float, ...]) -> None:
    """Choose the images on which the trials of the learning rates are measured."""
    if not facts.has_test:
        choices.add(validation="train")  # the data's own validation split measures the finished model
    share = row.held_out or VTAB_HELD_OUT
    shown = ", ".join(f"{rate:g}" for rate in rates)
    choices.add(
        f"the best learning rate of {shown}, chosen on {share:.0%} of the training images (or on the validation split, "
        "if the data has a test split as well); the model then trains on all training images",
        validation_share=share,
    )
    choices.add(evaluations=10)


def _choose_crops(choices: Choices, row: Row, size: tuple[int, int]) -> None:
    """Choose the random crops of a row for images of this height and width, unless the user chose crops."""
    if not {"interpolation", "antialias", "resampler"} & choices.explicit.keys():
        choices.add(crop_rule="tensorflow")  # it scales boxes without antialiasing, and acts only if there are crops
    if crops_are_chosen(choices.explicit):
        return
    if row.crop_from is None:
        reason = f"random crops of at least {CROP_AREA[0]:.0%} of the area"
        choices.add(reason, crop_area=CROP_AREA)
        return
    height, width = (round(side * row.crop_from / LONGEST_SIDE) for side in size)
    choices.add(
        f"training images are scaled to {height} x {width} (height x width), and random boxes of "
        f"{size[0]} x {size[1]} are cut out",
        crop_from=(height, width),
    )


def check_final_run(config: TrainConfig, splits: Splits) -> None:
    """Raise `ConfigError` for settings that the final run cannot have. It is called before any trial starts.

    `splits` is the data of the final run.
    """
    run = config.run
    for name, is_set, lacking in (
        ("keep", run.keep == "best", "no evaluations"),
        ("patience", run.patience is not None, "no evaluations"),
        ("probe", bool(run.probe) and not splits.validation, "no held-out images to measure"),
    ):
        if is_set:
            raise ConfigError(
                f"{name}={getattr(run, name)!r} cannot be used when learning rates are tried, because the final run "
                f"trains on all images and has {lacking}; leave {name} out, or give one learning rate"
            )


def final_config(config: TrainConfig, rate: float) -> TrainConfig:
    """Return the config of the final run, with the chosen learning rate and all training images."""
    return with_all_images(config).override(learning_rate=rate, evaluations=0, keep="last")


def with_all_images(config: TrainConfig) -> TrainConfig:
    """Return the config with no training image held out. If the validation split is a slice of the training images,
    this slice is used for training too."""
    validation = "auto" if config.data.validation == "auto" else "train"
    return config.override(validation=validation, validation_share=0.0)


# BiT-HyperRule (1912.11370, section 3.3): settings for fine-tuning a BiT ResNet from the size of data and images.


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

LEARNING_RATE, HYPERRULE_BATCH_SIZE = 0.003, 512
SMALL, LARGE = (160, 128), (512, 480)
"""Settings for small and for large images: the side in pixels to which a training image is scaled, and the side of the
box that is cut out of the scaled image. They are those of the original code. The paper has 512 and 480 for R152x4 only,
and 448 and 384 for large images with its other networks."""


def plan_by_hyperrule(
    base: TrainConfig,
    network: AnyConfig,
    preprocess: Preprocess,
    facts: DataFacts,
    *,
    memory: int,
    explicit: Explicit = NO_SETTINGS,
) -> FinetunePlan:
    """Return the settings of BiT-HyperRule for fine-tuning a ResNet with this config and preprocessing.

    No training image is held out, because the rule has nothing to choose on held-out images. `memory` is in bytes.
    Raise `ConfigError` if the network is not a BiT ResNet, or if an explicit
    optimizer lacks a learning rate.
    """
    if network.architecture != "BiT":
        raise ConfigError(
            "protocol='bit' is the rule of Big Transfer for BiT ResNets, but the model is a Vision Transformer; choose "
            "protocol='paper' or protocol='rule'"
        )
    check_rate(base.override(**explicit).optimizer, explicit, "sgd")
    row, choices = next(one for one in SCHEDULES if facts.images < one.max_images), Choices(explicit)
    choices.reasons.append(f"BiT-HyperRule for {facts.images:,} training images")
    size = _choose_images(choices, facts)
    batch = choose_length(choices, row.steps, HYPERRULE_BATCH_SIZE)
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
            f"learning rate {LEARNING_RATE:g} for a batch size of {HYPERRULE_BATCH_SIZE}, in proportion for other "
            "sizes",
            learning_rate=LEARNING_RATE, base_batch_size=HYPERRULE_BATCH_SIZE,
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
