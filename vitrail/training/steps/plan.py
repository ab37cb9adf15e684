"""The plan of a run: all settings that stay the same from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from vitrail.data.augmentation.augment import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.machine import TrainingPrecision
from vitrail.processes.group import Processes
from vitrail.tasks.task import Position
from vitrail.training.optimization.schedule import Schedule
from vitrail.training.state.state import TrainState
from vitrail.training.steps.faults import FaultConfig
from vitrail.training.steps.phases import Phase

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """The settings of a run's steps, and the conditions that end the run."""

    steps: int
    schedule: Schedule
    accumulation: int
    clip: float
    seed: int
    augment: Augment
    preprocess: Preprocess
    precision: TrainingPrecision
    device: torch.device
    decay_factor: Callable[[int, int], float] = lambda step, steps: 1.0
    """Function that returns the factor of the weight decay at a step of a run with this many steps."""
    batch_size: int = 1
    images: int = 1
    """Number of training images, which is the length of an epoch."""
    classes: int = 0
    """Number of classes in the data, which is the number of columns of the targets that mixup and CutMix make."""
    patience: int | None = None
    """Number of consecutive evaluations without a better result after which the run ends."""
    most_skipped: int = 0
    """Maximum number of training samples that may fail to decode."""
    adapts_threads: bool = False
    """True if the number of compute threads follows the cores that other programs leave."""
    chooses_readers: bool = False
    """True if the first steps decide by their time whether threads or the main thread reads the images."""

    processes: Processes = Processes()
    """The processes that share every batch."""

    faults: FaultConfig = field(default_factory=FaultConfig)
    """Reactions to faults of steps."""

    phases: tuple[Phase, ...] = ()
    """The phases of the run, in order. Without phases, all steps have the settings above."""

    def phase_of(self, step: int) -> Phase | None:
        """Return the phase of a step, counted from 0."""
        return next((phase for phase in reversed(self.phases) if phase.first <= step), None)

    def augment_at(self, step: int, *, height: int | None = None) -> Augment:
        """Return the augmentation of a step. Shifts are proportional to the height of the images, which is by default
        that of the step's phase."""
        phase, whole = self.phase_of(step), self.preprocess.image_size[0]
        if height is None:
            height = whole if phase is None else phase.image_size[0]
        if height == whole:
            return self.augment
        return replace(self.augment, shift=round(self.augment.shift * height / whole))

    def weight_decay(self, step: int) -> float:
        """Return the factor of the weight decay at a step."""
        return self.decay_factor(step, self.steps)

    def position(self, step: int) -> Position:
        """Return the position of a step in the run."""
        drawn = sum(phase.batch_size * min(max(step - phase.first, 0), phase.steps) for phase in self.phases)
        return Position(step, self.steps, (drawn or step * self.batch_size) / self.images)

    def work(self, step: int) -> float:
        """Return the cost of the steps before this one, in steps of the last phase."""
        return sum(phase.cost * min(max(step - phase.first, 0), phase.steps) for phase in self.phases) or float(step)

    def flops(self, step: int) -> int:
        """Return the FLOPs of a step, counted from 0, of all processes. Return 0 if they are unknown."""
        phase = self.phase_of(step)
        return 0 if phase is None else phase.flops

    def is_over(self, state: TrainState) -> bool:
        """Return True after the last step, or if patience is exhausted.

        The answer depends on the training state alone. A run that ended early therefore also ends when it is resumed
        from its last checkpoint.
        """
        return state.step >= self.steps or (self.patience is not None and state.best.waited >= self.patience)
