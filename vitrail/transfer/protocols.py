"""Fine-tuning protocols: SGD with a chosen learning rate as in the paper (Appendix B.1.1), BiT-HyperRule, and our own
rule, which chooses settings from the size of the data, the model and the machine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from vitrail.data.augment.settings import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, plural
from vitrail.models.variants import AnyConfig
from vitrail.training.config import StartConfig, TrainConfig
from vitrail.training.optimizer import OptimizerConfig
from vitrail.training.schedule import Duration
from vitrail.transfer.facts import (
    FEW,
    MANY,
    NO_SETTINGS,
    SMALL_SIDE,
    Candidate,
    Choices,
    DataFacts,
    Explicit,
    Findings,
    FinetunePlan,
    Search,
    check_rate,
    choose_accumulation,
    choose_all_images,
    choose_geometry,
    choose_length,
    choose_task,
    crops_are_chosen,
    exact_size,
    scaled_size,
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

PAPER_BATCH_SIZE, LONGEST_SIDE = 512, 384
PAPER_CROP_AREA = (0.05, 1.0)
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
    batch = choose_length(choices, found.steps, PAPER_BATCH_SIZE)
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
        reason = f"random crops of at least {PAPER_CROP_AREA[0]:.0%} of the area"
        choices.add(reason, crop_area=PAPER_CROP_AREA)
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


BIT_SCHEDULES = (
    StepSchedule(FEW, 100, (200, 300, 400), 500, 0.0),
    StepSchedule(MANY, 500, (3000, 6000, 9000), 10_000, 0.1),
    StepSchedule(math.inf, 500, (6000, 12_000, 18_000), 20_000, 0.1),
)
"""The rows of the rule's table, with the numbers of steps of the original code."""

BIT_RATE, BIT_BATCH_SIZE = 0.003, 512
BIT_SMALL, BIT_LARGE = (160, 128), (512, 480)
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
    row, choices = next(one for one in BIT_SCHEDULES if facts.images < one.max_images), Choices(explicit)
    choices.reasons.append(f"BiT-HyperRule for {facts.images:,} training images")
    size = _choose_images(choices, facts)
    batch = choose_length(choices, row.steps, BIT_BATCH_SIZE)
    choose_accumulation(choices, network, size, batch, memory)
    _choose_staircase(choices, row)
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
    scaled, side = BIT_SMALL if small else BIT_LARGE
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


def _choose_staircase(choices: Choices, row: StepSchedule) -> None:
    """Choose SGD and the learning rate schedule.

    In a run of another length than the row's, the learning rate changes at the same fractions of the run.
    """
    explicit = choices.explicit
    is_own_length = "epochs" in explicit or "steps" in explicit
    choices.add("SGD with momentum 0.9", optimizer="sgd", momentum=0.9)
    choices.add(weight_decay=0.0, clip=0.0)
    if "learning_rate" not in explicit:
        choices.add(
            f"learning rate {BIT_RATE:g} for a batch size of {BIT_BATCH_SIZE}, in proportion for other "
            "sizes",
            learning_rate=BIT_RATE, base_batch_size=BIT_BATCH_SIZE,
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


# Our own rule. Like BiT's HyperRule, it has a few numbers that are chosen once and work for most data. docs/transfer.md
# has the measurements behind these numbers.


SMALL_SIZE, LARGE_SIZE = 128, 384
"""Longest side in pixels to which inputs are scaled: SMALL_SIZE for small images, as in BiT, and LARGE_SIZE for large
images on a GPU, as in the paper."""

RULE_RATES = {"lora": 1.2, "head": 2.5}
"""Learning rate times network width at a batch size of 32, for each choice of trained weights. docs/transfer.md has the
measurements."""

RATE_OF_ALL, LOWEST_RATE = 0.75, 3e-5
"""Learning rate for all weights at a batch size of 32, times width ** 1.5, and its lower bound. Wide networks were
pre-trained on more data and lose more by large steps."""

RATE_FACTORS = (1.0, 0.3, 3.0)
"""Learning rates to try, as multiples of the usual rate. The first of equally good rates is chosen."""

HIGHER_FACTORS = (10.0, 30.0)
"""Learning rates to try while the highest one so far is the best. Networks that learned little from small images, such
as `small`, need them; the usual rates are made for networks that learned from many photographs."""

TITLES = {"adamw": "AdamW", "muon": "Muon"}
"""Optimizers for which the rule has learning rates. Muon has those of AdamW, because its updates have the same size."""

LAYER_DECAY = 0.9

RULE_CROP_AREA = (0.8, 1.0)

MIXUP = 0.1

LORA_RANK = 8

MIN_STEPS = 100

ENOUGH_VALIDATION = 500
"""Number of validation images that are enough, unless `share` of the training images in use are more."""


def plan_by_rule(
    base: TrainConfig,
    network: AnyConfig,
    preprocess: Preprocess,
    facts: DataFacts,
    *,
    device: torch.device,
    memory: int,
    explicit: Explicit = NO_SETTINGS,
    findings: Findings,
    seconds: float | None = None,
) -> FinetunePlan:
    """Return the settings for fine-tuning a network with this config and preprocessing on data with these properties.

    The rule chooses the image size, the length of the run, the batch size, the optimizer, the augmentation and the
    loss, except for settings in `explicit`. Other settings are those of `base`. `memory` is the memory of the training
    device in bytes. `findings` replace guesses about mirroring and the image size. With `seconds`, the plan has a
    search within this time. Raise `ConfigError` if `explicit` has an optimizer for which the rule has no learning
    rate, and no learning rate.
    """
    check_rate(base.override(**explicit).optimizer, explicit, *TITLES)
    choices, gpu = Choices(explicit), device.type == "cuda"
    size, why_size = image_size_for(network, facts, gpu=gpu)
    if findings.image_size is not None:
        size, why_size = findings.image_size, findings.size_reason
    choices.add(f"image size {size[0]} x {size[1]}: {why_size}", image_size=size)
    size = explicit.get("image_size", size)
    batch = explicit.get("batch_size", _batch_size(facts.images, gpu=gpu))
    choices.add(batch_size=batch)
    _choose_steps(choices, facts.images, batch, gpu=gpu, limited=seconds is not None)
    choose_accumulation(choices, network, size, batch, memory)
    _choose_optimizer(choices, network, base.override(**explicit).start, batch)
    _choose_augmentation(choices, facts, findings)
    choose_task(choices, base.task.name, facts, label_smoothing=0.1)
    choices.add(
        keep="best" if facts.has_validation else "last",
        evaluations=10 if facts.has_validation else 0,
        checkpoints=5,
    )
    kept = ", which is kept unless training improves it" if facts.has_validation else ""
    choices.add(f"the head starts as a linear model of the model's features{kept}", linear_head=True)
    start = replace(base, images=preprocess, optimizer=OptimizerConfig(), augment=Augment())
    chosen = choices.plan(start)
    is_random = chosen.config.augment.is_random_for(chosen.config.images)
    has_fixed_features = chosen.config.start.train_blocks == 0 and not is_random
    if has_fixed_features and not {"steps", "epochs", "linear_head"} & explicit.keys():
        choices.add("one step: without random augmentation, the linear model is the best head already", steps=1)
        chosen = choices.plan(start)
    return (
        chosen if seconds is None else replace(chosen, search=_search(chosen.config, network, facts, explicit, seconds))
    )


def image_size_for(network: AnyConfig, facts: DataFacts, *, gpu: bool) -> tuple[tuple[int, int], str]:
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
    return max(4, min(512 if gpu else 32, 2 ** int(math.log2(max(images / 8, 4)))))


def _choose_steps(choices: Choices, images: int, batch: int, *, gpu: bool, limited: bool) -> None:
    if "epochs" in choices.explicit:
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
    most = "at most " if limited else ""
    choices.add(f"{most}{steps:,} steps of {batch} images: {why}", steps=steps)


def _choose_optimizer(choices: Choices, network: AnyConfig, start: StartConfig, batch: int) -> None:
    trained = "lora" if start.lora_rank is not None else "head" if start.train_blocks == 0 else "all"
    rate = usual_rate(network, trained, batch)
    why = f"for a network of width {network.stream_width:,} and a batch size of {batch}"
    if trained != "all":
        why += ", higher because few weights are trained"
    kind = choices.explicit.get("optimizer", "adamw")
    choices.add(f"learning rate {rate:g} with {TITLES.get(kind, kind)}: {why}", learning_rate=rate)
    if trained == "all":
        choices.add(f"layer decay {LAYER_DECAY}: lower blocks change less than upper ones", layer_decay=LAYER_DECAY)


def enough_validation(data: Splits, splits: Splits, share: float) -> float | None:
    """Return a smaller fraction of the images to hold out, if `share` holds out far more than the rule needs.

    This happens if only a few of many images are trained on: all images are divided into splits before some of them are
    selected. `data` are the splits before the division. Return None if `share` is right.
    """
    if data.validation is not None or splits.validation is None:
        return None
    most = max(ENOUGH_VALIDATION, round(share * len(splits.train)))
    held_out = len(splits.validation)
    return float(f"{share * most / held_out:.2g}") if held_out > 1.5 * most else None


def _search(config: TrainConfig, network: AnyConfig, facts: DataFacts, explicit: Explicit, seconds: float) -> Search:
    """Return the settings to try: learning rates and, unless the user chose the trained weights, LoRA."""
    own_length = bool({"steps", "epochs"} & explicit.keys())
    candidates = _candidates(config, network, explicit)
    usual = config.optimizer.learning_rate
    rising = [_with_rate(usual * factor) for factor in (*sorted(RATE_FACTORS), *HIGHER_FACTORS)]
    return Search(
        candidates,
        seconds,
        is_limited=not own_length,
        may_thin_evaluations="evaluations" not in explicit,
        rising=tuple(rising) if rising[0] in candidates else (),
    )


def _candidates(config: TrainConfig, network: AnyConfig, explicit: Explicit) -> tuple[Candidate, ...]:
    usual = config.optimizer.learning_rate
    if "learning_rate" in explicit or config.start.train_blocks == 0:
        return (Candidate("the chosen settings", {}),)
    found = [_with_rate(usual * factor) for factor in RATE_FACTORS]
    is_free = not {"train_blocks", "lora_rank", "layer_decay"} & explicit.keys()
    if is_free:
        blocks = max(network.num_blocks // 3, 1)
        settings: dict[str, Any] = {"train_blocks": blocks, "learning_rate": 2 * usual, "layer_decay": 1.0}
        found.append(Candidate(f"the last {plural(blocks, 'block')}, learning rate {2 * usual:g}", settings))
    if is_free and network.architecture == "ViT":
        rate = usual_rate(network, "lora", config.run.batch_size)
        settings = {"lora_rank": LORA_RANK, "learning_rate": rate, "layer_decay": 1.0}
        found.append(Candidate(f"LoRA of rank {LORA_RANK}, learning rate {rate:g}", settings))
    return tuple(found)


def _with_rate(rate: float) -> Candidate:
    rounded = float(f"{rate:.2g}")
    return Candidate(f"learning rate {rounded:g}", {"learning_rate": rounded})


def usual_rate(network: AnyConfig, trained: str, batch: int) -> float:
    """Return the usual learning rate of AdamW for a network, a choice of trained weights and a batch size."""
    width = network.stream_width
    rate = max(RATE_OF_ALL / width**1.5, LOWEST_RATE) if trained == "all" else RULE_RATES[trained] / width
    return float(f"{rate * math.sqrt(batch / 32):.2g}")


def _choose_augmentation(choices: Choices, facts: DataFacts, findings: Findings) -> None:
    if findings.flip is None:
        choices.add("random mirroring: set --no-flip if left and right differ, as in text", flip=True)
    else:
        choices.add(findings.flip_reason, flip=findings.flip)
    if "preset" in choices.explicit:
        return
    hint = ": set --crop-area 1 1 if the numbers depend on position or size" if facts.targets == "numbers" else ""
    if "crop_from" not in choices.explicit:
        choices.add(f"random crops of at least {RULE_CROP_AREA[0]:.0%} of the area{hint}", crop_area=RULE_CROP_AREA)
    mixup = MIXUP if facts.images >= FEW and facts.targets == "class" else None
    choices.add(f"mixup {mixup}: there are at least {FEW:,} training images" if mixup else "", mixup=mixup)
