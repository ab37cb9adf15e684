"""Everything that a run's next step depends on: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from vitrail.data.pipeline import TrainingBatches
from vitrail.training.state.average import Average

__all__ = ["Best", "TrainState"]


@dataclass
class Best:
    """The best result on the validation split so far, and the step it was measured after."""

    score: float = -1.0
    """Accuracy; where images can have several labels, mean average precision, since the likeliest class says little."""
    step: int = -1
    waited: int = 0
    """Evaluations since then."""


@dataclass
class TrainState:
    """The moving parts of a run. Two runs whose states are equal go on equally."""

    objective: nn.Module
    """The network and its loss."""
    optimizer: Optimizer
    batches: TrainingBatches
    step: int = 0
    """Optimiser steps taken."""
    best: Best = field(default_factory=Best)
    skipped: set[str] = field(default_factory=set)
    """Keys of the training samples that could not be decoded."""
    average: Average | None = None

    @property
    def measured(self) -> str:
        """Which weights are measured and kept, as the journal calls them."""
        return "trained" if self.average is None else "averaged"

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the network has the mean of its weights, where there is one."""
        if self.average is None:
            yield
            return
        self.average.swap()
        try:
            yield
        finally:
            self.average.swap()

    def tensors(self) -> dict[str, Any]:
        """Weights and their mean, optimiser state and random-number generators, as torch.distributed.checkpoint takes
        them."""
        weights, optimizer = get_state_dict(self.objective, self.optimizer)
        mean = {} if self.average is None else {"average": self.average.mean}
        return {"weights": weights, "optimizer": optimizer, "random": _random_state(), **mean}

    def restore_tensors(self, tensors: dict[str, Any]) -> None:
        """Takes over what `tensors` gave."""
        set_state_dict(
            self.objective,
            self.optimizer,
            model_state_dict=tensors["weights"],
            optim_state_dict=tensors["optimizer"],
        )
        if self.average is not None:
            self.average.restore(tensors["average"])
        torch.set_rng_state(tensors["random"]["cpu"])
        if "cuda" in tensors["random"]:
            torch.cuda.set_rng_state(tensors["random"]["cuda"])

    def values(self) -> dict[str, Any]:
        """The rest, as plain JSON values."""
        return {
            "step": self.step,
            "batches": self.batches.state(),
            "best": vars(self.best),
            "skipped": sorted(self.skipped),
        }

    def restore_values(self, values: dict[str, Any]) -> None:
        """Takes over what `values` gave."""
        self.step = values["step"]
        self.batches.restore(values["batches"])
        self.best = Best(**values["best"])
        self.skipped = set(values["skipped"])


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
