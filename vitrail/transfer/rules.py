"""The rule that chooses fine-tuning settings from the size of the data, the model and the machine.

Like BiT's HyperRule (1912.11370, section 3.3), it has a few numbers that are chosen once and work for most data.
docs/transfer.md has the measurements behind these numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from vitrail.data.augment.settings import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.errors import plural
from vitrail.models.variants import AnyConfig
from vitrail.training.config import StartConfig, TrainConfig
from vitrail.training.optimizer import OptimizerConfig
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
    choose_task,
    scaled_size,
)

SMALL_SIZE, LARGE_SIZE = 128, 384
"""Longest side in pixels to which inputs are scaled: SMALL_SIZE for small images, as in BiT, and LARGE_SIZE for large
images on a GPU, as in the paper."""


RATES = {"lora": 1.2, "head": 2.5}
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


CROP_AREA = (0.8, 1.0)


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
    largest = 512 if gpu else 32
    return max(4, min(largest, 2 ** int(math.log2(max(images / 8, 4)))))


def _choose_steps(choices: Choices, images: int, batch: int, *, gpu: bool, limited: bool) -> None:
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
    rate = max(RATE_OF_ALL / width**1.5, LOWEST_RATE) if trained == "all" else RATES[trained] / width
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
        choices.add(f"random crops of at least {CROP_AREA[0]:.0%} of the area{hint}", crop_area=CROP_AREA)
    mixup = MIXUP if facts.images >= FEW and facts.targets == "class" else None
    choices.add(f"mixup {mixup}: there are at least {FEW:,} training images" if mixup else "", mixup=mixup)
