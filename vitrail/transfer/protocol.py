"""Fine-tuning as the paper did it (Appendix B.1.1): SGD, and a learning rate chosen on held-out images."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vitrail.data.augment import Augment
from vitrail.errors import ConfigError, RunError
from vitrail.models.variants import AnyConfig
from vitrail.training.config import OptimizerConfig, TrainConfig
from vitrail.training.display import Display
from vitrail.training.folder import read_record
from vitrail.training.journal import read_journal
from vitrail.training.run import resume, train
from vitrail.transfer.rules import DataFacts, Given, Rule, accumulation, scaled_size
from vitrail.weights.bundle import Bundle

__all__ = ["PROTOCOL", "Row", "Trial", "choose_rate", "paper_rule", "row_for", "whole_set"]


class Row(NamedTuple):
    """Table 4 for data of a size; `below` training images, it holds."""

    below: float
    steps: int
    warmup: int
    rates: tuple[float, ...]
    share: float
    """Of the training images, held out to choose the learning rate."""
    like: str


PROTOCOL = (
    Row(20_000, 500, 100, (0.001, 0.003, 0.01, 0.03), 0.1, "Pets and Flowers"),
    Row(500_000, 10_000, 500, (0.001, 0.003, 0.01, 0.03), 0.02, "CIFAR"),
    Row(math.inf, 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.01, "ImageNet"),
)
"""The paper names data sets; the bounds between them are BiT's."""

BATCH, LONGEST_SIDE = 512, 384


class Trial(NamedTuple):
    """A learning rate that was tried, and the accuracy on the images held out for it."""

    rate: float
    accuracy: float
    folder: Path


def row_for(images: int) -> Row:
    """The protocol's row for so many training images."""
    return next(row for row in PROTOCOL if images < row.below)


def paper_rule(base: TrainConfig, network: AnyConfig, facts: DataFacts, *, memory: int, given: Given = Given()) -> Rule:
    """`base` with the paper's settings: SGD with momentum 0.9, no weight decay, batches of 512, the longer side 384.

    Its images are cut and mirrored as the original code does: boxes of 5 to 100 % of the area. The learning rate is the
    first of those to try. Multi-label data keeps its sigmoid loss.
    """
    row = row_for(facts.images)
    size = given.image_size or scaled_size(network, LONGEST_SIDE)
    batch = given.batch_size or BATCH
    parts, why_parts = accumulation(network, size, batch, memory)
    config = replace(
        base,
        steps=row.steps,
        batch_size=batch,
        accumulation=parts,
        label_smoothing=0.0,
        validation_share=row.share,
        images=replace(base.images, image_size=size),
        augment=Augment(flip=True, crop_area=(0.05, 1.0)),
        optimization=OptimizerConfig(
            optimizer="sgd",
            learning_rate=row.rates[0],
            warmup=row.warmup / row.steps,
            weight_decay=0.0,
            momentum=0.9,
            clip=1.0,
        ),
        keep="last",
    )
    rates = ", ".join(f"{rate:g}" for rate in row.rates)
    return Rule(
        config,
        (
            f"the paper's protocol for data of {row.like}'s size, {facts.images:,} images",
            f"image size {size[0]} x {size[1]}; {row.steps:,} steps of {batch}{why_parts}",
            f"SGD with momentum 0.9; the learning rate is the best of {rates} on {row.share:.0%} of the training "
            "images (or the validation split), and the model then learns from all of them",
        ),
    )


def choose_rate(
    config: TrainConfig,
    rates: tuple[float, ...],
    folder: Path,
    *,
    initial: Bundle | None = None,
    display: Display | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> tuple[Trial, ...]:
    """A run for each rate in a folder of its own inside `folder`, best first; of equal ones the lower rate.

    A run that is there already is not done again, and one that was stopped goes on. The test split has no part in it.
    Raises `ConfigError` where no image is held out to choose by, and what `train` does.
    """
    trials = []
    for rate in rates:
        place = folder / f"{rate:g}"
        trial_config = replace(
            config, optimization=replace(config.optimization, learning_rate=rate), keep="last", run=str(place)
        )
        metrics = _metrics(trial_config, place, initial, display)
        if "validation_accuracy" not in metrics:
            raise ConfigError(
                f"validation_share={config.validation_share} leaves no image to choose the learning rate by; give "
                "--learning-rate, or more images"
            )
        trials.append(Trial(rate, metrics["validation_accuracy"], place))
        on_trial(trials[-1])
    return tuple(sorted(trials, key=lambda trial: (-trial.accuracy, trial.rate)))


def _metrics(config: TrainConfig, place: Path, initial: Bundle | None, display: Display | None) -> dict[str, float]:
    if not (place / "run.json").is_file():
        return train(config, initial=initial, display=display, measure_test=False).metrics
    if (there := read_record(place).config) != replace(config, precision=there.precision):
        raise RunError(f"{place} holds a run with other settings; choose another --name, or delete that folder")
    for event in read_journal(place / "journal.jsonl"):
        if event["event"] == "finished":
            found: dict[str, float] = event["metrics"]
            return found
    return resume(place, display=display, measure_test=False).metrics


def whole_set(config: TrainConfig, rate: float) -> TrainConfig:
    """The last run: with the rate that was chosen, from all training images."""
    return replace(
        config,
        optimization=replace(config.optimization, learning_rate=rate),
        validation_share=0.0,
        evaluations=0,
        keep="last",
    )
