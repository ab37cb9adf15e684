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

from vitrail.data.objects import Objects
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

PATCHES_OF_OBJECT = 1.75
"""Side in patches of the objects of the smallest class, from which larger images are not needed."""

LOOKED_AT = 2000
"""Largest number of images whose objects are looked at."""

ENOUGH_EPOCHS, ENOUGH_EPOCHS_OF_BLOCKS = 6.0, 4.0
"""Numbers of epochs for which larger images, and more trained blocks, are given up."""

TIMES_OF_USUAL = 3.0
"""Usual time of dense targets as a multiple of that of classes."""

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
    low, high = SCALES[facts.targets]
    choices.add(f"random scales from {low} to {high}", scale_jitter=(low, high))
    choices.add("random mirroring: set --no-flip if left and right differ", flip=True)
    choices.add("random changes of colours", colour_jitter=COLOURS)
    largest = 16 if device.type == "cuda" else 4
    batch = explicit.get("batch_size", min(largest, max(1, facts.images // 8)))
    choices.add(f"batches of {plural(batch, 'image')}", batch_size=batch)
    chosen = _size(base, bundle, splits, facts, explicit, device=device, seconds=seconds)
    rows, columns = network.grid_of(*chosen.image_size)
    height, width = chosen.image_size
    choices.add(f"image size {height} x {width}: {rows} x {columns} patches", image_size=chosen.image_size)
    blocks = network.num_blocks
    if chosen.trained < blocks and "lora_rank" not in explicit:
        below = f" and the last {chosen.trained} of {blocks} blocks are" if chosen.trained else " is"
        choices.add(f"the head{below} trained", train_blocks=chosen.trained)
    choices.add(f"learning rate {RATE:g} of the head, {RATE * BACKBONE_FACTOR:g} below it", learning_rate=RATE)
    if not {"learning_rate_factors", "lora_rank"} & explicit.keys():
        factors = (r"(network\.)?head\..*=1", f".*={BACKBONE_FACTOR}")
        choices.add(learning_rate_factors=factors, layer_decay=LAYER_DECAY)
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
    """Return the image size and the number of blocks to train.

    The size is the largest one with which the head alone learns for `ENOUGH_EPOCHS`, but no larger than the objects
    need. Then as many blocks are trained as the time allows. If the time suffices for nothing, the smallest size with
    only the head is returned.
    """
    network = bundle.network.config
    shape = typical_shape(splits.train)
    precision: Precision = "float32" if base.run.precision == "float32" else "bf16"
    sizes = [explicit["image_size"]] if "image_size" in explicit else sizes_for(network, shape, splits.train)
    measured = sizes[-1]
    forward = forward_seconds(on_device(adapted(bundle, image_size=measured), device), precision, batch=4)
    speed = network.inference_flops(measured) / forward
    blocks = network.num_blocks
    if explicit.get("lora_rank") is not None:
        trained = [blocks]
    elif (given := explicit.get("train_blocks")) is not None:
        trained = [given]
    else:
        trained = [0, blocks // 4, blocks // 2, blocks]

    def fits(one: Size, epochs: float) -> bool:
        return one.seconds * facts.images * epochs <= FOR_STEPS * seconds

    for size in sizes:
        of_size = fitted(network, base.start.init, replace(bundle.preprocess, image_size=size), {}, 10, base.task)
        found = [Size(size, count, of_size.training_flops(trained_blocks=count) / speed) for count in trained]
        if fits(found[0], ENOUGH_EPOCHS):
            break
    return next((one for one in reversed(found) if fits(one, ENOUGH_EPOCHS_OF_BLOCKS)), found[0])


def sizes_for(network: AnyConfig, shape: tuple[float, float], train: Source) -> list[tuple[int, int]]:
    """Return the image sizes to choose from, the largest first: those of images of this shape with the `PATCHES`, but
    no larger than `LARGEST_SCALE` times the images, or than objects need (`PATCHES_OF_OBJECT`)."""
    rows, columns = network.grid_of(*network.image_size)
    patch = network.image_size[0] / rows, network.image_size[1] / columns
    needed = LARGEST_SCALE
    if (side := smallest_side(train, shape)) is not None:
        needed = min(needed, PATCHES_OF_OBJECT * math.sqrt(patch[0] * patch[1]) / side)
    most = needed**2 * math.prod(shape) / math.prod(patch)
    found = []
    for count in [count for count in PATCHES if count <= most] or PATCHES[-1:]:
        scale = math.sqrt(count * math.prod(patch) / math.prod(shape))
        found.append(network.nearest_size(round(shape[0] * scale), round(shape[1] * scale)))
    return found


def smallest_side(train: Source, shape: tuple[float, float]) -> float | None:
    """Return the median side of the objects of the class whose objects are smallest, in pixels of images of this shape.
    Return None without boxes."""
    targets = (train.target(index) for index in evenly(len(train), LOOKED_AT).tolist())
    objects = [one for one in targets if isinstance(one, Objects) and len(one)]
    if not objects:
        return None
    labels, boxes = (np.concatenate([getattr(one, name) for one in objects]) for name in ("labels", "boxes"))
    sides = np.sqrt((boxes[:, 2:] - boxes[:, :2]).prod(axis=1) * math.prod(shape))
    return float(min(np.median(sides[labels == label]) for label in np.unique(labels)))


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
