"""Jobs for tests that take single steps or read a clock, without data, and a finished run that tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.listening import Display
from tests.several import in_processes
from tests.tasks.images import Pictures
from vitrail.data.splits import Splits
from vitrail.errors import Stopped
from vitrail.training.config import TrainConfig
from vitrail.training.job import Job, Phase
from vitrail.training.log import Log
from vitrail.training.run import RunResult, train

SMALL = (
    "--variant", "ViT-Pico/7", "--image-size", "28", "28", "--width", "16", "--depth", "2", "--heads", "2",
    "--mlp-width", "32", "--precision", "float32", "--device", "cpu",
)  # fmt: skip
"""Options of a small network, for commands."""


class Finished(NamedTuple):
    config: TrainConfig
    result: RunResult


Make = Callable[..., TrainConfig]
"""A fixture that makes configs."""

Initial = Callable[..., Path]
"""The fixture that makes models to start from."""

Outcome = Callable[[Path], dict[str, Any]]
"""The fixture that returns all that two equal runs have equal."""


class AtStep(Display):
    """Acts when a step is reported, before anything is saved, in runs of at most 100 steps."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.at, self.act = step, act

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            self.act()


class StopAt(AtStep):
    """Sends this process a real SIGTERM."""

    def __init__(self, step: int) -> None:
        super().__init__(step, lambda: os.kill(os.getpid(), signal.SIGTERM))


def train_until(config: TrainConfig, step: int, **options: Any) -> Path:
    """Train until a signal after a step stops the run, and return the run's folder."""
    with pytest.raises(Stopped):
        train(config, log=Log(StopAt(step)), **options)
    return Path(config.run.folder or "")


def crash(*given: object) -> None:
    """Take the place of a function that ends a run."""
    raise MemoryError


def job_of(config: TrainConfig, images: int, **fields: Any) -> Job:
    """Return the job of a config that sets the number of steps, with this number of training images."""
    steps = config.total_steps(images)
    phase = Phase(0, steps, config.images.image_size, patch_dropout=0.0, batch_size=config.run.batch_size)
    known = {"device": torch.device("cpu"), "splits": Splits(Pictures(images), None, None), "phases": (phase,)}
    return Job(config=config, steps=steps, **{**known, **fields})


def results_of(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function in `world` processes, and return their results. None of them may fail."""
    found = in_processes(world, function, *arguments)
    assert [one.error for one in found] == [None] * world
    return [one.result for one in found]
