"""Losses and metrics of training steps, which stay on the device until they are read, and their means."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.errors import NonFiniteLoss

__all__ = ["Meter", "RunningMeans", "check_finite"]


def check_finite(result: dict[str, float], metric: str, step: int) -> None:
    """Raise `NonFiniteLoss` if this metric of the evaluation after `step` is not finite."""
    if not math.isfinite(value := result.get(metric, 0.0)):
        raise NonFiniteLoss(f"the evaluation's {metric.replace('_', ' ')} is {value} at step {step}")


class Meter:
    """Collects a dictionary of scalars per step. `read` waits for the device once, for any number of steps."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._names: tuple[str, ...] = ()
        self._steps: list[int] = []

    def add(self, step: int, values: dict[str, Tensor]) -> None:
        """Add the loss and metrics of a step."""
        if not self._rows:
            self._names = tuple(values)
        self._steps.append(step)
        self._rows.append(torch.stack([value.detach().float() for value in values.values()]))

    def read(self) -> dict[str, float]:
        """Return the means over the steps since the last call.

        Raises `NonFiniteLoss` with the first step whose loss or metric is not finite.
        """
        if not self._rows:
            return {}
        table = torch.stack(self._rows).cpu()
        steps, self._rows, self._steps = self._steps, [], []
        if len(bad := (~table.isfinite()).nonzero()):
            row, column = bad[0].tolist()
            raise NonFiniteLoss(f"{self._names[column]} is {table[row, column].item()} at step {steps[row]}")
        return dict(zip(self._names, table.mean(dim=0).tolist(), strict=True))


class RunningMeans:
    """Means of metrics over the steps of several reports."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._last: dict[str, float] = {}

    def add(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Add the means over some steps."""
        self._sums = {name: self._sums.get(name, 0.0) + steps * value for name, value in metrics.items()}
        self._steps += steps

    def read(self) -> dict[str, float]:
        """Return the means since the last call that had any steps, and begin again with the next report."""
        if self._steps:
            self._last = {name: total / self._steps for name, total in self._sums.items()}
            self._sums, self._steps = {}, 0
        return self._last
