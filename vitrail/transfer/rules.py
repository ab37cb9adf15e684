"""How to fine-tune, from the size of the data and the machine: the rule behind `vitrail finetune`'s defaults.

In the spirit of BiT's HyperRule (1912.11370, section 3.3): few numbers, chosen once, that work untouched on most data.
What was measured to choose them is in docs/transfer.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from vitrail.data.augmentation.augment import Augment
from vitrail.data.pixels.decode import image_size_of
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, target_kind
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError
from vitrail.models.cost.footprint import training_bytes
from vitrail.models.variants import AnyConfig
from vitrail.tasks.classification import Loss
from vitrail.training.config import TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig

__all__ = ["DataFacts", "Given", "Rule", "accumulation", "facts_of", "rule", "scaled_size"]

SMALL_SIDE = 96
"""Images of less than this squared are small: BiT's bound."""

SMALL_SIZE, LARGE_SIZE = 128, 384
"""What small images are enlarged to, as BiT does, and what large ones are seen at on a GPU, as in the paper."""

FEW, MANY = 20_000, 500_000
"""Training images: below and from these, HyperRule's steps change."""

RATES = {"all": 0.2, "lora": 1.2, "head": 2.5}
"""Learning rate times width, at batches of 32, by which weights move. Measured at width 96 (docs/transfer.md); the law
makes it 0.0015 for all weights of a ViT-B and batches of 1,024."""

LAYER_DECAY = 0.9
CROP_AREA = (0.8, 1.0)

LEAST_STEPS = 100

LOOKED_AT = 64
"""Images whose headers tell the data's size."""


class DataFacts(NamedTuple):
    """What the rule wants to know of the data."""

    images: int
    """To train on."""
    classes: int
    side: int | None
    """Square root of the median area in pixels, of a few training images; None where none could be read."""
    several_labels: bool
    validation: bool
    """Whether there is an image to choose weights by."""


class Given(NamedTuple):
    """Choices of the user's that others depend on; None where the rule is to choose."""

    image_size: tuple[int, int] | None = None
    batch_size: int | None = None
    train_blocks: int | None = None
    lora_rank: int | None = None
    learning_rate: float | None = None
    loss: Loss | None = None


@dataclass(frozen=True)
class Rule:
    """A config, and what it follows from."""

    config: TrainConfig
    reasons: tuple[str, ...]


def facts_of(splits: Splits) -> DataFacts:
    """Reads the headers of up to 64 training images, spread evenly."""
    train = splits.train
    areas = list(_areas(train))
    side = round(math.sqrt(float(np.median(areas)))) if areas else None
    return DataFacts(len(train), len(splits.classes), side, target_kind(train) == "classes", bool(splits.validation))


def _areas(source: Source) -> Iterator[int]:
    for index in np.unique(np.linspace(0, len(source) - 1, min(LOOKED_AT, len(source))).astype(np.int64)).tolist():
        try:
            image = source[index].image
            yield math.prod(image_size_of(image) if isinstance(image, bytes) else image.shape[:2])
        except DataError:  # training skips it and says so
            continue


def rule(
    base: TrainConfig,
    network: AnyConfig,
    preprocess: Preprocess,
    facts: DataFacts,
    *,
    device: torch.device,
    memory: int,
    given: Given = Given(),
) -> Rule:
    """How to fine-tune the model that `base.start.init` names, whose network and preprocessing these are, on such data.

    Fields of `base` that are not chosen here stay. `memory` is in bytes, of the device that trains. Raises
    `ConfigError` where there is no image to train on.
    """
    if not facts.images:
        raise ConfigError(f"data {base.data.spec!r} has no image to fine-tune on")
    gpu = device.type == "cuda"
    size, why_size = given.image_size, "as given"
    if size is None:
        size, why_size = _image_size(network, facts, gpu=gpu)
    seen, why_seen = _images_seen(facts.images, gpu=gpu)
    batch = given.batch_size or _batch_size(facts.images, gpu=gpu)
    parts, why_parts = accumulation(network, size, batch, memory)
    steps = max(LEAST_STEPS, math.ceil(seen / batch))
    if steps * batch >= seen + batch:
        why_seen = f"no fewer, though {seen:,} images, {seen / facts.images:.3g} times each, would be done sooner"
    optimizer, why_rate = _optimizer(network, batch, given)
    augment, why_augment = _augment(facts)
    questions = facts.several_labels or given.loss == "sigmoid"
    run = replace(
        base.run,
        steps=steps,
        batch_size=batch,
        accumulation=parts,
        keep="best" if facts.validation else "last",
        evaluations=10 if facts.validation else 0,
        checkpoints=5,
    )
    config = replace(
        base.override(loss="sigmoid" if questions else "softmax", label_smoothing=0.0 if questions else 0.1),
        images=replace(preprocess, image_size=size),
        augment=augment,
        optimizer=optimizer,
        run=run,
    )
    reasons = (
        f"image size {size[0]} x {size[1]}: {why_size}",
        f"{steps:,} steps of {batch}: {why_seen}" + why_parts,
        why_rate,
        f"augmentation: {why_augment}",
    )
    return Rule(config, reasons)


def _image_size(network: AnyConfig, facts: DataFacts, *, gpu: bool) -> tuple[tuple[int, int], str]:
    own = network.image_size
    small = facts.side is not None and facts.side < SMALL_SIDE
    if small and max(own) > SMALL_SIZE:
        why = f"images are small, {facts.side} pixels a side: at {own[0]} x {own[1]}, the model's, they only cost more"
        return scaled_size(network, SMALL_SIZE), why
    large = facts.side is not None and facts.side >= LARGE_SIZE
    if gpu and large and max(own) < LARGE_SIZE and network.architecture == "ViT":
        return scaled_size(network, LARGE_SIZE), f"images are large, {facts.side} pixels a side, and a GPU has the time"
    return own, "the model's own"


def scaled_size(network: AnyConfig, longest: int) -> tuple[int, int]:
    """The model's image size, brought to this longest side, where patches divide it."""
    height, width = network.image_size
    factor = longest / max(height, width)
    scaled = round(height * factor), round(width * factor)
    return network.nearest_size(*scaled)


def _images_seen(images: int, *, gpu: bool) -> tuple[int, str]:
    if gpu:
        steps = 500 if images < FEW else 10_000 if images < MANY else 20_000
        return 512 * steps, f"{steps:,} steps of 512 (BiT's rule for {images:,} images)"
    seen = max(min(20 * images, 20_000), 3 * images)
    return seen, f"{seen:,} images seen, {seen / images:.3g} times each (20,000 in all, but 3 to 20 times each)"


def _batch_size(images: int, *, gpu: bool) -> int:
    """On a CPU a large batch is no faster, and small ones leave more steps. Eight batches an epoch, if possible."""
    largest = 512 if gpu else 32
    return max(4, min(largest, 2 ** int(math.log2(max(images / 8, 4)))))


def accumulation(network: AnyConfig, size: tuple[int, int], batch: int, memory: int) -> tuple[int, str]:
    """Parts of a batch, so that a step needs at most 0.7 of the memory: by the closed form, which is of CPUs."""
    config = replace(network, image_size=size)
    for parts in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        if parts >= batch or training_bytes(config, math.ceil(batch / parts), size, "bf16") <= 0.7 * memory:
            parts = min(parts, batch)
            return parts, f", each in {parts} parts to fit into {memory / 1e9:.3g} GB of memory" if parts > 1 else ""
    return batch, f", image by image to fit into {memory / 1e9:.3g} GB of memory"


def _optimizer(network: AnyConfig, batch: int, given: Given) -> tuple[OptimizerConfig, str]:
    width = network.stream_width
    moving = "lora" if given.lora_rank is not None else "head" if given.train_blocks == 0 else "all"
    rate = float(f"{RATES[moving] / width * math.sqrt(batch / 32):.2g}")
    text = f"AdamW, learning rate {rate:g} (falls with the network's width, grows as the root of the batch)"
    if moving != "all":
        return OptimizerConfig(learning_rate=rate), f"{text}, more than for all weights since few of them move"
    text += f", in each block {LAYER_DECAY} of that above"
    return OptimizerConfig(learning_rate=rate, layer_decay=LAYER_DECAY), text


def _augment(facts: DataFacts) -> tuple[Augment, str]:
    mixup = 0.1 if facts.images >= FEW and not facts.several_labels else None
    text = f"boxes of {CROP_AREA[0]:.0%} of the image or more, half mirrored (--no-flip where left and right differ)"
    if mixup:
        text += f", mixup {mixup} from {FEW:,} images on"
    return Augment(flip=True, crop_area=CROP_AREA, mixup=mixup), text
