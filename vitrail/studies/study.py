"""The contract of studies: a question with its points, and the claims that the results confirm or not.

A study is a row of `vitrail.studies.questions.STUDIES`. It only defines which runs answer its question. The engine
(`engine.py`) runs them, and `claims.py` computes the verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vitrail.data.augment.settings import Augment
from vitrail.data.check.images import has_colour, images_of
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import decodable, fingerprint
from vitrail.data.sources import DataConfig
from vitrail.errors import ConfigError, DataError, plural
from vitrail.models.variants import ModelConfig
from vitrail.studies.claims import Claim
from vitrail.training.config import RunConfig, StartConfig, TrainConfig
from vitrail.training.job import phases_of, run_flops
from vitrail.training.optimizer import OptimizerConfig

Scale = Literal["quick", "default"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The choices of one execution of a study."""

    scale: Scale = "default"
    data: str = "bundled"
    """Data set of classification, without an amount in brackets."""
    images: int = 9000
    """Number of training images of the data, without the cut on which learning rates are chosen."""
    classes: int = 10
    channels: Literal[1, 3] = 1
    """Channels of the networks' images: 1 if the images are grey, else 3."""
    fingerprint: str = ""
    """Hash of the names and labels of all images."""

    def of(self, quick: Any, default: Any) -> Any:
        """Return the value for the scale."""
        return quick if self.scale == "quick" else default

    def part(self, fraction: float) -> int:
        """Return the number of images that are a fraction of the training images."""
        return round(fraction * self.images)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A training run of a point. The run of a second stage starts from the model of the first."""

    config: TrainConfig
    rates: tuple[float, ...]
    """Learning rates to try. A single one is used without trials."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A row of the table of a study: an arm at a place of the x axis. It is measured with every seed."""

    arm: str
    stages: tuple[Stage, ...]
    x: float | None = None
    """Place on the x axis, such as the number of training images. None for studies without an axis."""
    label: str = ""
    """Name of the place, such as "10 %"."""
    by: tuple[str, ...] = ("accuracy",)
    """Evaluators of the finished model on the test split."""
    evaluator_settings: Mapping[str, Any] = field(default_factory=dict)
    tuned: str = ""
    """Points of the same name share the learning rates that are chosen for the first of them. By default every point is
    tuned by itself."""

    @property
    def name(self) -> str:
        """The arm with its place."""
        return f"{self.arm} at {self.label}" if self.label else self.arm

    @property
    def tuning(self) -> str:
        """Name under which learning rates are chosen."""
        return self.tuned or self.name


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question of the paper as a grid of runs."""

    name: str
    question: str
    """The question, as a sentence for the page."""
    paper: str
    """Table or figure of the paper, and the finding that it reports."""
    points: Callable[[Settings], Sequence[Point]]
    """Returns the points of the study. The seed and the learning rate are set by the engine."""
    claims: Callable[[Sequence[Point]], Sequence[Claim]]
    """Returns the statements to check, for the points that are measured."""
    metrics: Mapping[str, str] = field(default_factory=lambda: {"accuracy": "accuracy"})
    """Metrics of the table with their names for readers. The first one is drawn."""
    x_name: str = ""
    """Name of the x axis, or "" for studies without an axis."""
    published: Callable[[], Sequence[Point]]
    """Returns the points of the study in the published size. They are planned for their cost and not run. Settings that
    the paper does not state are assumed, and learning rates do not matter."""


# The data of a study: it is opened once, and checked before the first cell runs.


AMOUNT = re.compile(r".*\[[^\[\]]*\]", re.S)

COUNT = re.compile(r"\[:(\d+)\]$")


def open_study_data(spec: str, scale: Scale) -> Settings:
    """Open the data of a study, and return the settings that follow from it.

    Raises `ConfigError` if the spec has an amount of its own, and `DataError` for data without one class per image or
    without a test split.
    """
    if AMOUNT.fullmatch(spec):
        raise ConfigError(f"data={spec!r} selects an amount, but the study selects its subsets; leave the brackets out")
    splits = data_config(spec).open()
    if splits.target_kind != "class":
        raise DataError(f"data {spec!r} has no single class for each image; a study needs classes to predict")
    if splits.test is None or splits.validation is None:
        raise DataError(
            f"data {spec!r} has no test split; a study reports results on test images, so add a folder test/ or files "
            "whose names begin with test"
        )
    return Settings(
        scale=scale,
        data=spec,
        images=len(splits.train),
        classes=len(splits.classes),
        channels=3 if any(decodable(has_colour, images_of(splits.train))) else 1,
        fingerprint=fingerprint(splits.train, splits.validation, splits.test),
    )


def check_subsets(points: Sequence[Point], settings: Settings) -> None:
    """Raise `DataError` if the training images of a point are fewer than the classes, or miss a class."""
    for config in dict.fromkeys(stage.config.data for point in points for stage in point.stages):
        count = COUNT.search(config.spec)
        if count is None or not config.spec.startswith(settings.data):
            continue
        images, classes = int(count[1]), settings.classes
        if images < classes:
            raise DataError(
                f"data {config.spec!r}: a subset of {plural(images, 'image')} is smaller than its {classes} classes; "
                f"choose data of more images, or fewer classes"
            )
        chosen = config.open().train
        present = {chosen.target(index) for index in range(len(chosen))}
        if missing := [name for label, name in enumerate(chosen.classes) if label not in present]:
            raise DataError(
                f"data {config.spec!r}: a subset of {images} images has none of the class {missing[0]!r}; choose data "
                "of more images for each class"
            )


# Settings of the studies' own runs: small networks on small images, which train on a CPU.


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
