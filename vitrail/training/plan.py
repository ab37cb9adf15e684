"""What stays the same from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vitrail.data.augmentation.augment import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.machine import TrainingPrecision
from vitrail.training.optimization.schedule import Schedule
from vitrail.training.state.state import TrainState

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """How a run takes its steps, and when it ends."""

    steps: int
    schedule: Schedule
    accumulation: int
    clip: float
    seed: int
    augment: Augment
    preprocess: Preprocess
    precision: TrainingPrecision
    device: torch.device
    classes: int = 0
    """Of the data: columns of the targets that mixup and CutMix make."""
    patience: int | None = None
    """Evaluations in a row without a better accuracy that end the run."""
    most_skipped: int = 0
    """Training samples that may be undecodable."""

    def is_over(self, state: TrainState) -> bool:
        """Whether the last step was taken, or patience is exhausted. It follows from the state, so a checkpoint of a
        run that ended early is the end of the resumed one as well."""
        return state.step >= self.steps or (self.patience is not None and state.best.waited >= self.patience)
