"""Losses and metrics, kept where they were computed until somebody asks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitrail.errors import NonFiniteLoss

__all__ = ["Meter", "check_finite"]


def check_finite(result: dict[str, float], step: int) -> None:
    """Raises `NonFiniteLoss` when an evaluation shows weights that were broken in the very last step."""
    if not math.isfinite(result["cross_entropy"]):
        raise NonFiniteLoss(f"the evaluation's cross-entropy is {result['cross_entropy']} at step {step}")


class Meter:
    """Collects one dictionary of scalars a step. `read` waits for the device once, however many steps there were."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._names: tuple[str, ...] = ()
        self._first_step = 0

    def add(self, step: int, values: dict[str, Tensor]) -> None:
        if not self._rows:
            self._first_step = step
            self._names = tuple(values)
        self._rows.append(torch.stack([value.detach().float() for value in values.values()]))

    def read(self) -> dict[str, float]:
        """Means since the last reading, and forgets them. Raises `NonFiniteLoss`, which names the first such step."""
        if not self._rows:
            return {}
        table = torch.stack(self._rows).cpu()
        self._rows = []
        if len(bad := (~table.isfinite()).nonzero()):
            row, column = bad[0].tolist()
            raise NonFiniteLoss(
                f"{self._names[column]} is {table[row, column].item()} at step {self._first_step + row}"
            )
        return dict(zip(self._names, table.mean(dim=0).tolist(), strict=True))
