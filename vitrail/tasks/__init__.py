"""Batch -> loss and metrics. An objective is a module around a network; training knows nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from vitrail.data.pipeline import Batch

__all__ = ["LossOutput", "Objective"]


@dataclass(frozen=True)
class LossOutput:
    """What an objective says of a batch: means over its valid samples, as tensors that nobody has waited for."""

    loss: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


@runtime_checkable
class Objective(Protocol):
    """An `nn.Module` around a network."""

    def __call__(self, batch: Batch) -> LossOutput: ...
