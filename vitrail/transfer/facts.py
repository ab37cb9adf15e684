"""Facts about the data, the time budget, and the choices of settings that the protocols of fine-tuning share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.augment.settings import PRESETS
from vitrail.data.pixels.decode import image_size_of
from vitrail.data.pixels.preprocess import GEOMETRIES
from vitrail.data.source import Source, decodable, image_of, target_kind, truth_of
from vitrail.data.splits import Splits
from vitrail.data.targets import TargetKind
from vitrail.errors import ConfigError
from vitrail.models.cost import training_bytes
from vitrail.models.variants import AnyConfig
from vitrail.settings import seconds_in
from vitrail.tasks.classification import Classification
from vitrail.training.config import TrainConfig
from vitrail.training.optimizer import OptimizerConfig

Explicit = Mapping[str, Any]
"""Values of the settings that the user chose, by the names that `TrainConfig.override` accepts."""


NO_SETTINGS: Explicit = MappingProxyType({})


SMALL_SIDE = 96
"""Images with a shorter side (in pixels) count as small. The bound is BiT's."""


FEW, MANY = 20_000, 500_000
"""Numbers of training images at which BiT's HyperRule changes the number of steps."""


MAX_HEADERS = 64
"""Maximum number of images whose headers are read to measure image sizes."""


MEMORY_FRACTION = 0.7
"""Fraction of the memory that a training step may use."""


class DataFacts(NamedTuple):
    """Properties of the data that the rule uses."""

    images: int
    """Number of training images."""
    side: int | None
    """Square root of the median image area, in pixels. None if no image could be read."""
    targets: TargetKind
    has_validation: bool
    """True if there are held-out images to choose the best weights by."""
    has_test: bool = False
    """True if there is a test split, whose images are used only to measure the finished model."""


@dataclass(frozen=True)
class Findings:
    """Results of an examination of the training images, which replace guesses of the rule."""

    flip: bool | None = None
    """True if mirrored images are recognised as well as the images themselves. None if this was not examined."""
    image_size: tuple[int, int] | None = None
    """The better of two image sizes, or None if sizes were not compared."""
    flip_reason: str = ""
    size_reason: str = ""


class Candidate(NamedTuple):
    """Settings that a trial tries."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Search:
    """The settings to try before a run, and the time that the whole command may take."""

    candidates: tuple[Candidate, ...]
    """Settings to try. The first of equally good settings is chosen. With a single candidate, nothing is tried."""
    seconds: float
    """Time of the command in seconds, up to the trained model."""
    is_limited: bool
    """True if the final run may have fewer steps than its config. Steps that the user chose are not limited."""
    may_thin_evaluations: bool
    """True if the final run may have fewer evaluations than its config, because the validation split is large."""
    includes_test: bool = False
    """True if the measurement of the finished model on the test split is part of `seconds`."""
    rising: tuple[Candidate, ...] = ()
    """Settings with rising learning rates, of which `candidates` has the lowest ones. If the highest rate that was
    tried is the best of them, the next one is tried too."""


@dataclass(frozen=True)
class FinetunePlan:
    """The config of a run, with the reasons for the settings that were chosen."""

    config: TrainConfig
    reasons: tuple[str, ...]
    rates: tuple[float, ...] = ()
    """Learning rates to try before the run. If empty, the run uses the learning rate of the config."""
    search: Search | None = None
    """Settings to try before the run within a time budget, or None."""


class Choices:
    """Settings that a rule chooses one by one, with a reason for each choice.

    Settings that the user chose are kept, and no reason is recorded for them.
    """

    def __init__(self, explicit: Explicit) -> None:
        self.explicit = explicit
        self.settings: dict[str, Any] = {}
        self.reasons: list[str] = []

    def add(self, reason: str = "", **settings: Any) -> None:
        """Choose settings by their field names, such as `batch_size`. The reason is dropped if the user chose one of
        these settings, because the reason could name a value that is not used."""
        chosen = {name: value for name, value in settings.items() if name not in self.explicit}
        self.settings |= chosen
        if chosen.keys() == settings.keys() and reason:
            self.reasons.append(reason)

    def plan(self, base: TrainConfig, rates: tuple[float, ...] = ()) -> FinetunePlan:
        """Return a plan: `base` with the chosen settings and the user's settings."""
        return FinetunePlan(base.override(**self.settings, **self.explicit), tuple(self.reasons), rates)


def facts_of(splits: Splits) -> DataFacts:
    """Return the properties of the data. The headers of up to 64 training images, evenly spaced, are read."""
    train = splits.train
    places = np.unique(np.linspace(0, len(train) - 1, min(MAX_HEADERS, len(train))).astype(np.int64)).tolist()
    areas = list(decodable(lambda index: math.prod(image_size_of(image_of(train, index))), places))
    side = math.floor(math.sqrt(float(np.median(areas)))) if areas else None
    return DataFacts(len(train), side, target_kind(train), _has_targets(splits.validation), _has_targets(splits.test))


def _has_targets(source: Source | None) -> bool:
    """Return True if a held-out split has at least one image with a known target, so that it can measure a model."""
    return source is not None and bool(truth_of(source).known.any())


def check_rate(optimizer: OptimizerConfig, explicit: Explicit, *usual: str) -> None:
    """Raise `ConfigError` if the user chose an optimizer that is not one of `usual`, and no learning rate."""
    if optimizer.kind not in usual and "optimizer" in explicit and "learning_rate" not in explicit:
        raise ConfigError(
            f"optimizer={optimizer.kind!r} also needs a learning_rate, because the automatic learning rates are "
            f"for {' and '.join(map(repr, usual))}"
        )


def choose_task(choices: Choices, task: str, facts: DataFacts, *, label_smoothing: float) -> None:
    """Choose the task's loss for the targets of the data. Label smoothing is used only with the softmax loss."""
    if task != Classification.name:
        choices.add(f"task {task}: the targets are {facts.targets}", task=task)
        return
    loss = choices.explicit.get("loss", "sigmoid" if facts.targets == "classes" else "softmax")
    choices.add("loss sigmoid: an image can have several labels" if loss == "sigmoid" else "", loss=loss)
    choices.add(label_smoothing=label_smoothing if loss == "softmax" else 0.0)


def choose_all_images(choices: Choices, facts: DataFacts) -> None:
    """Choose to train on all training images, without evaluations during the run.

    If there is no test split, the finished model is measured on the data's own validation split.
    """
    choices.add("the run trains on all training images", validation_share=0.0)
    choices.add(evaluations=0)
    if not facts.has_test:
        choices.add(validation="train")


def choose_geometry(choices: Choices) -> None:
    """Choose the resizing and cropping of vision_transformer and Big Transfer, whichever library the weights came from.

    If the user chose any of interpolation, antialiasing and resampler, the others keep the values of the model.
    """
    scaling = dict(GEOMETRIES["vision_transformer"])
    shape = {name: scaling.pop(name) for name in ("resize", "crop_share")}
    choices.add("images squashed to the image size, as in the original code", **shape)
    choices.add(scaled_decode=scaling.pop("scaled_decode"))
    if not scaling.keys() & choices.explicit.keys():
        choices.add("images scaled bilinearly without antialiasing, as in the original code", **scaling)


def crops_are_chosen(explicit: Explicit) -> bool:
    """Return True if the user chose random crops, by a preset or by an option."""
    preset = PRESETS[explicit.get("preset", "none")]
    return bool({"crop_area", "crop_from"} & explicit.keys()) or preset.crop_area is not None


def choose_length(choices: Choices, steps: int, batch_size: int) -> int:
    """Choose the batch size and the number of steps, unless the user chose epochs. Return the batch size of the run."""
    batch: int = choices.explicit.get("batch_size", batch_size)
    choices.add(batch_size=batch)
    if "epochs" not in choices.explicit:
        choices.add(f"{steps:,} steps of {batch} images", steps=steps)
    return batch


def choose_accumulation(choices: Choices, network: AnyConfig, size: tuple[int, int], batch: int, memory: int) -> None:
    """Choose the number of parts of a batch so that a training step needs at most `MEMORY_FRACTION` of the memory.

    The estimate is the formula for CPUs. If nothing fits, every part is a single image.
    """
    config = network.with_image_size(size)
    fitting = (
        min(parts, batch)
        for parts in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        if parts >= batch or training_bytes(config, math.ceil(batch / parts), size, "bf16") <= MEMORY_FRACTION * memory
    )
    parts = next(fitting, batch)
    reason = f"each batch in {parts} parts, to fit into {memory / 1e9:.3g} GB of memory" if parts > 1 else ""
    choices.add(reason, accumulation=parts)


def exact_size(network: AnyConfig, longest: int) -> tuple[int, int]:
    """Return the model's image size scaled to this longest side. Patches may not divide this size."""
    height, width = network.image_size
    factor = longest / max(height, width)
    return round(height * factor), round(width * factor)


def scaled_size(network: AnyConfig, longest: int) -> tuple[int, int]:
    """Return the model's image size scaled to this longest side, or the nearest size that the network can take."""
    return network.nearest_size(*exact_size(network, longest))


# The time limit of a command: a duration, or a word for a fraction or a multiple of the usual time.


FACTORS = {"quick": 0.4, "best": 4.0}

SECONDS_PER_ROOT = 34.0
"""Usual seconds of fine-tuning, divided by the cube root of the number of training images: four minutes for 300 images,
ten for 5,000 and twenty for 50,000."""


def usual_seconds(images: int) -> float:
    """Return the usual time of fine-tuning on this many training images, in seconds."""
    return SECONDS_PER_ROOT * images ** (1 / 3)


def seconds_of(budget: str | None, usual: float) -> float:
    """Return a time in seconds: `usual` for None, a fraction or multiple of it for "quick" and "best", or a duration.

    A duration is a number with a unit: "90s", "3m" or "1.5h". Raise `ConfigError` for another text.
    """
    if budget is None:
        return usual
    if budget in FACTORS:
        return FACTORS[budget] * usual
    seconds = seconds_in(budget)
    if seconds is None:
        raise ConfigError(
            f"budget={budget!r} is not a time; give a number above 0 with a unit, such as 90s, 3m or 1h, or one of "
            f"{', '.join(FACTORS)}"
        )
    return seconds
