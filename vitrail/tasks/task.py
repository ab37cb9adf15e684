"""The contract of a task: everything that differs between kinds of training.

The training loop calls the task's objective and knows nothing else of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from vitrail.data.pipeline import Batch
from vitrail.data.splits import Splits
from vitrail.weights.bundle import OutputKind

__all__ = ["LossOutput", "Objective", "Task"]


@dataclass(frozen=True)
class LossOutput:
    """The loss and the metrics of a batch, as means over its valid samples. They stay on the device."""

    loss: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


@runtime_checkable
class Objective(Protocol):
    """An `nn.Module` around a network that computes the loss of a batch."""

    def __call__(self, batch: Batch) -> LossOutput: ...


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """The settings of a kind of training. Raises `ConfigError`, naming every field that does not fit."""

    name: ClassVar[str]
    """The task's name in `TASKS`, on the command line and in run.json."""

    @property
    @abstractmethod
    def output(self) -> OutputKind:
        """The meaning of the trained network's outputs."""

    @abstractmethod
    def check_data(self, splits: Splits, spec: str) -> None:
        """Raise `ConfigError` if the task cannot be learned from this data; `spec` is what the user calls it."""

    @abstractmethod
    def objective(self, network: nn.Module, splits: Splits) -> nn.Module:
        """Return the network with its loss, an `Objective`."""
