"""Settings for training from scratch, from the data and a time budget: those of `vitrail train --data DIR`."""

from __future__ import annotations

import functools
import math
import shlex
import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.bench.entries import OURS, Entry, make_step
from vitrail.bench.measure import timed, waits_for
from vitrail.bench.workload import Workload
from vitrail.data.colour import MIN_IMAGES, has_colour, images_of
from vitrail.data.pipeline import TrainingBatches, default_threads
from vitrail.data.pixels.decode import open_image
from vitrail.data.pixels.preprocess import SPARE, Preprocess
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, UndecodableImage
from vitrail.machine import pick_device, resolve_precision
from vitrail.models.config import ModelConfig
from vitrail.models.variants import AnyConfig
from vitrail.recipes.folder import folder
from vitrail.training.config import TrainConfig
from vitrail.transfer.choices import Choices, DataFacts, Explicit, Plan, check_images, choose_task, facts_of
from vitrail.transfer.examination import divide, mirror_test, mirrored_reason, mirroring_hurts, pixel_features

__all__ = ["DEFAULT_SECONDS", "Colours", "colours_of", "plan_for_data", "reading_speed", "training_speed"]

DEFAULT_SECONDS = 300.0

SIZES = (96, 64, 48, 32)
"""Image sizes to choose from: the smallest one that is not smaller than the images, unless there is too little time."""

MIN_EPOCHS = 8
"""Number of epochs for which a smaller image size is chosen rather than fewer epochs."""

MANY_IMAGES = 20_000
"""Number of training images from which the network is wider."""

MUON_RATE = 2e-3
"""Learning rate of Muon for a network that is chosen here. docs/recipes.md has the measurements."""

MANY_EPOCHS = 15
"""Number of epochs from which grey boxes hide parts of the images. In fewer epochs, a network does not learn the images
by heart."""

TIME_FOR_STEPS = 0.75
"""Fraction of the budget for training steps. The rest is for starting, augmentation, evaluation and saving."""

TIMED_BATCH = 8
"""Largest batch with which the reading of training images is timed, so that large photographs take little time."""

TIMED_SECONDS = 0.5
"""Time in seconds for which the reading of training images is timed, unless a few batches take longer."""

LEAST_TIME = 0.1
"""Smallest fraction of the budget for training, if choosing the settings took nearly all of it."""

MAX_SEEN, MIN_MAX_EPOCHS, MAX_EPOCHS = 250_000, 30, 200
"""Most images to train on, counted with repetition: MAX_SEEN, but at least 30 and at most 200 epochs."""

FINETUNING_BELOW = 50_000
"""Number of training images below which a pre-trained model is usually the better choice."""


class Colours(NamedTuple):
    """Colours of the training images, from a few images."""

    channels: int
    """1 if the images are grey, else 3."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Mean and standard deviation of the levels in [0, 1], one number per channel."""


def plan_for_data(config: TrainConfig, splits: Splits, explicit: Explicit, seconds: float = DEFAULT_SECONDS) -> Plan:
    """Return settings for training on this data from scratch within a time in seconds, with the reasons.

    The network, the image size, the colours, the augmentation, the batch size and the number of epochs follow from the
    training images and the speed of this machine. The time that the choice takes is part of `seconds`. Settings in
    `explicit` are kept. Raise `ConfigError` if the data has
    no training image.
    """
    end = time.perf_counter() + seconds
    facts = facts_of(splits)
    check_images(config.data.spec, facts)
    choices = Choices(explicit)
    base = folder()
    choose_task(choices, config.task.name, facts, label_smoothing=0.1)
    _choose_colours(choices, splits.train)
    _choose_mirroring(choices, splits.train, channels=_chosen(choices, "channels", base.images.channels))
    batch = 64 if facts.images >= MANY_IMAGES else max(8, min(32, 2 ** int(math.log2(max(facts.images / 8, 8)))))
    choices.add(batch_size=batch)
    if "variant" not in explicit:
        wide = {"width": 128, "heads": 4, "mlp_width": 512} if facts.images >= MANY_IMAGES else {}
        why = f"{'wider, because there are' if wide else 'small, for'} {facts.images:,} training images"
        choices.add(f"network Conv+ViT-Pico/8, {why}", variant="Conv+ViT-Pico/8", **wide)
        if not {"optimizer", "learning_rate"} & explicit.keys():
            choices.add(
                "Muon for the weight matrices, which learns more in the same time than AdamW",
                optimizer="muon",
                learning_rate=MUON_RATE,
            )
    base = replace(config, model=ModelConfig(), images=base.images, augment=base.augment, optimizer=base.optimizer)
    base = base.override(keep="last" if splits.validation is None else "best")
    _choose_length(choices, base, splits, facts, seconds, end=end)
    if facts.images < FINETUNING_BELOW:
        choices.reasons.append(
            f"with {facts.images:,} images, fine-tuning a pre-trained model is usually better: "
            f"vitrail finetune MODEL --data {shlex.quote(config.data.spec)}"
        )
    return choices.plan(base)


def colours_of(source: Source) -> Colours:
    """Return the number of channels, and the mean and the standard deviation of the levels of up to 32 images."""
    images, coloured = [], 0
    for image in images_of(source):
        try:
            coloured += has_colour(image)
        except UndecodableImage:
            continue
        images.append(image)
    channels = 3 if coloured > MIN_IMAGES * len(images) else 1
    preprocess = Preprocess(image_size=(32, 32), channels=channels, scaled_decode=True)
    levels = (
        np.stack([preprocess.pixels(image) for image in images]) / 255 if images else np.full((1, channels, 1, 1), 0.5)
    )
    mean, std = levels.mean(axis=(0, 2, 3)), levels.std(axis=(0, 2, 3))
    return Colours(channels, _rounded(mean), _rounded(np.maximum(std, 0.05)))


def training_speed(network: AnyConfig, batch: int, precision: Any, device: torch.device) -> float:
    """Return the training speed of a new network on this machine, in images per second, from a few steps."""
    workload = Workload(name="network", config=network, batch=batch, precision=precision, device=device)
    timer = timed(make_step(Entry(OURS), workload), waits_for(device))
    timer()  # the first step is slower
    return batch / min(timer() for _ in range(4))


def reading_speed(config: TrainConfig, train: Source) -> float:
    """Return the speed of reading, decoding and scaling training images, in images per second, from a few batches."""
    run, readers = config.run, config.run.readers
    batch = min(run.batch_size, TIMED_BATCH)
    batches = TrainingBatches(
        train,
        config.augment.training_preprocess(config.images),
        batch_size=batch,
        seed=run.seed,
        readers=readers,
        crop=config.augment.crop(run.seed),
        views=config.task.views,
    )
    # Each thread makes a whole batch, so that as many batches as there are threads are ready at about the same time.
    together = max(default_threads() if readers.threads is None else readers.threads, 1) * max(readers.processes, 1)
    try:
        if readers.processes:
            next(batches)  # processes take long to start
        begun, taken, seconds = time.perf_counter(), 0, 0.0
        while taken < together or (seconds < TIMED_SECONDS and taken < 8 * together):
            for _ in range(together):
                next(batches)
            taken += together
            seconds = time.perf_counter() - begun
    finally:
        batches.close()
    return batch * taken / seconds


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(round(float(value), 3) for value in values)


def _chosen(choices: Choices, name: str, default: Any) -> Any:
    return choices.explicit.get(name, choices.settings.get(name, default))


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


def _choose_length(
    choices: Choices, base: TrainConfig, splits: Splits, facts: DataFacts, seconds: float, *, end: float
) -> None:
    """Choose the image size, shifts and the number of epochs that this machine can train in the time.

    The time in seconds ends at `end` on the clock `time.perf_counter`.
    """
    images, explicit = facts.images, choices.explicit
    side = facts.side or SIZES[-1]
    fitting = [size for size in SIZES if size >= side] or [SIZES[0]]
    sizes = [(size, size) for size in SIZES if size <= fitting[-1]]
    if "image_size" in explicit:
        sizes = [explicit["image_size"]]
    most = min(max(MAX_SEEN / images, MIN_MAX_EPOCHS), MAX_EPOCHS)
    own_length = bool({"epochs", "steps"} & explicit.keys())
    size, epochs, speed, left = sizes[0], most, 0.0, seconds
    for size in () if own_length else sizes:
        trial = base.override(**{**choices.settings, **explicit, "image_size": size})
        speed = _speed(_with_fast_decoding(trial, splits.train, explicit), splits)
        left = max(end - time.perf_counter(), LEAST_TIME * seconds)
        epochs = min(most, TIME_FOR_STEPS * left * speed / images)
        if epochs >= MIN_EPOCHS:
            break
    choices.add(f"image size {size[0]} x {size[1]}: the images have about {side} pixels a side", image_size=size)
    chosen = base.override(**{**choices.settings, **explicit})
    if _with_fast_decoding(chosen, splits.train, explicit).images.scaled_decode:
        choices.add("JPEG files are decoded at a fraction of their size, because they are large", scaled_decode=True)
    choices.add(shift=max(1, min(size) // 8))
    if not own_length:
        why = (
            "each image is seen often enough"
            if epochs >= most * 0.99
            else f"this machine trains about {speed:,.0f} images/s, and {left:,.0f} s of the budget are left"
        )
        choices.add(f"{epochs:.3g} epochs: {why}", epochs=float(f"{epochs:.3g}"))
    seen = explicit.get("epochs", math.inf) if own_length else epochs
    choices.add(erase=0.0 if seen < MANY_EPOCHS else 0.25 if images >= MANY_IMAGES else 0.5)


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
    found = []
    for image in images_of(source):
        try:
            opened = open_image(image)
        except UndecodableImage:
            continue
        most = min(have / needed for have, needed in zip(opened.size, size, strict=True)) / SPARE
        found.append(opened.shrink_for(most) > 1)
    return sum(found) * 2 > len(found)


def _speed(config: TrainConfig, splits: Splits) -> float:
    """Return the number of images per second that this machine can read and train.

    A GPU trains while the processor reads. On a CPU, reading and training share the cores, so their times add up.
    """
    device = pick_device(config.run.device)
    precision = resolve_precision(config.run.precision, device)
    outputs = max(1, len(config.task.output_names(splits)))
    network = config.model.resolve(
        num_classes=outputs, image_size=config.images.image_size, channels=config.images.channels
    )
    speed = training_speed(network, config.run.batch_size, "bf16" if precision == "float8" else precision, device)
    reading = reading_speed(config, splits.train)
    return 1 / (1 / speed + 1 / reading) if device.type == "cpu" else min(speed, reading)
