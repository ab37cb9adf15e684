"""The rule that chooses fine-tuning settings for boxes and masks, from the data, the model and the time.

Small objects need many patches, and many patches need much time. The rule therefore measures how fast this machine is,
and chooses the largest images, and the largest part of the network to train, with which each training image is still
seen often enough. docs/transfer.md and docs/log.md have the measurements behind these numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.bench.workload import timed, waits_for
from vitrail.data.augment.settings import Augment
from vitrail.data.objects import Objects
from vitrail.data.source import LARGEST_SCALE, Source, evenly, typical_size
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, plural
from vitrail.experiments.runner import training_speeds
from vitrail.machine import Precision, TrainingPrecision, autocast, available_memory, resolve_precision
from vitrail.models.network import Features
from vitrail.models.variants import AnyConfig, build, transformer_config
from vitrail.models.vit_config import ViTConfig
from vitrail.tasks.kept_outputs import KEPT_FRACTION
from vitrail.tasks.segmentation import Segmentation
from vitrail.training.config import TrainConfig
from vitrail.training.optimizer import OptimizerConfig
from vitrail.training.start import fitted, head_fields
from vitrail.transfer.examination import on_device
from vitrail.transfer.facts import (
    MAX_HEADERS,
    Choices,
    DataFacts,
    Explicit,
    FinetunePlan,
    choose_accumulation,
)
from vitrail.transfer.trials import EVALUATION_PER_FORWARD, STEP_PER_FORWARD, forward_seconds
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

ENOUGH_EPOCHS, MOST_EPOCHS = 8.0, 60.0
"""Numbers of epochs of the head for which larger images are given up, and that are enough."""

ENOUGH_OF_ALL = {"boxes": (20.0, 1.0), "mask": (2.5, 0.5)}
"""Number of epochs for which all blocks are trained instead of the head alone, and the smallest fraction of the pixels
that images may then have of those for the head alone. A mask says what every patch is, so blocks learn much more from
it in a step than from boxes."""

TIMES_OF_USUAL = 3.0
"""Usual time of boxes and masks as a multiple of that of classes."""

BATCH, BATCH_OF_ALL = 4, {"boxes": 4, "mask": 2}
"""Largest number of images of a batch on a CPU for the head alone, and for all blocks. A CPU is as fast with few images
as with many, and the weights are changed more often."""

RATES = {"boxes": 1e-3, "mask": 3e-3}
"""Learning rate of the head."""

DICE_WEIGHT = 3.0
"""Weight of the Dice loss of masks beside the cross-entropy. Without it, few steps do not suffice to learn classes with
few pixels."""

BACKBONE_RATE, LAYER_DECAY = 1e-4, 0.8
"""Learning rate of the last block beside the head with its rate in `RATES`, and the ratio between blocks."""

SCALES = {"boxes": (0.7, 1.4), "mask": (0.6, 1.8)}
COLOURS = (0.3, 0.3, 0.2, 0.05)
"""Random scales, and strengths of changes of brightness, contrast, saturation and hue, if all blocks are trained. In
little time they cost more than they bring (docs/log.md)."""

FOR_STEPS = 0.88
"""Fraction of the time that is left for the steps and evaluations of the run."""

FOR_SPEED = 0.03
"""Fraction of the time for the measurement of the training speed, if all blocks are trained."""

OF_HEAD = 1.3
"""Time of a step of the head, with its loss, as a multiple of that of its forward and backward pass."""

EVALUATED, MOST_EVALUATIONS = 0.1, 4
"""Largest fraction of the time for evaluations during the run, and their largest number."""

MEASURED_SIZES = 3
"""Largest number of image sizes at which the speed is measured, until the chosen one is among them."""

LEAST, MIN_STEPS = 0.3, 20
"""Smallest fraction of the time for steps, and their smallest number."""

RANDOM = frozenset({"scale_jitter", "colour_jitter", "crop_area", "grey", "blur", "solarise", "shift", "preset"})
"""Settings with which an image looks different in every epoch."""


class Times(NamedTuple):
    """An image size, and the time that this machine needs for an image of this size."""

    image_size: tuple[int, int]
    forward: float
    """Seconds of the forward pass of all blocks in training."""
    in_float32: float
    """Seconds of this forward pass in float32, in which held-out images are answered."""
    head: float
    """Seconds of the forward and the backward pass of the head, with its loss."""
    images: int
    """Number of training images."""
    versions: float
    """Number of versions of each image: 2 with its mirror image. The tokens of each version are computed once. Infinity
    if tokens are computed in every step."""

    def of_head(self, epochs: float) -> float:
        """Return the seconds for training the head alone."""
        return self.images * (min(epochs, self.versions) * self.forward + epochs * self.head)

    def epochs_of_head(self, seconds: float) -> float:
        """Return the number of epochs of the head alone that fit into a time."""
        first = self.versions * self.images * (self.forward + self.head)
        if seconds < first:
            return seconds / (self.images * (self.forward + self.head))
        return self.versions + (seconds - first) / (self.images * self.head)

    @property
    def of_answer(self) -> float:
        """Seconds for the answer for a held-out image."""
        return EVALUATION_PER_FORWARD * self.in_float32 + self.head

    @property
    def of_all(self) -> float:
        """Seconds for an epoch in which all blocks are trained."""
        return self.images * (STEP_PER_FORWARD * self.forward + self.head)


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

    Settings in `explicit` are kept. Raise `ConfigError` for a model without patch tokens.
    """
    started = time.perf_counter()
    network = transformer_config(bundle.network.config)
    if network is None:
        raise ConfigError(
            f"{facts.targets} need a Vision Transformer or a hybrid, and this model is a "
            f"{bundle.network.config.architecture}; choose another model"
        )
    choices, kind, own_task = Choices(explicit), facts.targets, base.task
    task = TASKS_OF_TARGETS[kind]
    choices.add(f"task {task}: the data has {NOUNS[kind]}", task=task)
    choices.add("whole images, padded to the shape of most of them", resize="pad", crop_share=1.0)
    choices.add("random mirroring: set --no-flip if left and right differ", flip=True)
    base = replace(base.override(task=task), images=bundle.preprocess, optimizer=OptimizerConfig(), augment=Augment())
    largest = 16 if device.type == "cuda" else BATCH
    batch = explicit.get("batch_size", min(largest, max(1, facts.images // 8)))
    left = FOR_STEPS * seconds
    times, trains_all = _times(base, bundle, splits, facts, explicit, device=device, batch=batch, seconds=left)
    if trains_all and device.type == "cpu" and "batch_size" not in explicit:
        batch = min(batch, BATCH_OF_ALL[kind])
    choices.add(f"batches of {plural(batch, 'image')}", batch_size=batch)
    (height, width), (rows, columns) = times.image_size, network.grid_of(*times.image_size)
    choices.add(f"image size {height} x {width}: {rows} x {columns} patches", image_size=times.image_size)
    rate, below = explicit.get("learning_rate", RATES[kind]), BACKBONE_RATE / RATES[kind]
    if trains_all:
        low, high = SCALES[kind]
        choices.add(f"random scales from {low} to {high}", scale_jitter=(low, high))
        choices.add("random changes of colours", colour_jitter=COLOURS)
        choices.add(f"learning rate {rate:g} of the head, {below * rate:g} below it", learning_rate=rate)
        if not {"learning_rate_factors", "lora_rank"} & explicit.keys():
            factors = (r"(network\.)?head\..*=1", f".*={below:.4g}")
            choices.add(learning_rate_factors=factors, layer_decay=LAYER_DECAY)
    else:
        choices.add("the head alone is trained, which learns more in this time than all blocks", train_blocks=0)
        choices.add(f"learning rate {rate:g}", learning_rate=rate)
    head_kind = head_fields(bundle.network.config, base.model.overrides, base.task)["head_kind"]
    if isinstance(own_task, Segmentation) and "dice_weight" not in own_task.unread.get(head_kind, ()):
        reason = f"the Dice loss with the weight {DICE_WEIGHT:g}, so that classes with few pixels are learned"
        choices.add(reason, dice_weight=DICE_WEIGHT)
    choices.add(clip=10.0, warmup=0.05, weight_decay=0.05)
    choices.add(keep="best" if facts.has_validation else "last", checkpoints=5)
    choose_accumulation(choices, network, times.image_size, batch, available_memory(device))
    config = choices.plan(base).config
    if not {"steps", "epochs"} & explicit.keys():
        left = FOR_STEPS * (seconds - (time.perf_counter() - started))
        epochs = _epochs(choices, config, splits, times, seconds=left, trains_all=trains_all)
        steps = max(MIN_STEPS, int(epochs * facts.images / batch))
        choices.add(f"{steps:,} steps, in which each image is seen about {epochs:.3g} times", steps=steps)
    return choices.plan(base)


def _epochs(
    choices: Choices, config: TrainConfig, splits: Splits, times: Times, *, seconds: float, trains_all: bool
) -> float:
    """Return the number of epochs that fit into a time in seconds, with the evaluations that are chosen here."""
    held_out, tested = (0 if part is None else len(part) for part in (splits.validation, splits.test))
    affordable = min(MOST_EVALUATIONS, int(EVALUATED * seconds / max(held_out * times.of_answer, 1e-9)))
    several = affordable if held_out and affordable > 1 else 0  # the finished model is measured anyway
    evaluations = choices.explicit.get("evaluations", several)
    choices.add(evaluations=evaluations, keep="best" if evaluations else "last")
    measured = (evaluations + 1) * held_out + tested
    left = max(LEAST * seconds, seconds - measured * times.of_answer)
    if not trains_all:
        return min(MOST_EPOCHS, times.epochs_of_head(left))
    begun = time.perf_counter()
    speed = training_speeds([config], splits, FOR_SPEED * seconds, seconds)[0]
    return min(MOST_EPOCHS, (left - (time.perf_counter() - begun)) * speed / times.images)


def _times(
    base: TrainConfig,
    bundle: Bundle,
    splits: Splits,
    facts: DataFacts,
    explicit: Explicit,
    *,
    device: torch.device,
    batch: int,
    seconds: float,
) -> tuple[Times, bool]:
    """Return the image size, with the times of its steps, and True if all blocks are trained.

    The size is the largest one with which the head alone learns for `ENOUGH_EPOCHS` and all held-out images are
    answered, but no larger than the objects need. All blocks are trained if the time suffices (`ENOUGH_OF_ALL`), which
    can take smaller images, or if the user chose what is trained. Blocks that the tokens of a head enter must always be
    trained. The smallest size is measured first. The size that its times lead to is measured next, and its own times
    decide again.
    """
    network = bundle.network.config
    shape = typical_size(splits.train, MAX_HEADERS)
    own = resolve_precision(base.run.precision, device)
    precision: Precision = "float32" if own == "float32" else "bf16"
    sizes = [explicit["image_size"]] if "image_size" in explicit else sizes_for(network, shape, splits.train)
    images = replace(bundle.preprocess, image_size=sizes[-1])
    outputs = len(base.task.output_names(splits))
    headed: Any = fitted(network, base.start.init, images, base.model.overrides, outputs, base.task)
    enters, is_frozen = headed.dense_head.adds_tokens, explicit.get("train_blocks") == 0
    enough, least = (math.inf, 1.0) if is_frozen or enters else ENOUGH_OF_ALL[facts.targets]
    answered = sum(len(part) for part in (splits.validation, splits.test) if part is not None)
    measured = sizes[-1]
    for _ in range(MEASURED_SIZES):
        placed = on_device(adapted(bundle, image_size=measured), device)
        forward = forward_seconds(placed, precision, batch=2)
        in_float32 = forward if precision == "float32" else forward_seconds(placed, "float32", batch=2)
        head = OF_HEAD * _head_seconds(headed.with_image_size(measured), device, own, batch)
        expected = [
            Times(
                size,
                forward * (scale := network.inference_flops(size) / network.inference_flops(measured)),
                in_float32 * scale,
                head * math.prod(size) / math.prod(measured),
                facts.images,
                _versions(headed.with_image_size(size), facts.images, explicit, device),
            )
            for size in sizes
        ]
        times, suffices = choose_size(expected, seconds, answered, enters=enters, enough=enough, least=least)
        if times.image_size == measured:
            break
        measured = times.image_size
    is_chosen = bool(explicit.get("train_blocks") or explicit.get("lora_rank"))
    return times, is_chosen or suffices or (enters and not is_frozen)


def choose_size(
    expected: Sequence[Times], seconds: float, answered: int, *, enters: bool, enough: float, least: float
) -> tuple[Times, bool]:
    """Return the times of the image size to choose, and True if all blocks can be trained.

    `expected` has the times of all sizes, the largest first. The head alone gets the largest size with which it learns
    for `ENOUGH_EPOCHS` and `answered` images are answered within this number of seconds, or else the smallest size.
    All blocks get the largest size with which they learn for `enough` epochs. They are trained if it has at least a
    fraction `least` of the pixels of the other size. With `enters`, the tokens of the head enter blocks, so the head is
    never trained alone.
    """

    def largest(learned: Callable[[Times], float]) -> Times | None:
        return next((one for one in expected if learned(one) + answered * one.of_answer <= seconds), None)

    of_head = largest(lambda one: ENOUGH_EPOCHS * one.of_all if enters else one.of_head(ENOUGH_EPOCHS)) or expected[-1]
    of_all = largest(lambda one: enough * one.of_all)
    if of_all is None or math.prod(of_all.image_size) < least * math.prod(of_head.image_size):
        return of_head, False
    return of_all, True


def _versions(config: ViTConfig, images: int, explicit: Explicit, device: torch.device) -> float:
    """Return the number of versions of an image whose tokens are computed once and kept (`DenseObjective`), or infinity
    if they are computed in every epoch."""
    count = 1 + explicit.get("flip", True)
    middle = config.dense_head is not None and config.dense_head.reads_middle
    needed = images * count * 4 * config.width * config.tokens * (1 + middle)
    is_kept = device.type == "cpu" and needed <= KEPT_FRACTION * available_memory(device)
    return math.inf if not is_kept or RANDOM & explicit.keys() else float(count)


def _head_seconds(config: ViTConfig, device: torch.device, precision: TrainingPrecision, batch: int) -> float:
    """Return the seconds of the forward and the backward pass of a network's head for an image of a batch."""
    adds_tokens = config.dense_head is not None and config.dense_head.adds_tokens
    shallow: Any = {"depth": 2 + config.query_blocks * adds_tokens}  # the blocks are not measured
    network: Any = build(replace(config, **shallow)).to(device)
    with torch.no_grad():
        tokens: Features = network.features(torch.zeros(batch, config.channels, *config.image_size, device=device))

    def step() -> None:
        with autocast(precision, device):
            found = network.head(tokens)
        torch.autograd.backward(found.float().square().mean())

    timer = timed(step, waits_for(device))
    return min(timer() for _ in range(4)) / batch


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
