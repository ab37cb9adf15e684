"""Jobs for tests that take single steps or read a clock, without data, and a finished run that tests share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tests.listening import Shown
from vitrail.data.source import Sample
from vitrail.data.splits import Splits
from vitrail.training.config import TrainConfig
from vitrail.training.job import Job, Phase
from vitrail.training.run import RunResult


class Finished(NamedTuple):
    """A finished run that tests only read."""

    config: TrainConfig
    result: RunResult
    shown: Shown


class Blank:
    """A source of samples without classes, which nobody reads."""

    classes = ()

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        raise NotImplementedError

    def key(self, index: int) -> str:
        return str(index)

    def target(self, index: int) -> None:
        return None


def job_of(config: TrainConfig, images: int, **fields: Any) -> Job:
    """Return the job of a config that sets the number of steps, with this number of training images."""
    steps = config.total_steps(images)
    phase = Phase(0, steps, config.images.image_size, patch_dropout=0.0, batch_size=config.run.batch_size)
    known = {"device": torch.device("cpu"), "splits": Splits(Blank(images), None, None), "phases": (phase,)}
    return Job(config=config, steps=steps, **{**known, **fields})
