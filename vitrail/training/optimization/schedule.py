"""The schedule of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["Schedule", "ScheduleName"]

ScheduleName = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate rises linearly to `peak` during warm-up, then falls to 0 along a cosine or a line, or stays."""

    kind: ScheduleName
    peak: float
    steps: int
    warmup_steps: int

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. Warm-up ends at the peak, and the last step is not 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        progress = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        return self.peak * ((1 - progress) if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))
