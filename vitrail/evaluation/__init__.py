"""Network and source -> figures."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from vitrail.data.source import Source

__all__ = ["Evaluator"]


@runtime_checkable
class Evaluator(Protocol):
    """Measures a network on all samples of a source, without changing it."""

    def __call__(self, network: nn.Module, source: Source) -> dict[str, float]: ...
