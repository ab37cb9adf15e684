"""Pilots: short runs that measure how fast this machine trains with given settings. Nothing of them is kept."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitrail.data.source import subset
from vitrail.data.sources import OpenedData
from vitrail.data.splits import Splits
from vitrail.errors import Stopped
from vitrail.processes.group import join_processes
from vitrail.tasks.pictures import spread
from vitrail.training.build import pixels_fit
from vitrail.training.config import TrainConfig
from vitrail.training.run import train

FIRST_STEPS = 4
"""Number of steps of the first pilot, which determines the length of the others."""

MIN_SEEN_SECONDS = 1.0
"""A pilot sees at least as many images as the machine trains in this time. To shuffle n < 65,536 images, Grain needs
about 26 / n ms per image. With 130 images, this was a third of a pilot's time, and the speed seemed too low."""


def training_speeds(configs: Sequence[TrainConfig], splits: Splits, seconds: float, budget: float) -> list[float]:
    """Return the images per second of a run that takes `budget` seconds, for each config.

    Pilots on the training images measure it, with reading, augmentation and the optimizer. They take about `seconds` in
    all, but at least a few steps. Later epochs of a run can be faster than the first one, because the pixels stay in
    memory if they fit. A pilot then sees as few images as it needs to have as many epochs as the run, but at least as
    many as the machine trains in a second. If there is too little time to compare the configs, all have the speed of
    the first one.
    """
    processes = join_processes()
    first = processes.from_first(_pilot(configs[0], splits, FIRST_STEPS))
    batch, images = configs[0].run.batch_size, len(splits.train)
    affordable = int(seconds * first / batch)
    compared = configs if affordable // len(configs) > 2 * FIRST_STEPS else configs[:1]
    steps = affordable // len(compared)
    if steps <= FIRST_STEPS:
        return [first] * len(configs)
    seen, preprocess = images, configs[0].images
    if processes.from_first(pixels_fit(images * preprocess.channels * math.prod(preprocess.image_size), processes)):
        epochs = max(1.0, budget * first / images)
        seen = min(images, max(batch, math.ceil(MIN_SEEN_SECONDS * first), math.ceil(steps * batch / epochs)))
    # Samples at equal distances, so that sorted data keeps all classes.
    few = splits if seen == images else replace(splits, train=subset(splits.train, spread(images, seen)))
    speeds = [_pilot(config, few, steps) for config in compared]
    return speeds * (len(configs) // len(compared))


def _pilot(config: TrainConfig, splits: Splits, steps: int) -> float:
    """Return the images per second of a run of a few steps."""
    alone = replace(splits, validation=None, test=None)
    with tempfile.TemporaryDirectory() as place:
        of_run = {"run": str(Path(place) / "run"), "evaluations": 0, "checkpoints": 1, "keep": "last", "probe": ""}
        of_length = {"steps": steps, "warmup": 0.1, "cooldown": 0.0, "patience": None, "max_time": None}
        # Few images can by chance have more undecodable ones than the rule allows. The run itself applies the rule.
        of_data = {"validation": "auto", "validation_share": 0.0, "per_class": None, "mix": (), "max_skipped": 1.0}
        short = config.override(overwrite=False, **of_run, **of_length, **of_data)
        try:
            return train(short, data=OpenedData("", alone)).summary["images_per_second"]
        except Stopped:  # this run cannot be resumed
            raise KeyboardInterrupt from None
