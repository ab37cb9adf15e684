"""Settings for training from scratch, from the data and a time budget: those of `vitrail train --data DIR`."""

from __future__ import annotations

import functools
import math
import shlex
import time
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from vitrail.data.check.images import MIN_IMAGES, has_colour, images_of
from vitrail.data.pixels.decode import open_image
from vitrail.data.pixels.preprocess import SPARE, Preprocess
from vitrail.data.source import LARGEST_SCALE, Source, decodable, typical_size
from vitrail.data.splits import Splits
from vitrail.data.targets import PLACED
from vitrail.errors import ConfigError
from vitrail.experiments.runner import training_speeds
from vitrail.machine import pick_device
from vitrail.models.variants import AnyConfig, ModelConfig, override_fields
from vitrail.processes.group import join_processes
from vitrail.recipes.small import folder
from vitrail.tasks.task import Task
from vitrail.training.config import TrainConfig
from vitrail.transfer.examination import divide, mirror_test, mirrored_reason, mirroring_hurts, pixel_features
from vitrail.transfer.facts import (
    MAX_HEADERS,
    Choices,
    DataFacts,
    Explicit,
    FinetunePlan,
    choose_task,
    facts_of,
)

DEFAULT_SECONDS = 300.0

SIZES = (96, 64, 48, 32)
"""Image sizes to choose from: the smallest one that is not smaller than the images, unless there is too little time."""

MIN_EPOCHS = 8
"""Number of epochs for which a smaller image size is chosen rather than fewer epochs."""

MANY_IMAGES = 20_000
"""Number of training images from which batches are larger and boxes hide parts of fewer images."""

LARGE_BATCH = 128
"""Batch size for many images."""

FAST_IMAGES, FAST_SIDE = 8_000, 32
"""The first one of `NETWORKS` gets large batches from this number of training images on if no side of the images
is longer than this number of pixels. It then trains 1.8 times as many images per second (docs/log.md)."""

NETWORKS = "BiT-Pico", "RPico+ViT-Pico/8"
"""Networks to choose from. The first one that has all fields that the user set is chosen. docs/recipes.md has the
measurements."""

MUON_RATE = 5e-3
"""Learning rate of Muon for `NETWORKS`."""

MANY_EPOCHS = 15
"""Number of epochs from which grey boxes hide parts of the images. In fewer epochs, a network does not learn the images
by heart."""

TIME_FOR_STEPS = 0.92
"""Fraction of the budget for training steps and evaluations. The rest is for starting and saving."""

TIME_FOR_SPEED = 0.03
"""Fraction of the budget for the measurement of the speed."""

EVALUATION_SPEED = 2.0
"""Speed of an evaluation, which computes in float32 and needs no gradients, as a multiple of the training speed."""

TIME_FOR_EVALUATIONS = 0.1
"""Fraction of the budget for evaluations on the validation split during the run."""

LEAST_TIME = 0.1
"""Smallest fraction of the budget for training, if choosing the settings took nearly all of it."""

MAX_SEEN, MIN_MAX_EPOCHS, MAX_EPOCHS = 250_000, 30, 200
"""Most images to train on, counted with repetition: MAX_SEEN, but at least 30 and at most 200 epochs."""

FINETUNING_BELOW = 50_000
"""Number of training images below which a pre-trained model is usually the better choice."""


CONTINUED: dict[str, Any] = {
    "learning_rate": 2e-5, "layer_decay": 0.8, "teacher_momentum": 0.99, "local_views": 4, "prototypes": 4096,
    "projection_hidden": 512, "crop_area": (0.4, 1.0), "flip": True, "colour_jitter": (0.4, 0.4, 0.2, 0.1),
    "shift": 0, "batch_size": 64, "epochs": 10.0, "evaluations": 1, "keep": "last",
}  # fmt: skip
"""Settings of the task dino for a network that is pre-trained already: it changes little, and few prototypes are
enough. docs/train.md has what was measured."""


class Colours(NamedTuple):
    """Colours of the training images, from a few images."""

    channels: int
    """1 if the images are grey, else 3."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Mean and standard deviation of the levels in [0, 1], one number per channel."""


class Speed(NamedTuple):
    """Training speed of this machine."""

    images_per_second: float
    threads: int | Literal["auto"] | None
    """The setting `threads` with which it was measured."""


def plan_for_data(
    config: TrainConfig,
    splits: Splits,
    explicit: Explicit,
    seconds: float = DEFAULT_SECONDS,
    *,
    started: float | None = None,
) -> FinetunePlan:
    """Return settings for training on this data from scratch within a time in seconds, with the reasons.

    The network, the image size, the colours, the augmentation, the batch size and the number of epochs follow from the
    training images and the speed of this machine, or of all processes that train together. The time in seconds counts
    from `started` (`time.perf_counter()`), by default from the call. Settings in `explicit` are kept. Raise the
    errors of `train`.
    """
    end = seconds + (time.perf_counter() if started is None else started)
    facts = facts_of(splits)
    choices = Choices(explicit)
    base = folder()
    choose_task(choices, config.task.name, facts, label_smoothing=0.1)
    if facts.targets in PLACED:
        choices.add("images keep their aspect ratio, because it is part of the shape of objects", resize="pad")
    _choose_colours(choices, splits.train)
    _choose_mirroring(choices, splits.train, channels={**choices.settings, **explicit}["channels"])
    if "variant" not in explicit:
        variant = _variant(explicit, config.task)
        what = "a small ResNet, which is more accurate than a Vision Transformer with few images or little time"
        if variant != NETWORKS[0]:
            why = (
                "the fields that you set"
                if "pooled" in config.task.head_kinds
                else "the patch tokens that the task needs"
            )
            what = f"a small Vision Transformer on the stages of a small ResNet, which has {why}"
        choices.add(f"network {variant}, {what}", variant=variant)
        if not {"optimizer", "learning_rate"} & explicit.keys():
            choices.add(
                "Muon for the weight matrices, which learns more in the same time than AdamW",
                optimizer="muon",
                learning_rate=MUON_RATE,
            )
    batch, world = _batch_size(facts, choices), join_processes().world
    choices.add(batch_size=math.ceil(batch / world) * world)
    base = replace(config, model=ModelConfig(), images=base.images, augment=base.augment, optimizer=base.optimizer)
    base = base.override(keep="last" if splits.validation is None else "best")
    _choose_length(choices, base, splits, facts, seconds, end=end)
    if facts.images < FINETUNING_BELOW:
        choices.reasons.append(
            f"with {facts.images:,} images, fine-tuning a pre-trained model is usually better: "
            f"vitrail finetune MODEL --data {shlex.quote(config.data.spec)}"
        )
    return choices.plan(base)


def plan_continued(
    config: TrainConfig, network: AnyConfig, explicit: Explicit, seconds: float, *, started: float
) -> FinetunePlan:
    """Return settings for training a pre-trained network further without labels within a time in seconds, with the
    reasons. The time begins at `started`, a value of `time.perf_counter()`.

    Small images are scaled to at most `LARGEST_SCALE` times their size, and not to the network's own size. There are at
    most as many epochs as in the config. Raise the errors of `train`.
    """
    splits = config.data.cut(config.data.open_whole(**config.task.wanted))
    choices = Choices(explicit)
    (height, width), own = config.images.image_size, min(typical_size(splits.train, MAX_HEADERS))
    if (scale := LARGEST_SCALE * own / min(height, width)) < 1 and "local_size" not in explicit:
        local = network.nearest_size(round(scale * height / 2), round(scale * width / 2))
        size = 2 * local[0], 2 * local[1]  # local views have half of these sides, which must fit the network too
        why = f"image size {size[0]} x {size[1]}: the images have about {own:.0f} pixels on their shorter side"
        choices.add(why, image_size=size)
    if not {"epochs", "steps"} & explicit.keys():
        length = _length(choices.plan(config).config, splits, seconds, started + seconds)
        length = join_processes().from_first(length)  # the clocks of several processes differ
        epochs = float(f"{min(config.run.epochs, length.epochs):.3g}")
        speed = length.speed.images_per_second
        choices.add(f"{epochs:.3g} epochs, at about {speed:,.3g} images/s on this machine", epochs=epochs)
        _choose_pace(choices, length)
    return choices.plan(config)


def colours_of(source: Source) -> Colours:
    """Return the number of channels, and the mean and the standard deviation of the levels of up to 32 images."""
    images = list(images_of(source))
    coloured = list(decodable(has_colour, images))
    channels = 3 if sum(coloured) > MIN_IMAGES * len(coloured) else 1
    preprocess = Preprocess(image_size=(32, 32), channels=channels, scaled_decode=True)
    decoded = list(decodable(preprocess.pixels, images))
    levels = np.stack(decoded) / 255 if decoded else np.full((1, channels, 1, 1), 0.5)
    mean, std = levels.mean(axis=(0, 2, 3)), levels.std(axis=(0, 2, 3))
    return Colours(channels, _rounded(mean), _rounded(np.maximum(std, 0.05)))


def training_speed(config: TrainConfig, splits: Splits, seconds: float, budget: float) -> Speed:
    """Return the speed of a run of `budget` seconds with these settings on this machine.

    Measuring it takes about `seconds`. On a CPU, the numbers of reading threads are compared if `config` leaves them
    open.
    """
    is_open = config.run.threads is None and not config.run.processes
    choices = (None, 0) if is_open and pick_device(config.run.device).type == "cpu" else (config.run.threads,)
    speeds = training_speeds([config.override(threads=threads) for threads in choices], splits, seconds, budget)
    return max(map(Speed, speeds, choices), key=lambda speed: speed.images_per_second)


def _choose_pace(choices: Choices, length: _Length) -> None:
    choices.add(evaluations=length.evaluations)
    if length.speed.threads == 0:
        choices.add("images are read between the steps, which is faster here than in threads", threads=0)


def _variant(explicit: Explicit, task: Task) -> str:
    """Return the network to choose: the first one whose config has all fields of networks that the user set and that
    the task's heads need, or the first one of all if no config has them."""
    needed = {"head_kind"} if "pooled" not in task.head_kinds else set()
    set_fields = (explicit.keys() & override_fields().keys()) | needed
    return next((name for name in NETWORKS if set_fields <= override_fields(name).keys()), NETWORKS[0])


def _batch_size(facts: DataFacts, choices: Choices) -> int:
    """Return the batch size for these images and the chosen network."""
    longest = max(choices.explicit.get("image_size", (facts.side or math.inf,)))
    is_fast = choices.settings.get("variant") == NETWORKS[0] and longest <= FAST_SIDE
    if facts.images >= (FAST_IMAGES if is_fast else MANY_IMAGES):
        return LARGE_BATCH
    return max(8, min(32, 2 ** int(math.log2(max(facts.images / 8, 8)))))


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(round(float(value), 3) for value in values)


def _choose_colours(choices: Choices, train: Source) -> None:
    found = colours_of(train)
    kind = "grey" if found.channels == 1 else "in colour"
    choices.add(f"the images are {kind}", channels=found.channels)
    if choices.explicit.get("channels", found.channels) == found.channels:
        choices.add(mean=found.mean)
        choices.add(std=found.std)


def _choose_mirroring(choices: Choices, train: Source, *, channels: int) -> None:
    """Choose random mirroring unless it hurts a linear model of small images."""
    if "flip" in choices.explicit:
        return
    division = divide(train)
    features_of = functools.partial(pixel_features, channels=channels)
    found = None if division is None else mirror_test(features_of, division, channels)
    if found is None:
        choices.add("random mirroring: set --no-flip if left and right differ, as in text", flip=True)
    else:
        choices.add(mirrored_reason(found, "pixels"), flip=not mirroring_hurts(found))


class _Length(NamedTuple):
    """A number of epochs and of evaluations that fit into the time, and the measurements behind them."""

    epochs: float
    evaluations: int
    speed: Speed
    left: float
    """Time in seconds that was left after measuring the speed."""
    is_limited: bool
    """True if more epochs would be useful."""


def _choose_length(
    choices: Choices, base: TrainConfig, splits: Splits, facts: DataFacts, seconds: float, *, end: float
) -> None:
    """Choose the image size, shifts and the number of epochs that this machine can train in the time.

    The time in seconds ends at `end` on the clock `time.perf_counter`.
    """
    explicit = choices.explicit
    side = facts.side or SIZES[-1]
    fitting = [size for size in SIZES if size >= side] or [SIZES[0]]
    square = [(size, size) for size in SIZES if size <= fitting[-1]]
    sizes = [explicit["image_size"]] if "image_size" in explicit else square
    size, measured_at, length = sizes[0], sizes[0], None
    if not {"epochs", "steps"} & explicit.keys():
        for size in sizes:
            if length is not None and size != sizes[-1]:
                expected = length.epochs * math.prod(measured_at) / math.prod(size)
                if expected < 0.8 * MIN_EPOCHS:  # clearly too large, so it is not worth a measurement
                    continue
            measured_at = size
            trial = base.override(**{**choices.settings, **explicit, "image_size": size})
            length = _length(_with_fast_decoding(trial, splits.train, explicit), splits, seconds, end)
            length = join_processes().from_first(length)  # the clocks of several processes differ
            if length.epochs >= MIN_EPOCHS:
                break
    choices.add(f"image size {size[0]} x {size[1]}: the images have about {side} pixels a side", image_size=size)
    chosen = base.override(**{**choices.settings, **explicit})
    if _with_fast_decoding(chosen, splits.train, explicit).images.scaled_decode:
        choices.add("JPEG files are decoded at a fraction of their size, because they are large", scaled_decode=True)
    choices.add(shift=max(1, min(size) // 8))
    if length is not None:
        speed, left = f"{length.speed.images_per_second:,.0f} images/s", f"{length.left:,.0f} s of the budget are left"
        limited = f"this machine trains about {speed}, and {left}"
        why = limited if length.is_limited else "each image is seen often enough"
        choices.add(f"{length.epochs:.3g} epochs: {why}", epochs=float(f"{length.epochs:.3g}"))
        _choose_pace(choices, length)
    if facts.targets in PLACED:
        return
    seen = explicit.get("epochs", math.inf) if length is None else length.epochs
    choices.add(erase=0.0 if seen < MANY_EPOCHS else 0.25 if facts.images >= MANY_IMAGES else 0.5)


def _length(config: TrainConfig, splits: Splits, seconds: float, end: float) -> _Length:
    """Return the length of a run that ends at `end`. `seconds` is the whole budget, which bounds the measurement."""
    measured = training_speed(config, splits, TIME_FOR_SPEED * seconds, seconds)
    speed = measured.images_per_second
    left = max(end - time.perf_counter(), LEAST_TIME * seconds)
    images = len(splits.train)
    held_out = 0 if splits.validation is None else len(splits.validation)
    tested = 0 if splits.test is None else len(splits.test)
    evaluations = config.run.evaluations
    if held_out:
        affordable = int(TIME_FOR_EVALUATIONS * left * speed * EVALUATION_SPEED / held_out)
        evaluations = max(1, min(evaluations, affordable))
    evaluated = ((evaluations + 1) * held_out + tested) / EVALUATION_SPEED
    affordable_epochs = max(TIME_FOR_STEPS * left * speed - evaluated, LEAST_TIME * left * speed) / images
    most = min(max(MAX_SEEN / images, MIN_MAX_EPOCHS), MAX_EPOCHS)
    return _Length(min(most, affordable_epochs), evaluations, measured, left, affordable_epochs < most)


def _with_fast_decoding(config: TrainConfig, train: Source, explicit: Explicit) -> TrainConfig:
    """Return the config with `scaled_decode` if most of the images are JPEGs that are large enough for it, unless the
    user chose it or another setting excludes it."""
    if "scaled_decode" in explicit or not _are_large_jpegs(train, config.images.image_size):
        return config
    try:
        faster = config.override(scaled_decode=True)
        faster.augment.training_preprocess(faster.images)
    except ConfigError:
        return config
    return faster


def _are_large_jpegs(source: Source, size: tuple[int, int]) -> bool:
    """Return True if most of up to 32 images are JPEGs that can be shrunk while they are decoded to this size."""
    images = decodable(open_image, images_of(source))
    shrinks = [
        image.shrink_for(min(have / needed for have, needed in zip(image.size, size, strict=True)) / SPARE)
        for image in images
    ]
    return sum(shrink > 1 for shrink in shrinks) * 2 > len(shrinks)
