"""Settings of the studies' own runs: small networks on small images, which train on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vitrail.data.augmentation.augment import Augment
from vitrail.data.config import DataConfig
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.config import ModelConfig
from vitrail.studies.study import Point, Settings, Stage
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig
from vitrail.training.start import StartConfig
from vitrail.training.steps.phases import phases_of, run_flops

__all__ = [
    "NETWORKS",
    "VALIDATION_SHARE",
    "VIT",
    "data_config",
    "finetuning_config",
    "fractals",
    "patch_side",
    "point",
    "run_cost",
    "small_config",
]

VALIDATION_SHARE = 0.1
"""Fraction of the training images on which learning rates are chosen."""

STATISTICS = {1: ((0.286,), (0.353,)), 3: ((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))}
"""Mean and standard deviation of pixels by the number of channels: those of Fashion-MNIST and of CIFAR-10, rounded."""

SIDES = {1: 28, 3: 32}
"""Sides of the images in pixels by the number of channels."""

VIT: dict[str, Any] = {"width": 64, "depth": 4, "heads": 2, "mlp_width": 256, "position_std": 0.3}
"""The Vision Transformer of most studies, apart from its patches."""

FIRST_STAGE = "the model of the first stage"
"""Model to start from in the config of a second stage. The process of a cell replaces it by a path."""

NETWORKS: dict[str, dict[str, Any]] = {
    "ViT": {"variant": "ViT-Pico/4", **VIT},
    "hybrid": {"variant": "Conv+ViT-Pico/4", **VIT, "mlp_width": 192},
    "BiT": {"variant": "BiT-Pico"},
}
"""Three architectures whose training steps cost about the same: 53, 54 and 56 MFLOP for a grey image."""


def data_config(spec: str, images: int | None = None) -> DataConfig:
    """Return the data of a study with this number of training images, or with all. Smaller amounts are parts of larger
    ones, and have the same fractions of the classes. The held-out images are the same for every amount."""
    amount = "" if images is None else f"[:{images}]"
    return DataConfig(spec=f"{spec}{amount}", validation_share=VALIDATION_SHARE)


def patch_side(settings: Settings, parts: int) -> int:
    """Return the side of a patch if an image has about this many patches across."""
    return SIDES[settings.channels] // parts


def small_config(
    settings: Settings, *, images: int, epochs: float, variant: str | None = None, **overrides: Any
) -> TrainConfig:
    """Return the config of a run on `images` training images, or on all if there are fewer.

    `variant` is by default a small Vision Transformer of width 64 with 4 blocks. It has 16 patches in quick studies,
    and about 49 otherwise. `overrides` are other settings by their bare names.
    """
    mean, std = STATISTICS[settings.channels]
    side = SIDES[settings.channels]
    if variant is None:
        variant = f"ViT-Pico/{patch_side(settings, settings.of(4, 7))}"
        overrides = VIT | overrides
    config = TrainConfig(
        data=data_config(settings.data, min(images, settings.images)),
        model=ModelConfig(variant=variant),
        images=Preprocess(image_size=(side, side), channels=settings.channels, mean=mean, std=std),
        augment=Augment(flip=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.05, beta2=0.95),
        run=RunConfig(epochs=epochs, batch_size=64, evaluations=0, checkpoints=4, keep="last"),
    )
    return config.override(**overrides)


def finetuning_config(settings: Settings, *, images: int, steps: int, **overrides: Any) -> TrainConfig:
    """Return the config of a second stage, which starts from a model and learns from `images` labelled images."""
    config = replace(
        small_config(settings, images=images, epochs=1.0), model=ModelConfig(), start=StartConfig(init=FIRST_STAGE)
    )
    return config.override(steps=steps, **overrides)


def fractals(settings: Settings, classes: int, samples: int) -> str:
    """Return the spec of computed pictures for pre-training, with `samples` pictures of each class."""
    return f"fractals:{classes}:{samples}:0:{SIDES[settings.channels]}"


def run_cost(config: TrainConfig, settings: Settings) -> float:
    """Return the FLOPs of the training steps of a run that has a number of steps."""
    images = config.images
    network = config.model.resolve(num_classes=settings.classes, image_size=images.image_size, channels=images.channels)
    phases = phases_of(config, network, config.total_steps(settings.images))
    return float(run_flops(phases, network, config.task))


def point(arm: str, config: TrainConfig, rates: Sequence[float], **fields: Any) -> Point:
    """Return a point of one training run, whose learning rate is chosen from `rates`."""
    return Point(arm=arm, stages=(Stage(config=config, rates=tuple(rates)),), **fields)
