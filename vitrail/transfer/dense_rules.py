"""The rule that chooses fine-tuning settings for boxes and masks, from the data, the model and the time.

Small objects need many patches, and many patches need much time. The rule therefore measures how fast this machine is,
and chooses the largest images, and the largest part of the network to train, with which each training image is still
seen often enough. docs/train.md has the measurements behind these numbers.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from vitrail.data.pixels.decode import image_size_of
from vitrail.data.source import Source, evenly, image_of
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, plural
from vitrail.machine import Precision, available_memory
from vitrail.models.variants import AnyConfig, transformer_config
from vitrail.training.config import TrainConfig
from vitrail.training.pilot import training_speeds
from vitrail.training.start import fitted
from vitrail.transfer.examination import on_device
from vitrail.transfer.facts import (
    MAX_HEADERS,
    Choices,
    DataFacts,
    Explicit,
    FinetunePlan,
    check_images,
    choose_accumulation,
)
from vitrail.transfer.trials import forward_seconds
from vitrail.weights.adapt import adapted
from vitrail.weights.bundle import Bundle

TASKS_OF_TARGETS = {"boxes": "detection", "mask": "segmentation"}
"""The task for each kind of dense targets."""

NOUNS = {"boxes": "boxes of objects", "mask": "masks"}
"""The targets in messages."""

PATCHES = (1600, 1200, 900, 672, 504, 378, 283, 212)
"""Numbers of patches of an image to choose from, as the time allows."""

ENOUGH_EPOCHS = 10.0
"""Number of epochs for which larger images or more trained blocks are given up."""

TIMES_OF_USUAL = 3.0
"""Usual time of dense targets as a multiple of that of classes."""

BATCH = {"cpu": 4, "cuda": 16}

RATE, BACKBONE_FACTOR, LAYER_DECAY = 1e-3, 0.1, 0.8
"""Learning rate of the head, that of the last block beside it, and the ratio between blocks."""

SCALES = {"boxes": (0.7, 1.4), "mask": (0.6, 1.8)}
COLOURS = (0.3, 0.3, 0.2, 0.05)

FOR_STEPS = 0.88
"""Fraction of the time that is left for the steps and evaluations of the run."""


FOR_SPEED = 0.03
"""Fraction of the time for the measurement of the training speed."""

EVALUATED, MOST_EVALUATIONS = 0.1, 4
"""Largest fraction of the time for evaluations during the run, and their largest number."""

EVALUATION_OF_STEP, EVALUATION_OF_HEAD_STEP = 2.5, 1.2
"""Images per second of an evaluation as a multiple of those of training, with and without trained blocks."""

LEAST, MIN_STEPS = 0.3, 20
"""Smallest fraction of the time for steps, and their smallest number."""

LARGEST_SCALE = 2.0
"""Images are not made larger than this multiple of their pixels."""


class Size(NamedTuple):
    """An image size and a number of trained blocks, with the time that a training step needs for an image."""

    image_size: tuple[int, int]
    trained: int
    seconds: float


def plan_dense(
    base: TrainConfig,
    bundle: Bundle,
    splits: Splits,
    facts: DataFacts,
    *,
    device: torch.device,
    explicit: Explicit,
    seconds: float,
) -> FinetunePlan:
    """Return the settings for fine-tuning a model on boxes or masks within a time in seconds, which begins now.

    Settings in `explicit` are kept. Raise `ConfigError` for a model without patch tokens, and if the data has no
    training image.
    """
    started = time.perf_counter()
    check_images(base.data.spec, facts)
    network = transformer_config(bundle.network.config)
    if network is None:
        raise ConfigError(
            f"{facts.targets} need a Vision Transformer or a hybrid, and this model is a "
            f"{bundle.network.config.architecture}; choose another model"
        )
    choices = Choices(explicit)
    task = TASKS_OF_TARGETS[facts.targets]
    choices.add(f"task {task}: the data has {NOUNS[facts.targets]}", task=task)
    choices.add("whole images, padded to the shape of most of them", resize="pad", crop_share=1.0)
    choices.add(
        f"random scales from {SCALES[facts.targets][0]} to {SCALES[facts.targets][1]}",
        scale_jitter=SCALES[facts.targets],
    )
    choices.add("random mirroring: set --no-flip if left and right differ", flip=True)
    choices.add("random changes of colours", colour_jitter=COLOURS)
    batch = explicit.get("batch_size", min(BATCH[device.type], max(1, facts.images // 8)))
    choices.add(f"batches of {plural(batch, 'image')}", batch_size=batch)
    chosen = _size(base, bundle, splits, facts, explicit, device=device, seconds=seconds)
    height, width = chosen.image_size
    choices.add(
        f"image size {height} x {width}: {math.prod(network.grid_of(height, width)):,} patches",
        image_size=chosen.image_size,
    )
    blocks = network.num_blocks
    if chosen.trained < blocks and "lora_rank" not in explicit:
        choices.add(
            f"the head and the last {chosen.trained} of {blocks} blocks are trained", train_blocks=chosen.trained
        )
    choices.add(f"learning rate {RATE:g} of the head, {RATE * BACKBONE_FACTOR:g} below it", learning_rate=RATE)
    if not {"learning_rate_factors", "lora_rank"} & explicit.keys():
        choices.add(
            learning_rate_factors=(r"(network\.)?head\..*=1", rf".*={BACKBONE_FACTOR}"), layer_decay=LAYER_DECAY
        )
    choices.add(clip=10.0, warmup=0.05, weight_decay=0.05)
    choices.add(keep="best" if facts.has_validation else "last", checkpoints=5)
    choose_accumulation(choices, network, chosen.image_size, batch, available_memory(device))
    base = replace(base, images=bundle.preprocess)
    plan = choices.plan(base)
    if {"steps", "epochs"} & explicit.keys():
        return plan
    return _with_length(choices, plan.config, base, splits, seconds - (time.perf_counter() - started))


def _size(
    base: TrainConfig,
    bundle: Bundle,
    splits: Splits,
    facts: DataFacts,
    explicit: Explicit,
    *,
    device: torch.device,
    seconds: float,
) -> Size:
    """Return the image size and the number of blocks to train, with which the time suffices for `ENOUGH_EPOCHS`.

    More patches come before more blocks. If the time suffices for nothing, the smallest size with only the head is
    returned.
    """
    network = bundle.network.config
    shape = typical_shape(splits.train)
    precision: Precision = "float32" if base.run.precision == "float32" else "bf16"
    measured = network.nearest_size(*_with_patches(network, shape, PATCHES[-2]))
    forward = forward_seconds(on_device(adapted(bundle, image_size=measured), device), precision, batch=4)
    speed = network.inference_flops(measured) / forward
    sizes = [network.nearest_size(*_with_patches(network, shape, count)) for count in PATCHES]
    largest = LARGEST_SCALE * math.prod(shape)
    sizes = [size for size in sizes if math.prod(size) <= largest] or sizes[-1:]
    if "image_size" in explicit:
        sizes = [explicit["image_size"]]
    blocks = network.num_blocks
    trained = [explicit["train_blocks"]] if explicit.get("train_blocks") is not None else [blocks, blocks // 2, 0]
    if explicit.get("lora_rank") is not None:
        trained = [blocks]
    found = []
    for size in sizes:
        for count in trained:
            of_size = fitted(network, base.start.init, replace(bundle.preprocess, image_size=size), {}, 10, base.task)
            found.append(Size(size, count, of_size.training_flops(trained_blocks=count) / speed))
    enough = [one for one in found if one.seconds * facts.images * ENOUGH_EPOCHS <= FOR_STEPS * seconds]
    return (
        max(enough, key=lambda one: (one.trained > 0, math.prod(one.image_size), one.trained)) if enough else found[-1]
    )


def typical_shape(source: Source) -> tuple[float, float]:
    """Return the geometric mean of the heights and that of the widths of up to 64 images."""
    sizes = []
    for index in evenly(len(source), MAX_HEADERS).tolist():
        try:
            sizes.append(image_size_of(image_of(source, index)))
        except DataError:  # training skips the image and reports it
            continue
    if not sizes:
        raise DataError("none of the first training images can be decoded")
    height, width = np.exp(np.log(np.array(sizes)).mean(axis=0)).tolist()
    return height, width


def _with_patches(network: AnyConfig, shape: tuple[float, float], count: int) -> tuple[int, int]:
    """Return the size of this shape whose images have about `count` patches of a network."""
    (height, width), side = shape, network.image_size
    rows, columns = network.grid_of(*side)
    scale = math.sqrt(count * (side[0] // rows) * (side[1] // columns) / (height * width))
    return round(height * scale), round(width * scale)


def _with_length(
    choices: Choices, config: TrainConfig, base: TrainConfig, splits: Splits, seconds: float
) -> FinetunePlan:
    """Return the plan with the number of steps and evaluations that fit into the time in seconds that is left."""
    started = time.perf_counter()
    speed = training_speeds([config], splits, FOR_SPEED * seconds, seconds)[0]
    left = FOR_STEPS * (seconds - (time.perf_counter() - started))
    held_out, tested = (0 if part is None else len(part) for part in (splits.validation, splits.test))
    trained = config.start.train_blocks is None
    an_evaluation = 1 / (speed * (EVALUATION_OF_STEP if trained else EVALUATION_OF_HEAD_STEP))
    evaluations = min(MOST_EVALUATIONS, max(1, int(EVALUATED * left / max(held_out * an_evaluation, 1e-9))))
    evaluations = choices.explicit.get("evaluations", evaluations if held_out else 0)
    for_steps = max(LEAST * left, left - ((evaluations + 1) * held_out + tested) * an_evaluation)
    steps = max(MIN_STEPS, int(for_steps * speed / config.run.batch_size))
    epochs = steps * config.run.batch_size / len(splits.train)
    choices.add(
        f"{steps:,} steps, in which each image is seen {epochs:.3g} times: this machine trains {speed:.3g} images/s",
        steps=steps,
    )
    choices.add(evaluations=evaluations)
    return choices.plan(base)
