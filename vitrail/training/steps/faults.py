"""Faults of training steps: losses and gradients that are not finite, and spikes of the loss.

A step is checked between its backward pass and the update of the weights. All processes check the same sums, so all of
them find the same faults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.settings import at_least, one_of, raise_problems

__all__ = ["FaultConfig", "Faults", "OnNonFinite", "StepFault"]

OnNonFinite = Literal["stop", "skip", "rollback"]

MAD_OF_NORMAL = 1.4826
"""Standard deviation of a normal distribution, divided by its median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """Reactions to faults of training steps. Raises `ConfigError` if fields have invalid values. The message names all
    of them."""

    on_non_finite: OnNonFinite = "stop"
    """Reaction to a loss or gradient that is not finite. stop: end the run without saving its state. skip: skip the
    batch. rollback: go back to a checkpoint, and skip the last batches."""
    spike_score: float = 0.0
    """Go back to a checkpoint if the loss of a step is this many robust standard deviations above the median of the
    last steps, such as 10. 0: never."""
    spike_window: int = 100
    """Number of steps with which --spike-score compares a loss. The first steps of a run are not compared."""
    rollback_skips: int = 10
    """Number of batches to skip after the run goes back to a checkpoint. The last skipped batch is the batch of the
    fault."""
    max_faults: int = 10
    """Maximum number of faults in a run. The next fault ends the run."""

    def __post_init__(self) -> None:
        raise_problems(
            [
                *at_least(self, spike_score=0, spike_window=2, rollback_skips=1, max_faults=1),
                *one_of(self, on_non_finite=OnNonFinite),
            ]
        )

    @property
    def are_checked(self) -> bool:
        """True if steps are checked before the weights change."""
        return self.on_non_finite != "stop" or self.spike_score > 0

    @property
    def may_roll_back(self) -> bool:
        """True if a fault can lead back to a checkpoint."""
        return self.on_non_finite == "rollback" or self.spike_score > 0


class StepFault(Exception):
    """A fault of a step, found before the weights have changed."""

    def __init__(self, reason: str, action: OnNonFinite) -> None:
        super().__init__(reason)
        self.action = action


@dataclass
class Faults:
    """The faults of a run so far, and what is needed to find further ones."""

    count: int = 0
    left_out: set[int] = field(default_factory=set)
    """Steps whose batches are skipped. The first step is 1."""
    losses: list[float] = field(default_factory=list)
    """Losses of the last steps, if losses are compared."""

    def check(self, config: FaultConfig, metrics: dict[str, Tensor]) -> None:
        """Raise `StepFault` if the loss or the gradient norm of a step is not finite, or if the loss is a spike.

        The numbers are read from the device, unless steps are not checked.
        """
        if not config.are_checked:
            return
        names = ("loss", "gradient_norm")
        values = dict(zip(names, torch.stack([metrics[name].float() for name in names]).tolist(), strict=True))
        for name, value in values.items():
            if not math.isfinite(value):
                raise StepFault(f"{name} is {value}", config.on_non_finite)
        if not config.spike_score:
            return
        loss = values["loss"]
        if len(self.losses) >= config.spike_window and (score := robust_score(loss, self.losses)) > config.spike_score:
            raise StepFault(
                f"loss is {loss:.4g}, {score:.1f} robust standard deviations above the median of the "
                f"{config.spike_window} steps before",
                "rollback",
            )
        self.losses = [*self.losses, loss][-config.spike_window :]

    def values(self) -> dict[str, Any]:
        """Return the faults as plain JSON values."""
        return {"count": self.count, "left_out": sorted(self.left_out), "losses": self.losses}

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Faults:
        """Return the faults whose `values` these are."""
        return cls(values["count"], set(values["left_out"]), list(values["losses"]))


def robust_score(value: float, others: list[float]) -> float:
    """Return the difference of a value from the median of others, in robust standard deviations. Return 0 if most of
    the others are equal."""
    middle = median(others)
    deviation = MAD_OF_NORMAL * median(abs(other - middle) for other in others)
    return (value - middle) / deviation if deviation else 0.0
