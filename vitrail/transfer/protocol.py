"""Fine-tuning as the paper did it (Appendix B.1.1): SGD, and a learning rate chosen on held-out images."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vitrail.data.augmentation.augment import Augment
from vitrail.data.source import fingerprint
from vitrail.errors import ConfigError, RunError
from vitrail.models.variants import AnyConfig
from vitrail.training.config import TrainConfig
from vitrail.training.monitoring.display import Display
from vitrail.training.monitoring.journal import read_journal
from vitrail.training.optimization.optimizer import OptimizerConfig
from vitrail.training.record import read_record
from vitrail.training.run import resume, train
from vitrail.training.start import open_initial
from vitrail.transfer.rules import DataFacts, Given, Rule, accumulation, scaled_size
from vitrail.weights.bundle import Bundle, weights_sha256

__all__ = [
    "PROTOCOL",
    "Row",
    "Trial",
    "check_last_run",
    "choose_rate",
    "is_trial",
    "paper_rule",
    "row_for",
    "trials_of",
    "whole_set",
]


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

TRIALS = "-learning-rates"
"""End of the name of the folder that has the runs for a run's learning rate."""


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
    first of those to try; where one is given, nothing is held out to choose it by. Multi-label data keeps its sigmoid
    loss. `facts.images` counts the images that would be held out as well.
    """
    row = row_for(facts.images)
    size = given.image_size or scaled_size(network, LONGEST_SIDE)
    batch = given.batch_size or BATCH
    parts, why_parts = accumulation(network, size, batch, memory)
    chosen = given.learning_rate is None
    run = replace(
        base.run,
        steps=row.steps,
        batch_size=batch,
        accumulation=parts,
        evaluations=base.run.evaluations if chosen else 0,
        keep="last",
    )
    config = replace(
        base.override(label_smoothing=0.0),
        data=replace(base.data, validation_share=row.share if chosen else 0.0),
        images=replace(base.images, image_size=size),
        augment=Augment(flip=True, crop_area=(0.05, 1.0)),
        optimizer=OptimizerConfig(
            kind="sgd",
            learning_rate=row.rates[0] if given.learning_rate is None else given.learning_rate,
            warmup=row.warmup / row.steps,
            weight_decay=0.0,
            momentum=0.9,
            clip=1.0,
        ),
        run=run,
    )
    rates = ", ".join(f"{rate:g}" for rate in row.rates)
    why_rate = (
        f"the learning rate is the best of {rates} on {row.share:.0%} of the training images (or the validation "
        "split), and the model then learns from all of them"
        if chosen
        else f"learning rate {given.learning_rate:g}, as given, so the model learns from all training images"
    )
    return Rule(
        config,
        (
            f"the paper's protocol for data of {row.like}'s size, {facts.images:,} images",
            f"image size {size[0]} x {size[1]}; {row.steps:,} steps of {batch}{why_parts}",
            f"SGD with momentum 0.9; {why_rate}",
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
    Raises `ConfigError` where no image is held out to choose by, `RunError` where a run that is there is of other
    settings, data or weights, and what `train` does.
    """
    splits = config.data.open()
    nothing = (
        f"validation_share={config.data.validation_share} leaves no image to choose the learning rate by; give "
        "--learning-rate, or more images"
    )
    if not splits.validation:
        raise ConfigError(nothing)
    initial = initial or open_initial(config.start)
    weights = None if initial is None else weights_sha256(initial.network)
    begun = fingerprint(splits.train, splits.validation, splits.test), weights
    trials = []
    for rate in rates:
        place = folder / f"{rate:g}"
        trial_config = config.override(learning_rate=rate, keep="last", run=str(place), overwrite=False)
        metrics = _metrics(trial_config, place, begun, initial, display)
        if "validation_accuracy" not in metrics:  # none has a label, or none can be decoded
            raise ConfigError(nothing)
        trials.append(Trial(rate, metrics["validation_accuracy"], place))
        on_trial(trials[-1])
    return tuple(sorted(trials, key=lambda trial: (-trial.accuracy, trial.rate)))


def _metrics(
    config: TrainConfig, place: Path, begun: tuple[str, str | None], initial: Bundle | None, display: Display | None
) -> dict[str, float]:
    """Of a run's model on the validation split. `begun` is what it begins with: the data's fingerprint, the weights'
    hash."""
    if not (place / "run.json").is_file():
        return train(config, initial=initial, display=display, measure_test=False).metrics
    there = read_record(place)
    # Parts of a batch follow from the memory that is free at the moment, and change no result.
    alike = config.override(precision=there.config.run.precision, accumulation=there.config.run.accumulation)
    what = "" if there.config == alike else "settings"
    if not what and (there.fingerprint, there.origin and there.origin.sha256) != begun:
        what = "data or weights"
    if what:
        raise RunError(f"{place} holds a run with other {what}; choose another --name, or delete that folder")
    for event in read_journal(place / "journal.jsonl"):
        if event["event"] == "finished":
            found: dict[str, float] = event["metrics"]
            return found
    return resume(place, display=display, measure_test=False).metrics


def trials_of(folder: Path) -> Path:
    """Where the runs are that choose the learning rate of the run in `folder`."""
    return folder.with_name(f"{folder.name}{TRIALS}")


def is_trial(folder: Path) -> bool:
    """Whether a run is one of those."""
    return folder.absolute().parent.name.endswith(TRIALS)


def check_last_run(config: TrainConfig) -> None:
    """Raises `ConfigError` for what the last run could not do, before others are done for it."""
    if config.run.patience is not None:
        raise ConfigError(
            f"patience={config.run.patience} cannot be given with the paper's protocol: its last run learns from all "
            "images, so none says when to stop. Leave it out, or choose --protocol rule"
        )
    if config.run.probe and not replace(config.data, validation_share=0.0, mix=()).open().validation:
        raise ConfigError(
            f"probe={config.run.probe!r} cannot be given with the paper's protocol: its last run learns from all "
            "images, so none is left to measure on. Leave it out, or choose --protocol rule"
        )


def whole_set(config: TrainConfig, rate: float) -> TrainConfig:
    """The last run: with the rate that was chosen, from all training images."""
    return config.override(learning_rate=rate, validation_share=0.0, evaluations=0, keep="last")
